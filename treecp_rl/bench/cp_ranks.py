"""job -> one process a rank over gloo -> steps of every kind on the same rows -> maxima over the ranks.

All ranks form one domain and one FSDP2 world. At each point every kind first runs a step in which memory is counted
and its loss, gradient norm and bytes are compared with the others'; only then are kinds timed, in turns.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile
from transformers import PretrainedConfig

from treecp_rl.attention.huggingface import PROGRAM_KEY
from treecp_rl.attention.program import Program
from treecp_rl.bench.cp_plans import RUN_OPTIONS, PlannedStep, passes_of, planned_step
from treecp_rl.bench.memory import peak_bytes
from treecp_rl.bench.overlap import Overlap, overlap_of
from treecp_rl.bench.shapes import BatchPoint, Point
from treecp_rl.bench.step import BenchError
from treecp_rl.engine.capabilities import prepare_model
from treecp_rl.engine.passes import Domain, PassOptions, RowScores, StepReport, run_passes
from treecp_rl.engine.planning import planner_of
from treecp_rl.planner.batch import Mode
from treecp_rl.planner.estimates import dims_of, estimate
from treecp_rl.planner.profile import ClusterProfile
from treecp_rl.verify.models import random_model, tiny_config
from treecp_rl.verify.ranks import RankFailure, join_world

VOCAB_SIZE = 512
HIDDEN_SIZE = 256
NUM_LAYERS = 4
CLOSE = 1.15
"""CPU time over the fastest kind's up to which a kind is worth ``close_repeats``."""
AGREEMENT = 1e-4
"""Most relative difference of kinds' losses and gradient norms: float32, sums in another order."""


@dataclass(frozen=True)
class Job:
    """What the ranks of one world measure."""

    world_size: int
    points: tuple[Point | BatchPoint, ...]
    kinds: tuple[Mode, ...]
    repeats: int
    threads: int
    profile: ClusterProfile | None = None
    """What ``auto`` plans with, and what predictions are of; None: an estimate of a core."""
    close_repeats: int = 0
    """More repeats of ``auto`` and of the kinds that are within ``CLOSE`` of the fastest."""
    challengers: tuple[Mode, ...] = ()
    """Kinds whose fastest meets the fastest of the others in ``duel_repeats`` fresh repeats, in turns: the least of
    many noisy numbers is too low, so that who is ahead by it has to show it again."""
    duel_repeats: int = 0
    counts_memory: bool = True
    """Whether the first step of every kind counts memory, which takes as long as some more steps."""
    traced_point: int | None = None
    """Point of which one step of every kind is traced on rank 0."""
    trace_file: str | None = None
    """Where the trace of the first kind goes."""


@dataclass(frozen=True)
class Measured:
    """One kind at one point. Maxima over ranks, sums of bytes over ranks; of CPU time the least of the
    repeats, because whatever else a machine does only adds to it; of wall times medians."""

    kind: Mode
    seconds: float
    cpu_seconds: float
    """User and system time of the process, all threads; a rank that waits for bytes uses none."""
    blocked_seconds: float
    """Wall time spent waiting for bytes of attention."""
    bytes_moved: int
    peak_bytes: int
    tokens_computed: int
    planned: PlannedStep
    overlap: Overlap | None
    """Of rank 0, where the point was traced."""
    duel_cpu_seconds: float | None = None
    """Least CPU time in the duel, of the two kinds that had one."""


def run_world(job: Job, timeout_seconds: float) -> list[list[Measured]]:
    """The job on its own processes; per point the kinds in the job's order.

    Raises:
        BenchError: kinds do not agree, or bytes are not what their schedules say.
        RankFailure: a rank raised, died, or still ran after ``timeout_seconds``.
    """
    with tempfile.TemporaryDirectory(prefix="treecp-bench-cp-") as folder:
        ranks = mp.start_processes(
            _main, (job, folder), nprocs=job.world_size, join=False, start_method="spawn"
        )
        try:
            _wait(ranks, timeout_seconds)
        finally:
            for process in ranks.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        outcome = pickle.loads((Path(folder) / "outcome.pkl").read_bytes())
    if isinstance(outcome, BenchError):
        raise outcome
    return list(outcome)


