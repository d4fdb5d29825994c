"""Proves that the calls that costs count are those that the executor makes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.shapes import KINDS, decision, trees
from treecp_rl.attention.program import compile_program
from treecp_rl.planner.calls import calls_of_stages
from treecp_rl.planner.lower import lower
from treecp_rl.planner.lower_plan import nodes_of
from treecp_rl.planner.search import TreeLengths


def counted(schedule):
    """[stages][ranks]"""
    stages = calls_of_stages(schedule.segments, schedule.stages, schedule.resident)
    return [[of_ranks.get(rank, 0) for rank in range(schedule.world_size)] for of_ranks in stages]


def compiled(schedule):
    programs = [compile_program(schedule, rank) for rank in range(schedule.world_size)]
    return [
        [len(program.stages[number].calls) for program in programs] for number in range(len(schedule.stages))
    ]


@given(
    st.lists(
        st.tuples(st.integers(4, 900), st.lists(st.integers(1, 500), min_size=1, max_size=9)),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from(KINDS),
    st.sampled_from([2, 3, 4]),
    st.booleans(),
)
@settings(max_examples=120, deadline=None)
def test_calls_are_counted_as_they_are_compiled(shapes, kind, degree, is_replay):
    nodes = nodes_of([TreeLengths(prompt, tuple(responses)) for prompt, responses in shapes])
    resident = range(len(shapes)) if is_replay and kind != "dcp_fused" else ()
    schedule = lower(nodes, [decision(kind, degree)] * len(shapes), degree, resident_trees=resident)
    assert counted(schedule) == compiled(schedule)


@pytest.mark.parametrize(("kind", "tiles", "calls"), [("tree_move_kv", 80, 25), ("gather_whole", 18, 9)])
def test_ranks_have_fewer_calls_than_tiles(kind, tiles, calls):
    """A prompt of 8,192 and eight responses of 1,024 on 4 ranks, which are two lanes of ``tree_move_kv``."""
    schedule = lower(trees((8192, [1024] * 8)), [decision(kind, 4)], 4)
    of_ranks = [
        sum(tile.rank == rank for stage in schedule.stages for tile in stage.tiles) for rank in range(4)
    ]
    assert (max(of_ranks), max(map(sum, zip(*counted(schedule), strict=True)))) == (tiles, calls)
