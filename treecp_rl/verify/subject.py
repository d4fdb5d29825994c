"""case + model -> the engine's step on this rank -> scores, loss share and gradients, ready to compare."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from treecp_rl.engine.capabilities import prepare_model
from treecp_rl.engine.head import HeadOptions
from treecp_rl.engine.passes import Domain, PassOptions, RowScores, plan_passes, run_passes
from treecp_rl.engine.planning import Planner, planner_of
from treecp_rl.planner.batch import Mode
from treecp_rl.planner.estimates import dims_of, estimate
from treecp_rl.planner.forms import RunOptions
from treecp_rl.tree import Share
from treecp_rl.verify.cases import Case
from treecp_rl.verify.losses import BatchLoss
from treecp_rl.verify.oracle import gradients_of

_QUANTITIES = ("log_probs", "entropy", "sum_pi_squared")
# Smaller than most cases' scored positions, so that the chunked head is always under test.
_HEAD_CHUNK_TOKENS = 16


@dataclass(frozen=True)
class Outcome:
    """What one rank of the engine produced for a case. Scores are keyed by the case's row numbers."""

    update: dict[str, dict[int, Tensor]]
    """Scores seen by the loss, quantity -> row -> [R]."""
    forward_only: dict[str, dict[int, Tensor]]
    """The same from the pass without a loss (old log-prob, reference)."""
    loss: float
    """This rank's share; shares of all ranks average to the mini-batch's loss."""
    gradients: dict[str, Tensor]
    tokens_computed: int
    tokens_flat: int


@dataclass
class _Recorder:
    """Loss function for run_passes that keeps what it was shown."""

    loss: BatchLoss
    row_numbers: tuple[int, ...]
    scores: dict[str, dict[int, Tensor]] = field(default_factory=lambda: {name: {} for name in _QUANTITIES})
    total: float = 0.0

    def __call__(self, scores: RowScores) -> Tensor:
        rows = tuple(self.row_numbers[index] for index in scores.row_indices)
        record_scores(self.scores, scores, rows)
        value = self.loss(RowScores(rows, scores.log_probs, scores.entropy, scores.sum_pi_squared))
        self.total += float(value.detach())
        return value


def record_scores(into: dict[str, dict[int, Tensor]], scores: RowScores, rows: tuple[int, ...]) -> None:
    for name in _QUANTITIES:
        for row, values in zip(rows, getattr(scores, name), strict=True):
            into[name][row] = values.detach().cpu()


def prepare_engine_model(model: nn.Module, world_size: int) -> nn.Module:
    """The user's model made ready as the worker makes it: tree attention, then FSDP2 when there are peers."""
    prepare_model(model)
    if world_size > 1:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    return model


def run_engine(
    model: nn.Module,
    case: Case,
    loss: BatchLoss,
    *,
    share: Share,
    plan: Mode | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> Outcome:
    """Old-log-prob pass and update pass of one case on this rank. All ranks of the world call it together.

    Args:
        plan: None gives each rank rows of its own; a mode makes the world one domain, which runs all rows by it.
    """
    is_domain = plan is not None and world_size > 1
    domain = Domain(rank, world_size, dist.group.WORLD) if is_domain else None
    row_numbers = tuple(range(len(case.rows))) if is_domain else case.rows_of(rank, world_size)
    rows = [case.rows[index] for index in row_numbers]
    budget = case.tokens_per_pass or max(1, sum(row.num_tokens for row in case.rows))
    planner = None if domain is None else _planner(model, case, domain)
    passes = plan_passes(rows, share=share, tokens_per_pass=budget, mode=plan or "auto", planner=planner)
    head = HeadOptions(entropy=True, sum_pi_squared=True, chunk_tokens=_HEAD_CHUNK_TOKENS)
    options = PassOptions(head=head, mode=plan or "auto")
    recorder = _Recorder(loss if is_domain else loss.for_world(world_size), row_numbers)
    with _checkpointing(model, case.checkpointing):
        model.zero_grad(set_to_none=True)
        old = run_passes(model, passes, None, options, domain=domain)
        report = run_passes(
            model,
            passes,
            recorder,
            options,
            domain=domain,
            sync_context=lambda last: _sync_on_last(model, last),
        )
    gradients = gradients_of(model)
    model.zero_grad(set_to_none=True)
    forward_only: dict[str, dict[int, Tensor]] = {name: {} for name in _QUANTITIES}
    for scores in old.scores:
        record_scores(forward_only, scores, tuple(row_numbers[index] for index in scores.row_indices))
    return Outcome(
        update=recorder.scores,
        forward_only=forward_only,
        loss=recorder.total,
        gradients=gradients,
        # A domain counts its tokens once, on the first rank.
        tokens_computed=report.tokens_computed if domain is None or rank == 0 else 0,
        tokens_flat=report.tokens_flat if domain is None or rank == 0 else 0,
    )


def merge_outcomes(outcomes: list[Outcome]) -> Outcome:
    """Ranks -> one: scores side by side, losses averaged as FSDP averages gradients."""

    def union(parts: list[dict[str, dict[int, Tensor]]]) -> dict[str, dict[int, Tensor]]:
        return {name: {row: t for part in parts for row, t in part[name].items()} for name in _QUANTITIES}

    return Outcome(
        update=union([outcome.update for outcome in outcomes]),
        forward_only=union([outcome.forward_only for outcome in outcomes]),
        loss=sum(outcome.loss for outcome in outcomes) / len(outcomes),
        gradients=outcomes[0].gradients,
        tokens_computed=sum(outcome.tokens_computed for outcome in outcomes),
        tokens_flat=sum(outcome.tokens_flat for outcome in outcomes),
    )


def _planner(model: nn.Module, case: Case, domain: Domain) -> Planner:
    """What ``auto`` asks. Any costs will do: they choose among plans that must all be exact."""
    profile = estimate("cpu", model.config.model_type, dims_of(model.config))
    budget = None if case.tokens_per_pass is None else -(-case.tokens_per_pass // domain.size)
    return planner_of(profile, domain.size, RunOptions(case.checkpointing, tokens_per_rank=budget))


@contextmanager
def _checkpointing(model: nn.Module, enabled: bool) -> Iterator[None]:
    if not enabled:
        yield
        return
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()


@contextmanager
def _sync_on_last(model: nn.Module, is_last: bool) -> Iterator[None]:
    """Reduce-scatter gradients once, in the last pass; the accumulation before it stays local."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
    yield
