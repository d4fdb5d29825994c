"""What verl asks of a ``torch.<device>`` module, answered for the CPU; ``platform.py`` hands it to verl.

``torch.cpu`` has no memory figures, no cache to empty and no RNG accessors, and verl calls all of them.
Memory here is the memory of the process: resident size for "allocated" and "reserved", its high-water mark
for the peaks.
"""

import resource

import psutil
import torch
from torch.cpu import (  # noqa: F401  (part of the module's face)
    Event,
    Stream,
    current_stream,
    device_count,
    is_available,
    is_initialized,
    set_device,
    stream,
    synchronize,
)


def current_device() -> torch.device:
    """The CPU as a device: verl passes this to ``Tensor.to``, where an index would mean ``cuda:<index>``."""
    return torch.device("cpu")


def get_device_name(device: object = None) -> str:
    """``CPU``, the key verl's FLOPS table knows."""
    return "CPU"


def get_rng_state(device: object = None) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: object = None) -> None:
    torch.set_rng_state(state)


def memory_allocated(device: object = None) -> int:
    """Resident bytes of this process."""
    return psutil.Process().memory_info().rss


memory_reserved = memory_allocated


def max_memory_allocated(device: object = None) -> int:
    """Most resident bytes this process ever had (Linux reports KiB, and may lag behind the present size)."""
    return max(memory_allocated(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


max_memory_reserved = max_memory_allocated


def mem_get_info(device: object = None) -> tuple[int, int]:
    """``(available, total)`` bytes of the machine."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def reset_peak_memory_stats(device: object = None) -> None:
    """Nothing to reset: the kernel's high-water mark of a process only rises."""


def empty_cache() -> None:
    """Nothing to empty: the CPU allocator keeps no cache of its own."""


def ipc_collect() -> None:
    """Nothing to collect: no tensor is shared over device IPC."""


def set_per_process_memory_fraction(fraction: float, device: object = None) -> None:
    """Nothing to cap: a process on the CPU has the machine's memory."""
