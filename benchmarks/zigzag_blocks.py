"""Groups -> steps with zigzags cut at multiples of blocks and into equal chunks, in turns -> what blocks save.

    python benchmarks/zigzag_blocks.py --output benchmarks/zigzag_blocks.json

On gloo processes as in ``treecp-rl bench cp`` (float32, FSDP2, layers kept, one domain). The ratio is the median over
the turns of the busiest rank's CPU time with blocks over that without. Where blocks would leave ranks uneven both are
the same, and the ratio is noise: it says how much the others may be trusted.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch.distributed as dist

from treecp_rl.bench.cp_ranks import (
    Runner,
    sharded_model,
    small_model_estimate,
    stay_on_a_core,
    turn_ratios,
)
from treecp_rl.bench.shapes import BatchPoint
from treecp_rl.engine.passes import Domain
from treecp_rl.planner import place
from treecp_rl.planner.batch import Mode
from treecp_rl.planner.search import TreeLengths
from treecp_rl.verify.ranks import run_on_ranks

GROUPS = (TreeLengths(1005, (112,) * 8), TreeLengths(1300, (210,) * 4), TreeLengths(810, (1500, 700)))
KINDS: tuple[Mode, ...] = ("gather", "reuse_ring", "tree_move_kv", "move_q")
VARIANTS = {"blocks": place.BLOCKS, "equal": ()}
TIMEOUT_SECONDS = 3600.0

Seconds = dict[tuple[int, Mode, str], list[float]]
"""Of each turn, by group, kind and variant."""


def measure(rank: int, world_size: int, turns: int) -> Seconds:
    """One rank: every turn runs each kind on each group both ways."""
    stay_on_a_core(rank)
    group = dist.group.WORLD
    runner = Runner(sharded_model(), Domain(rank, world_size, group), small_model_estimate())  # type: ignore[arg-type]
    points = [BatchPoint(str(number), (tree,)) for number, tree in enumerate(GROUPS)]
    seconds: Seconds = {}
    for turn in range(turns + 1):
        for number, point in enumerate(points):
            for kind in KINDS:
                for name in sorted(VARIANTS, reverse=bool(turn % 2)):
                    use(VARIANTS[name])
                    result = runner.step(point, kind)
                    if turn:
                        seconds.setdefault((number, kind, name), []).append(max(result.rank_cpu_seconds))
    return seconds


def is_cut_at_blocks(tree: TreeLengths, world_size: int) -> bool:
    """Whether blocks change where the prompt or a response is cut over all ranks."""
    cuts = []
    for blocks in VARIANTS.values():
        use(blocks)
        lengths = (tree.prompt, *tree.responses)
        cuts.append([place.zigzag(0, length, range(world_size), 0) for length in lengths])
    return cuts[0] != cuts[1]


def use(blocks: tuple[int, ...]) -> None:
    """Zigzags are cut at these from now on."""
    place.BLOCKS = blocks
    place._zigzag_borders.cache_clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--output")
    arguments = parser.parse_args()
    cases = []
    for world_size in (2, 4):
        seconds = run_on_ranks(measure, world_size, arguments.turns, timeout_seconds=TIMEOUT_SECONDS)[0]
        for number, tree in enumerate(GROUPS):
            for kind in KINDS:
                with_blocks, equal = (seconds[number, kind, name] for name in ("blocks", "equal"))
                ratio = statistics.median(turn_ratios(with_blocks, equal))
                cases.append(
                    {
                        "ranks": world_size,
                        "prompt": tree.prompt,
                        "responses": list(tree.responses),
                        "kind": kind,
                        "is_cut_at_blocks": is_cut_at_blocks(tree, world_size),
                        "ratio": ratio,
                    }
                )
                print(json.dumps(cases[-1]), flush=True)
    means = {
        name: statistics.geometric_mean(case["ratio"] for case in cases if case["is_cut_at_blocks"] is cut)
        for name, cut in (("cut_at_blocks", True), ("same_schedules", False))
    }
    print(json.dumps(means))
    if arguments.output:
        report = {"turns": arguments.turns, "geometric_means": means, "cases": cases}
        Path(arguments.output).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
