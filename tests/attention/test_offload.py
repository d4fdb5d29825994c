"""Proves that a tensor parked in host memory comes back bit for bit; tests/gpu runs the same on a GPU."""

import pytest
import torch

from treecp_rl.attention.offload import HostCopy

TENSORS = {
    "plain": lambda: torch.randn(3, 5),
    "bfloat16": lambda: torch.randn(7, dtype=torch.float64).to(torch.bfloat16),
    "transposed": lambda: torch.randn(1, 6, 4, 8).transpose(1, 2),
    "slice": lambda: torch.randn(1, 4, 9, 8)[:, :, 2:7],
    "empty": lambda: torch.empty(0, 4),
}


def check_round_trip(make, device):
    torch.manual_seed(0)
    tensor = make().to(device).requires_grad_()
    copy = HostCopy.of(tensor)
    copy.wait()
    expected = tensor.detach().clone()
    with torch.no_grad():
        tensor.fill_(7)
    assert copy.num_bytes == expected.nbytes
    for _ in range(2):
        back = copy.on_device()
        assert back.device == tensor.device and not back.requires_grad
        assert torch.equal(back, expected)
        back.zero_()


@pytest.mark.parametrize("name", TENSORS)
def test_round_trip(name):
    check_round_trip(TENSORS[name], "cpu")


def test_prefetch_changes_nothing():
    copy = HostCopy.of(torch.arange(4))
    copy.prefetch()
    assert copy.on_device().tolist() == [0, 1, 2, 3]
