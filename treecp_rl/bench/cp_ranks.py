"""job -> one process a rank over gloo -> steps of every kind on the same rows -> maxima over the ranks.

All ranks form one domain and one FSDP2 world. At each point every kind first runs a step in which memory is counted
and its loss, gradient norm and bytes are compared with the others'; only then are kinds timed, in turns.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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
from treecp_rl.verify.ranks import run_on_ranks

VOCAB_SIZE = 512
HIDDEN_SIZE = 256
NUM_LAYERS = 4
CLOSE = 1.15
"""CPU time over the fastest kind's up to which a kind is worth ``close_repeats``."""
MOST_DUEL_ROUNDS = 6
"""Times ``duel_repeats`` that a duel takes at most."""
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
    """Kinds whose fastest meets the fastest of the others in ``duel_repeats`` fresh turns: the least of many noisy
    numbers is too low, so that who is ahead by it has to show it again."""
    duel_repeats: int = 0
    duel_limit: float | None = None
    """A ratio of CPU times: duels that do not tell yet on which side of it they are go on."""
    counts_memory: bool = True
    """Whether the first step of every kind counts memory, which takes as long as some more steps."""
    traced_point: int | None = None
    """Point of which one step of every kind is traced on rank 0."""
    trace_file: str | None = None
    """Where the trace of the first kind goes."""


@dataclass(frozen=True)
class Measured:
    """One kind at one point. Maxima over ranks, sums of bytes over ranks; of a rank's CPU time the least of the
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
    duel_cpu_seconds: tuple[float, ...] = ()
    """Of the busiest rank in each turn of the duel, of the two kinds that had one."""

    def duel_ratios(self, rival: Measured) -> list[float]:
        """CPU time over the rival's in each turn."""
        return turn_ratios(self.duel_cpu_seconds, rival.duel_cpu_seconds)

    def duel_ratio(self, rival: Measured) -> float:
        """Their median."""
        return statistics.median(self.duel_ratios(rival))


def turn_ratios(own: Sequence[float], rival: Sequence[float]) -> list[float]:
    """One time over another, turn by turn. A machine changes its speed in mid-run: both steps of a turn meet the same,
    the least of either side need not."""
    return [a / b for a, b in zip(own, rival, strict=True)]


def run_world(job: Job, timeout_seconds: float) -> list[list[Measured]]:
    """The job on its own processes; per point the kinds in the job's order.

    Raises:
        BenchError: kinds do not agree, or bytes are not what their schedules say.
        RankFailure: a rank raised, died, or still ran after ``timeout_seconds``.
    """
    advice = "raise --timeout, or lower --budgets or --scale"
    outcome = run_on_ranks(
        _main, job.world_size, job, timeout_seconds=timeout_seconds, threads=job.threads, advice=advice
    )[0]
    if isinstance(outcome, BenchError):
        raise outcome
    return outcome


def _main(rank: int, world_size: int, job: Job) -> list[list[Measured]] | BenchError:
    stay_on_a_core(rank)
    try:
        # What stops a bench is computed from numbers that all ranks share, so that all stop together.
        return _measure(job, Domain(rank, world_size, dist.group.WORLD))  # type: ignore[arg-type]
    except BenchError as error:
        return error


