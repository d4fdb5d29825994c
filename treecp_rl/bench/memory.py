"""callable -> the most bytes its tensors held at one time.

Counted from the allocator's own events (torch.profiler with profile_memory), not from the process: the
resident set keeps what the C library does not give back and what earlier engines left behind, and a
dispatch mode does not see buffers inside an operator. Allocation events see every tensor and every
operator's scratch space, are the same in every run, and need no process of their own. They cost time, so
memory is measured apart from time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], Any]) -> int:
    """Peak above what was allocated before; on CUDA the allocator's own counter."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = work()
    del result
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak
