"""Trees of so many attention blocks -> time to find a tree's plan, measured here: AugTree's Fig. 15b.

The one figure of the simulator that is a measurement. What the paper reports stands beside it as reported.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from math import sqrt
from typing import Literal

from treecp_rl.planner.forms import Space, powers_of_two
from treecp_rl.planner.profile import ClusterProfile
from treecp_rl.planner.search import DEFAULT_OPTIONS, TreeLengths, TreeSearch

BLOCK_TOKENS = 512
GROUP_SIZE = 8
ATTENTION_BLOCKS = (16, 64, 256, 1024, 4096, 8192)
DEGREES = powers_of_two(128)
WARM_UP, REPEATS = 5, 25
SPACES: tuple[tuple[str, Space], ...] = (("AugTree's space", "augtree"), ("our space", "full"))
REPORTED = {
    # AugTree, section 4.3: ends of the curves of Fig. 15b, milliseconds.
    "DCP (reported)": {16: 0.17, 8192: 3336.5},
    "AugTree (reported)": {16: 0.018, 8192: 1.70},
}


@dataclass(frozen=True, slots=True)
class SolveTime:
    """How long one tree's plan takes, all degrees to 128."""

    planner: str
    attention_blocks: int
    """Nominal."""
    prompt_blocks: int | None
    response_blocks: int | None
    """Of each response. None: as reported."""
    milliseconds: float
    kind: Literal["measured", "reported"]


def shape_of_graph(attention_blocks: int) -> tuple[int, int]:
    """Blocks of the prompt and of each response whose replay has about so many blocks of queries times keys.

    A response of r blocks meets p of the prompt and a triangle of its own: G (r p + r (r + 1) / 2) in all.
    """
    of_response = attention_blocks / GROUP_SIZE
    response = max(1, int(sqrt(of_response / 2.5)))
    prompt = round((of_response - response * (response + 1) / 2) / response)
    return max(1, prompt), response


def num_attention_blocks(prompt: int, response: int) -> int:
    """Of the replay of ``GROUP_SIZE`` responses."""
    return GROUP_SIZE * (response * prompt + response * (response + 1) // 2)


def solve_times(profile: ClusterProfile) -> list[SolveTime]:
    """Medians of trees that are each planned once, after some for warming up; then what the paper reports."""
    found = []
    for blocks in ATTENTION_BLOCKS:
        prompt, response = shape_of_graph(blocks)
        for name, space in SPACES:
            search = TreeSearch(profile, DEGREES, DEFAULT_OPTIONS, space)
            milliseconds = [_milliseconds(search, tree) for tree in _trees(prompt, response)][WARM_UP:]
            median = statistics.median(milliseconds)
            found.append(SolveTime(name, blocks, prompt, response, median, "measured"))
    for name, points in REPORTED.items():
        found += [SolveTime(name, blocks, None, None, value, "reported") for blocks, value in points.items()]
    return found


def _milliseconds(search: TreeSearch, tree: TreeLengths) -> float:
    started = time.perf_counter()
    search(tree)
    return (time.perf_counter() - started) * 1e3


def _trees(prompt: int, response: int) -> list[TreeLengths]:
    """Trees of these blocks, the last block of every node partly filled, so that no two are equal."""
    rng = random.Random(prompt)

    def tokens(blocks: int) -> int:
        return blocks * BLOCK_TOKENS - rng.randrange(BLOCK_TOKENS)

    return [
        TreeLengths(tokens(prompt), tuple(tokens(response) for _ in range(GROUP_SIZE)))
        for _ in range(WARM_UP + REPEATS)
    ]