def stay_on_a_core(rank: int) -> None:
    """A rank that wanders between cores leaves its caches behind, which is in nobody's plan."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


def _measure(job: Job, domain: Domain) -> list[list[Measured]]:
    """Rounds over all points: what slows the machine down for a while then meets a kind in few of its repeats."""
    runner = Runner(sharded_model(), domain, job.profile or small_model_estimate())
    # The first step of a process loads kernels and lets FSDP2 lay out its parameters.
    runner.step(job.points[0], job.kinds[0])

    def tell(what: str) -> None:
        if domain.rank == 0:
            print(f"world {domain.size}: {what}", file=sys.stderr, flush=True)

    runs = []
    for number, point in enumerate(job.points, 1):
        runs.append(_first_steps(job, runner, point))
        tell(f"{point.name} at {point.budget_tokens} tokens, {number} of {len(job.points)} points")

    def play(what: str, repeats: int, kinds: Sequence[Sequence[Mode]], into: Sequence[Results]) -> None:
        for number in range(repeats):
            for one, of_point, results in zip(runs, kinds, into, strict=True):
                for kind in _rotated(of_point, number):
                    results[kind].append(runner.step(one.point, kind))
            tell(f"{what} kinds, round {number + 1} of {repeats}")

    play("all", job.repeats, [job.kinds] * len(runs), [one.rounds for one in runs])
    play("close", job.close_repeats, [_close_kinds(one) for one in runs], [one.rounds for one in runs])
    duels = [_duellists(job, one) for one in runs]
    for _ in range(MOST_DUEL_ROUNDS):
        play("duelling", job.duel_repeats, duels, [one.duel for one in runs])
        duels = [
            kinds if kinds and one.is_undecided(kinds, job.duel_limit) else []
            for kinds, one in zip(duels, runs, strict=True)
        ]
        if not any(duels):
            break
    return [
        one.measured(job, runner, is_traced=number == job.traced_point) for number, one in enumerate(runs)
    ]


def small_config() -> PretrainedConfig:
    """Of the model that is measured."""
    return tiny_config(VOCAB_SIZE, hidden_size=HIDDEN_SIZE, num_layers=NUM_LAYERS)


def small_model_estimate() -> ClusterProfile:
    """Costs of that model on a core."""
    return estimate("cpu", "small model of bench cp", dims_of(small_config()))


def sharded_model() -> torch.nn.Module:
    model = random_model(small_config(), torch.float32, drawn_in=torch.float32)
    prepare_model(model)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def _first_steps(job: Job, runner: Runner, point: Point | BatchPoint) -> _PointRuns:
    planned = {kind: runner.plan(point, kind) for kind in job.kinds}
    first = {kind: runner.step(point, kind, counts_memory=job.counts_memory) for kind in job.kinds}
    _require_agreement(first, planned, f"{point.name} at {point.budget_tokens} tokens")
    rounds, duel = ({kind: list[StepResult]() for kind in job.kinds} for _ in range(2))
    return _PointRuns(point, planned, first, rounds, duel)


@dataclass
class _PointRuns:
    """What ran at a point so far."""

    point: Point | BatchPoint
    planned: dict[Mode, PlannedStep]
    first: dict[Mode, StepResult]
    """Not timed: kernels and caches are cold."""
    rounds: Results
    duel: Results

    def least_cpu_seconds(self, kind: Mode) -> float:
        """Of the kind's schedules: kinds that share them are one plan, and their repeats count together."""
        digest = self.planned[kind].digest
        same = (results for other, results in self.rounds.items() if self.planned[other].digest == digest)
        return least_cpu_seconds([one for results in same for one in results])

    def is_undecided(self, duel: Sequence[Mode], limit: float | None) -> bool:
        """Whether the limit lies in the 95 % interval of the median ratio of the duel's turns."""
        if limit is None:
            return False
        low, high = median_interval(turn_ratios(*map(self.duel_cpu_seconds, duel)))
        return low <= limit <= high

    def duel_cpu_seconds(self, kind: Mode) -> tuple[float, ...]:
        """Of the busiest rank in each turn of the duel."""
        return tuple(max(one.rank_cpu_seconds) for one in self.duel[kind])

    def measured(self, job: Job, runner: Runner, *, is_traced: bool) -> list[Measured]:
        """Every kind's figures, and its trace."""

        def median(clock: str, kind: Mode) -> float:
            return statistics.median(getattr(one, clock) for one in self.rounds[kind])

        def trace(index: int, kind: Mode) -> Overlap:
            return runner.trace(self.point, kind, job.repeats, job.trace_file if not index else None)

        return [
            Measured(
                kind=kind,
                seconds=median("seconds", kind),
                cpu_seconds=self.least_cpu_seconds(kind),
                blocked_seconds=median("blocked_seconds", kind),
                bytes_moved=self.first[kind].bytes_moved,
                peak_bytes=self.first[kind].peak_bytes,
                tokens_computed=self.first[kind].tokens_computed,
                planned=self.planned[kind],
                duel_cpu_seconds=self.duel_cpu_seconds(kind),
                overlap=trace(index, kind) if is_traced else None,
            )
            for index, kind in enumerate(job.kinds)
        ]


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """About the 95 % confidence interval of a median, from order statistics (normal approximation of the sign test:
    92 % for 16 values, 94 % for 24 and more)."""
    ordered, count = sorted(values), len(values)
    reach = 0.98 * math.sqrt(count)
    low = max(0, math.floor(count / 2 - reach))
    high = min(count - 1, math.ceil(count / 2 + reach) - 1)
    return ordered[low], ordered[high]


