"""Every collective of the package, named for what it moves. All ranks of ``group`` enter each of them."""

import torch
import torch.distributed as dist


def max_over_ranks(number: int, group: dist.ProcessGroup | None) -> int:
    """The largest of the ranks' numbers; without a process group, the number itself."""
    if not dist.is_initialized():
        return number
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    largest = torch.tensor(number, dtype=torch.int64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return int(largest)
