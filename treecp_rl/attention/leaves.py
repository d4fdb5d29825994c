"""K/V of a prompt between its prefill pass and the replay passes that read it, layer by layer.

Prefill puts a layer's K/V here; replays read them and add their gradients in fp32 or wider; the backward of the
prefill takes the sum. Nothing of it is part of any graph, so a recomputed layer may come by again unharmed.
"""

import torch

from treecp_rl.attention.offload import HostCopy

KeyValue = tuple[torch.Tensor, torch.Tensor]


class Leaves:
    """The K/V leaves of one rank's share of a prompt; K key/value heads, n tokens, head dim D.

    Args:
        offload: they wait in host memory, and are brought back whenever a layer reads them.
    """

    def __init__(self, offload: bool = False) -> None:
        self._offload = offload
        self._kept: dict[int, KeyValue | tuple[HostCopy, HostCopy]] = {}
        self._grads: dict[int, KeyValue] = {}
        self._last_read = 0
        self._is_closed = False

    def put(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keep a layer's K/V [1,K,n,D]; a second time (a recomputed layer) changes nothing."""
        if self._is_closed or layer in self._kept:
            return
        key, value = key.detach(), value.detach()
        self._kept[layer] = (HostCopy.of(key), HostCopy.of(value)) if self._offload else (key, value)

    def of(self, layer: int) -> KeyValue:
        """A layer's K/V [1,K,n,D] on the device."""
        self._prefetch(2 * layer - self._last_read)
        self._last_read = layer
        key, value = self._kept[layer]
        if isinstance(key, HostCopy) and isinstance(value, HostCopy):
            return key.on_device(), value.on_device()
        assert isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor)
        return key, value

    def _prefetch(self, layer: int) -> None:
        """Layers are read one after another, up in forward and down in backward."""
        for tensor in self._kept.get(layer, ()):
            if isinstance(tensor, HostCopy):
                tensor.prefetch()

    def grads(self, layer: int) -> KeyValue:
        """Where replays add the gradients of a layer's K/V, [1,K,n,D] in fp32 or wider."""
        if layer not in self._grads:
            key, value = self.of(layer)
            self._grads[layer] = (_zeros_like(key), _zeros_like(value))
        return self._grads[layer]

    def close(self) -> None:
        """Free the K/V: all replays are done. Their gradients wait for the prompt's backward."""
        self._is_closed = True
        self._kept.clear()

    def take_grads(self, layer: int) -> KeyValue | None:
        """The summed gradients of a layer, which are then forgotten; None if no replay has read it."""
        return self._grads.pop(layer, None)


def _zeros_like(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