def _wait(ranks: Any, timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    try:
        while not ranks.join(timeout=1.0):
            if time.monotonic() > deadline:
                running = [rank for rank, process in enumerate(ranks.processes) if process.is_alive()]
                raise RankFailure(
                    f"ranks {running} still ran after {timeout_seconds:.0f} s and were ended; a hang, or a machine "
                    "too slow for these points: raise --timeout, or lower --budgets or --scale"
                )
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        raise RankFailure(str(error).strip()) from error


def _main(rank: int, job: Job, folder: str) -> None:
    torch.set_num_threads(job.threads)
    _stay_on_a_core(rank)
    join_world(rank, job.world_size, f"{folder}/rendezvous")
    outcome: list[list[Measured]] | BenchError
    try:
        # What stops a bench is computed from numbers that all ranks share, so that all stop together.
        outcome = _measure(job, Domain(rank, job.world_size, dist.group.WORLD))  # type: ignore[arg-type]
    except BenchError as error:
        outcome = error
    if rank == 0:
        (Path(folder) / "outcome.pkl").write_bytes(pickle.dumps(outcome))
    dist.destroy_process_group()


def _stay_on_a_core(rank: int) -> None:
    """A rank that wanders between cores leaves its caches behind, which is in nobody's plan."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


def _measure(job: Job, domain: Domain) -> list[list[Measured]]:
    runner = _Runner(_sharded_model(), domain, job.profile or small_model_estimate())
    # The first step of a process loads kernels and lets FSDP2 lay out its parameters.
    runner.step(job.points[0], job.kinds[0])
    measured = []
    for number, point in enumerate(job.points):
        is_traced = number == job.traced_point
        measured.append(_measure_point(job, runner, point, is_traced=is_traced))
        if domain.rank == 0:
            print(
                f"world {domain.size}: {point.name} at {point.budget_tokens} tokens, {number + 1} of "
                f"{len(job.points)} points",
                file=sys.stderr,
                flush=True,
            )
    return measured


def small_config() -> PretrainedConfig:
    """Of the model that is measured."""
    return tiny_config(VOCAB_SIZE, hidden_size=HIDDEN_SIZE, num_layers=NUM_LAYERS)


def small_model_estimate() -> ClusterProfile:
    """Costs of that model on a core."""
    return estimate("cpu", "small model of bench cp", dims_of(small_config()))


def _sharded_model() -> torch.nn.Module:
    model = random_model(small_config(), torch.float32, drawn_in=torch.float32)
    prepare_model(model)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def _measure_point(
    job: Job, runner: _Runner, point: Point | BatchPoint, *, is_traced: bool
) -> list[Measured]:
    planned = {kind: runner.plan(point, kind) for kind in job.kinds}
    first = {kind: runner.step(point, kind, counts_memory=job.counts_memory) for kind in job.kinds}
    _require_agreement(first, planned, f"{point.name} at {point.budget_tokens} tokens")
    rounds = {kind: list[StepResult]() for kind in job.kinds}
    for number in range(job.repeats):
        for kind in _rotated(job.kinds, number):
            rounds[kind].append(runner.step(point, kind))
    close = _close_kinds(rounds)
    for number in range(job.close_repeats):
        for kind in _rotated(close, number):
            rounds[kind].append(runner.step(point, kind))

    duel = {kind: list[StepResult]() for kind in _duellists(job, planned, rounds)}
    for number in range(job.duel_repeats):
        for kind in _rotated(list(duel), number):
            duel[kind].append(runner.step(point, kind))

    def median(clock: str, kind: Mode) -> float:
        return statistics.median(getattr(one, clock) for one in rounds[kind])

    return [
        Measured(
            kind=kind,
            seconds=median("seconds", kind),
            cpu_seconds=least_cpu_seconds(rounds[kind]),
            blocked_seconds=median("blocked_seconds", kind),
            bytes_moved=first[kind].bytes_moved,
            peak_bytes=first[kind].peak_bytes,
            tokens_computed=first[kind].tokens_computed,
            planned=planned[kind],
            duel_cpu_seconds=least_cpu_seconds(duel[kind]) if duel.get(kind) else None,
            overlap=runner.trace(point, kind, job.repeats, job.trace_file if not index else None)
            if is_traced
            else None,
        )
        for index, kind in enumerate(job.kinds)
    ]


def _duellists(
    job: Job, planned: dict[Mode, PlannedStep], rounds: dict[Mode, list[StepResult]]
) -> list[Mode]:
    """The fastest challenger and the fastest other kind so far; none where they are one plan."""
    least = {kind: least_cpu_seconds(results) for kind, results in rounds.items() if results}
    sides = [[kind for kind in least if (kind in job.challengers) is side] for side in (True, False)]
    if not all(sides) or not job.duel_repeats:
        return []
    found = [min(side, key=lambda kind: least[kind]) for side in sides]
    return found if len({planned[kind].digest for kind in found}) > 1 else []


def _rotated(kinds: Sequence[Mode], by: int) -> list[Mode]:
    """Another kind first in every round: what a step leaves in caches and allocators falls to each in turn."""
    start = by % max(1, len(kinds))
    return [*kinds[start:], *kinds[:start]]


def _close_kinds(rounds: dict[Mode, list[StepResult]]) -> list[Mode]:
    """``auto``, and what may be the fastest; from maxima over the ranks, so that all ranks go on with the same."""
    least = {kind: least_cpu_seconds(results) for kind, results in rounds.items() if results}
    limit = CLOSE * min(least.values(), default=0.0)
    return [kind for kind in rounds if kind == "auto" or least.get(kind, math.inf) <= limit]


@dataclass(frozen=True)
class StepResult:
    """One step: maxima over the ranks, bytes summed over them."""

    seconds: float
    cpu_seconds: float
    blocked_seconds: float
    bytes_moved: int
    peak_bytes: int
    """0 where memory was not counted."""
    loss: float
    gradient_norm: float
    tokens_computed: int


class _Runner:
    """Steps of a model on this rank's domain."""

    def __init__(self, model: torch.nn.Module, domain: Domain, profile: ClusterProfile) -> None:
        self._model, self._domain, self._profile = model, domain, profile
        self._planner = planner_of(profile, domain.size, RUN_OPTIONS)
        self._programs: list[Program] = []
        model.register_forward_pre_hook(
            lambda _, __, named: self._programs.append(named[PROGRAM_KEY]), with_kwargs=True
        )

    def plan(self, point: Point | BatchPoint, kind: Mode) -> PlannedStep:
        return planned_step(point.rows(VOCAB_SIZE), kind, self._profile, self._domain.size)

    def step(self, point: Point | BatchPoint, kind: Mode, *, counts_memory: bool = False) -> StepResult:
        """One forward and backward of all rows, planning included. All ranks call it together."""
        rows = point.rows(VOCAB_SIZE)
        self._model.zero_grad(set_to_none=True)
        self._programs.clear()
        losses: list[torch.Tensor] = []
        reports: list[StepReport] = []

        def work() -> None:
            reports.append(self._run(rows, kind, losses))

        dist.barrier(self._domain.group)
        cpu, wall = time.process_time(), time.perf_counter()
        peak = peak_bytes(work) if counts_memory else work()
        seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
        traffic = [t for p in self._programs for t in (p.forward_traffic, p.backward_traffic)]
        blocked = sum(t.blocked_seconds for t in traffic)
        maxima = self._over_ranks((seconds, cpu_seconds, blocked, float(peak or 0)), max)
        (sent,) = self._over_ranks((float(sum(t.sent_bytes for t in traffic)),), sum)
        return StepResult(
            *maxima[:3],
            bytes_moved=int(sent),
            peak_bytes=int(maxima[3]),
            loss=float(torch.stack(losses).sum()),
            gradient_norm=self._gradient_norm(),
            tokens_computed=reports[0].tokens_computed,
        )

    def trace(self, point: Point | BatchPoint, kind: Mode, repeats: int, file: str | None) -> Overlap:
        """Overlap of this rank's step, and on rank 0 its chrome trace in ``file``: of several steps the median one."""
        traces = [self._trace(point, kind) for _ in range(repeats)]
        overlap, text = sorted(traces, key=lambda one: one[0].hidden_fraction or 0.0)[len(traces) // 2]
        if file is not None and self._domain.rank == 0:
            Path(file).write_text(text)
        return overlap

    def _trace(self, point: Point | BatchPoint, kind: Mode) -> tuple[Overlap, str]:
        rows = point.rows(VOCAB_SIZE)
        self._model.zero_grad(set_to_none=True)
        dist.barrier(self._domain.group)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            self._run(rows, kind, [])
        with tempfile.TemporaryDirectory(prefix="treecp-trace-") as folder:
            written = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(written))
            text = written.read_text()
        return overlap_of(json.loads(text)), text

    def _run(self, rows: Sequence[Any], kind: Mode, losses: list[torch.Tensor]) -> StepReport:
        return run_passes(
            self._model,
            passes_of(rows, kind, self._planner),
            partial(_loss_of, num_rows=len(rows), seen=losses),
            PassOptions(mode=kind),
            domain=self._domain,
            sync_context=self._sync_on_last,
        )

    @contextmanager
    def _sync_on_last(self, is_last: bool) -> Iterator[None]:
        self._model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
        yield

    def _gradient_norm(self) -> float:
        grads = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def _over_ranks(
        self, numbers: tuple[float, ...], fold: Callable[[Sequence[float]], float]
    ) -> tuple[float, ...]:
        gathered: list[Any] = [None] * self._domain.size
        dist.all_gather_object(gathered, numbers, group=self._domain.group)
        return tuple(fold(column) for column in zip(*gathered, strict=True))


def least_cpu_seconds(results: Sequence[StepResult]) -> float:
    return min(one.cpu_seconds for one in results)


def _loss_of(scores: RowScores, *, num_rows: int, seen: list[torch.Tensor]) -> torch.Tensor:
    """Policy-gradient-like: each row's mean log-probability, weighted by an advantage of its number."""
    parts = [
        -math.cos(1.0 + row) * log_probs.mean() / num_rows
        for row, log_probs in zip(scores.row_indices, scores.log_probs, strict=True)
    ]
    loss = torch.stack(parts).sum()
    seen.append(loss.detach())
    return loss


def _require_agreement(results: dict[Mode, StepResult], planned: dict[Mode, PlannedStep], where: str) -> None:
    reference = next(iter(results))
    for kind, result in results.items():
        for name in ("loss", "gradient_norm"):
            found, expected = getattr(result, name), getattr(results[reference], name)
            if not abs(found - expected) <= AGREEMENT * abs(expected):
                raise BenchError(
                    f"{where}: the {name.replace('_', ' ')} of {kind} is {found:.6g}, of {reference} {expected:.6g}; "
                    "run `treecp-rl verify` to find which of them is wrong"
                )
        if result.bytes_moved != planned[kind].bytes_expected:
            raise BenchError(
                f"{where}: {kind} moved {result.bytes_moved} bytes, its schedules say "
                f"{planned[kind].bytes_expected}; one of collectives.Traffic and planner.cost miscounts"
            )
