"""Proves that ``gather`` loads its ranks evenly, in work and in tokens, on public length shapes and random ones."""

import math
import random
from collections import Counter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.planner.shapes import decision, trees
from treecp_rl.plan import TOKEN_PAIRS, Decision, Node
from treecp_rl.planner import place
from treecp_rl.planner.check import check
from treecp_rl.planner.lower import lower
from treecp_rl.planner.lower_plan import nodes_of
from treecp_rl.planner.search import TreeLengths

PROMPT_TO_RESPONSE = {"LongAlign": (50, 1), "LongReward": (40, 1), "LMSYS": (1, 3), "OpenThoughts": (1, 7)}
BUDGETS = tuple(1024 * k for k in (4, 8, 16, 32, 64))
GROUP_ROWS = 8
DEGREES = (2, 4, 8)


def lengths(ratio, budget, skew, seed):
    """(prompt, responses) with GROUP_ROWS * (P + mean R) = budget and lognormal responses of that skew."""
    row = budget // GROUP_ROWS
    prompt = round(row * ratio[0] / sum(ratio))
    rng, sigma = random.Random(seed), math.sqrt(math.log(1 + skew * skew))
    draws = [math.exp(sigma * rng.gauss(0, 1)) for _ in range(GROUP_ROWS)]
    scale = (row - prompt) * GROUP_ROWS / sum(draws)
    return prompt, [max(1, round(scale * draw)) for draw in draws]


def work_of(first_position, num_tokens):
    """Of consecutive tokens of a row, in pairs."""
    return num_tokens * (TOKEN_PAIRS + first_position) + num_tokens * (num_tokens + 1) // 2


def unevenness(nodes, schedule):
    """Max over mean of the ranks' work, counted from the tiles, and of their tokens."""
    works, tokens = [0] * schedule.world_size, [0] * schedule.world_size
    for stage in schedule.stages:
        for tile in stage.tiles:
            works[tile.rank] += tile.num_pairs
    for segment in schedule.segments:
        tokens[segment.rank] += segment.stop - segment.start
        works[segment.rank] += (segment.stop - segment.start) * TOKEN_PAIRS
    return tuple(max(loads) * len(loads) / sum(loads) for loads in (works, tokens))


def gather(group, degree):
    nodes = trees(group)
    schedule = lower(nodes, [decision("gather", degree)], degree)
    check(schedule, nodes)
    return nodes, schedule


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("dataset", PROMPT_TO_RESPONSE)
def test_public_shapes_are_even(dataset, degree):
    for budget in BUDGETS:
        for skew, seeds in ((0.0, 1), (0.6, 5)):
            for seed in range(seeds):
                group = lengths(PROMPT_TO_RESPONSE[dataset], budget, skew, seed)
                work, tokens = unevenness(*gather(group, degree))
                assert work <= place.WORK_LIMIT and tokens <= place.TOKEN_LIMIT, (budget, skew, seed)


@pytest.mark.parametrize("degree", DEGREES)
def test_a_long_tail_is_even(degree):
    """Without a zigzag of the long response one rank would hold 1.44 times the mean of the tokens at 8 ranks."""
    work, tokens = unevenness(*gather((512, [4096, 200, 150, 90, 60, 30, 9, 1]), degree))
    assert work <= place.WORK_LIMIT
    assert tokens <= place.TOKEN_LIMIT


def test_equal_responses_that_fill_the_ranks_stay_whole():
    """Evenness must not cost bytes where whole responses give it: only the prompt is moved."""
    _, schedule = gather((512, [512] * 8), 4)
    moved = [move for stage in schedule.stages for move in stage.moves]
    assert all(move.stop <= 512 for move in moved)


