"""Runs a program: stages of moves and tiles -> one merged attention output, forward and backward.

The executor knows no primitive by name. Forward, stage by stage: wait for the stage's moves, post the next
stage's, compute the stage's tiles meanwhile. Backward is the mirror: stages in reverse, each move's gradient
travelling the other way. Layout legend as in ``kernels``; T tokens of this rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from treecp_rl.attention.kernels import Kernel, choose_kernel
from treecp_rl.attention.parcels import Format, pack_parcels, unpack_parcels
from treecp_rl.attention.program import OWN, Call, Parcel, Place, Program
from treecp_rl.collectives import Exchange, exchange
from treecp_rl.errors import PlanError


def tile_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, program: Program, scale: float
) -> torch.Tensor:
    """Attention of one layer over a rank's tokens of a pass. Every rank of the program's group enters.

    Args:
        query: [1,H,T,D]; key, value: [1,K,T,D].
        program: what this rank does.
        scale: factor on q k^T.

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
        return _TileAttention.apply(query, key, value, program, scale)


class _TileAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, program: Program, scale: float
    ) -> torch.Tensor:
        kernel = choose_kernel(query.device, query.dtype, program.kernel)
        run = _Forward(program, kernel, scale, query, key, value)
        out, lse = run.run()
        out = out.to(value.dtype)
        # What arrived is kept for backward through save_for_backward, so that checkpointing may drop it.
        names = list(run.arrived)
        ctx.save_for_backward(query, key, value, out, lse, *(t for name in names for t in run.arrived[name]))
        ctx.names, ctx.sizes = names, [len(run.arrived[name]) for name in names]
        ctx.program, ctx.kernel, ctx.scale = program, kernel, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, lse, *kept = ctx.saved_tensors
        arrived = {}
        for name, size in zip(ctx.names, ctx.sizes, strict=True):
            arrived[name], kept = tuple(kept[:size]), kept[size:]
        run = _Backward(ctx.program, ctx.kernel, ctx.scale, query, key, value, out, lse, arrived, grad_out)
        return (*run.run(), None, None)


Buffers = dict[tuple[str, int], tuple[torch.Tensor, ...]]
"""(kind, stage) -> the tensors that arrived: ("kv", i) -> (key, value), ("q", i) -> (query,)."""


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


