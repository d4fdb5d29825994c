"""Runs a program: stages of moves and tiles -> one merged attention output, forward and backward.

The executor knows no primitive by name. Forward, stage by stage: wait for the stage's moves, post the next
stage's, compute the stage's tiles meanwhile. Backward is the mirror: stages in reverse, each move's gradient
travelling the other way. Layout legend as in ``kernels``; T tokens of this rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import record_function

from treecp_rl.attention.kernels import Kernel, choose_kernel
from treecp_rl.attention.parcels import Format, pack_parcels, unpack_parcels
from treecp_rl.attention.program import (
    OWN,
    RESIDENT,
    BufferKey,
    Call,
    Heads,
    Parcel,
    Place,
    Program,
)
from treecp_rl.collectives import Exchange, Traffic, exchange
from treecp_rl.errors import PlanError


def tile_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    program: Program,
    scale: float,
    layer: int = 0,
) -> torch.Tensor:
    """Attention of one layer over a rank's tokens of a pass. Every rank of the program's group enters.

    Args:
        query: [1,H,T,D]; key, value: [1,K,T,D].
        program: what this rank does.
        scale: factor on q k^T.
        layer: tells the layers of a model apart, for what a program keeps of each.

    Returns:
        [1,H,T,D] in the dtype of ``value``.
    """
    if query.shape[0] != 1 or query.shape[2] != program.num_tokens:
        raise PlanError(
            f"the program has 1 x {program.num_tokens} packed tokens, the layer received {query.shape[0]} x "
            f"{query.shape[2]}; run the model through engine.passes"
        )
    # Under autocast rotary embeddings may promote q and k; kernels want one dtype, that of the projections.
    query, key = query.to(value.dtype), key.to(value.dtype)
    with torch.autocast(device_type=query.device.type, enabled=False):
        return _TileAttention.apply(query, key, value, program, scale, layer, torch.is_grad_enabled())


class _TileAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        program: Program,
        scale: float,
        layer: int,
        wants_grad: bool,
    ) -> torch.Tensor:
        kernel = choose_kernel(query.device, query.dtype, program.kernel, query.shape[-1])
        if program.captured is not None and program.leaves is not None:
            program.leaves.put(layer, key[:, :, program.captured], value[:, :, program.captured])
        saved = program.saved_outputs.get(layer)
        inputs = _Inputs(program, kernel, scale, layer, query, key, value)
        run = _Forward(inputs, saved)
        out, lse = run.run()
        out = out.to(value.dtype)
        if program.recomputation is not None and wants_grad and saved is None:
            spans = program.saved
            program.saved_outputs[layer] = [
                (out[:, :, span].clone(), lse[:, :, span].clone()) for span in spans
            ]
        # What arrived is kept for backward through save_for_backward, so that checkpointing may drop it.
        names = [] if program.resend else list(run.arrived)
        ctx.save_for_backward(query, key, value, out, lse, *(t for name in names for t in run.arrived[name]))
        ctx.names, ctx.sizes = names, [len(run.arrived[name]) for name in names]
        ctx.program, ctx.kernel, ctx.scale, ctx.layer = program, kernel, scale, layer
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, lse, *kept = ctx.saved_tensors
        arrived = {}
        for name, size in zip(ctx.names, ctx.sizes, strict=True):
            arrived[name], kept = tuple(kept[:size]), kept[size:]
        ctx.program.saved_outputs.pop(ctx.layer, None)
        inputs = _Inputs(ctx.program, ctx.kernel, ctx.scale, ctx.layer, query, key, value)
        return (*_Backward(inputs, out, lse, arrived, grad_out).run(), None, None, None, None)


@dataclass(frozen=True)
class _Inputs:
    """What one layer of a pass computes from, on one rank."""

    program: Program
    kernel: Kernel
    scale: float
    layer: int
    query: torch.Tensor
    """[1,H,T,D]"""
    key: torch.Tensor
    """[1,K,T,D], as ``value``."""
    value: torch.Tensor


Buffers = dict[BufferKey, tuple[torch.Tensor, ...]]
"""What arrived -> its tensors: K/V as (key, value), queries as (query,), of that part of the heads."""

SavedOutputs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""(out, lse) of each span of ``Program.saved``."""


def _part(x: torch.Tensor, heads: Heads) -> torch.Tensor:
    """A part of the heads of [1,*,...]."""
    part, num_parts = heads
    if num_parts == 1:
        return x
    size = x.shape[1] // num_parts
    return x[:, part * size : (part + 1) * size]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What partial results and gradients accumulate in."""
    return torch.promote_types(dtype, torch.float32)


def _empty_like(x: torch.Tensor, num_tokens: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """[1,*,n,D] stored token by token: a span is one block, and the layer's final reshape is free."""
    return x.new_empty(1, num_tokens, x.shape[1], x.shape[3], dtype=dtype or x.dtype).transpose(1, 2)


