"""Proves the bytes of a plan against the closed forms of each kind, and the memory budget's refusals.

Lengths are multiples of every cut, so that padding is nothing and the closed forms are exact. Elements are counted
a layer: P prompt tokens, R response tokens together, d ranks, H query and K key/value heads of D.
"""

from dataclasses import replace

import pytest

from tests.planner.shapes import KINDS, decision, trees
from treecp_rl.errors import PlanError
from treecp_rl.plan import Decision, Move, Schedule, Segment, Stage, Tile
from treecp_rl.planner.check import check
from treecp_rl.planner.cost import (
    MemoryBudget,
    ModelShape,
    bytes_sent,
    moved_bytes_kept,
    peak_attention_bytes,
)
from treecp_rl.planner.lower import lower, lower_local

SHAPE = ModelShape(num_layers=4, num_heads=8, num_kv_heads=4, head_dim=16, itemsize=2)
H, K, D, WIDE = 8, 4, 16, 4
PROMPT, RESPONSES = 1024, [512] * 8
TOTAL = sum(RESPONSES)


def kv(tokens, itemsize=2):
    return 2 * tokens * K * D * itemsize


def q(tokens, itemsize=2):
    return tokens * H * D * itemsize


def state(tokens):
    return tokens * H * (D + 1) * WIDE


def state_back(tokens):
    """dO in the model's dtype, log-sum-exp and delta: not the output, whose only use is delta."""
    return tokens * H * (D * 2 + 2 * WIDE)


def moved_tokens(kind, degree, lanes):
    """(K/V, queries) in tokens of all heads that all ranks receive, by counting.

    In a zigzag of 2d chunks the early half is read by all ranks, the late half by those that own later chunks: 3/4 of
    the (d - 1) copies that a ring which passes everything on would carry.
    """
    ring = 3 * (degree - 1) / 4
    in_lane = degree // lanes
    if kind == "ring":
        return (degree - 1) * PROMPT + ring * TOTAL, 0
    if kind in ("gather", "gather_whole"):
        return (degree - 1) * PROMPT, 0
    if kind == "tree_move_kv":
        return (degree - 1) * PROMPT + 3 * (in_lane - 1) / 4 * TOTAL, 0
    if kind == "move_q":
        return ring * PROMPT, (degree - 1) * TOTAL
    assert kind == "heads"
    # A rank has 1 of in_lane parts of the heads: of the prompt's K/V all over the ranks, of the rest in its lane.
    rest = (in_lane - 1) / in_lane
    return (degree - 1) / in_lane * PROMPT + rest * TOTAL, rest * (PROMPT + TOTAL)


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "dcp_fused"])
def test_bytes_equal_the_closed_form(kind, degree):
    chosen = decision(kind, degree)
    schedule = lower(trees((PROMPT, RESPONSES)), [chosen], degree)
    kv_tokens, q_tokens = moved_tokens(kind, degree, chosen.lanes)
    sent = bytes_sent(schedule, SHAPE)
    assert sum(sent.forward) == kv(kv_tokens) + q(q_tokens) + state(q_tokens)
    assert sum(sent.backward) == kv(kv_tokens, WIDE) + q(q_tokens, WIDE) + state_back(q_tokens)
    again = bytes_sent(replace(schedule, resend=True), SHAPE)
    assert again.forward == sent.forward
    assert sum(again.backward) - sum(sent.backward) == kv(kv_tokens) + q(q_tokens)
    assert sum(moved_bytes_kept(schedule, SHAPE)) == kv(kv_tokens) + q(q_tokens)
    assert sum(moved_bytes_kept(replace(schedule, resend=True), SHAPE)) == 0


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_rings_move_no_more_than_the_paper_counts(degree):
    """Paper: a hop carries all K/V of the lane, (d - 1) hops forward; backward K/V again and d hops of dK/dV.

    AugTree, equation 3 and its backward. ``flat_ring`` is a ring over every row of prompt and response on its own.
    """
    for groups, tokens in (
        ([(PROMPT, RESPONSES)], PROMPT + TOTAL),
        ([(PROMPT + response, []) for response in RESPONSES], len(RESPONSES) * PROMPT + TOTAL),
    ):
        schedule = lower(trees(*groups), [decision("ring", degree)] * len(groups), degree)
        sent = bytes_sent(schedule, SHAPE)
        assert sum(sent.forward) <= (degree - 1) * kv(tokens)
        assert sum(sent.backward) <= (degree - 1) * kv(tokens) + degree * kv(tokens, WIDE)


def test_a_flat_ring_moves_three_quarters_of_every_row():
    rows = [(PROMPT + response, []) for response in RESPONSES]
    schedule = lower(trees(*rows), [decision("ring", 4)] * len(rows), 4)
    assert sum(bytes_sent(schedule, SHAPE).forward) == kv(3 * 3 / 4 * (8 * PROMPT + TOTAL))


