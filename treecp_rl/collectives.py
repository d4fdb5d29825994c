"""Every collective of the package, named for what it moves. All ranks of ``group`` enter each of them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from treecp_rl.errors import PlanError


def max_over_ranks(numbers: Sequence[int], group: dist.ProcessGroup | None) -> list[int]:
    """Element by element the largest of the ranks' numbers, shorter lists filled up with zeros.

    Without a process group, the numbers themselves.
    """
    if not dist.is_initialized():
        return list(numbers)
    device = _device_of(group)
    longest = torch.tensor(len(numbers), dtype=torch.int64, device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=group)
    largest = torch.zeros(int(longest), dtype=torch.int64, device=device)
    largest[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return [int(number) for number in largest]


def sum_over_ranks(numbers: Sequence[int], group: dist.ProcessGroup) -> list[int]:
    """Element by element the sum of the ranks' numbers."""
    total = torch.tensor(numbers, dtype=torch.int64, device=_device_of(group))
    dist.all_reduce(total, group=group)
    return [int(number) for number in total]


def _device_of(group: dist.ProcessGroup | None) -> str:
    """Where a group's tensors must lie."""
    return "cuda" if dist.get_backend(group) == "nccl" else "cpu"


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


@dataclass
class Traffic:
    """What exchanges have cost this rank so far."""

    sent_bytes: int = 0
    num_exchanges: int = 0
    blocked_seconds: float = 0.0
    """Wall time spent waiting for bytes that had not come yet."""


class Exchange:
    """Bytes under way. ``wait`` returns what each rank sent here."""

    def __init__(
        self, received: Sequence[torch.Tensor], works: Sequence[dist.Work], traffic: Traffic
    ) -> None:
        self._received, self._works, self._traffic = list(received), works, traffic

    def wait(self) -> list[torch.Tensor]:
        """Per source rank, its bytes as a uint8 tensor."""
        start = time.perf_counter()
        with record_function("treecp::wait"):
            for work in self._works:
                work.wait()
        self._traffic.blocked_seconds += time.perf_counter() - start
        return self._received


def exchange(
    outgoing: Sequence[torch.Tensor],
    incoming_bytes: Sequence[int],
    group: dist.ProcessGroup,
    traffic: Traffic,
    *,
    is_sparse: bool,
) -> Exchange:
    """Send each rank its bytes, without blocking. Every rank of ``group`` enters with the same ``is_sparse``.

    Args:
        outgoing: per destination rank a uint8 tensor, possibly empty.
        incoming_bytes: per source rank how much will come; known from the plan, so no sizes travel.
        traffic: counts what is sent and how long it is waited for.
        is_sparse: few pairs of ranks have something to say: they do so point to point. Otherwise one uneven
            all-to-all, which is cheaper where most pairs do.
    """
    traffic.sent_bytes += sum(len(payload) for payload in outgoing)
    traffic.num_exchanges += 1
    whole = outgoing[0].new_empty(sum(incoming_bytes))
    received = torch.split(whole, list(incoming_bytes))
    if is_sparse:
        return Exchange(received, _point_to_point(outgoing, received, group), traffic)
    work = dist.all_to_all_single(
        whole,
        torch.cat(list(outgoing)),
        output_split_sizes=list(incoming_bytes),
        input_split_sizes=[len(payload) for payload in outgoing],
        group=group,
        async_op=True,
    )
    return Exchange(received, [work] if work is not None else [], traffic)


def _point_to_point(
    outgoing: Sequence[torch.Tensor], received: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> list[dist.Work]:
    operations = [
        dist.P2POp(operation, tensor, group=group, group_peer=peer)
        for operation, tensors in ((dist.isend, outgoing), (dist.irecv, received))
        for peer, tensor in enumerate(tensors)
        if len(tensor)
    ]
    return dist.batch_isend_irecv(operations) if operations else []
