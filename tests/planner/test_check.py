"""Proves that the checker accepts every lowering and refuses what is broken in one place."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.shapes import KINDS, decision, trees
from treecp_rl.errors import PlanError
from treecp_rl.plan import Decision, Node, Schedule, Stage
from treecp_rl.planner.check import check
from treecp_rl.planner.lower import lower, lower_local

DEEP = [
    Node(-1, 0, 70, 400), Node(0, 70, 150, 300), Node(1, 150, 151, 151), Node(1, 151, 300, 300),
    Node(0, 300, 390, 400), Node(4, 390, 400, 400),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("degree", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    "nodes",
    [
        trees((2048, [64] * 8)),
        trees((512, [512] * 8)),
        trees((64, [2048] * 3)),
        trees((512, [4096, 200, 150, 90, 1])),
        trees((1, [1, 1, 1])),
        trees((7, [7, 29])),
        DEEP,
    ],
    ids=["prompt-heavy", "even", "response-heavy", "long-tail", "one-token", "7-and-29", "deep"],
)
def test_every_lowering_is_accepted(kind, degree, nodes):
    degree = min(degree, nodes[0].subtree_stop)
    check(lower(nodes, [decision(kind, degree)], degree), nodes)


def test_the_local_lowering_is_accepted():
    nodes = trees((5, [3, 1]), (2, [4]))
    check(lower_local(nodes), nodes)


lengths = st.lists(st.integers(1, 90), min_size=1, max_size=5)


@given(
    st.lists(
        st.tuples(st.integers(1, 200), lengths, st.sampled_from(KINDS), st.integers(0, 3), st.integers(1, 4)),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=100, deadline=None)
def test_mixed_trees_on_nested_ranks_are_accepted(groups):
    nodes = trees(*[(prompt, responses) for prompt, responses, *_ in groups])
    decisions = [
        decision(kind, min(degree, 4 - first, prompt + sum(responses)), first)
        for prompt, responses, kind, first, degree in groups
    ]
    check(lower(nodes, decisions, 4), nodes)


def mutants(schedule: Schedule, rng: random.Random):
    """Schedules broken in one place: a tile dropped, doubled or shortened; a move dropped or made late."""
    index = rng.choice([i for i, stage in enumerate(schedule.stages) if stage.tiles])
    stage = schedule.stages[index]
    tile = rng.choice(stage.tiles)
    others = tuple(t for t in stage.tiles if t is not tile)
    yield "tile dropped", index, Stage(stage.moves, others)
    yield "tile doubled", index, Stage(stage.moves, (*stage.tiles, tile))
    if tile.key_stop - tile.key_start > 1 and not tile.causal:
        yield (
            "tile shortened",
            index,
            Stage(stage.moves, (*others, tile._replace(key_stop=tile.key_stop - 1))),
        )
    moving = [i for i, stage in enumerate(schedule.stages) if stage.moves]
    if moving:
        index = rng.choice(moving)
        stage = schedule.stages[index]
        move = rng.choice(stage.moves)
        kept = tuple(m for m in stage.moves if m is not move)
        yield "move dropped", index, Stage(kept, stage.tiles)
        yield "move doubled", index, Stage((*stage.moves, move), stage.tiles)
        yield "move from another rank", index, Stage((*kept, move._replace(src=move.dst)), stage.tiles)
        if move.stop - move.start > 1:
            yield "move shortened", index, Stage((*kept, move._replace(stop=move.stop - 1)), stage.tiles)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(10))
def test_schedules_broken_in_one_place_are_refused(kind, seed):
    rng = random.Random(seed)
    nodes = trees((rng.randint(130, 300), [rng.randint(1, 200) for _ in range(4)]))
    schedule = lower(nodes, [decision(kind, 4)], 4)
    for name, index, stage in mutants(schedule, rng):
        broken = replace(schedule, stages=(*schedule.stages[:index], stage, *schedule.stages[index + 1 :]))
        with pytest.raises(PlanError):
            check(broken, nodes)
            pytest.fail(f"{name} in stage {index} was accepted")


def test_a_state_that_leaves_too_early_is_refused():
    nodes = trees((300, [200, 200]))
    schedule = lower(nodes, [decision("move_q", 2)], 2)
    early = [replace(stage, moves=stage.moves) for stage in schedule.stages]
    early[2] = replace(early[2], moves=early[3].moves)
    early[3] = replace(early[3], moves=())
    with pytest.raises(PlanError, match="leaves before the tiles of stage 1 are computed"):
        check(replace(schedule, stages=tuple(early)), nodes)


def test_tokens_that_travel_unread_are_refused():
    """Exactness cannot see this: only bytes would tell."""
    nodes = trees((300, [200, 200]))
    schedule = lower(nodes, [decision("gather", 2)], 2)
    stage = schedule.stages[1]
    come = [(move.start, move.stop) for move in stage.moves if move.dst == 0]
    owned = next(s for s in schedule.segments if s.rank == 1 and not any(a <= s.start < b for a, b in come))
    extra = stage.moves[0]._replace(src=1, dst=0, start=owned.start, stop=owned.stop)
    stages = (schedule.stages[0], replace(stage, moves=(*stage.moves, extra)))
    with pytest.raises(PlanError, match="reads only"):
        check(replace(schedule, stages=stages), nodes)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Decision("gather", 2, 4), r"ranks 2\.\.5 of a domain of 4"),
        (Decision("tree_move_kv", 0, 4, lanes=3), "3 lanes do not divide degree 4"),
        (Decision("local", 0, 2), "local runs on 1 rank"),
        (Decision("ring", 0, 4), "degree 4 for a tree of 3 tokens; choose at most 3"),
    ],
)
def test_impossible_decisions_are_refused(bad, message):
    with pytest.raises(PlanError, match=message):
        lower(trees((2, [1])), [bad], 4)
