"""(log-probs, entropies of rows) + (mask, advantage, old and ref log-probs of the same rows) -> one scalar.

The losses of GRPO and its kin, written from their formulas, with no code shared with verl or with the engine.
Every term is a sum over tokens divided by a normaliser of the WHOLE mini-batch, so the same object may be
called once on all rows (the oracle) or once per pass and rank on some of them (the engine): the calls add
up.

Notation: t runs over the response tokens of row i, m_it is 1 where a token counts, A_it the advantage.
    d_it = log p_it - log p_old_it          clamped to [-20, 20] before exp
    ratio r_it = exp(d_it)                  GSPO: r_it = exp(sg[mean_t d_it] + log p_it - sg[log p_it])
    ppo_it = max(-A r, -A clip(r, 1-low, 1+high)); with dual clip c and A < 0: min(ppo_it, -A c)
    k1 = log p - log ref;  k2 = k1^2 / 2;  k3 = exp(-k1) + k1 - 1 with k1 clamped to +-20 and k3 to +-10
    loss = agg(ppo) - entropy_coef * agg(entropy) + kl_coef * agg(kl)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

Aggregation = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum"
]

# A log-ratio beyond this is numerical accident, not policy change; exp(20) still fits in half precision's
# range of float32 and the gradient of the clamped part is zero.
_MAX_LOG_RATIO = 20.0
_MAX_K3 = 10.0
# verl divides a row's sum by (tokens + 1e-8). Kept, because a comparison at 1e-12 sees it.
_ROW_MEAN_EPSILON = 1e-8


class Scores(Protocol):
    """What a loss reads; the engine's RowScores and the oracle's DenseScores both satisfy it."""

    row_indices: tuple[int, ...]
    log_probs: list[Tensor]
    entropy: list[Tensor] | None


@dataclass(frozen=True)
class RowTarget:
    """What the loss knows of one row beside the model's scores. Every tensor is [R]."""

    mask: Tensor
    advantages: Tensor
    old_log_probs: Tensor
    ref_log_probs: Tensor


@dataclass(frozen=True)
class LossSpec:
    """One loss of the family. `scale` is only read by seq-mean-token-sum-norm."""

    objective: Literal["ppo", "gspo", "reinforce"] = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    aggregation: Aggregation = "token-mean"
    scale: float | None = None
    kl: Literal["k1", "k2", "k3"] | None = None
    kl_coef: float = 0.0
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        if self.aggregation == "seq-mean-token-sum-norm" and self.scale is None:
            raise ValueError(
                "seq-mean-token-sum-norm needs a scale; without one the result depends on padding"
            )


LOSSES: dict[str, LossSpec] = {
    "grpo": LossSpec(aggregation="seq-mean-token-mean", kl="k3", kl_coef=0.05, entropy_coef=0.01),
    "dapo": LossSpec(clip_high=0.28, aggregation="token-mean"),
    "dr_grpo": LossSpec(aggregation="seq-mean-token-sum-norm", scale=64.0, dual_clip=None),
    "gspo": LossSpec(
        objective="gspo", clip_low=3e-4, clip_high=4e-4, dual_clip=None, aggregation="seq-mean-token-mean"
    ),
    "rloo": LossSpec(objective="reinforce", aggregation="seq-mean-token-sum", kl="k1", kl_coef=0.02),
}


class BatchLoss:
    """A LossSpec bound to the targets of one whole mini-batch; callable on the scores of any subset of its
    rows.

    `world_size` multiplies every call: data-parallel training averages gradients over ranks, and the loss
    of the whole mini-batch is the sum of the ranks' parts.
    """

    def __init__(self, spec: LossSpec, targets: Sequence[RowTarget], world_size: int = 1) -> None:
        self.spec = spec
        self.targets = tuple(targets)
        self.world_size = world_size
        self.valid_tokens = max(1.0, float(sum(target.mask.sum() for target in self.targets)))
        self.rows = len(self.targets)

    @property
    def needs_entropy(self) -> bool:
        return self.spec.entropy_coef != 0.0

    def for_world(self, world_size: int) -> BatchLoss:
        return BatchLoss(self.spec, self.targets, world_size)

    def __call__(self, scores: Scores) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for slot, row in enumerate(scores.row_indices):
            entropy = scores.entropy[slot] if scores.entropy is not None else None
            total = total + self._row_loss(scores.log_probs[slot], entropy, self.targets[row])
        return total * self.world_size

    def _row_loss(self, log_probs: Tensor, entropy: Tensor | None, target: RowTarget) -> Tensor:
        dtype = log_probs.dtype
        mask, advantages = target.mask.to(dtype), target.advantages.to(dtype)
        per_token = self._policy(log_probs, target.old_log_probs.to(dtype), advantages, mask)
        if self.needs_entropy:
            if entropy is None:
                raise ValueError("the loss has an entropy bonus, and the scores carry no entropy")
            per_token = per_token - self.spec.entropy_coef * entropy
        if self.spec.kl is not None:
            per_token = per_token + self.spec.kl_coef * kl_estimate(
                log_probs, target.ref_log_probs.to(dtype), self.spec.kl
            )
        # where, not multiplication: a masked token's value may be infinite and must not turn the sum into
        # nan.
        return self._aggregate(torch.where(mask > 0, per_token, torch.zeros_like(per_token)), mask)

    def _policy(self, log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        spec = self.spec
        if spec.objective == "reinforce":
            return -advantages * log_probs
        difference = log_probs - old
        if spec.objective == "gspo":
            row_mean = (difference * mask).sum() / mask.sum().clamp(min=1)
            log_ratio = (log_probs - log_probs.detach() + row_mean.detach()).clamp(max=10.0)
        else:
            log_ratio = difference.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high)
        loss = torch.maximum(-advantages * ratio, -advantages * clipped)
        if spec.dual_clip is not None:
            bounded = torch.minimum(loss, -advantages * spec.dual_clip)
            loss = torch.where(advantages < 0, bounded, loss)
        return loss

    def _aggregate(self, masked: Tensor, mask: Tensor) -> Tensor:
        row_sum = masked.sum()
        match self.spec.aggregation:
            case "token-sum":
                return row_sum
            case "token-mean":
                return row_sum / self.valid_tokens
            case "seq-mean-token-sum":
                return row_sum / self.rows
            case "seq-mean-token-sum-norm":
                assert self.spec.scale is not None
                return row_sum / self.rows / self.spec.scale
            case "seq-mean-token-mean":
                return row_sum / (mask.sum() + _ROW_MEAN_EPSILON) / self.rows


def kl_estimate(log_probs: Tensor, reference: Tensor, kind: Literal["k1", "k2", "k3"]) -> Tensor:
    """Schulman's estimators of KL(policy || reference) from one sampled token each."""
    difference = log_probs - reference
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference.square()
    negative = (-difference).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return (negative.exp() - negative - 1).clamp(-_MAX_K3, _MAX_K3)


def group_advantages(
    rewards: Tensor, kind: Literal["grpo", "dr_grpo", "rloo"], epsilon: float = 1e-6
) -> Tensor:
    """One advantage a row from the rewards of a group: [G] -> [G]. A group of one has no baseline: zero."""
    if rewards.numel() == 1:
        return torch.zeros_like(rewards)
    centred = rewards - rewards.mean()
    if kind == "grpo":
        return centred / (rewards.std() + epsilon)
    if kind == "rloo":
        return centred * rewards.numel() / (rewards.numel() - 1)
    return centred
