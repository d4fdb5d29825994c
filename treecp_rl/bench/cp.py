"""(shapes x budgets x world sizes) -> one step of every kind of plan -> time, bytes and memory side by side.

A step is forward and backward of all rows of a group, lowered, run and reduced as in training: float32, FSDP2 over
all ranks, which form one domain. Kinds take turns on the same rows, round after round, so that whatever else the
machine does hits all of them. What is compared is CPU time, maximum over ranks; wall time and the time blocked on
bytes stand beside it, because ranks that share cores say little by wall time.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from treecp_rl.bench.cp_plans import BASELINE_KINDS, KINDS, OUR_KINDS
from treecp_rl.bench.cp_ranks import HIDDEN_SIZE, NUM_LAYERS, VOCAB_SIZE, Job, Measured, run_world
from treecp_rl.bench.shapes import GROUP_ROWS, RESPONSE_CV, SHAPES, Point, point
from treecp_rl.errors import ConfigError
from treecp_rl.planner.batch import Mode
from treecp_rl.planner.place import TOKEN_LIMIT, WORK_LIMIT
from treecp_rl.planner.profile import load_profile

SPEED_TOLERANCE = 1.05
"""Most CPU time of our best kind over the best baseline's: what repeats of one plan differ by."""


@dataclass(frozen=True)
class BenchOptions:
    """What `treecp-rl bench cp` was asked for."""

    world_sizes: tuple[int, ...] = (2, 4)
    budgets: tuple[int, ...] = (12288, 16384, 24576, 28672, 32768)
    """G (P + R) of a point, before ``scale``."""
    scale: float = 0.125
    shapes: tuple[str, ...] = tuple(SHAPES)
    kinds: tuple[Mode, ...] = KINDS
    repeats: int = 3
    close_repeats: int = 0
    """More, of the kinds that may be the fastest."""
    duel_repeats: int = 0
    """Fresh turns of our fastest kind and the fastest baseline, which then make the ratio."""
    threads: int = 1
    timeout_seconds: float = 3600.0
    """Of the ranks of one world size, all points together."""
    trace_file: str | None = None
    profile: str | None = None
    """What ``auto`` plans with; None: an estimate of a core."""

    def __post_init__(self) -> None:
        unknown = [kind for kind in self.kinds if kind not in KINDS]
        if unknown:
            raise ConfigError(f"--kinds: no kind {unknown[0]!r}; choose from {', '.join(KINDS)}")
        if not self.scale > 0:
            raise ConfigError(f"--scale: {self.scale} is not above 0; 1 runs the budgets as they are")
        if min(self.world_sizes, default=0) < 2:
            raise ConfigError(f"--world-sizes: {self.world_sizes} must be 2 or more; one rank moves nothing")

    @property
    def points(self) -> tuple[Point, ...]:
        """Shape by shape, budgets ascending.

        Raises:
            ConfigError: a shape that does not exist, or a budget too small for one.
        """
        budgets = [round(budget * self.scale) for budget in sorted(self.budgets)]
        return tuple(point(shape, budget) for shape in self.shapes for budget in budgets)


@dataclass(frozen=True)
class Case:
    """Every kind at one point and world size."""

    world_size: int
    point: Point
    measured: tuple[Measured, ...]

    def of(self, kinds: Sequence[Mode]) -> list[Measured]:
        return [one for one in self.measured if one.kind in kinds]

    def summary(self) -> dict[str, Any]:
        """What the point says to each claim; None where a side of the comparison, or gather, was not run."""
        ours, baselines = self.of(OUR_KINDS), self.of(BASELINE_KINDS)
        (gather,) = self.of(("gather",)) or (None,)
        found: dict[str, Any] = _where(self) | dict.fromkeys(CLAIMS)
        if gather is not None:
            found["gather_is_even"] = _is_even(gather)
        found["bytes_as_expected"] = all(
            one.bytes_moved == one.planned.bytes_expected for one in self.measured
        )
        if not ours or not baselines:
            return found
        best, rival, ratio = _compared(ours, baselines)
        found |= {
            "best_ours": best.kind,
            "best_baseline": rival.kind,
            "cpu_ratio": ratio,
            "wall_ratio": min(one.seconds for one in ours) / min(one.seconds for one in baselines),
            "kinds_with_fewest_bytes": _kinds_with_fewest_bytes(ours, baselines),
            "baseline_with_fewest_bytes": min(baselines, key=lambda one: one.bytes_moved).kind,
            "kinds_with_fewest_bytes_of_even": _kinds_with_fewest_bytes(
                [one for one in ours if _is_even(one)], [one for one in baselines if _is_even(one)]
            ),
        }
        found["as_fast_as_best_baseline"] = found["cpu_ratio"] <= SPEED_TOLERANCE
        found["fewest_bytes"] = bool(found["kinds_with_fewest_bytes"])
        found["fewest_bytes_of_even"] = bool(found["kinds_with_fewest_bytes_of_even"])
        return found