@dataclass
class _State:
    """Running result of some queries."""

    out: torch.Tensor
    """[1,H,n,D] fp32 or wider."""
    lse: torch.Tensor
    """[1,H,n]"""

    @classmethod
    def empty(cls, query: torch.Tensor, num_tokens: int) -> "_State":
        wide = _wide(query.dtype)
        out = _empty_like(query, num_tokens, wide)
        lse = query.new_empty(1, num_tokens, query.shape[1], dtype=wide).transpose(1, 2)
        return cls(out, lse)

    @classmethod
    def nothing(cls, query: torch.Tensor, num_tokens: int) -> "_State":
        """The state of queries that have attended to nothing: a merge into it is a plain write."""
        state = cls.empty(query, num_tokens)
        state.out.zero_()
        state.lse.fill_(float("-inf"))
        return state

    def of(self, heads: Heads) -> "_State":
        """The same state seen through a part of the heads."""
        return _State(_part(self.out, heads), _part(self.lse, heads))

    def write(self, span: slice, part: torch.Tensor, part_lse: torch.Tensor) -> None:
        self.out[:, :, span] = part
        self.lse[:, :, span] = part_lse

    def merge(self, span: slice, part: torch.Tensor, part_lse: torch.Tensor) -> None:
        """Fold one partial result in.

        With sigma = sigmoid(part_lse - lse), the part's share of the joint softmax:
        out <- out + sigma (part - out), lse <- log(exp(lse) + exp(part_lse)). part_lse is finite: no tile
        is empty.
        """
        out, lse = self.out[:, :, span], self.lse[:, :, span]
        sigma = torch.sigmoid(part_lse.to(lse.dtype) - lse)
        out.add_((part.to(out.dtype) - out).mul_(sigma.unsqueeze(-1)))
        lse.copy_(torch.logaddexp(lse, part_lse.to(lse.dtype)))