class _Forward:
    """One layer's forward on one rank."""

    def __init__(
        self,
        program: Program,
        kernel: Kernel,
        scale: float,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        self.program, self.kernel, self.scale = program, kernel, scale
        self.query, self.key, self.value = query, key, value
        self.own = _State.empty(query, program.num_tokens)
        self.arrived: Buffers = {}
        self.foreign: dict[int, _State] = {}
        """Stage in which queries arrived -> their running state, computed here for their owners."""

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Merged out [1,H,T,D] and lse [1,H,T]."""
        stages = self.program.stages
        under_way = self._post(0)
        for index, stage in enumerate(stages):
            self._receive(index, under_way)
            under_way = self._post(index + 1)
            for call in stage.calls:
                self._compute(call)
        return self.own.out, self.own.lse

    def _post(self, index: int) -> Exchange | None:
        """Send a stage's moves: K/V and queries of our own, states of queries computed here."""
        if index >= len(self.program.stages) or not self.program.stages[index].has_moves:
            return None
        stage = self.program.stages[index]
        return _post(
            self.program, stage.sends, stage.receives, self._tensors_to_send, self._format, self.query.device
        )

    def _tensors_to_send(self, parcel: Parcel) -> tuple[torch.Tensor, ...]:
        span = parcel.place.span
        if parcel.kind == "kv":
            return self.key[:, :, span], self.value[:, :, span]
        if parcel.kind == "q":
            return (self.query[:, :, span],)
        state = self.foreign[parcel.place.buffer]
        return state.out[:, :, span], state.lse[:, :, span].unsqueeze(-1)

    def _format(self, kind: str) -> Format:
        """(heads, width, dtype) of each tensor in a parcel."""
        _, heads, _, dim = self.query.shape
        wide = _wide(self.query.dtype)
        if kind == "kv":
            return ((self.key.shape[1], dim, self.key.dtype), (self.value.shape[1], dim, self.value.dtype))
        if kind == "q":
            return ((heads, dim, self.query.dtype),)
        return ((heads, dim, wide), (heads, 1, wide))

    def _receive(self, index: int, under_way: Exchange | None) -> None:
        if under_way is None:
            return
        for kind, like in (("kv", (self.key, self.value)), ("q", (self.query,))):
            num_tokens = self.program.buffer_tokens.get((kind, index))  # type: ignore[call-overload]
            if num_tokens is not None:
                self.arrived[kind, index] = tuple(_empty_like(x, num_tokens) for x in like)
        if ("q", index) in self.arrived:
            self.foreign[index] = _State.nothing(self.query, self.arrived["q", index][0].shape[2])
        receives = self.program.stages[index].receives
        for parcel, tensors in unpack_parcels(receives, under_way.wait(), self._format):
            span = parcel.place.span
            if parcel.kind == "state":
                self.own.merge(span, tensors[0], tensors[1].squeeze(-1))
            else:
                for buffer, tensor in zip(self.arrived[parcel.kind, index], tensors, strict=True):
                    buffer[:, :, span] = tensor

    def _compute(self, call: Call) -> None:
        query, key, value = _operands(call, self.query, self.key, self.value, self.arrived)
        part, part_lse = self.kernel.forward(query, key, value, call.causal, self.scale)
        if call.causal:
            self.own.write(call.queries.span, part, part_lse)
        else:
            state = self.own if call.queries.buffer == OWN else self.foreign[call.queries.buffer]
            state.merge(call.queries.span, part, part_lse)


class _Backward:
    """One layer's backward on one rank: the forward's stages in reverse, moves turned round.

    A K/V move returns dK and dV, a query move returns dQ. A state move sends (dO, lse, delta) the other way,
    so that a tile computed away from home sees the merged softmax of its queries.
    """

    def __init__(
        self,
        program: Program,
        kernel: Kernel,
        scale: float,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        arrived: Buffers,
        grad_out: torch.Tensor,
    ) -> None:
        self.program, self.kernel, self.scale = program, kernel, scale
        self.query, self.key, self.value = query, key, value
        self.out, self.lse, self.grad_out = out, lse, grad_out.contiguous()
        self.arrived = arrived
        self.grads = tuple(torch.zeros_like(x, dtype=_wide(x.dtype)) for x in (query, key, value))
        self.arrived_grads: Buffers = {
            name: tuple(torch.zeros_like(x, dtype=_wide(x.dtype)) for x in tensors)
            for name, tensors in arrived.items()
        }
        self.foreign: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {
            stage: self._room_for_foreign(tensors[0])
            for (kind, stage), tensors in arrived.items()
            if kind == "q"
        }
        """Stage in which queries arrived -> their (dO, out as the kernel needs it, lse)."""

    def _room_for_foreign(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        num_tokens = query.shape[2]
        grad_out, out = _empty_like(self.grad_out, num_tokens), _empty_like(self.out, num_tokens)
        return grad_out, out, self.lse.new_empty(1, query.shape[1], num_tokens)

    def run(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of query, key, value in their dtype; what tiles add up in is fp32 or wider."""
        for index in range(len(self.program.stages) - 1, -2, -1):
            under_way = self._post(index + 1)
            if index >= 0:
                for call in self.program.stages[index].calls:
                    self._compute(call)
            self._receive(index + 1, under_way)
        grad_query, grad_key, grad_value = self.grads
        return grad_query.to(self.query.dtype), grad_key.to(self.key.dtype), grad_value.to(self.value.dtype)

    def _post(self, index: int) -> Exchange | None:
        if index >= len(self.program.stages) or not self.program.stages[index].has_moves:
            return None
        stage = self.program.stages[index]
        return _post(
            self.program, stage.receives, stage.sends, self._tensors_to_send, self._format, self.query.device
        )

    def _tensors_to_send(self, parcel: Parcel) -> tuple[torch.Tensor, ...]:
        """What goes back for a parcel that was received in forward."""
        span = parcel.place.span
        if parcel.kind != "state":
            return tuple(grad[:, :, span] for grad in self.arrived_grads[parcel.kind, parcel.place.buffer])
        grad_out, wide = self.grad_out[:, :, span], self.lse.dtype
        delta = (grad_out.to(wide) * self.out[:, :, span].to(wide)).sum(-1, keepdim=True)
        return grad_out, self.lse[:, :, span].unsqueeze(-1), delta

    def _format(self, kind: str) -> Format:
        _, heads, _, dim = self.query.shape
        wide = _wide(self.query.dtype)
        if kind == "kv":
            return ((self.key.shape[1], dim, wide), (self.value.shape[1], dim, wide))
        if kind == "q":
            return ((heads, dim, wide),)
        return ((heads, dim, self.grad_out.dtype), (heads, 1, wide), (heads, 1, wide))

    def _receive(self, index: int, under_way: Exchange | None) -> None:
        if under_way is None:
            return
        sends = self.program.stages[index].sends
        for parcel, tensors in unpack_parcels(sends, under_way.wait(), self._format):
            span = parcel.place.span
            if parcel.kind == "state":
                self._take_in_foreign(parcel.place, *tensors)
            else:
                own = self.grads[1:] if parcel.kind == "kv" else self.grads[:1]
                for grad, tensor in zip(own, tensors, strict=True):
                    grad[:, :, span] += tensor

    def _take_in_foreign(
        self, place: Place, grad_out: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor
    ) -> None:
        """Kernels use ``out`` only as rowsum(dO * out) = delta, so dO * delta / |dO|^2 stands in for it."""
        room = self.foreign[place.buffer]
        norm = (grad_out.to(delta.dtype) ** 2).sum(-1, keepdim=True)
        room[0][:, :, place.span] = grad_out
        room[1][:, :, place.span] = grad_out * torch.where(norm > 0, delta / norm, 0.0)
        room[2][:, :, place.span] = lse.squeeze(-1)

    def _compute(self, call: Call) -> None:
        query, key, value = _operands(call, self.query, self.key, self.value, self.arrived)
        span = call.queries.span
        at_home = call.queries.buffer == OWN
        grad_out, out, lse = (
            (self.grad_out, self.out, self.lse) if at_home else self.foreign[call.queries.buffer]
        )
        parts = self.kernel.backward(
            grad_out[:, :, span],
            query,
            key,
            value,
            out[:, :, span],
            lse[:, :, span].contiguous(),
            call.causal,
            self.scale,
        )
        grad_query = self.grads[0] if at_home else self.arrived_grads["q", call.queries.buffer][0]
        own_keys = call.keys.buffer == OWN
        grad_kv = self.grads[1:] if own_keys else self.arrived_grads["kv", call.keys.buffer]
        grad_query[:, :, span] += parts[0]
        for grad, part in zip(grad_kv, parts[1:], strict=True):
            grad[:, :, call.keys.span] += part


def _operands(
    call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, arrived: Buffers
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if call.queries.buffer != OWN:
        (query,) = arrived["q", call.queries.buffer]
    if call.keys.buffer != OWN:
        key, value = arrived["kv", call.keys.buffer]
    return query[:, :, call.queries.span], key[:, :, call.keys.span], value[:, :, call.keys.span]


def _post(
    program: Program,
    sends: Sequence[Parcel],
    receives: Sequence[Parcel],
    tensors_of: Callable[[Parcel], Sequence[torch.Tensor]],
    format_of: Callable[[str], Format],
    device: torch.device,
) -> Exchange:
    """One exchange of parcels among the ranks of the program's group."""
    world_size = torch.distributed.get_world_size(program.group)
    outgoing, incoming = pack_parcels(sends, receives, tensors_of, format_of, world_size, device)
    return exchange(outgoing, incoming, program.group)