def _compared(ours: Sequence[Measured], baselines: Sequence[Measured]) -> tuple[Measured, Measured, float]:
    """The fastest of either side, and the ratio of their CPU times: in their duel, if they had one. Where one of ours
    runs the baseline's very schedules, both are equally fast, and there is none."""
    best, rival = (
        next(
            (one for one in side if one.duel_cpu_seconds),
            min(side, key=lambda one: one.cpu_seconds),
        )
        for side in (ours, baselines)
    )
    if best.duel_cpu_seconds and rival.duel_cpu_seconds:
        return best, rival, best.duel_ratio(rival)
    return best, rival, best.cpu_seconds / rival.cpu_seconds


def _is_even(one: Measured) -> bool:
    return one.planned.work_imbalance <= WORK_LIMIT and one.planned.token_imbalance <= TOKEN_LIMIT


def _kinds_with_fewest_bytes(ours: Sequence[Measured], baselines: Sequence[Measured]) -> list[Mode]:
    """Our kinds that move no more than any of the baselines."""
    fewest = min((one.bytes_moved for one in baselines), default=None)
    return [one.kind for one in ours if fewest is None or one.bytes_moved <= fewest]


CLAIMS = (
    "as_fast_as_best_baseline",
    "gather_is_even",
    "bytes_as_expected",
    "fewest_bytes",
    "fewest_bytes_of_even",
)
"""What a point can hold: our best kind's CPU time at most ``SPEED_TOLERANCE`` of the best baseline's; gather's planned
work and tokens within the planner's limits; bytes as the schedules say; one of our kinds moves no more bytes than
any baseline; the same among the kinds, ours and baselines, whose plan is within those limits, because a plan that
leaves work on few ranks moves little."""


@dataclass(frozen=True)
class BenchReport:
    """All points of one invocation, and what they ran on."""

    options: BenchOptions
    cases: tuple[Case, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "model": f"qwen2, {NUM_LAYERS} layers, hidden {HIDDEN_SIZE}, intermediate {2 * HIDDEN_SIZE}, 8 query and "
            "2 key-value heads",
            "dtype": "float32",
            "vocab_size": VOCAB_SIZE,
            "group_size": GROUP_ROWS,
            "response_cv": RESPONSE_CV,
            "scale": self.options.scale,
            "repeats": self.options.repeats,
            "close_repeats": self.options.close_repeats,
            "duel_repeats": self.options.duel_repeats,
            "threads": self.options.threads,
            "machine": {
                "processor": platform.machine(),
                "cores": os.cpu_count(),
                "torch": torch.__version__,
                "load_average": os.getloadavg()[0],
            },
            "summary": self.summary(),
            "points": [case.summary() for case in self.cases],
            "overlap": [
                _where(case) | {"kind": one.kind} | one.overlap.as_json()
                for case in self.cases
                for one in case.measured
                if one.overlap is not None
            ],
            "cases": [_case_json(case, one) for case in self.cases for one in case.measured],
        }

    def summary(self) -> dict[str, Any]:
        """Of how many points each claim holds, by world size; and what our kinds achieve one by one."""
        found: dict[str, Any] = {}
        for world_size in self.options.world_sizes:
            points = [case.summary() for case in self.cases if case.world_size == world_size]
            ours = [kind for kind in self.options.kinds if kind in OUR_KINDS]
            found[f"world_{world_size}"] = {
                "points": len(points),
                **{claim: sum(bool(one[claim]) for one in points) for claim in CLAIMS},
                "fewest_bytes_by_kind": {
                    kind: sum(kind in one.get("kinds_with_fewest_bytes", ()) for one in points)
                    for kind in ours
                },
                "worst_cpu_ratio": max(
                    (one["cpu_ratio"] for one in points if "cpu_ratio" in one), default=None
                ),
                "does_not_hold": [
                    f"{claim}: {one['shape']} at {one['budget_tokens']} tokens"
                    for one in points
                    for claim in CLAIMS
                    if one[claim] is False
                ],
            }
        return found


def _where(case: Case) -> dict[str, Any]:
    return {
        "world_size": case.world_size,
        "shape": case.point.name,
        "budget_tokens": case.point.budget_tokens,
    }


