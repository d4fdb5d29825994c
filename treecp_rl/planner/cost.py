"""Schedule, model shape -> bytes: what each rank sends, keeps and holds at its peak in the attention of a pass.

All are pure functions of the plan. What is sent is exact, byte for byte as the executor packs it. Peaks add up the
tensors that a layer holds, as if the arrivals of all its stages were there at once, without messages in flight, a
kernel's workspace or an allocator's rounding.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from treecp_rl.errors import PlanError
from treecp_rl.plan import Move, Schedule

ALIGNMENT_BYTES = 16
"""Each tensor of a message begins at a multiple of this."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What attention bytes depend on.

    Example: Qwen2.5-7B in bfloat16 is ``ModelShape(28, 28, 4, 128, itemsize=2)``.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int
    """Bytes of an activation."""
    accumulate_itemsize: int = 4
    """Bytes of a partial result or gradient: 4, and 8 for float64 activations."""

    def query_bytes(self, num_tokens: int, itemsize: int, num_parts: int = 1) -> int:
        """Of one tensor with the width of the queries, a part of the heads."""
        return num_tokens * (self.num_heads // num_parts) * self.head_dim * itemsize

    def key_bytes(self, num_tokens: int, itemsize: int, num_parts: int = 1) -> int:
        """Of one tensor with the width of the keys, a part of the heads."""
        return num_tokens * (self.num_kv_heads // num_parts) * self.head_dim * itemsize

    def scalar_bytes(self, num_tokens: int, num_parts: int = 1) -> int:
        """Of one number per token and query head: log-sum-exp, or delta."""
        return num_tokens * (self.num_heads // num_parts) * self.accumulate_itemsize


@dataclass(frozen=True, slots=True)
class SentBytes:
    """Bytes that each rank sends in one layer."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]

    @property
    def total(self) -> int:
        """Of all ranks, forward and backward."""
        return sum(self.forward) + sum(self.backward)


def bytes_sent(schedule: Schedule, shape: ModelShape, *, needs_gradients: bool = True) -> SentBytes:
    """What each rank sends in one layer, padding included.

    Forward, a move's source sends K and V, or queries, in the model's dtype, or a state's output and log-sum-exp
    in the accumulation dtype. Backward, its destination answers: gradients in the accumulation dtype, or for a state
    the output's gradient in the model's dtype with log-sum-exp and delta. ``resend`` adds forward's K/V and
    queries to backward. Where activation checkpointing runs a layer's forward again, its bytes count again.

    Raises:
        PlanError: a move's parts do not divide the model's heads.
    """
    stages = [_stage_bytes(stage.moves, schedule, shape) for stage in schedule.stages if stage.moves]
    forward = _sum_of(schedule.world_size, (stage.forward for stage in stages))
    backward = _sum_of(schedule.world_size, (stage.backward for stage in stages))
    return SentBytes(forward, backward if needs_gradients else (0,) * schedule.world_size)


def _stage_bytes(moves: Iterable[Move], schedule: Schedule, shape: ModelShape) -> SentBytes:
    forward, backward = [0] * schedule.world_size, [0] * schedule.world_size
    for move in moves:
        there = sum(map(_padded, _tensors_there(move, shape)))
        forward[move.src] += there
        backward[move.dst] += sum(map(_padded, _tensors_back(move, shape)))
        if schedule.resend and move.kind != "state":
            backward[move.src] += there
    return SentBytes(tuple(forward), tuple(backward))


def _sum_of(world_size: int, rows: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(sum, zip((0,) * world_size, *rows, strict=True)))


def _tensors_there(move: Move, shape: ModelShape) -> tuple[int, ...]:
    """Bytes of each tensor of a move's parcel in forward."""
    num_tokens, parts = move.num_tokens, move.num_head_parts
    _require_parts(parts, shape)
    if move.kind == "kv":
        return (shape.key_bytes(num_tokens, shape.itemsize, parts),) * 2
    if move.kind == "q":
        return (shape.query_bytes(num_tokens, shape.itemsize, parts),)
    out = shape.query_bytes(num_tokens, shape.accumulate_itemsize, parts)
    return out, shape.scalar_bytes(num_tokens, parts)


def _tensors_back(move: Move, shape: ModelShape) -> tuple[int, ...]:
    """Bytes of each tensor of a move's answer in backward."""
    num_tokens, parts = move.num_tokens, move.num_head_parts
    if move.kind == "kv":
        return (shape.key_bytes(num_tokens, shape.accumulate_itemsize, parts),) * 2
    if move.kind == "q":
        return (shape.query_bytes(num_tokens, shape.accumulate_itemsize, parts),)
    grad_out = shape.query_bytes(num_tokens, shape.itemsize, parts)
    return grad_out, shape.scalar_bytes(num_tokens, parts), shape.scalar_bytes(num_tokens, parts)


def _require_parts(parts: int, shape: ModelShape) -> None:
    if shape.num_heads % parts or shape.num_kv_heads % parts:
        raise PlanError(
            f"{parts} parts of the heads do not divide {shape.num_heads} heads and {shape.num_kv_heads} key/value "
            "heads; give the decision more lanes"
        )


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def moved_bytes_kept(schedule: Schedule, shape: ModelShape) -> tuple[int, ...]:
    """Bytes of arrived K/V and queries that each rank keeps from forward to backward, in one layer."""
    if schedule.resend:
        return (0,) * schedule.world_size
    return _arrived_bytes(schedule, shape, shape.itemsize)


def _arrived_bytes(schedule: Schedule, shape: ModelShape, itemsize: int) -> tuple[int, ...]:
    """Of the K/V and queries that arrive at each rank, at ``itemsize`` bytes an element."""
    arrived = [0] * schedule.world_size
    for move in _operands(schedule):
        if move.kind == "kv":
            arrived[move.dst] += 2 * shape.key_bytes(move.num_tokens, itemsize, move.num_head_parts)
        else:
            arrived[move.dst] += shape.query_bytes(move.num_tokens, itemsize, move.num_head_parts)
    return tuple(arrived)


def _operands(schedule: Schedule) -> Iterable[Move]:
    return (move for stage in schedule.stages for move in stage.moves if move.kind != "state")


def peak_attention_bytes(
    schedule: Schedule, shape: ModelShape, *, num_kept_layers: int | None = None
) -> tuple[int, ...]:
    """Most bytes of attention that each rank holds at once in a pass with gradients.

    Three parts: of every kept layer what backward needs, i.e. own q, k, v, output and log-sum-exp and what
    ``moved_bytes_kept`` says; of every layer resident K/V and their gradients; and of the one layer that runs
    whichever is more, forward's running states and arrivals or backward's gradients, arrivals and states.

    Args:
        num_kept_layers: layers whose tensors are held at once: all (the default), or 1 under activation
            checkpointing of layers.
    """
    layers = shape.num_layers if num_kept_layers is None else num_kept_layers
    own, resident = _own_tokens(schedule)
    kept = moved_bytes_kept(schedule, shape)
    forward = _forward_bytes(schedule, shape, own)
    backward = _backward_bytes(schedule, shape, own)
    leaves = shape.num_layers * 2
    leaf_itemsize = shape.itemsize + shape.accumulate_itemsize
    return tuple(
        layers * (_own_bytes(shape, own[rank]) + kept[rank])
        + leaves * shape.key_bytes(resident[rank], leaf_itemsize)
        + max(forward[rank], backward[rank])
        for rank in range(schedule.world_size)
    )


def _own_tokens(schedule: Schedule) -> tuple[list[int], list[int]]:
    """Tokens that each rank computes, and that lie resident on it."""
    own, resident = [0] * schedule.world_size, [0] * schedule.world_size
    for segment in schedule.segments:
        is_resident = any(start <= segment.start < stop for start, stop in schedule.resident)
        (resident if is_resident else own)[segment.rank] += segment.stop - segment.start
    return own, resident


def _own_bytes(shape: ModelShape, num_tokens: int) -> int:
    """q, k, v, output and log-sum-exp of a rank's own tokens in one layer."""
    return (
        2 * shape.query_bytes(num_tokens, shape.itemsize)
        + 2 * shape.key_bytes(num_tokens, shape.itemsize)
        + shape.scalar_bytes(num_tokens)
    )


def _forward_bytes(schedule: Schedule, shape: ModelShape, own: list[int]) -> list[int]:
    """Running states of own and arrived queries, and arrivals that are not kept anyway."""
    arrived = _arrived_bytes(schedule, shape, shape.itemsize) if schedule.resend else None
    held = [shape.query_bytes(tokens, shape.accumulate_itemsize) for tokens in own]
    for move in _operands(schedule):
        if move.kind == "q":
            out, lse = _tensors_there(move._replace(kind="state"), shape)
            held[move.dst] += out + lse
    return [bytes_ + (arrived[rank] if arrived else 0) for rank, bytes_ in enumerate(held)]


def _backward_bytes(schedule: Schedule, shape: ModelShape, own: list[int]) -> list[int]:
    """Gradients of own and arrived tensors, arrivals that were not kept, and of arrived queries (dO, out, lse)."""
    wide = shape.accumulate_itemsize
    grads = _arrived_bytes(schedule, shape, wide)
    arrived = _arrived_bytes(schedule, shape, shape.itemsize) if schedule.resend else None
    held = [shape.query_bytes(tokens, wide) + 2 * shape.key_bytes(tokens, wide) for tokens in own]
    for move in _operands(schedule):
        if move.kind == "q":
            parts = move.num_head_parts
            held[move.dst] += 2 * shape.query_bytes(move.num_tokens, shape.itemsize, parts)
            held[move.dst] += shape.scalar_bytes(move.num_tokens, parts)
    return [bytes_ + grads[rank] + (arrived[rank] if arrived else 0) for rank, bytes_ in enumerate(held)]


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """What a rank may hold in a pass, and what to count against it."""

    bytes_per_rank: int
    shape: ModelShape
    num_kept_layers: int | None = None
    """As in ``peak_attention_bytes``."""
    other_bytes_per_token: int = 0
    """Activations outside of attention, all layers together, of one token that a rank computes."""

    def peak_bytes(self, schedule: Schedule) -> tuple[int, ...]:
        """What each rank holds at most, attention and the rest."""
        attention = peak_attention_bytes(schedule, self.shape, num_kept_layers=self.num_kept_layers)
        own, _ = _own_tokens(schedule)
        return tuple(
            peak + tokens * self.other_bytes_per_token for peak, tokens in zip(attention, own, strict=True)
        )

    def require(self, schedule: Schedule) -> None:
        """Refuse a schedule whose worst rank exceeds the budget.

        Raises:
            PlanError: with the numbers, and the smallest change that would work.
        """
        peaks = self.peak_bytes(schedule)
        worst = max(peaks)
        if worst > self.bytes_per_rank:
            raise PlanError(
                f"rank {peaks.index(worst)} needs {in_gib(worst)} for the pass, the budget is "
                f"{in_gib(self.bytes_per_rank)}; {self._smallest_change(schedule, peaks)}"
            )

    def _smallest_change(self, schedule: Schedule, peaks: tuple[int, ...]) -> str:
        if not schedule.resend:
            lean = max(self.peak_bytes(replace(schedule, resend=True)))
            if lean <= self.bytes_per_rank:
                return f"with resend it needs {in_gib(lean)}"
        mean = sum(peaks) / len(peaks)
        if mean <= self.bytes_per_rank:
            return (
                f"the mean of the {len(peaks)} ranks is {in_gib(mean)}: raise the degree of the largest tree"
            )
        return f"raise the budget to {max(peaks)} bytes, or the number of ranks to {self._ranks(peaks)}"

    def _ranks(self, peaks: tuple[int, ...]) -> int:
        """Ranks among which the pass's bytes would fit if they were dealt out evenly."""
        return -(-sum(peaks) // self.bytes_per_rank)


def in_gib(num_bytes: float) -> str:
    """For errors: short, and exact where two numbers look alike."""
    return f"{num_bytes / 2**30:.2f} GiB ({round(num_bytes)} bytes)"
