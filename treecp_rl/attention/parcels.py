"""Tensors of a stage's moves <-> one byte buffer per peer.

Both ends list a stage's parcels in the same order and know every size from the plan, so bytes travel without
labels. Each tensor starts at a multiple of 16 bytes; dtypes may differ inside one message.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from treecp_rl.attention.program import Heads, Parcel

Format = tuple[tuple[int, int, torch.dtype], ...]
"""(heads, width, dtype) of each tensor of a parcel."""

_ALIGNMENT_BYTES = 16


def pack_parcels(
    sends: Sequence[Parcel],
    receives: Sequence[Parcel],
    tensors_of: Callable[[Parcel], Sequence[torch.Tensor]],
    format_of: Callable[[str, Heads], Format],
    world_size: int,
    device: torch.device,
) -> tuple[list[torch.Tensor], list[int]]:
    """Per destination its bytes, and per source how many will come.

    Args:
        tensors_of: a parcel's tensors, each [1,heads,n,width].
    """
    pieces: list[list[torch.Tensor]] = [[] for _ in range(world_size)]
    for parcel in sends:
        for tensor in tensors_of(parcel):
            flat = tensor.transpose(1, 2).contiguous().view(-1).view(torch.uint8)
            pieces[parcel.peer].append(flat)
            pieces[parcel.peer].append(flat.new_zeros(_padded(len(flat)) - len(flat)))
    incoming = [0] * world_size
    for parcel in receives:
        incoming[parcel.peer] += sum(_padded(size) for size in _sizes(parcel, format_of))
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    return [torch.cat(parts) if parts else empty for parts in pieces], incoming


def unpack_parcels(
    receives: Sequence[Parcel], received: Sequence[torch.Tensor], format_of: Callable[[str, Heads], Format]
) -> Iterator[tuple[Parcel, list[torch.Tensor]]]:
    """Each parcel with its tensors, [1,heads,n,width], as views of the received bytes."""
    cursor = [0] * len(received)
    for parcel in receives:
        tensors = []
        for size, (heads, width, dtype) in zip(
            _sizes(parcel, format_of), format_of(parcel.kind, parcel.heads), strict=True
        ):
            start = cursor[parcel.peer]
            flat = received[parcel.peer][start : start + size].view(dtype)
            tensors.append(flat.view(1, -1, heads, width).transpose(1, 2))
            cursor[parcel.peer] += _padded(size)
        yield parcel, tensors


def _sizes(parcel: Parcel, format_of: Callable[[str, Heads], Format]) -> list[int]:
    """Bytes of each tensor of a parcel, without padding."""
    num_tokens = parcel.place.stop - parcel.place.start
    return [
        num_tokens * heads * width * dtype.itemsize
        for heads, width, dtype in format_of(parcel.kind, parcel.heads)
    ]


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
