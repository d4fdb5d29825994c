"""Groups -> steps placed with and without one of the planner's ways, in turns -> what it saves.

    python benchmarks/placements.py blocks --output benchmarks/placements_blocks.json
    python benchmarks/placements.py spans --output benchmarks/placements_spans.json

blocks: zigzags are cut at multiples of blocks, or into equal chunks. spans: ``auto`` may give a rank its part of a node
in one piece, or only two chunks of a zigzag. On gloo processes as in ``treecp-rl bench cp`` (float32, FSDP2, layers
kept, one domain). The ratio is the median over the turns of the busiest rank's CPU time with it over that without.
Where both lead to the same schedules the ratio is noise: it says how much the others may be trusted.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from treecp_rl.bench.cp_ranks import Runner, sharded_model, small_model_estimate, stay_on_a_core, turn_ratios
from treecp_rl.bench.shapes import BatchPoint
from treecp_rl.engine.passes import Domain
from treecp_rl.planner import place
from treecp_rl.planner.batch import Mode
from treecp_rl.planner.profile import ClusterProfile, load_profile
from treecp_rl.planner.search import TreeLengths
from treecp_rl.verify.ranks import run_on_ranks

TIMEOUT_SECONDS = 3600.0
BLOCKS, SPAN_TOKEN_LIMIT = place.BLOCKS, place.SPAN_TOKEN_LIMIT


def use_blocks(is_on: bool) -> None:
    place.BLOCKS = BLOCKS if is_on else ()
    place._zigzag_borders.cache_clear()


def use_spans(is_on: bool) -> None:
    place.SPAN_TOKEN_LIMIT = SPAN_TOKEN_LIMIT if is_on else 0.0


@dataclass(frozen=True)
class Change:
    """What is done with and without, and on what."""

    use: Callable[[bool], None]
    kinds: tuple[Mode, ...]
    groups: tuple[TreeLengths, ...]


CHANGES = {
    "blocks": Change(
        use_blocks,
        ("gather", "reuse_ring", "tree_move_kv", "move_q"),
        (TreeLengths(1005, (112,) * 8), TreeLengths(1300, (210,) * 4), TreeLengths(810, (1500, 700))),
    ),
    "spans": Change(
        use_spans,
        ("auto",),
        (
            TreeLengths(1005, (112,) * 8),
            TreeLengths(900, (40, 12, 30, 25)),
            TreeLengths(60, (190, 70, 250, 130)),
            TreeLengths(140, (950, 410)),
            TreeLengths(500, (300, 120, 260)),
            TreeLengths(1800, (90, 160, 40, 210, 70, 130, 110, 100)),
        ),
    ),
}


@dataclass
class Found:
    """One kind on one group."""

    digests: dict[bool, str]
    """Of the schedules, by whether the change is on."""
    seconds: dict[bool, list[float]]
    """Busiest rank's CPU time of each turn."""


def measure(
    rank: int, world_size: int, name: str, turns: int, profile: ClusterProfile
) -> dict[tuple[int, Mode], Found]:
    """One rank: every turn runs each kind on each group both ways."""
    stay_on_a_core(rank)
    change, group = CHANGES[name], dist.group.WORLD
    runner = Runner(sharded_model(), Domain(rank, world_size, group), profile)  # type: ignore[arg-type]
    points = [BatchPoint(str(number), (tree,)) for number, tree in enumerate(change.groups)]
    found: dict[tuple[int, Mode], Found] = {}
    for turn in range(turns + 1):
        for number, point in enumerate(points):
            for kind in change.kinds:
                one = found.setdefault((number, kind), Found({}, {True: [], False: []}))
                for is_on in (True, False) if turn % 2 else (False, True):
                    change.use(is_on)
                    if not turn:
                        one.digests[is_on] = runner.plan(point, kind).digest
                    result = runner.step(point, kind)
                    if turn:
                        one.seconds[is_on].append(max(result.rank_cpu_seconds))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("change", choices=CHANGES)
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--profile", help="JSON of `treecp-rl calibrate`; default: an estimate of a core")
    parser.add_argument("--output")
    chosen = parser.parse_args(arguments)
    profile = load_profile(chosen.profile) if chosen.profile else small_model_estimate()
    groups, cases = CHANGES[chosen.change].groups, []
    for world_size in chosen.world_sizes:
        call = (chosen.change, chosen.turns, profile)
        found = run_on_ranks(measure, world_size, *call, timeout_seconds=TIMEOUT_SECONDS)[0]
        for (number, kind), one in found.items():
            cases.append(
                {
                    "ranks": world_size,
                    "prompt": groups[number].prompt,
                    "responses": list(groups[number].responses),
                    "kind": kind,
                    "same_schedules": one.digests[True] == one.digests[False],
                    "ratio": statistics.median(turn_ratios(one.seconds[True], one.seconds[False])),
                }
            )
            print(json.dumps(cases[-1]), flush=True)
    means = {}
    for name, is_same in (("changed", False), ("same_schedules", True)):
        ratios = [case["ratio"] for case in cases if case["same_schedules"] is is_same]
        means[name] = statistics.geometric_mean(ratios) if ratios else None
    print(json.dumps(means))
    if chosen.output:
        report = {"change": chosen.change, "turns": chosen.turns, "geometric_means": means, "cases": cases}
        Path(chosen.output).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
