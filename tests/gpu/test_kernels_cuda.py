"""Proves on a GPU what tests/attention/test_kernels.py proves on the CPU: each kernel equals dense float64."""

from itertools import pairwise

import pytest
import torch

from tests.attention.test_kernels import BORDERS, SHAPES, TILES, check_segments, check_tiles, random_tensors
from treecp_rl.attention.kernels import available_kernels, choose_kernel

CUDA = torch.device("cuda")
DTYPES = {
    "math": (torch.float64, torch.float32, torch.bfloat16),
    **dict.fromkeys(("cuda_flash", "flash_attn2", "flash_attn3"), (torch.bfloat16, torch.float16)),
}
PATHS = [(name, dtype) for name, dtypes in DTYPES.items() for dtype in dtypes]


def kernel_of(name, dtype):
    if name not in available_kernels(CUDA):
        pytest.skip(f"kernel {name} is not available on this machine")
    return choose_kernel(CUDA, dtype, name)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", TILES)
@pytest.mark.parametrize(("name", "dtype"), PATHS)
def test_tiles_equal_dense_attention(name, dtype, case, shape):
    check_tiles(kernel_of(name, dtype), case, shape, dtype, CUDA)


@pytest.mark.parametrize("shape", [*SHAPES, (8, 2, 60)])
@pytest.mark.parametrize("borders", BORDERS)
@pytest.mark.parametrize(("name", "dtype"), PATHS)
def test_segments_equal_dense_attention(name, dtype, borders, shape):
    check_segments(kernel_of(name, dtype), borders, shape, dtype, CUDA)


@pytest.mark.parametrize("name", ["cuda_flash", "flash_attn2", "flash_attn3"])
def test_segments_in_one_launch_equal_one_launch_each(name):
    kernel, borders = kernel_of(name, torch.bfloat16), (0, 1, 200, 513, 640)
    _, q, k, v = random_tensors(640, 640, (8, 2, 128), torch.bfloat16, CUDA)
    out, lse = kernel.forward_segments(q, k, v, borders, 0.1)
    for start, stop in pairwise(borders):
        alone, alone_lse = kernel.forward(*(x[:, :, start:stop] for x in (q, k, v)), True, 0.1)
        assert (out[:, :, start:stop] - alone).abs().max() <= 2e-2
        assert (lse[:, :, start:stop] - alone_lse).abs().max() <= 1e-4


@pytest.mark.parametrize("name", ["cuda_flash", "flash_attn2", "flash_attn3"])
def test_backward_is_bit_identical_when_torch_is_deterministic(name):
    kernel, borders = kernel_of(name, torch.bfloat16), (0, 700, 1500)
    grad_out, q, k, v = random_tensors(1500, 1500, (8, 2, 128), torch.bfloat16, CUDA)
    out, lse = kernel.forward_segments(q, k, v, borders, 0.1)
    torch.use_deterministic_algorithms(True)
    try:
        runs = [kernel.backward_segments(grad_out, q, k, v, out, lse, borders, 0.1) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_auto_takes_torchs_flash_attention(dtype):
    if torch.cuda.get_device_capability()[0] < 8:
        pytest.skip("this GPU is older than flash attention's code")
    assert choose_kernel(CUDA, dtype).name == "cuda_flash"
    assert choose_kernel(CUDA, torch.float32).name == "math"
