"""Runs a schedule: tiles -> partial (out, lse) -> one merged output, forward and backward.

The executor reads tiles and knows no primitive by name. Layout legend as in ``kernels``; T packed tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from treecp_rl.attention.kernels import Kernel, choose_kernel
from treecp_rl.errors import PlanError
from treecp_rl.plan import Schedule, Tile


@dataclass(frozen=True, slots=True)
class TileSpan:
    """A tile as one rank sees it: spans of its own local token axis."""

    queries: slice
    keys: slice
    causal: bool
    first: bool
    """No earlier tile has these queries, so the result is written rather than merged."""


class Program:
    """A schedule compiled for one rank. Handed through the model as one opaque object.

    Deliberately not a dataclass: FSDP2 rebuilds dataclass arguments that travel through a wrapped module's
    forward, and a copy would no longer be the object the attention layers share.
    """

    def __init__(self, tiles: Sequence[TileSpan], num_tokens: int, kernel: str = "auto") -> None:
        self.tiles = tuple(tiles)
        self.num_tokens = num_tokens
        self.kernel = kernel


def compile_program(schedule: Schedule, rank: int = 0, kernel: str = "auto") -> Program:
    """The tiles of ``rank``, in stage order.

    Raises:
        PlanError: a query is attended by no tile, or the first tiles of a span only cover it in part.
    """
    if schedule.world_size != 1:
        raise PlanError(
            f"the schedule spans {schedule.world_size} ranks; this executor runs schedules of 1 rank, "
            "use lower_local"
        )
    tiles = [tile for stage in schedule.stages for tile in stage.tiles if tile.rank == rank]
    return Program(_mark_first(tiles, schedule.num_tokens), schedule.num_tokens, kernel)


def _mark_first(tiles: Sequence[Tile], num_tokens: int) -> list[TileSpan]:
    seen = torch.zeros(num_tokens, dtype=torch.bool)
    spans = []
    for tile in tiles:
        queries = slice(tile.query_start, tile.query_stop)
        covered = seen[queries]
        if covered.any() and not covered.all():
            raise PlanError(f"tile {tile} mixes queries that other tiles have and have not reached; split it")
        spans.append(TileSpan(queries, slice(tile.key_start, tile.key_stop), tile.causal, not covered.any()))
        seen[queries] = True
    if not seen.all():
        raise PlanError(
            f"packed token {int((~seen).nonzero()[0])} of {num_tokens} attends to nothing, not even itself"
        )
    return spans


def tile_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, program: Program, scale: float
) -> torch.Tensor:
    """Attention of one layer over the pass's tiles.

    Args:
        query: [1,H,T,D]; key, value: [1,K,T,D].
        program: the pass's tiles.
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
        out, lse = _forward_tiles(query, key, value, program, kernel, scale)
        out = out.to(value.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.program, ctx.kernel, ctx.scale = program, kernel, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grads = _backward_tiles(grad_out, *ctx.saved_tensors, ctx.program, ctx.kernel, ctx.scale)
        return (*grads, None, None)


def _forward_tiles(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    program: Program,
    kernel: Kernel,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merged out [1,H,T,D] and lse [1,H,T], both accumulated in fp32 or wider."""
    wide = torch.promote_types(query.dtype, torch.float32)
    # Token-major storage: a span of tokens is one contiguous block, and the layer's reshape is free.
    _, num_heads, num_tokens, head_dim = query.shape
    out = query.new_empty(1, num_tokens, num_heads, head_dim, dtype=wide).transpose(1, 2)
    lse = query.new_empty(1, num_tokens, num_heads, dtype=wide).transpose(1, 2)
    for tile in program.tiles:
        part, part_lse = kernel.forward(
            query[:, :, tile.queries], key[:, :, tile.keys], value[:, :, tile.keys], tile.causal, scale
        )
        if tile.first:
            out[:, :, tile.queries] = part
            lse[:, :, tile.queries] = part_lse
        else:
            _merge(out[:, :, tile.queries], lse[:, :, tile.queries], part, part_lse)
    return out, lse


def _merge(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Fold one tile's result into the running one, in place.

    With sigma = sigmoid(part_lse - lse), the part's share of the joint softmax:
    out <- out + sigma (part - out), lse <- lse - log(1 - sigma). Both lse are finite: no tile is empty.
    """
    sigma = torch.sigmoid(part_lse.to(lse.dtype) - lse)
    out.add_((part.to(out.dtype) - out).mul_(sigma.unsqueeze(-1)))
    lse.copy_(torch.logaddexp(lse, part_lse.to(lse.dtype)))


def _backward_tiles(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    program: Program,
    kernel: Kernel,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key, value in their dtype; tiles add up in fp32 or wider."""
    wide = torch.promote_types(query.dtype, torch.float32)
    grad_query, grad_key, grad_value = (torch.zeros_like(x, dtype=wide) for x in (query, key, value))
    grad_out = grad_out.contiguous()
    for tile in program.tiles:
        part_query, part_key, part_value = kernel.backward(
            grad_out[:, :, tile.queries],
            query[:, :, tile.queries],
            key[:, :, tile.keys],
            value[:, :, tile.keys],
            out[:, :, tile.queries],
            lse[:, :, tile.queries].contiguous(),
            tile.causal,
            scale,
        )
        grad_query[:, :, tile.queries] += part_query
        grad_key[:, :, tile.keys] += part_key
        grad_value[:, :, tile.keys] += part_value
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)