class _Layer:
    """One layer of a pass on one rank: what its forward and its backward both need."""

    def __init__(self, inputs: _Inputs) -> None:
        program, layer = inputs.program, inputs.layer
        self.program, self.kernel, self.scale, self.layer = program, inputs.kernel, inputs.scale, layer
        self.query, self.key, self.value = inputs.query, inputs.key, inputs.value
        self.wide = _wide(self.query.dtype)
        reads_leaves = program.leaves is not None and program.captured is None
        self.leaves = program.leaves if reads_leaves else None
        self.resident = self.leaves.of(layer) if self.leaves is not None else (self.key, self.value)
        """K/V of an earlier pass."""
        self.arrived: Buffers = {}

    def packs_diagonals(self) -> bool:
        """Whether one kernel launch computes all of the rank's own causal tiles."""
        return self.program.writes_diagonals and self.kernel.capabilities.packs_segments

    def calls_of(self, index: int) -> Sequence[Call]:
        """A stage's calls, but for those that a packed launch takes care of."""
        calls = self.program.stages[index].calls
        if index > 0 or not self.packs_diagonals():
            return calls
        return [call for call in calls if not (call.causal and call.queries.buffer == OWN)]

    def operands(self, call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of the queries, keys and values that a call reads."""
        query, key, value = _part(self.query, call.heads), *self._keys_at(call.keys, call.heads)
        if call.queries.buffer != OWN:
            (query,) = self.arrived["q", call.queries.buffer, call.heads]
        return query[:, :, call.queries.span], key[:, :, call.keys.span], value[:, :, call.keys.span]

    def _keys_at(self, place: Place, heads: Heads) -> tuple[torch.Tensor, ...]:
        if place.buffer >= 0:
            return self.arrived["kv", place.buffer, heads]
        own = self.resident if place.buffer == RESIDENT else (self.key, self.value)
        return tuple(_part(x, heads) for x in own)

    def operands_to_send(self, parcel: Parcel) -> tuple[torch.Tensor, ...]:
        """Views of the K/V or queries in a parcel."""
        if parcel.kind == "q":
            tensors: tuple[torch.Tensor, ...] = (_part(self.query, parcel.heads),)
        else:
            tensors = self._keys_at(parcel.place, parcel.heads)
        return tuple(x[:, :, parcel.place.span] for x in tensors)

    def operand_format(self, kind: str, heads: Heads) -> Format:
        """(heads, width, dtype) of each tensor in a parcel of K/V or queries."""
        tensors = (self.query,) if kind == "q" else (self.key, self.value)
        return tuple((x.shape[1] // heads[1], x.shape[3], x.dtype) for x in tensors)

    def room_in(self, index: int) -> Buffers:
        """Buffers for the K/V and queries that arrive in a stage."""
        return {
            buffer: tuple(
                _empty_like(_part(x, buffer[2]), num_tokens)
                for x in ((self.query,) if buffer[0] == "q" else (self.key, self.value))
            )
            for buffer, num_tokens in self.program.buffer_tokens.items()
            if buffer[1] == index
        }

    def exchange(
        self,
        index: int,
        sends: Sequence[Parcel],
        receives: Sequence[Parcel],
        tensors_of: Callable[[Parcel], Sequence[torch.Tensor]],
        format_of: Callable[[str, Heads], Format],
        traffic: Traffic,
    ) -> Exchange:
        """Post one exchange of a stage's parcels among the ranks of the program's group."""
        group = self.program.group
        outgoing, incoming = pack_parcels(
            sends, receives, tensors_of, format_of, torch.distributed.get_world_size(group), self.query.device
        )
        return exchange(outgoing, incoming, group, traffic, is_sparse=self.program.stages[index].is_sparse)


class _Forward(_Layer):
    """One layer's forward on one rank."""

    def __init__(self, inputs: _Inputs, saved: SavedOutputs | None) -> None:
        super().__init__(inputs)
        program, query = inputs.program, inputs.query
        if saved is not None and program.recomputation is not None:
            self.program = program.recomputation
        fresh = _State.empty if self.program.writes_diagonals else _State.nothing
        self.own = fresh(query, program.num_tokens)
        for span, (out, lse) in zip(program.saved, saved or (), strict=saved is not None):
            self.own.write(span, out, lse)
        self.foreign: dict[tuple[int, Heads], _State] = {}
        """Stage in which queries arrived, and their heads -> their running state, computed for their owners."""

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Merged out [1,H,T,D] and lse [1,H,T]."""
        under_way = self._post(0)
        for index in range(len(self.program.stages)):
            self._receive(index, under_way)
            under_way = self._post(index + 1)
            with record_function("treecp::tiles"):
                if index == 0 and self.packs_diagonals():
                    self._compute_diagonals()
                for call in self.calls_of(index):
                    self._compute(call)
        return self.own.out, self.own.lse

    def _post(self, index: int) -> Exchange | None:
        """Send a stage's moves: K/V and queries of our own, states of queries computed here."""
        stages = self.program.stages
        if index >= len(stages) or not stages[index].has_moves:
            return None
        sends, receives, traffic = stages[index].sends, stages[index].receives, self.program.forward_traffic
        return self.exchange(index, sends, receives, self._tensors_to_send, self._format, traffic)

    def _tensors_to_send(self, parcel: Parcel) -> tuple[torch.Tensor, ...]:
        if parcel.kind != "state":
            return self.operands_to_send(parcel)
        state, span = self.foreign[parcel.place.buffer, parcel.heads], parcel.place.span
        return state.out[:, :, span], state.lse[:, :, span].unsqueeze(-1)

    def _format(self, kind: str, heads: Heads) -> Format:
        if kind != "state":
            return self.operand_format(kind, heads)
        num_heads, dim = self.query.shape[1] // heads[1], self.query.shape[3]
        return ((num_heads, dim, self.wide), (num_heads, 1, self.wide))

    def _receive(self, index: int, under_way: Exchange | None) -> None:
        if under_way is None:
            return
        room = self.room_in(index)
        self.arrived |= room
        for (kind, stage, heads), tensors in room.items():
            if kind == "q":
                self.foreign[stage, heads] = _State.nothing(tensors[0], tensors[0].shape[2])
        receives = self.program.stages[index].receives
        for parcel, tensors in unpack_parcels(receives, under_way.wait(), self._format):
            span = parcel.place.span
            if parcel.kind == "state":
                self.own.of(parcel.heads).merge(span, tensors[0], tensors[1].squeeze(-1))
            else:
                for buffer, tensor in zip(room[parcel.kind, index, parcel.heads], tensors, strict=True):
                    buffer[:, :, span] = tensor

    def _compute_diagonals(self) -> None:
        out, lse = self.kernel.forward_segments(  # type: ignore[attr-defined]
            self.query, self.key, self.value, self.program.diagonal_borders, self.scale
        )
        self.own.write(slice(None), out, lse)

    def _compute(self, call: Call) -> None:
        part, part_lse = self.kernel.forward(*self.operands(call), call.causal, self.scale)
        at_home = call.queries.buffer == OWN
        state = self.own.of(call.heads) if at_home else self.foreign[call.queries.buffer, call.heads]
        if call.causal and self.program.writes_diagonals:
            state.write(call.queries.span, part, part_lse)
        else:
            state.merge(call.queries.span, part, part_lse)


class _Backward(_Layer):
    """One layer's backward on one rank: the forward's stages in reverse, moves turned round.

    A K/V move returns dK and dV, a query move returns dQ. A state move sends (dO, lse, delta) the other way,
    so that a tile computed away from home sees the merged softmax of its queries.
    """

    def __init__(
        self,
        inputs: _Inputs,
        out: torch.Tensor,
        lse: torch.Tensor,
        arrived: Buffers,
        grad_out: torch.Tensor,
    ) -> None:
        super().__init__(inputs)
        self.out, self.lse, self.grad_out = out, lse, grad_out.contiguous()
        self.arrived = arrived
        self.grads = tuple(torch.zeros_like(x, dtype=self.wide) for x in (self.query, self.key, self.value))
        self.arrived_grads: Buffers = {}
        self.foreign: dict[tuple[int, Heads], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {
            (stage, heads): self._room_for_foreign(num_tokens, heads)
            for (kind, stage, heads), num_tokens in inputs.program.buffer_tokens.items()
            if kind == "q"
        }
        """Stage in which queries arrived, and their heads -> their (dO, out as the kernel needs it, lse)."""

    def _room_for_foreign(
        self, num_tokens: int, heads: Heads
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        grad_out, out = _part(self.grad_out, heads), _part(self.out, heads)
        lse = self.lse.new_empty(1, out.shape[1], num_tokens)
        return _empty_like(grad_out, num_tokens), _empty_like(out, num_tokens), lse

    def run(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of query, key, value in their dtype; what tiles add up in is fp32 or wider."""
        last = len(self.program.stages) - 1
        sent_again = self._post_again(last)
        for index in range(last, -2, -1):
            under_way = self._post(index + 1)
            if index >= 0:
                self._receive_again(index, sent_again)
                sent_again = self._post_again(index - 1)
                with record_function("treecp::tiles"):
                    if index == 0 and self.packs_diagonals():
                        self._compute_diagonals()
                    for call in self.calls_of(index):
                        self._compute(call)
            self._receive(index + 1, under_way)
        self._take_in_leaves()
        grad_query, grad_key, grad_value = self.grads
        return grad_query.to(self.query.dtype), grad_key.to(self.key.dtype), grad_value.to(self.value.dtype)

    def _take_in_leaves(self) -> None:
        """Backward of a prefill: what replays have added to its K/V."""
        program = self.program
        if program.captured is None or program.leaves is None:
            return
        added = program.leaves.take_grads(self.layer)
        if added is not None:
            for grad, more in zip(self.grads[1:], added, strict=True):
                grad[:, :, program.captured] += more

    def _post_again(self, index: int) -> Exchange | None:
        """Send a stage's K/V and queries as forward did, where they were not kept."""
        if index < 0 or not self.program.resend or not self.program.stages[index].has_operands:
            return None
        sends, receives = (_operand_parcels(parcels) for parcels in self._both_ends(index))
        traffic = self.program.backward_traffic
        return self.exchange(index, sends, receives, self.operands_to_send, self.operand_format, traffic)

    def _receive_again(self, index: int, under_way: Exchange | None) -> None:
        if under_way is None:
            return
        self.arrived = self.room_in(index)
        receives = _operand_parcels(self.program.stages[index].receives)
        for parcel, tensors in unpack_parcels(receives, under_way.wait(), self.operand_format):
            for buffer, tensor in zip(self.arrived[parcel.kind, index, parcel.heads], tensors, strict=True):
                buffer[:, :, parcel.place.span] = tensor

    def _both_ends(self, index: int) -> tuple[Sequence[Parcel], Sequence[Parcel]]:
        stage = self.program.stages[index]
        return stage.sends, stage.receives

    def _post(self, index: int) -> Exchange | None:
        """Answer a stage's moves: gradients of what arrived, and (dO, lse, delta) for states."""
        stages = self.program.stages
        if index >= len(stages) or not stages[index].has_moves:
            return None
        receives, sends = self._both_ends(index)
        traffic = self.program.backward_traffic
        under_way = self.exchange(index, sends, receives, self._tensors_to_send, self._format, traffic)
        for buffer in [buffer for buffer in self.arrived_grads if buffer[1] == index]:
            del self.arrived_grads[buffer]
        return under_way

    def _tensors_to_send(self, parcel: Parcel) -> tuple[torch.Tensor, ...]:
        """What goes back for a parcel that was received in forward."""
        span, heads = parcel.place.span, parcel.heads
        if parcel.kind != "state":
            grads = self._grads_of_arrived((parcel.kind, parcel.place.buffer, heads))
            return tuple(grad[:, :, span] for grad in grads)
        grad_out, out = (_part(x, heads)[:, :, span] for x in (self.grad_out, self.out))
        delta = (grad_out.to(self.wide) * out.to(self.wide)).sum(-1, keepdim=True)
        return grad_out, _part(self.lse, heads)[:, :, span].unsqueeze(-1), delta

    def _format(self, kind: str, heads: Heads) -> Format:
        if kind == "state":
            num_heads, dim = self.query.shape[1] // heads[1], self.query.shape[3]
            return (
                (num_heads, dim, self.grad_out.dtype),
                (num_heads, 1, self.wide),
                (num_heads, 1, self.wide),
            )
        like = self.operand_format(kind, heads)
        return tuple((num_heads, width, self.wide) for num_heads, width, _ in like)

    def _receive(self, index: int, under_way: Exchange | None) -> None:
        if under_way is None:
            return
        sends = self.program.stages[index].sends
        for parcel, tensors in unpack_parcels(sends, under_way.wait(), self._format):
            if parcel.kind == "state":
                self._take_in_foreign(parcel, *tensors)
                continue
            own = self._grads_of_keys(parcel.place) if parcel.kind == "kv" else self.grads[:1]
            for grad, tensor in zip(own, tensors, strict=True):
                _part(grad, parcel.heads)[:, :, parcel.place.span] += tensor

    def _take_in_foreign(
        self, parcel: Parcel, grad_out: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor
    ) -> None:
        """Kernels use ``out`` only as rowsum(dO * out) = delta, so dO * delta / |dO|^2 stands in for it."""
        room, span = self.foreign[parcel.place.buffer, parcel.heads], parcel.place.span
        norm = (grad_out.to(delta.dtype) ** 2).sum(-1, keepdim=True)
        room[0][:, :, span] = grad_out
        room[1][:, :, span] = grad_out * torch.where(norm > 0, delta / norm, 0.0)
        room[2][:, :, span] = lse.squeeze(-1)

    def _compute_diagonals(self) -> None:
        parts = self.kernel.backward_segments(  # type: ignore[attr-defined]
            self.grad_out,
            self.query,
            self.key,
            self.value,
            self.out,
            self.lse,
            self.program.diagonal_borders,
            self.scale,
        )
        for grad, part in zip(self.grads, parts, strict=True):
            grad += part

    def _compute(self, call: Call) -> None:
        span, heads = call.queries.span, call.heads
        if call.queries.buffer == OWN:
            grad_out, out, lse = (_part(x, heads) for x in (self.grad_out, self.out, self.lse))
            grad_query = _part(self.grads[0], heads)
        else:
            grad_out, out, lse = self.foreign[call.queries.buffer, heads]
            (grad_query,) = self._grads_of_arrived(("q", call.queries.buffer, heads))
        parts = self.kernel.backward(
            grad_out[:, :, span],
            *self.operands(call),
            out[:, :, span],
            lse[:, :, span].contiguous(),
            call.causal,
            self.scale,
        )
        grad_query[:, :, span] += parts[0]
        if call.keys.buffer >= 0:
            grad_kv = self._grads_of_arrived(("kv", call.keys.buffer, heads))
        else:
            grad_kv = tuple(_part(grad, heads) for grad in self._grads_of_keys(call.keys))
        for grad, part in zip(grad_kv, parts[1:], strict=True):
            grad[:, :, call.keys.span] += part

    def _grads_of_keys(self, place: Place) -> tuple[torch.Tensor, ...]:
        """Gradients of the K/V that live here, all heads."""
        if place.buffer == RESIDENT and self.leaves is not None:
            return self.leaves.grads(self.layer)
        return self.grads[1:]

    def _grads_of_arrived(self, buffer: BufferKey) -> tuple[torch.Tensor, ...]:
        if buffer not in self.arrived_grads:
            zeros = tuple(torch.zeros_like(x, dtype=self.wide) for x in self.arrived[buffer])
            self.arrived_grads[buffer] = zeros
        return self.arrived_grads[buffer]


def _operand_parcels(parcels: Sequence[Parcel]) -> list[Parcel]:
    return [parcel for parcel in parcels if parcel.kind != "state"]
