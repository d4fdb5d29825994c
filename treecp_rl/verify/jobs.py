"""job -> cases on every rank, see ``ranks`` -> merged outcomes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig

from treecp_rl.planner.batch import Mode
from treecp_rl.tree import Share
from treecp_rl.verify.cases import Case, Lengths, cases_from_lengths, standard_cases
from treecp_rl.verify.losses import BatchLoss
from treecp_rl.verify.models import DTYPES, random_model
from treecp_rl.verify.ranks import run_on_ranks
from treecp_rl.verify.subject import Outcome, merge_outcomes, prepare_engine_model, run_engine


@dataclass(frozen=True)
class Job:
    """All a rank needs; cases are rebuilt from their recipe, because they hold functions."""

    config: PretrainedConfig
    dtype: str
    share: Share
    lengths: tuple[Lengths, ...] | None
    case_names: tuple[str, ...]
    losses: tuple[BatchLoss, ...]
    plans: tuple[Mode | None, ...] = (None,)
    """What each case is run by, one after another, see ``subject.run_engine``."""


def build_cases(config: PretrainedConfig, lengths: tuple[Lengths, ...] | None) -> tuple[Case, ...]:
    return cases_from_lengths(config.vocab_size, lengths) if lengths else standard_cases(config.vocab_size)


def run_job(job: Job, rank: int, world_size: int) -> list[Outcome]:
    """Every case of the job on this rank, in order, for the first plan, then for the next."""
    dtype = DTYPES[job.dtype]
    model = prepare_engine_model(random_model(job.config, dtype, drawn_in=dtype), world_size)
    by_name = {case.name: case for case in build_cases(job.config, job.lengths)}
    return [
        run_engine(model, by_name[name], loss, share=job.share, plan=plan, rank=rank, world_size=world_size)
        for plan in job.plans
        for name, loss in zip(job.case_names, job.losses, strict=True)
    ]


def run_world(job: Job, world_size: int, timeout_seconds: float) -> list[Outcome]:
    """The job on `world_size` processes; one merged outcome a plan and case."""
    if world_size == 1:
        return run_job(job, 0, 1)
    threads = max(1, torch.get_num_threads() // world_size)
    advice = "ask for fewer tokens (--lengths), or raise --timeout"
    ranks = run_on_ranks(
        _run_rank, world_size, job, timeout_seconds=timeout_seconds, threads=threads, advice=advice
    )
    return [merge_outcomes(list(parts)) for parts in zip(*ranks, strict=True)]


def _run_rank(rank: int, world_size: int, job: Job) -> list[Outcome]:
    outcomes = run_job(job, rank, world_size)
    # Gradients are whole on every rank, and large.
    return outcomes if rank == 0 else [replace(outcome, gradients={}) for outcome in outcomes]
