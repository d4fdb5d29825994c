"""rows -> every row forwarded alone, densely -> scores, loss by its formula, gradient of every parameter.

The reference against which everything else is compared. It is as plain as can be on purpose: a stock
transformers model, one row at a time, math attention under a causal mask, log_softmax over the whole
vocabulary, one loss over the whole mini-batch, one backward. In float64 (see float64.py) its own error is
about 1e-15.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from treecp_rl.verify.float64 import float64_norms, keep_float64

if TYPE_CHECKING:
    from treecp_rl.tree import Row

__all__ = [
    "DenseScores",
    "DenseStep",
    "GradientError",
    "dense_scores",
    "dense_step",
    "float64_norms",
    "gradients_of",
    "keep_float64",
    "max_relative_gradient_error",
    "relative_gradient_errors",
    "relative_l2_error",
]


@dataclass(frozen=True)
class DenseScores:
    """Scores of all rows in the caller's order; tensors are [R_i] and carry a graph unless made under
    no_grad.
    """

    row_indices: tuple[int, ...]
    log_probs: list[Tensor]
    entropy: list[Tensor]
    sum_pi_squared: list[Tensor]


@dataclass(frozen=True)
class DenseStep:
    """One reference step: scores without graph, the loss, and the gradient of every parameter by name."""

    scores: DenseScores
    loss: float
    gradients: dict[str, Tensor]


class GradientError(NamedTuple):
    """max|a-b| / max|b| of the worst parameter, and its name."""

    error: float
    parameter: str


def dense_scores(model: nn.Module, rows: Sequence[Row], *, math_attention: bool = True) -> DenseScores:
    """Score every response token of every row. `model` is a stock transformers causal LM with sdpa attention.

    `math_attention=False` leaves the kernel to torch: that is the flattened training other trainers do, and
    the yardstick for bfloat16.
    """
    scored = [_score_row(model, row, math_attention) for row in rows]
    return DenseScores(
        row_indices=tuple(range(len(rows))),
        log_probs=[row[0] for row in scored],
        entropy=[row[1] for row in scored],
        sum_pi_squared=[row[2] for row in scored],
    )


def dense_step(
    model: nn.Module,
    rows: Sequence[Row],
    loss: Callable[[DenseScores], Tensor] | None,
    *,
    math_attention: bool = True,
) -> DenseStep:
    """Scores, loss and gradients of the whole mini-batch; `loss=None` only scores. Leaves no .grad behind."""
    model.zero_grad(set_to_none=True)
    if loss is None:
        with torch.no_grad():
            return DenseStep(dense_scores(model, rows, math_attention=math_attention), 0.0, {})
    scores = dense_scores(model, rows, math_attention=math_attention)
    value = loss(scores)
    value.backward()
    gradients = gradients_of(model)
    model.zero_grad(set_to_none=True)
    return DenseStep(_without_graph(scores), float(value.detach()), gradients)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradient of every trainable parameter on this rank's CPU, zeros where there is none.

    A collective when the model is sharded: every rank of the mesh must call it.
    """
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            gradients[_plain_name(name)] = _whole(gradient)
    return gradients


def relative_gradient_errors(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, float]:
    """max|a-b| / max|b| for each parameter; absolute where the reference gradient is exactly zero."""
    if ours.keys() != reference.keys():
        raise ValueError(f"parameters differ: {sorted(ours.keys() ^ reference.keys())}")
    errors = {}
    for name, expected in reference.items():
        expected = expected.double()
        difference = (ours[name].double() - expected).abs().max().item()
        scale = expected.abs().max().item()
        errors[name] = difference / scale if scale > 0 else difference
    return errors


def max_relative_gradient_error(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> GradientError:
    errors = relative_gradient_errors(ours, reference)
    # A nan must win: max() would drop it or keep it depending on its place.
    worst = max(errors, key=lambda name: float("inf") if errors[name] != errors[name] else errors[name])
    return GradientError(errors[worst], worst)


def relative_l2_error(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """|a-b| / |b| over all parameters as one vector: the measure for dtypes whose maxima are rounding
    luck.
    """
    difference = sum(
        (ours[name].double() - reference[name].double()).square().sum().item() for name in reference
    )
    scale = sum(reference[name].double().square().sum().item() for name in reference)
    return float((difference / scale) ** 0.5 if scale > 0 else difference**0.5)


def _score_row(model: nn.Module, row: Row, math_attention: bool) -> tuple[Tensor, Tensor, Tensor]:
    """log p(y_t), H_t and sum_v p_v^2 for each response token; logits at position p predict token p + 1."""
    device = next(model.parameters()).device
    prompt_tokens, response_tokens = row.prompt.numel(), row.response.numel()
    tokens = torch.cat([row.prompt, row.response]).to(device)[None]
    kernel: AbstractContextManager[None] = sdpa_kernel(SDPBackend.MATH) if math_attention else nullcontext()
    with kernel:
        logits = model(input_ids=tokens, use_cache=False).logits[0]
    predicting = logits[prompt_tokens - 1 : prompt_tokens - 1 + response_tokens]
    # Half precision is scored in float32, as trainers do; float64 stays float64.
    scaled = predicting.to(torch.promote_types(predicting.dtype, torch.float32)) / row.temperature
    log_pi = torch.log_softmax(scaled, dim=-1)
    pi = log_pi.exp()
    log_probs = log_pi.gather(-1, row.response.to(device)[:, None])[:, 0]
    return log_probs, -(pi * log_pi).sum(-1), pi.square().sum(-1)


def _without_graph(scores: DenseScores) -> DenseScores:
    def detached(tensors: list[Tensor]) -> list[Tensor]:
        return [tensor.detach() for tensor in tensors]

    return DenseScores(
        scores.row_indices,
        detached(scores.log_probs),
        detached(scores.entropy),
        detached(scores.sum_pi_squared),
    )


def _whole(tensor: Tensor) -> Tensor:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().cpu().clone()


def _plain_name(name: str) -> str:
    """Without the pieces that wrappers put into parameter names."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
