"""Every collective of the package, named for what it moves. All ranks of ``group`` enter each of them."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from treecp_rl.errors import PlanError


def max_over_ranks(number: int, group: dist.ProcessGroup | None) -> int:
    """The largest of the ranks' numbers; without a process group, the number itself."""
    if not dist.is_initialized():
        return number
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    largest = torch.tensor(number, dtype=torch.int64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return int(largest)


def require_equal_digest(digest: str, group: dist.ProcessGroup) -> None:
    """Stop every rank at once when their plans differ; the exchanges of unequal plans would never meet.

    Raises:
        PlanError: names the digests and the ranks that hold them.
    """
    digests: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(digests, digest, group=group)
    if len(set(digests)) > 1:
        held = "; ".join(
            f"{value} on ranks {[rank for rank, other in enumerate(digests) if other == value]}"
            for value in dict.fromkeys(digests)
        )
        raise PlanError(
            f"the ranks of a domain hold different plans: {held}. They must receive the same rows and options; "
            "compare their batches and versions (treecp-rl doctor)"
        )


class _SumScores(torch.autograd.Function):
    """Each rank's pairs -> all pairs on every rank. Every rank computes the same loss, so a rank's gradient is
    its own pairs' share of it, and backward communicates nothing."""

    @staticmethod
    def forward(
        ctx: Any, own: torch.Tensor, pairs: torch.Tensor, num_pairs: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.save_for_backward(pairs)
        scores = own.new_zeros(len(own), num_pairs)
        scores[:, pairs] = own
        dist.all_reduce(scores, group=group)
        return scores

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (pairs,) = ctx.saved_tensors
        return grad[:, pairs], None, None, None


def share_scores(
    own: torch.Tensor, pairs: torch.Tensor, num_pairs: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """[Q,n] scores of a rank's own pairs -> [Q,N] scores of all, on every rank; differentiable."""
    return _SumScores.apply(own, pairs, num_pairs, group)


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