def _duellists(job: Job, point: _PointRuns) -> list[Mode]:
    """The fastest challenger and the fastest other kind so far; none where a challenger runs the latter's schedules."""
    sides = [[kind for kind in job.kinds if (kind in job.challengers) is side] for side in (True, False)]
    if not all(sides) or not job.duel_repeats:
        return []
    champion, rival = (min(side, key=point.least_cpu_seconds) for side in sides)
    digest = point.planned[rival].digest
    return [] if any(point.planned[kind].digest == digest for kind in sides[0]) else [champion, rival]


def _rotated(kinds: Sequence[Mode], by: int) -> list[Mode]:
    """Another kind first in every round: what a step leaves in caches and allocators falls to each in turn."""
    start = by % max(1, len(kinds))
    return [*kinds[start:], *kinds[:start]]


def _close_kinds(point: _PointRuns) -> list[Mode]:
    """``auto``, and what may be the fastest; from maxima over the ranks, so that all ranks go on with the same."""
    least = {kind: point.least_cpu_seconds(kind) for kind in point.rounds}
    limit = CLOSE * min(least.values())
    return [kind for kind in least if kind == "auto" or least[kind] <= limit]


@dataclass(frozen=True)
class StepResult:
    """One step: maxima over the ranks, bytes summed over them."""

    seconds: float
    rank_cpu_seconds: tuple[float, ...]
    """Of each rank."""
    blocked_seconds: float
    bytes_moved: int
    peak_bytes: int
    """0 where memory was not counted."""
    loss: float
    gradient_norm: float
    tokens_computed: int


Results = dict[Mode, list[StepResult]]
"""Of a point's kinds, round by round."""


class Runner:
    """Steps of a model on this rank's domain."""

    def __init__(self, model: torch.nn.Module, domain: Domain, profile: ClusterProfile) -> None:
        self._model, self._domain, self._profile = model, domain, profile
        # As in a run, where the planner's actor has solved a batch before its ranks ask.
        self._planner = cache(planner_of(profile, domain.size, RUN_OPTIONS))
        self._programs: list[Program] = []
        model.register_forward_pre_hook(
            lambda _, __, named: self._programs.append(named[PROGRAM_KEY]), with_kwargs=True
        )

    def plan(self, point: Point | BatchPoint, kind: Mode) -> PlannedStep:
        return planned_step(point.rows(VOCAB_SIZE), kind, self._profile, self._domain.size)

    def step(self, point: Point | BatchPoint, kind: Mode, *, counts_memory: bool = False) -> StepResult:
        """One forward and backward of all rows, lowering included. All ranks call it together."""
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
        sent = sum(t.sent_bytes for t in traffic)
        of_ranks = self._over_ranks((seconds, cpu_seconds, blocked, sent, peak or 0))
        return StepResult(
            seconds=max(of_ranks[0]),
            rank_cpu_seconds=of_ranks[1],
            blocked_seconds=max(of_ranks[2]),
            bytes_moved=int(sum(of_ranks[3])),
            peak_bytes=int(max(of_ranks[4])),
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

    def _over_ranks(self, numbers: tuple[float, ...]) -> list[tuple[float, ...]]:
        """Each number of every rank."""
        gathered: list[Any] = [None] * self._domain.size
        dist.all_gather_object(gathered, numbers, group=self._domain.group)
        return list(zip(*gathered, strict=True))


def least_cpu_seconds(results: Sequence[StepResult]) -> float:
    """Of the busiest rank. What disturbs one rank in a repeat need not disturb the others: each has its own least."""
    return max(map(min, zip(*(one.rank_cpu_seconds for one in results), strict=True)))


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