def _case_json(case: Case, one: Measured) -> dict[str, Any]:
    group = case.point
    return {
        "world_size": case.world_size,
        "shape": {
            "name": group.name,
            "prompt": group.prompt,
            "responses": list(group.responses),
            "budget_tokens": group.budget_tokens,
        },
        "kind": one.kind,
        "ours": one.kind in OUR_KINDS,
        "seconds": one.seconds,
        "cpu_seconds": one.cpu_seconds,
        "duel_cpu_seconds": list(one.duel_cpu_seconds),
        "blocked_seconds": one.blocked_seconds,
        "bytes_moved": one.bytes_moved,
        "bytes_expected": one.planned.bytes_expected,
        "peak_bytes": one.peak_bytes,
        "tokens_computed": one.tokens_computed,
        "work_imbalance": one.planned.work_imbalance,
        "token_imbalance": one.planned.token_imbalance,
        "predicted_seconds": one.planned.predicted_seconds,
    }


def parse_numbers(flag: str, text: str) -> tuple[int, ...]:
    """'2,4' -> (2, 4), each 1 or more."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{flag}: cannot read {text!r}; write whole numbers as 2,4") from error
    if min(numbers) < 1:
        raise ConfigError(f"{flag}: {min(numbers)} is not a whole number of 1 or more")
    return numbers


def parse_kinds(text: str) -> tuple[Mode, ...]:
    """'gather,move_q' -> modes; ``BenchOptions`` refuses what is none."""
    return cast(tuple[Mode, ...], tuple(text.split(",")))


def measure(options: BenchOptions, progress: Callable[[str], None] = lambda line: None) -> BenchReport:
    """Run every point at every world size. A trace is taken at the first world size, first shape, largest budget.

    Raises:
        BenchError: kinds do not agree on loss or gradient norm, or bytes are not what schedules say.
        RankFailure: a rank raised, died, or ran too long.
    """
    points = options.points
    cases: list[Case] = []
    for number, world_size in enumerate(options.world_sizes):
        progress(f"world {world_size}: {len(points)} points x {len(options.kinds)} kinds")
        job = Job(
            world_size=world_size,
            points=points,
            kinds=options.kinds,
            repeats=options.repeats,
            close_repeats=options.close_repeats,
            profile=None if options.profile is None else load_profile(options.profile),
            challengers=OUR_KINDS,
            duel_repeats=options.duel_repeats,
            threads=options.threads,
            traced_point=len(options.budgets) - 1 if number == 0 else None,
            trace_file=options.trace_file,
        )
        found = run_world(job, options.timeout_seconds)
        cases += [Case(world_size, one, tuple(kinds)) for one, kinds in zip(points, found, strict=True)]
    return BenchReport(options, tuple(cases))


def file_text(report: BenchReport) -> str:
    """The JSON with one case, point or summary a line, so that two reports can be compared by their lines."""
    parts = []
    for name, value in report.as_json().items():
        lines = ",\n".join(json.dumps(one) for one in value) if isinstance(value, list) else ""
        parts.append(f"{json.dumps(name)}: " + (f"[\n{lines}\n]" if lines else json.dumps(value)))
    return "{\n" + ",\n".join(parts) + "\n}\n"


def render(report: BenchReport) -> str:
    """Per point a table of kinds, CPU time beside the best baseline's; then of how many points each claim holds."""
    lines = []
    for case in report.cases:
        group = case.point
        lines.append(
            f"world {case.world_size}, {group.name} at {group.budget_tokens} tokens: prompt {group.prompt}, "
            f"{len(group.responses)} responses of {min(group.responses)} to {max(group.responses)}"
        )
        lines += [*_table(case), ""]
    for world, held in report.summary().items():
        of = held["points"]
        lines.append(
            f"{world}: " + ", ".join(f"{claim.replace('_', ' ')} {held[claim]} of {of}" for claim in CLAIMS)
        )
        lines += [f"  does not hold: {one}" for one in held["does_not_hold"]]
    return "\n".join(lines)


def _table(case: Case) -> list[str]:
    baselines = case.of(BASELINE_KINDS) or case.measured
    best = min(one.cpu_seconds for one in baselines)
    lines = [
        f"{'kind':>20}{'cpu s':>9}{'ratio':>7}{'wall s':>9}{'blocked':>9}{'moved MiB':>11}{'peak MiB':>10}"
        f"{'work':>7}{'tokens':>7}"
    ]
    for one in case.measured:
        name = one.kind + ("" if one.kind in OUR_KINDS else " *")
        lines.append(
            f"{name:>20}{one.cpu_seconds:>9.3f}{one.cpu_seconds / best:>7.2f}{one.seconds:>9.3f}"
            f"{one.blocked_seconds:>9.3f}{one.bytes_moved / 2**20:>11.2f}{one.peak_bytes / 2**20:>10.1f}"
            f"{one.planned.work_imbalance:>7.3f}{one.planned.token_imbalance:>7.3f}"
        )
    return lines
