"""Proves that each kernel's tiles and packed segments equal dense float64 attention, in value and gradient.

The body is shared with tests/gpu: a case is a set of tiles, and the reference is one dense softmax under the
mask that the tiles add up to, differentiated by autograd.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise

import pytest
import torch

from treecp_rl.attention.kernels import (
    Capabilities,
    CudaFlashKernel,
    FlashKernel,
    MathKernel,
    available_kernels,
    choose_kernel,
)
from treecp_rl.errors import ConfigError, PlanError

BOUNDS = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Relative to the largest number of the tensor."""

SCALE = 0.3


@dataclass(frozen=True)
class Tile:
    query: slice
    key: slice
    causal: bool = False


def causal(start, stop):
    return Tile(slice(start, stop), slice(start, stop), True)


TILES = {
    "rectangle": [Tile(slice(0, 37), slice(0, 53))],
    "one_query": [Tile(slice(0, 1), slice(0, 53))],
    "one_token": [causal(0, 1)],
    "causal": [causal(0, 67)],
    "two_tiles_of_a_query": [
        Tile(slice(0, 40), slice(0, 40), causal=True),
        Tile(slice(0, 40), slice(40, 93)),
    ],
    "tree": [causal(0, 53), causal(53, 80), causal(80, 93), Tile(slice(53, 93), slice(0, 53))],
}

BORDERS = [(0, 130), (0, 1, 40, 41, 97, 130), (0, 1, 2, 3), (0, 64, 128)]

SHAPES = [(8, 2, 64), (8, 2, 128), (4, 4, 64)]
"""(query heads, key heads, head dim)"""


def random_tensors(num_queries, num_keys, shape, dtype, device):
    """grad_out, q, k, v."""
    heads, key_heads, dim = shape
    generator = torch.Generator().manual_seed(0)
    sizes = [(heads, num_queries), (heads, num_queries), (key_heads, num_keys), (key_heads, num_keys)]
    draws = (torch.randn(1, n, h, dim, generator=generator, dtype=torch.float64) for h, n in sizes)
    return [x.to(device, dtype).transpose(1, 2) for x in draws]


