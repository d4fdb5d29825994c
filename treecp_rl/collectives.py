"""Every collective of the package, named for what it moves. All ranks of ``group`` enter each of them."""

from collections.abc import Sequence

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


class Exchange:
    """An all-to-all of bytes under way. ``wait`` returns what each rank sent here."""

    def __init__(self, received: torch.Tensor, sizes: Sequence[int], work: dist.Work | None) -> None:
        self._received, self._sizes, self._work = received, list(sizes), work

    def wait(self) -> list[torch.Tensor]:
        """Per source rank, its bytes as a uint8 tensor."""
        if self._work is not None:
            self._work.wait()
        return list(torch.split(self._received, self._sizes))


def exchange(
    outgoing: Sequence[torch.Tensor], incoming_bytes: Sequence[int], group: dist.ProcessGroup
) -> Exchange:
    """Send each rank its bytes, without blocking: one uneven all-to-all, entered by every rank of ``group``.

    Args:
        outgoing: per destination rank a uint8 tensor, possibly empty.
        incoming_bytes: per source rank how much will come; known from the plan, so no sizes travel.
    """
    received = outgoing[0].new_empty(sum(incoming_bytes))
    work = dist.all_to_all_single(
        received,
        torch.cat(list(outgoing)),
        output_split_sizes=list(incoming_bytes),
        input_split_sizes=[len(payload) for payload in outgoing],
        group=group,
        async_op=True,
    )
    return Exchange(received, incoming_bytes, work)