def test_sender_and_answerer_are_told_apart():
    """Rank 0 sends K/V to rank 1, which answers with gradients; padding rounds each tensor up to 16 bytes."""
    shape = ModelShape(num_layers=1, num_heads=3, num_kv_heads=1, head_dim=3, itemsize=2)
    moves = (Move("kv", 0, 1, 0, 1), Move("kv", 0, 1, 1, 2), Move("q", 1, 0, 2, 3), Move("state", 0, 1, 2, 3))
    schedule = Schedule(2, 3, (Segment(0, 0, 2), Segment(1, 2, 3)), (Stage(moves, ()),))
    sent = bytes_sent(schedule, shape)
    # Tensors of 6 and 18 bytes forward; 12 and 36 backward; a state is 36 + 12 there, 18 + 12 + 12 back.
    assert sent.forward == (4 * 16 + 48 + 16, 32)
    assert sent.backward == (48, 4 * 16 + 32 + 16 + 16)
    assert bytes_sent(schedule, shape, needs_gradients=False).backward == (0, 0)
    assert sent.total == sum(sent.forward) + sum(sent.backward)
    wide = replace(shape, itemsize=8, accumulate_itemsize=8)
    assert bytes_sent(schedule, wide).forward == (4 * 32 + 80 + 32, 80)


def test_parts_that_do_not_divide_the_heads_are_refused():
    schedule = lower(trees((256, [256] * 4)), [Decision("heads", degree=8)], 8)
    with pytest.raises(PlanError, match="8 parts of the heads do not divide 8 heads and 4 key/value heads"):
        bytes_sent(schedule, SHAPE)


def test_peak_of_one_rank_is_what_its_tensors_hold():
    schedule = lower_local(trees((10, [6])))
    per_layer = 2 * q(16) + kv(16) + 16 * H * WIDE
    backward = q(16, WIDE) + kv(16, WIDE)
    assert peak_attention_bytes(schedule, SHAPE) == (4 * per_layer + backward,)
    assert peak_attention_bytes(schedule, SHAPE, num_kept_layers=1) == (per_layer + backward,)
    replay = lower_local(trees((10, [6])), roots_are_resident=True)
    own = 2 * q(6) + kv(6) + 6 * H * WIDE
    assert peak_attention_bytes(replay, SHAPE, num_kept_layers=1) == (
        own + q(6, WIDE) + kv(6, WIDE) + 4 * kv(10, 2 + WIDE),
    )


def test_peak_counts_what_arrives():
    """Rank 1 of two receives one token's K/V and computes one query of its own."""
    nodes = trees((1, [1]))
    tiles = (Tile(0, 0, 1, 0, 1, True), Tile(1, 1, 2, 1, 2, True))
    late = Stage((Move("kv", 0, 1, 0, 1),), (Tile(1, 1, 2, 0, 1, False),))
    schedule = Schedule(2, 2, (Segment(0, 0, 1), Segment(1, 1, 2)), (Stage((), tiles), late))
    check(schedule, nodes)
    alone, reader = peak_attention_bytes(schedule, SHAPE)
    assert reader - alone == 4 * kv(1) + kv(1, WIDE)
    alone, reader = peak_attention_bytes(replace(schedule, resend=True), SHAPE)
    assert reader - alone == kv(1) + kv(1, WIDE)


def test_a_budget_is_kept_or_refused_with_the_smallest_change():
    nodes = trees((4096, [64] * 8))
    schedule = lower(nodes, [decision("gather", 4)], 4)
    lean = replace(schedule, resend=True)
    kept, resent = (max(peak_attention_bytes(s, SHAPE)) for s in (schedule, lean))
    assert resent < kept
    check(schedule, nodes, MemoryBudget(kept, SHAPE))
    with pytest.raises(PlanError, match=rf"needs .*\({kept} bytes\).*budget is .*with resend it needs"):
        check(schedule, nodes, MemoryBudget(kept - 1, SHAPE))
    check(lean, nodes, MemoryBudget(resent, SHAPE))
    half = resent // 2
    with pytest.raises(PlanError, match=r"raise the budget to \d+ bytes, or the number of ranks to \d+"):
        check(lean, nodes, MemoryBudget(half, SHAPE))
    on_one = lower(nodes, [Decision("local")], 4)
    even = sum(peak_attention_bytes(on_one, SHAPE)) // 4 + 1
    with pytest.raises(PlanError, match="raise the degree of the largest tree"):
        check(on_one, nodes, MemoryBudget(even, SHAPE))


def test_a_budget_counts_other_activations_of_computed_tokens():
    schedule = lower_local(trees((10, [6])), roots_are_resident=True)
    (bare,) = MemoryBudget(0, SHAPE).peak_bytes(schedule)
    (more,) = MemoryBudget(0, SHAPE, other_bytes_per_token=100).peak_bytes(schedule)
    assert more - bare == 600