def dense_reference(tiles, grad_out, q, k, v):
    """out, lse and gradients in float64."""
    allowed = torch.zeros(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    for tile in tiles:
        block = torch.ones_like(allowed[tile.query, tile.key])
        allowed[tile.query, tile.key] |= block.tril() if tile.causal else block
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    scores = (q.unflatten(1, (k.shape[1], -1)) @ k.unsqueeze(2).mT) * SCALE
    scores = scores.masked_fill(~allowed, float("-inf"))
    out = (scores.softmax(-1) @ v.unsqueeze(2)).flatten(1, 2)
    return (
        out.detach(),
        scores.logsumexp(-1).flatten(1, 2).detach(),
        *torch.autograd.grad(out, (q, k, v), grad_out.double()),
    )


def run_tiles(kernel, tiles, grad_out, q, k, v):
    """Forward of every tile, merged; backward of every tile, fed the merged out and lse, summed."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros_like(q, dtype=wide)
    lse = torch.full(q.shape[:3], float("-inf"), dtype=wide, device=q.device)
    for tile in tiles:
        operands = q[:, :, tile.query], k[:, :, tile.key], v[:, :, tile.key]
        part, part_lse = kernel.forward(*operands, tile.causal, SCALE)
        assert part.shape == operands[0].shape and part_lse.shape == operands[0].shape[:3]
        old = lse[:, :, tile.query]
        new = torch.logaddexp(old, part_lse)
        share = (torch.exp(old - new).unsqueeze(-1), torch.exp(part_lse - new).unsqueeze(-1))
        out[:, :, tile.query] = out[:, :, tile.query] * share[0] + part * share[1]
        lse[:, :, tile.query] = new
    out = out.to(q.dtype)
    grads = [torch.zeros_like(x, dtype=wide) for x in (q, k, v)]
    for tile in tiles:
        spans = (tile.query, tile.key, tile.key)
        operands = (x[:, :, span] for x, span in zip((q, k, v), spans, strict=True))
        seen = (x[:, :, tile.query] for x in (out, lse))
        parts = kernel.backward(grad_out[:, :, tile.query], *operands, *seen, tile.causal, SCALE)
        for grad, part, span in zip(grads, parts, spans, strict=True):
            grad[:, :, span] += part
    return out, lse, *grads


def run_segments(kernel, borders, grad_out, q, k, v):
    out, lse = kernel.forward_segments(q, k, v, borders, SCALE)
    assert out.shape == q.shape and lse.shape == q.shape[:3]
    return out, lse, *kernel.backward_segments(grad_out, q, k, v, out, lse, borders, SCALE)


def require_close(ours, reference, bound):
    # lse is a log: an absolute error, and never worse than single precision.
    errors = {"lse": (ours[1] - reference[1]).abs().max().item()}
    for name, index in (("out", 0), ("dq", 2), ("dk", 3), ("dv", 4)):
        a, b = ours[index].double(), reference[index]
        # A token that sees itself alone has no gradient in q and k: what is left is rounding of numbers near 1.
        errors[name] = ((a - b).abs().max() / b.abs().max().clamp_min(1)).item()
    lse_bound = max(bound, 1e-5) if ours[1].dtype == torch.float32 else bound
    worse = {name: e for name, e in errors.items() if not e <= (lse_bound if name == "lse" else bound)}
    assert not worse, f"{worse} exceed {bound:.0e}"


def check_tiles(kernel, case, shape, dtype, device, bound=None):
    num_queries = max(tile.query.stop for tile in TILES[case])
    num_keys = max(tile.key.stop for tile in TILES[case])
    tensors = random_tensors(num_queries, num_keys, shape, dtype, device)
    reference = dense_reference(TILES[case], *tensors)
    require_close(run_tiles(kernel, TILES[case], *tensors), reference, bound or BOUNDS[dtype])


def check_segments(kernel, borders, shape, dtype, device, bound=None):
    tensors = random_tensors(borders[-1], borders[-1], shape, dtype, device)
    tiles = [causal(*span) for span in pairwise(borders)]
    reference = dense_reference(tiles, *tensors)
    require_close(run_segments(kernel, borders, *tensors), reference, bound or BOUNDS[dtype])


CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("case", TILES)
@pytest.mark.parametrize("name", ["math", "cpu_flash"])
def test_tiles_equal_dense_attention(name, case, dtype):
    check_tiles(choose_kernel(CPU, dtype, name), case, (8, 2, 16), dtype, CPU)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("borders", BORDERS)
def test_segments_equal_dense_attention(borders, dtype):
    check_segments(choose_kernel(CPU, dtype, "math"), borders, (8, 2, 16), dtype, CPU)


@pytest.mark.parametrize("borders", BORDERS)
def test_segments_in_one_call_equal_one_call_each(borders):
    tensors = random_tensors(borders[-1], borders[-1], (8, 2, 16), torch.float64, CPU)
    tiles = [causal(*span) for span in pairwise(borders)]
    looped = run_tiles(MathKernel(), tiles, *tensors)
    for a, b in zip(run_segments(MathKernel(), borders, *tensors), looped, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("borders", [(0,), (1, 3), (0, 2), (0, 2, 2, 3), (0, 4)])
@pytest.mark.parametrize("kernel", [MathKernel(), CudaFlashKernel()], ids=lambda kernel: kernel.name)
def test_borders_that_do_not_ascend_to_the_end_are_refused(kernel, borders):
    _, q, k, v = random_tensors(3, 3, (2, 1, 8), torch.float64, CPU)
    with pytest.raises(PlanError, match="do not ascend from 0 to the 3 tokens"):
        kernel.forward_segments(q, k, v, borders, SCALE)


# ------------------------------------------------------------------ what the CUDA kernels share, on the CPU


class StandIn(FlashKernel):
    """A flash op's contract on its operands, held to, with the formula in the op's place."""

    name = "stand_in"
    capabilities = Capabilities(packs_segments=True)

    def launch_forward(self, q, k, v, launch):
        operands = self.operands(launch, q, k, v)
        if launch.cu_seqlens is None:
            out, lse = MathKernel().forward(*operands, launch.causal, launch.scale)
            return out.transpose(1, 2), lse.float()
        borders = tuple(launch.cu_seqlens.tolist())
        out, lse = MathKernel().forward_segments(*operands, borders, launch.scale)
        return out.transpose(1, 2)[0], lse[0].float()

    def launch_backward(self, grad_out, q, k, v, out, lse, launch):
        operands = self.operands(launch, grad_out, q, k, v, out)
        assert lse.dtype == torch.float32 and lse.is_contiguous()
        if launch.cu_seqlens is None:
            grads = MathKernel().backward(*operands, lse, launch.causal, launch.scale)
            return tuple(grad.transpose(1, 2) for grad in grads)
        borders = tuple(launch.cu_seqlens.tolist())
        grads = MathKernel().backward_segments(*operands, lse.unsqueeze(0), borders, launch.scale)
        return tuple(grad.transpose(1, 2)[0] for grad in grads)

    @staticmethod
    def operands(launch, *tensors):
        """Checked, and back in heads before tokens."""
        assert all(x.stride(-1) == 1 and x.shape[-1] % 8 == 0 for x in tensors)
        assert len({x.dtype for x in tensors}) == 1
        if launch.cu_seqlens is None:
            return [x.transpose(1, 2) for x in tensors]
        lengths = launch.cu_seqlens.diff()
        assert launch.cu_seqlens.dtype == torch.int32 and launch.causal
        assert launch.longest_q == launch.longest_k == lengths.max()
        return [x.unsqueeze(0).transpose(1, 2) for x in tensors]


# Its lse is in single precision, as the ops' is.
STAND_IN_BOUND = 1e-5


@pytest.mark.parametrize("head_dim", [16, 12])
@pytest.mark.parametrize("case", TILES)
def test_layout_and_padding_of_the_flash_kernels_on_tiles(case, head_dim):
    check_tiles(StandIn(), case, (8, 2, head_dim), torch.float64, CPU, STAND_IN_BOUND)


@pytest.mark.parametrize("head_dim", [16, 12])
@pytest.mark.parametrize("borders", BORDERS)
def test_layout_and_padding_of_the_flash_kernels_on_segments(borders, head_dim):
    check_segments(StandIn(), borders, (8, 2, head_dim), torch.float64, CPU, STAND_IN_BOUND)


def test_tensors_whose_heads_are_not_contiguous_are_taken():
    _, q, k, v = random_tensors(9, 9, (2, 1, 8), torch.float64, CPU)
    expected = StandIn().forward(q, k, v, True, SCALE)[0]
    scattered = [x.mT.contiguous().mT for x in (q, k, v)]
    assert scattered[0].stride(-1) != 1
    assert torch.equal(StandIn().forward(*scattered, True, SCALE)[0], expected)


def test_the_layers_of_a_pass_share_one_cu_seqlens():
    seen = []

    class Watch(StandIn):
        def launch_forward(self, q, k, v, launch):
            seen.append(launch.cu_seqlens)
            return super().launch_forward(q, k, v, launch)

    _, q, k, v = random_tensors(9, 9, (2, 1, 8), torch.float64, CPU)
    for borders in ((0, 4, 9), (0, 4, 9), (0, 5, 9)):
        Watch().forward_segments(q, k, v, borders, SCALE)
    assert seen[0] is seen[1] and seen[0] is not seen[2]


@pytest.mark.parametrize("shape", [(8, 2, 64), (8, 2, 60)])
def test_torchs_cuda_ops_accept_the_call(shape):
    """Shapes alone: the ops' meta kernels stand for what this machine may lack."""
    kernel, meta = CudaFlashKernel(), torch.device("meta")
    grad_out, q, k, v = random_tensors(50, 70, shape, torch.bfloat16, meta)
    out, lse = kernel.forward(q, k, v, False, SCALE)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
    grads = kernel.backward(grad_out, q, k, v, out, lse, False, SCALE)
    assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]
    k, v = k[:, :, :50], v[:, :, :50]
    out, lse = kernel.forward_segments(q, k, v, (0, 20, 50), SCALE)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
    grads = kernel.backward_segments(grad_out, q, k, v, out, lse, (0, 20, 50), SCALE)
    assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]