@given(
    st.integers(1, 4000),
    st.lists(st.integers(1, 3000), min_size=1, max_size=24),
    st.sampled_from(DEGREES),
)
@settings(max_examples=100, deadline=None)
def test_random_shapes_are_even_in_work(prompt, responses, degree):
    """Within the limit, two tokens or what blocks of a prompt cost; a prompt too short for a zigzag comes on top."""
    total = work_of(0, prompt) + sum(work_of(prompt, response) for response in responses)
    whole = 0 if prompt >= 2 * degree * place.ROOT_ZIGZAG_FLOOR else work_of(0, prompt)
    assume(whole <= total / degree)
    work, _ = unevenness(*gather((prompt, responses), degree))
    last_token = TOKEN_PAIRS + prompt + max(responses)
    of_blocks = place.BLOCK_TOLERANCE * work_of(0, prompt) / degree
    assert (work - 1) * total / degree <= max(0.01 * total / degree, 2 * last_token, of_blocks) + whole


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("budget", [2048, 4096, 8192])
@pytest.mark.parametrize("prompt_part", [50 / 51, 3 / 4, 1 / 4, 1 / 8])
def test_no_placement_of_the_baselines_that_is_as_even_moves_fewer_tokens(prompt_part, budget, degree):
    """Of one group of 8: gather against the baselines within its limits, gather_whole against those within 1.05."""
    prompt = round(budget / 8 * prompt_part)
    draw = random.Random(budget)
    mean = max(1, budget // 8 - prompt)
    nodes = trees((prompt, [max(1, round(mean * draw.uniform(0.5, 1.5))) for _ in range(8)]))

    def lowered(kind):
        schedule = lower(nodes, [decision(kind, degree)], degree)
        moved = sum(move.num_tokens for stage in schedule.stages for move in stage.moves)
        return moved, *unevenness(nodes, schedule)

    rivals = [lowered(kind) for kind in ("ring", "tree_move_kv", "move_q", "dcp_fused")]
    even = [
        moved for moved, work, tokens in rivals if work <= place.WORK_LIMIT and tokens <= place.TOKEN_LIMIT
    ]
    assert lowered("gather")[0] <= min(even, default=1 << 60)
    fair = [moved for moved, work, _ in rivals if work <= 1.05]
    assert lowered("gather_whole")[0] <= min(fair, default=1 << 60)


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("kind", ["gather", "gather_whole"])
def test_short_root_stays_whole_where_responses_balance(degree, kind):
    # LMSYS-like: chunks of 6 to 24 tokens would cost every rank more tiles, and move as much.
    nodes = nodes_of([TreeLengths(94, (152, 323, 433, 212, 144, 262, 339, 454))])
    schedule = lower(nodes, [Decision(kind, degree=degree)], degree)
    is_whole = len({s.rank for s in schedule.segments if s.start < 94}) == 1
    tiles = Counter(tile.rank for stage in schedule.stages for tile in stage.tiles)
    assert is_whole == ((kind, degree) != ("gather", 4))  # which cuts a response to be even
    assert not is_whole or max(tiles.values()) <= 6


def test_root_is_cut_where_responses_cannot_balance_it():
    nodes = nodes_of([TreeLengths(188, (2, 4, 6, 3))])
    for kind in ("gather", "gather_whole"):
        schedule = lower(nodes, [Decision(kind, degree=4)], 4)
        assert len({s.rank for s in schedule.segments if s.start < 188}) == 4


@given(
    st.integers(1, 3000), st.lists(st.integers(1, 900), min_size=1, max_size=9), st.sampled_from([2, 4, 8])
)
@settings(max_examples=60, deadline=None)
def test_a_replay_finds_its_root_where_the_prefill_left_it(prompt, responses, degree):
    for kind in ("gather", "gather_whole"):
        decision = Decision(kind, degree=min(degree, prompt))
        alone = lower([Node(-1, 0, prompt, prompt)], [decision], degree)
        replay = lower(
            nodes_of([TreeLengths(prompt, tuple(responses))]), [decision], degree, resident_trees=(0,)
        )
        roots = [
            {(s.start, s.stop, s.rank) for s in one.segments if s.stop <= prompt} for one in (alone, replay)
        ]
        assert roots[0] == roots[1]


@pytest.mark.parametrize(
    ("length", "ranks", "borders"),
    [
        (1005, 4, (0, 128, 256, 384, 496, 624, 752, 880, 1005)),
        (50_000, 2, (0, 12_544, 24_960, 37_504, 50_000)),
        # A rank would have 160 tokens, 150 being the mean.
        (600, 4, (0, 75, 150, 225, 300, 375, 450, 525, 600)),
        # Chunks shorter than a block.
        (60, 2, (0, 15, 30, 45, 60)),
    ],
)
def test_zigzags_are_cut_at_blocks_where_that_leaves_ranks_even(length, ranks, borders):
    chunks = place.zigzag(7, 7 + length, range(ranks), 0, floor=1)
    assert tuple(chunk.start - 7 for chunk in chunks) == borders[:-1]
    assert [chunk.stop for chunk in chunks] == [*(chunk.start for chunk in chunks[1:]), 7 + length]
    assert [chunk.rank for chunk in chunks] == [*range(ranks), *reversed(range(ranks))]


@given(st.integers(4, 60_000), st.integers(2, 64))
def test_chunks_of_a_zigzag_hold_tokens_and_are_even(length, ranks):
    assume(length >= 2 * ranks)
    chunks = place.zigzag(0, length, range(ranks), 0, floor=1)
    assert all(chunk.stop > chunk.start for chunk in chunks)
    tokens = [chunk.stop - chunk.start for chunk in chunks]
    most = max(front + back for front, back in zip(tokens, reversed(tokens), strict=True))
    assert most <= max(length / ranks * (1 + place.BLOCK_TOLERANCE) * (1 + 1e-12), length // ranks + 2)
