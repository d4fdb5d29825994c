"""Proves that tiles, merged, equal dense masked attention in value and gradient, for every kernel here."""

from dataclasses import replace

import pytest
import torch

from tests.planner.test_lower import allowed_pairs
from treecp_rl.attention.executor import tile_attention
from treecp_rl.attention.kernels import choose_kernel
from treecp_rl.attention.program import compile_program
from treecp_rl.errors import ConfigError, PlanError
from treecp_rl.plan import Schedule, Segment, Stage, Tile
from treecp_rl.planner.check import check
from treecp_rl.planner.lower import lower_local
from treecp_rl.tree import Row, fold, pack

HEADS, KEY_HEADS, HEAD_DIM = 8, 2, 16


def packed_trees(share="prefix"):
    torch.manual_seed(0)
    prompt, other = torch.randint(0, 9, (17,)), torch.randint(0, 9, (3,))
    stem = torch.randint(0, 9, (11,))
    responses = [torch.randint(0, 9, (n,)) for n in (9, 1, 30, 2)]
    rows = [Row("a", prompt, r) for r in (*responses, stem, torch.cat([stem, stem]), stem[:4], stem)]
    return pack(fold([*rows, Row("b", other, stem)], share))


def dense_attention(q, k, v, allowed, scale):
    scores = (q.unflatten(1, (KEY_HEADS, -1)) @ k.unsqueeze(2).transpose(-1, -2)) * scale
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
    return (weights @ v.unsqueeze(2)).flatten(1, 2)


@pytest.mark.parametrize("kernel", ["math", "cpu_flash"])
@pytest.mark.parametrize("share", ["none", "prompt", "prefix"])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)]
)
def test_tiles_equal_dense_attention(kernel, share, dtype, bound):
    packed = packed_trees(share)
    allowed = allowed_pairs(packed.nodes, packed.num_tokens).bool()
    program = compile_program(lower_local(packed.nodes), kernel=kernel)
    shapes = [(1, heads, packed.num_tokens, HEAD_DIM) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    ours = [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]
    reference = [x.detach().double().requires_grad_() for x in ours]
    out, expected = tile_attention(*ours, program, 0.25), dense_attention(*reference, allowed, 0.25)
    seed = torch.randn(expected.shape, dtype=torch.float64)
    out.backward(seed.to(dtype))
    expected.backward(seed)
    for name, a, b in [
        ("out", out, expected),
        *(("qkv"[i], ours[i].grad, reference[i].grad) for i in range(3)),
    ]:
        error = ((a.double() - b).abs().max() / b.abs().max()).item()
        assert error <= bound, f"{name}: {error:.1e} > {bound:.0e}"


def test_the_same_pass_twice_is_bit_identical():
    packed = packed_trees()
    program = compile_program(lower_local(packed.nodes))
    q = torch.randn(1, HEADS, packed.num_tokens, HEAD_DIM)
    k = torch.randn(1, KEY_HEADS, packed.num_tokens, HEAD_DIM)
    assert torch.equal(tile_attention(q, k, k, program, 1.0), tile_attention(q, k, k, program, 1.0))


def test_float64_gradients_by_finite_differences():
    packed = pack(fold([Row("a", torch.tensor([1, 2]), torch.tensor(r)) for r in ([3], [4, 5])]))
    program = compile_program(lower_local(packed.nodes))
    q = torch.randn(1, 2, packed.num_tokens, 4, dtype=torch.float64, requires_grad=True)
    k = torch.randn(1, 1, packed.num_tokens, 4, dtype=torch.float64, requires_grad=True)
    v = torch.randn(1, 1, packed.num_tokens, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *x: tile_attention(*x, program, 0.5), (q, k, v))


def schedule_of(*tiles, num_tokens=4):
    return Schedule(1, num_tokens, (Segment(0, 0, num_tokens),), (Stage((), tiles),))


def test_tiles_that_are_not_in_the_usual_order_are_merged_all_the_same():
    """Usually stage 0's causal tiles cover every query and are written; here one of them comes a stage later."""
    nodes = pack(fold([Row("a", torch.tensor([1, 2]), torch.tensor([3, 4]))])).nodes
    first, *others = lower_local(nodes).stages[0].tiles
    late = replace(lower_local(nodes), stages=(Stage((), tuple(others)), Stage((), (first,))))
    check(late, nodes)
    q = torch.randn(1, 2, 4, 4)
    usual, unusual = (
        tile_attention(q, q, q, compile_program(schedule), 1.0) for schedule in (lower_local(nodes), late)
    )
    assert torch.allclose(usual, unusual, atol=1e-6)


def test_a_tile_of_keys_that_never_arrive_is_refused():
    tiles = (Tile(0, 0, 4, 0, 4, True), Tile(0, 0, 4, 4, 6, False))
    with pytest.raises(PlanError, match=r"no keys of tokens \[4, 6\) here"):
        compile_program(schedule_of(*tiles))


def test_a_program_of_another_length_is_refused():
    program = compile_program(schedule_of(Tile(0, 0, 4, 0, 4, True)))
    x = torch.randn(1, 2, 5, 4)
    with pytest.raises(PlanError, match=r"1 x 4 packed tokens, the layer received 1 x 5"):
        tile_attention(x, x, x, program, 1.0)


def test_unknown_kernel_lists_the_known():
    with pytest.raises(ConfigError, match="choose one of auto, math, cpu_flash, cuda_flash"):
        choose_kernel(torch.device("cpu"), torch.float32, "flashy")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kernel", ["math", "cuda_flash"])
def test_tiles_equal_dense_attention_on_cuda(kernel):
    packed = packed_trees().to("cuda")
    allowed = allowed_pairs(packed.nodes, packed.num_tokens).bool().cuda()
    program = compile_program(lower_local(packed.nodes), kernel=kernel)
    shapes = [(1, heads, packed.num_tokens, 64) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    ours = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    reference = [x.detach().double().requires_grad_() for x in ours]
    out, expected = tile_attention(*ours, program, 0.25), dense_attention(*reference, allowed, 0.25)
    out.sum().backward()
    expected.sum().backward()
    for a, b in [(out, expected), *((x.grad, y.grad) for x, y in zip(ours, reference, strict=True))]:
        assert ((a.double() - b).abs().max() / b.abs().max()).item() <= 2e-2
