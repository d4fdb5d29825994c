"""K/V of a prompt between its prefill pass and the replay passes that read it, layer by layer.

Prefill puts a layer's K/V here; replays read them and add their gradients in fp32 or wider; the backward of the
prefill takes the sum. Nothing of it is part of any graph, so a recomputed layer may come by again unharmed.
"""

import torch

KeyValue = tuple[torch.Tensor, torch.Tensor]


class Leaves:
    """The K/V leaves of one rank's share of a prompt; K key/value heads, n tokens, head dim D."""

    def __init__(self) -> None:
        self._kept: dict[int, KeyValue] = {}
        self._grads: dict[int, KeyValue] = {}

    def put(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keep a layer's K/V [1,K,n,D]; a second time (a recomputed layer) changes nothing."""
        if layer not in self._kept:
            self._kept[layer] = (key.detach(), value.detach())

    def of(self, layer: int) -> KeyValue:
        """A layer's K/V [1,K,n,D]."""
        return self._kept[layer]

    def grads(self, layer: int) -> KeyValue:
        """Where replays add the gradients of a layer's K/V, [1,K,n,D] in fp32 or wider."""
        if layer not in self._grads:
            key, value = self._kept[layer]
            self._grads[layer] = (_zeros_like(key), _zeros_like(value))
        return self._grads[layer]

    def take_grads(self, layer: int) -> KeyValue | None:
        """The summed gradients of a layer, which are then forgotten; None if no replay has read it."""
        return self._grads.pop(layer, None)


def _zeros_like(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
