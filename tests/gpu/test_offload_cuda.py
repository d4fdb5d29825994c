"""Proves on a GPU that copies to pinned host memory and back are asynchronous and ordered."""

import pytest
import torch

from tests.attention.test_offload import TENSORS, check_round_trip
from treecp_rl.attention.offload import HostCopy

NUM_BYTES = 256 << 20


@pytest.mark.parametrize("name", TENSORS)
def test_round_trip(name):
    check_round_trip(TENSORS[name], "cuda")


def busy(milliseconds):
    """Hold the stream in use."""
    torch.cuda._sleep(int(milliseconds * 1e6))


def test_the_copy_waits_for_the_kernel_that_writes_the_tensor():
    tensor = torch.zeros(1 << 20, device="cuda")
    busy(50)
    tensor.fill_(3)
    assert bool((HostCopy.of(tensor).on_device() == 3).all())


def test_the_host_memory_is_pinned_and_the_host_does_not_wait():
    tensor = torch.ones(NUM_BYTES, dtype=torch.uint8, device="cuda")
    HostCopy.of(tensor).wait()  # The first pinned allocation is slow.
    busy(200)
    copy = HostCopy.of(tensor)
    assert copy._host.is_pinned()
    assert not copy._written.query()
    copy.wait()
    assert copy._written.query() and bool(copy._host.eq(1).all())


def test_the_tensor_may_be_dropped_at_once():
    copies = []
    for value in range(8):
        tensor = torch.full((NUM_BYTES // 8,), value, dtype=torch.uint8, device="cuda")
        copies.append(HostCopy.of(tensor))
        del tensor
    for value, copy in enumerate(copies):
        copy.prefetch()
        assert bool((copy.on_device() == value).all())


def test_the_device_memory_comes_free():
    tensor = torch.ones(NUM_BYTES, dtype=torch.uint8, device="cuda")
    held = torch.cuda.memory_allocated()
    copy = HostCopy.of(tensor)
    del tensor
    copy.wait()
    torch.empty(1, device="cuda")  # The allocator looks at its events when it is asked for memory.
    assert torch.cuda.memory_allocated() <= held - NUM_BYTES + (1 << 20)
