"""A tensor on the device -> its copy in host memory -> back on the device, copies overlapping with compute.

Each device has one side stream a direction, so that a copy out and a copy in run beside each other and
beside the kernels of the stream in use.
"""

from functools import cache
from typing import Literal

import torch
from torch import Tensor


class HostCopy:
    """A tensor parked in host memory: pinned if it comes from a GPU, a plain copy if it lives on the CPU.

    The CUDA side is not yet run.
    """

    def __init__(self, host: Tensor, device: torch.device, written: torch.cuda.Event | None) -> None:
        self._host = host
        self._device = device
        self._written = written
        """Reached when the copy to the host is complete; None where copies are synchronous."""
        self._returning: tuple[Tensor, torch.cuda.Event] | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> "HostCopy":
        """Start copying. The tensor may be dropped at once, but not written to before ``wait``."""
        source, device = tensor.detach(), tensor.device
        if device.type != "cuda":
            return cls(source.to("cpu", copy=True), device, None)
        host = torch.empty_like(source, device="cpu", pin_memory=True)
        stream = _side_stream(device, "out")
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            host.copy_(source, non_blocking=True)
            written = stream.record_event()
        # Its memory is not given to another tensor before the side stream has read it.
        source.record_stream(stream)
        return cls(host, device, written)

    @property
    def num_bytes(self) -> int:
        """Of host memory."""
        return self._host.nbytes

    def wait(self) -> None:
        """Block the host until the copy out is complete."""
        if self._written is not None:
            self._written.synchronize()

    def prefetch(self) -> None:
        """Start the way back, so that ``on_device`` finds the tensor there."""
        if self._written is None or self._returning is not None:
            return
        stream = _side_stream(self._device, "in")
        stream.wait_event(self._written)
        with torch.cuda.stream(stream):
            tensor = torch.empty_like(self._host, device=self._device)
            tensor.copy_(self._host, non_blocking=True)
            self._returning = tensor, stream.record_event()

    def on_device(self) -> Tensor:
        """A fresh tensor without gradient history; kernels of the stream in use wait for it, the host does not."""
        if self._written is None:
            return self._host.to(self._device, copy=True)
        self.prefetch()
        assert self._returning is not None
        (tensor, arrived), self._returning = self._returning, None
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(arrived)
        # It was allocated on the side stream: its memory is not reused there while this stream works on it.
        tensor.record_stream(stream)
        return tensor


@cache
def _side_stream(device: torch.device, direction: Literal["out", "in"]) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
