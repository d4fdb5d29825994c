"""callable -> the most bytes its tensors held at one time.

Counted from the allocator's own events (torch.profiler with profile_memory), not from the process: the
resident set keeps what the C library does not give back and what earlier engines left behind, and a
dispatch mode does not see buffers inside an operator. Allocation events see every tensor and every
operator's scratch space, are the same in every run, and need no process of their own. They cost time, so
memory is measured apart from time.

What was there before and goes meanwhile is not taken off: the profiler knows the sizes of only some such blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._profiler import _EventType
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
    changes = []
    events = list(profiler.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    while events:
        event = events.pop()
        events += event.children
        if event.tag == _EventType.Allocation:
            changes.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    held = peak = 0
    sizes: dict[int, int] = {}
    for _, address, change in sorted(changes):
        if change > 0:
            sizes[address] = change
            held += change
        else:
            held -= sizes.pop(address, 0)
        peak = max(peak, held)
    return peak
