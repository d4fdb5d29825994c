"""Random batches -> every forced kind of plan and the planner's, timed -> how far its choice is from the fastest.

    treecp-rl calibrate --repeats 5 --plan-ranks 2 --output two.json
    treecp-rl calibrate --repeats 5 --plan-ranks 4 --output four.json
    python benchmarks/planner_reality.py --profiles 2=two.json,4=four.json --output planner_reality.json

Batches of one to four groups run on gloo processes as in ``treecp-rl bench cp`` (float32, FSDP2, layers kept, one
domain); time is CPU time, of each rank the least of the repeats, maximum over ranks. Lowering is in it; plans of
``auto`` are ready, as in a run, where the planner's actor solves them ahead. Kinds far from the fastest are not
repeated; ``auto`` then meets the fastest kind in fresh turns, whose median ratio counts, unless both run the same
schedules. Duels whose 95 % interval holds the limit of 5 % go on, up to six times as long.
"""

import argparse
import json
import math
import platform
import random
import statistics
from pathlib import Path
from typing import Any, get_args

from treecp_rl.bench.cp_ranks import Job, Measured, median_interval, run_world
from treecp_rl.bench.shapes import BatchPoint
from treecp_rl.calibrate import kendall_tau
from treecp_rl.errors import ConfigError
from treecp_rl.planner.batch import Mode
from treecp_rl.planner.profile import ClusterProfile, load_profile
from treecp_rl.planner.search import TreeLengths

FORCED_KINDS: tuple[Mode, ...] = tuple(
    mode for mode in get_args(Mode) if mode not in ("auto", "fused", "split")
)
TOLERANCE = 1.05
WORLD_TIMEOUT_SECONDS = 5400.0


def random_batch(rng: random.Random, number: int, most_tokens: int) -> BatchPoint:
    """One to four groups; prompt-heavy and response-heavy, even and ragged ones."""
    trees = []
    for _ in range(rng.choice([1, 1, 2, 3, 4])):
        prompt = round(2 ** rng.uniform(4, math.log2(most_tokens)))
        responses = round(2 ** rng.uniform(5, math.log2(most_tokens)))
        group, spread = rng.choice([2, 4, 8]), rng.choice([0.0, 0.5, 1.0])
        drawn = [math.exp(spread * rng.gauss(0, 1)) for _ in range(group)]
        trees.append(TreeLengths(prompt, tuple(max(1, round(responses * one / sum(drawn))) for one in drawn)))
    return BatchPoint(f"batch {number}", tuple(trees))


def record_of(point: BatchPoint, world_size: int, measured: list[Measured]) -> dict[str, Any]:
    """What one batch says."""
    seconds = {one.kind: one.cpu_seconds for one in measured}
    predicted = {one.kind: one.planned.predicted_seconds for one in measured}
    forced = [kind for kind in seconds if kind != "auto"]
    duel = {one.kind: one for one in measured if one.duel_cpu_seconds}
    (fastest,) = [kind for kind in duel if kind != "auto"] or [min(forced, key=lambda kind: seconds[kind])]
    return {
        "world_size": world_size,
        "trees": [[tree.prompt, *tree.responses] for tree in point.trees],
        "cpu_seconds": seconds,
        "predicted_seconds": predicted,
        "fastest_forced": fastest,
        "duel_cpu_seconds": {kind: list(one.duel_cpu_seconds) for kind, one in duel.items()},
        "auto_over_fastest_forced": duel["auto"].duel_ratio(duel[fastest]) if duel else 1.0,
        "interval_95": median_interval(duel["auto"].duel_ratios(duel[fastest])) if duel else (1.0, 1.0),
        "kendall_tau": _tau([one for one in measured if one.kind != "auto"]),
    }


def _tau(measured: list[Measured]) -> float:
    """Of plans; kinds that run the same schedules are one plan, as fast as the fastest of them was."""
    plans: dict[str, tuple[float, float]] = {}
    for one in measured:
        _, least = plans.get(one.planned.digest, (0.0, math.inf))
        plans[one.planned.digest] = (one.planned.predicted_seconds, min(least, one.cpu_seconds))
    predicted, seconds = zip(*plans.values(), strict=True)
    return kendall_tau(predicted, seconds)


def summary_of(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Over the batches of a world size."""
    ratios = [one["auto_over_fastest_forced"] for one in records]
    errors = [
        abs(one["predicted_seconds"][kind] / one["cpu_seconds"][kind] - 1)
        for one in records
        for kind in one["cpu_seconds"]
    ]
    return {
        "batches": len(records),
        "within_5_percent": sum(ratio <= TOLERANCE for ratio in ratios),
        "worst_ratio": max(ratios),
        "mean_ratio": statistics.mean(ratios),
        "kendall_tau": statistics.mean(one["kendall_tau"] for one in records),
        "median_prediction_error": statistics.median(errors),
    }


def profiles_of(text: str) -> dict[int, ClusterProfile]:
    """Of each number of ranks."""
    profiles = {}
    for one in text.split(","):
        ranks, _, file = one.partition("=")
        if not ranks.isdecimal() or not file:
            raise argparse.ArgumentTypeError(f"{one!r} is not RANKS=FILE, such as 2=two.json")
        try:
            profiles[int(ranks)] = load_profile(file)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return profiles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--profiles",
        type=profiles_of,
        required=True,
        metavar="RANKS=FILE,...",
        help="of treecp-rl calibrate on this machine",
    )
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument(
        "--most-tokens", type=int, default=768, help="of a prompt, and of a group's responses"
    )
    parser.add_argument("--repeats", type=int, default=1, help="of every kind")
    parser.add_argument("--close-repeats", type=int, default=2, help="more, of auto and of the fastest kinds")
    parser.add_argument(
        "--duel-repeats", type=int, default=8, help="fresh turns of auto and the fastest kind"
    )
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--output")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    points = [random_batch(rng, number, arguments.most_tokens) for number in range(arguments.batches)]
    profiles: dict[int, ClusterProfile] = arguments.profiles
    kinds: tuple[Mode, ...] = ("auto", *FORCED_KINDS)
    records, summary = [], {}
    for world_size, profile in profiles.items():
        job = Job(
            world_size,
            tuple(points),
            kinds,
            arguments.repeats,
            threads=1,
            profile=profile,
            close_repeats=arguments.close_repeats,
            challengers=("auto",),
            duel_repeats=arguments.duel_repeats,
            duel_limit=TOLERANCE,
            counts_memory=False,
        )
        measured = run_world(job, WORLD_TIMEOUT_SECONDS)
        found = [record_of(point, world_size, one) for point, one in zip(points, measured, strict=True)]
        summary[f"world_{world_size}"] = summary_of(found)
        records += found
        print(world_size, json.dumps(summary[f"world_{world_size}"]), flush=True)
        report = {
            "profiles": {ranks: one.digest for ranks, one in profiles.items()},
            "repeats": [arguments.repeats, arguments.close_repeats, arguments.duel_repeats],
            "machine": platform.machine(),
            "summary": summary,
            "batches": records,
        }
        if arguments.output:
            Path(arguments.output).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