# ---------------------------------------------------------------------------------------------- the choice


def test_auto_takes_the_fast_kernel():
    assert choose_kernel(CPU, torch.float32).name == "cpu_flash"
    assert choose_kernel(torch.device("meta"), torch.float32).name == "math"


@pytest.mark.parametrize(
    ("name", "device", "dtype", "message"),
    [
        ("flashy", "cpu", torch.float32, "'flashy' does not exist; choose one of auto, math, cpu_flash"),
        ("cuda_flash", "cpu", torch.bfloat16, "'cuda_flash' runs on cuda, the tensors are on cpu; choose"),
        ("cpu_flash", "meta", torch.float32, "'cpu_flash' runs on cpu, the tensors are on meta; choose"),
        ("math", "cpu", torch.float8_e4m3fn, "'math' takes float64, .*, not float8_e4m3fn; train in"),
    ],
)
def test_a_kernel_that_cannot_run_is_refused(name, device, dtype, message):
    with pytest.raises(ConfigError, match=message):
        choose_kernel(torch.device(device), dtype, name)


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "message"),
    [
        ((7, 5), torch.float16, 64, r"code for compute capability 8.x or .*, this GPU has 7.5; choose"),
        ((8, 0), torch.float32, 64, "takes bfloat16, float16, not float32; train in one of these or choose"),
        ((9, 0), torch.bfloat16, 320, "takes heads of up to 256 numbers, this model has 320; choose math"),
    ],
)
def test_a_gpu_dtype_or_head_that_does_not_fit_is_refused(monkeypatch, capability, dtype, head_dim, message):
    # Only the question "which GPU is this" is answered here; no kernel runs.
    monkeypatch.setattr("treecp_rl.attention.kernels._compute_capability", lambda device: capability)
    with pytest.raises(ConfigError, match=message):
        choose_kernel(torch.device("cuda"), dtype, "cuda_flash", head_dim)
    assert choose_kernel(torch.device("cuda"), dtype, "auto", head_dim).name == "math"


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [
        ("flash_attn2", "flash_attn", "flash-attn>=2.7"),
        ("flash_attn3", "flash_attn_interface", "flash_attn_3"),
    ],
)
def test_a_package_that_is_missing_is_named(name, module, package):
    if find_spec(module):
        pytest.skip(f"{module} is installed")
    with pytest.raises(ConfigError, match=f"'{name}' needs {package}, .* cannot be imported .*; install it"):
        choose_kernel(CPU, torch.bfloat16, name)


def test_available_on_the_cpu():
    assert available_kernels(CPU) == ("math", "cpu_flash")
