"""Proves that attention cut over ranks equals dense attention: every kind of decision, values and gradients.

One spawn of gloo processes a world size runs all cases; a rank compares its own tokens with the dense result
it computes itself.
"""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.attention.test_executor import dense_attention
from tests.planner.test_check import DEEP, decision, trees
from tests.planner.test_lower import allowed_pairs
from treecp_rl.attention.executor import tile_attention
from treecp_rl.attention.program import compile_program
from treecp_rl.plan import Decision
from treecp_rl.planner.check import check
from treecp_rl.planner.cost import ModelShape, bytes_sent
from treecp_rl.planner.lower import lower
from treecp_rl.verify.ranks import run_on_ranks

HEADS, KEY_HEADS, HEAD_DIM = 4, 2, 8
KINDS = ("gather", "gather_whole", "heads", "ring", "tree_move_kv", "move_q", "dcp_fused")
SHAPES = {
    "ragged": trees((130, [9, 1, 30, 170, 2])),
    "prompt-heavy": trees((400, [5, 4])),
    "response-heavy": trees((8, [140, 150, 40])),
    "one-token": trees((1, [1] * 9)),
    "deep": DEEP,
}
BOUNDS = {torch.float64: 1e-13, torch.float32: 2e-6}


def cases(world_size):
    """name -> (nodes, decisions, dtype, options of lower)"""
    found = {
        f"{kind} {shape}{' sent again' if resend else ''}": (
            nodes,
            [heads_that_divide(decision(kind, world_size))],
            torch.float64,
            {"resend": resend},
        )
        for kind in KINDS
        for shape, nodes in SHAPES.items()
        for resend in (False, True)
    }
    half = max(1, world_size // 2)
    mixed = trees((150, [60, 80]), (90, [70]), (140, [31, 32]), (5, [4]))
    decisions = [
        decision("move_q", world_size),
        decision("gather", half),
        decision("move_q", world_size - half, half),
        Decision("local", world_size - 1),
    ]
    for dtype in (torch.float64, torch.float32):
        for streaming in (True, False):
            name = f"mixed nested {dtype}{' streamed' if streaming else ''}"
            found[name] = (mixed, decisions, dtype, {"streaming": streaming})
    found["mixed nested sent again"] = (mixed, decisions, torch.float64, {"resend": True})
    return found


def heads_that_divide(wanted):
    """Lanes in which every rank has key/value heads."""
    if wanted.kind != "heads":
        return wanted
    per_lane = math.gcd(wanted.degree, KEY_HEADS)
    return replace(wanted, lanes=wanted.degree // per_lane)


def error_of(ours, reference):
    return (
        ((ours.double() - reference.double()).abs().max() / reference.abs().max()).item()
        if ours.numel()
        else 0.0
    )


def worst_error(nodes, decisions, dtype, options, rank, world_size):
    schedule = lower(nodes, decisions, world_size, **options)
    check(schedule, nodes)
    program = compile_program(schedule, rank, group=dist.group.WORLD)
    generator = torch.Generator().manual_seed(7)
    num_tokens = schedule.num_tokens
    whole = [
        torch.randn(1, heads, num_tokens, HEAD_DIM, generator=generator, dtype=torch.float64)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    ]
    allowed = allowed_pairs(nodes, num_tokens).bool()
    reference = [x.clone().requires_grad_() for x in whole[:3]]
    expected = dense_attention(*reference, allowed, 0.3)
    expected.backward(whole[3])

    own = torch.cat(
        [torch.arange(0), *(torch.arange(s.start, s.stop) for s in schedule.segments if s.rank == rank)]
    )
    ours = [x[:, :, own].to(dtype).requires_grad_() for x in whole[:3]]
    out = tile_attention(*ours, program, 0.3)
    again = tile_attention(*[x.detach() for x in ours], program, 0.3)
    assert torch.equal(out, again), "the same plan twice must be bit-identical"
    out.backward(whole[3][:, :, own].to(dtype))
    shape = ModelShape(1, HEADS, KEY_HEADS, HEAD_DIM, dtype.itemsize, max(4, dtype.itemsize))
    sent = bytes_sent(schedule, shape)
    assert program.forward_traffic.sent_bytes == 2 * sent.forward[rank], "forward ran twice"
    assert program.backward_traffic.sent_bytes == sent.backward[rank]
    pairs = [(out, expected), *((x.grad, y.grad) for x, y in zip(ours, reference, strict=True))]
    return max(error_of(a.detach(), b.detach()[:, :, own]) for a, b in pairs)


def run_rank(rank, world_size):
    return {name: worst_error(*case, rank, world_size) for name, case in cases(world_size).items()}


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_kind_of_decision_equals_dense_attention(world_size):
    ranks = run_on_ranks(run_rank, world_size, timeout_seconds=300)
    for name, (_, _, dtype, _) in cases(world_size).items():
        worst = max(errors[name] for errors in ranks)
        assert worst <= BOUNDS[dtype], f"{name}: {worst:.1e} > {BOUNDS[dtype]:.0e}"
