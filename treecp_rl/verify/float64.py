"""Model in float64 -> the same model whose norms and routers really compute in float64.

transformers' RMSNorm and mixture-of-experts routers cast to float32 whatever the model's dtype. Two exact
ways of computing the same gradient then differ by 1.2e-7, because each sums float32-rounded pieces in
another order. With the casts removed, agreement to 1e-14 is a proof and 1e-12 a bound.

Rotary embeddings keep their float32 arithmetic: cos and sin are constants of the position, without a
gradient, and equal in oracle and engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_SOFTMAXES = (torch.softmax, torch.Tensor.softmax, nn.functional.softmax)


class KeepFloat64(TorchFunctionMode):
    """Inside it, a float64 tensor asked to become float32 stays as it is."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not (args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64):
            return function(*args, **kwargs)
        if function is torch.Tensor.float:
            return args[0]
        if function in _SOFTMAXES or function is torch.Tensor.to:
            args = tuple(torch.float64 if argument is torch.float32 else argument for argument in args)
            kwargs = {
                key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()
            }
        return function(*args, **kwargs)


def _casts_to_float32(module: nn.Module) -> bool:
    """Norms and routers: leaves that transformers defines itself, rotary tables apart."""
    is_leaf = next(module.children(), None) is None
    is_torch = type(module).__module__.startswith("torch.")
    return is_leaf and not is_torch and "Rotary" not in type(module).__name__


def keep_float64(model: nn.Module) -> list[nn.Module]:
    """Make norms and routers of `model` compute in float64 for good; returns the modules changed.

    The mode is entered inside the module's forward, so activation checkpointing, which calls it again from
    the backward (on another thread on a GPU), sees it too.
    """
    changed = []
    for module in model.modules():
        if _casts_to_float32(module):
            module.forward = _inside_mode(module.forward)  # type: ignore[method-assign]
            changed.append(module)
    return changed


@contextmanager
def float64_norms(model: nn.Module) -> Iterator[None]:
    """`keep_float64` for the length of a with-block."""
    changed = keep_float64(model)
    try:
        yield
    finally:
        for module in changed:
            del module.forward


def _inside_mode(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with KeepFloat64():
            return forward(*args, **kwargs)

    return wrapped
