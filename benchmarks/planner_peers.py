"""Planners of a batch side by side: time to solve and predicted seconds, on the same batches and the same costs.

    pip install --no-deps -r requirements/planner_peers.txt
    python benchmarks/planner_peers.py --json benchmarks/planner_peers.json      # ten minutes

batch -> ``Costs``: seconds and room of every tree at every degree -> an assignment by each method -> ``evaluate``, one
function for all: passes one after another, each as long as its busiest rank; and the same assignments lowered to
schedules and scored by ``planner.seconds``.

| method | what it is |
|---|---|
| ours | ``plan_batch``, policy auto, and with effort thorough |
| NSP, disjoint | this project's re-implementations of NSP's Algorithm 1 and of FlexSP's groups by a heuristic |
| Karmarkar-Karp | verl's ``karmarkar_karp``, over groups of one size; of all sizes the best |
| FlexSP | its problem as the paper states it, written here as an OR-tools CP-SAT model, under two time limits |

Exit status: 0, or 2 if a package is missing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from treecp_rl.errors import ConfigError
from treecp_rl.planner.forms import (
    Candidate,
    Floats,
    RunOptions,
    candidates,
    cost_table,
    pass_fixed_seconds,
    token_pairs,
    weights_of,
)
from treecp_rl.planner.lower_plan import lower_plan
from treecp_rl.planner.profile import ClusterProfile, load_profile
from treecp_rl.planner.schedule_batch import (
    MEMORY_PART,
    MOST_LANES,
    BatchPlan,
    Effort,
    PlannedPass,
    PlannedTree,
    Policy,
    batch_features,
    degree_chain,
    plan_batch,
)
from treecp_rl.planner.search import TreeLengths, fitting
from treecp_rl.planner.seconds import predict
from treecp_rl.simulator.workloads import draw_batch

WORKLOADS = ("long", "reasoning", "mixed")
SIZES = ((16, 8), (64, 64))
"""(trees, ranks)"""
GROUP_SIZE = 8
LIMITS_SECONDS = (10.0, 60.0)
OUR_REPEATS = 7
TICKS_PER_SECOND = 1_000_000
"""Integers that solvers count in: microseconds."""
ROOM_TICKS = 1_000_000
INSTALL = "pip install --no-deps -r requirements/planner_peers.txt"


@dataclass(frozen=True)
class Costs:
    """Trees of a batch as tasks: what every method is given."""

    trees: tuple[TreeLengths, ...]
    degrees: tuple[int, ...]
    seconds: Floats
    """[T, D] that a tree adds on each of its ranks, the best kind chosen; infinite where it does not fit."""
    room: Floats
    """[T, D] part of a rank's memory that it takes."""
    chosen: tuple[tuple[Candidate, ...], ...]
    """[T][D] that best kind."""
    fixed_seconds: float
    """Of a pass."""

    @property
    def num_ranks(self) -> int:
        return self.degrees[-1]

    @cached_property
    def fewest_passes(self) -> int:
        """That room allows."""
        area = np.where(np.isfinite(self.seconds), self.room * np.array(self.degrees), np.inf).min(axis=1)
        return max(1, int(np.ceil(area.sum() / self.num_ranks - 1e-9)))


def costs_of(trees: Sequence[TreeLengths], num_ranks: int, profile: ClusterProfile) -> Costs:
    """The costs that ``plan_batch`` plans with, fused kinds only.

    Raises:
        ValueError: a tree that fits by none.
    """
    options, degrees = RunOptions(), degree_chain(num_ranks)
    most = min(MOST_LANES, max(len(tree.responses) for tree in trees))
    by_degree = [
        [
            one
            for one in candidates("full", (degree,), most, profile.shape.num_kv_heads)
            if one.form == "fused" and one.kind != "tree_move_kv"
        ]
        for degree in degrees
    ]
    table = cost_table(profile, options, tuple(one for some in by_degree for one in some))
    features = batch_features(trees, table.index, token_pairs(profile))
    seconds, limits = table.marginal_seconds(features), features @ table.limits.T
    room = limits[:, : len(table.candidates)] / (MEMORY_PART * profile.memory.bytes_per_rank)
    fits = fitting(table, features, limits, profile.memory.bytes_per_rank, options) & (room <= 1.0)
    fits &= np.array([one.lanes for one in table.candidates]) <= [[len(tree.responses)] for tree in trees]
    seconds[~fits] = np.inf
    for tree in np.flatnonzero(~fits.any(axis=1)):
        raise ValueError(
            f"tree {tree} fits on no {num_ranks} ranks in one pass; give batches of shorter trees"
        )
    stops = np.cumsum([len(some) for some in by_degree])
    best = np.stack(
        [
            stop - len(some) + seconds[:, stop - len(some) : stop].argmin(axis=1)
            for stop, some in zip(stops, by_degree, strict=True)
        ],
        axis=1,
    )
    rows = np.arange(len(trees))[:, None]
    return Costs(
        tuple(trees),
        degrees,
        seconds[rows, best],
        room[rows, best],
        tuple(tuple(table.candidates[i] for i in row) for row in best.tolist()),
        pass_fixed_seconds(profile, options) * profile.factors.fused,
    )


@dataclass(frozen=True)
class Place:
    """Where one tree runs."""

    pass_number: int
    level: int
    """Index of its degree."""
    first_rank: int


Assignment = tuple[Place, ...]
"""A place a tree."""


def evaluate(assignment: Assignment, costs: Costs) -> float:
    """Seconds of all passes: of each its busiest rank and its fixed costs.

    Raises:
        ValueError: a tree where it does not fit, a block off its grid, or a rank with more than its room.
    """
    num_passes = 1 + max(place.pass_number for place in assignment)
    load, room = (np.zeros((num_passes, costs.num_ranks)) for _ in range(2))
    for tree, place in enumerate(assignment):
        degree, seconds = costs.degrees[place.level], costs.seconds[tree, place.level]
        if place.first_rank % degree or not np.isfinite(seconds):
            raise ValueError(f"tree {tree} has no place on {degree} ranks from rank {place.first_rank}")
        ranks = slice(place.first_rank, place.first_rank + degree)
        load[place.pass_number, ranks] += seconds
        room[place.pass_number, ranks] += costs.room[tree, place.level]
    if room.max() > 1.0 + 1e-6:
        raise ValueError(f"a rank has {room.max():.3f} of its memory")
    return float(load.max(axis=1).sum()) + num_passes * costs.fixed_seconds


def by_schedules(assignment: Assignment, costs: Costs, profile: ClusterProfile) -> float:
    """The same by lowered schedules, which know more than sums: stages, tiles and who waits for whom."""
    passes: list[list[PlannedTree]] = [[] for _ in range(1 + max(place.pass_number for place in assignment))]
    for tree, place in enumerate(assignment):
        seconds = float(costs.seconds[tree, place.level])
        planned = PlannedTree(tree, costs.chosen[tree][place.level], place.first_rank, seconds)
        passes[place.pass_number].append(planned)
    # Trees of a pass are lowered in their order.
    of_passes = tuple(PlannedPass(tuple(one), 0.0) for one in passes if one)
    plan = BatchPlan("auto", costs.num_ranks, "", of_passes, 0.0, weights_of(profile, RunOptions()))
    lowered = [one for _, of_pass in lower_plan(plan, costs.trees) for one in of_pass]
    return predict(lowered, profile, RunOptions()).seconds


def assignment_of(plan: BatchPlan, costs: Costs) -> Assignment:
    """A plan of ``plan_batch`` as places.

    Raises:
        ValueError: a tree with passes of its own, which these costs do not have.
    """
    places: dict[int, Place] = {}
    for number, one in enumerate(plan.passes):
        for planned in one.trees:
            if planned.candidate.form != "fused":
                raise ValueError(
                    f"tree {planned.tree} runs {planned.candidate.form}; give batches that fit fused"
                )
            places[planned.tree] = Place(
                number, costs.degrees.index(planned.candidate.degree), planned.first_rank
            )
    return tuple(places[tree] for tree in range(len(costs.trees)))


def karmarkar_karp_of_verl() -> Callable[..., list[list[int]]]:
    """verl's function.

    Raises:
        ConfigError: verl is not installed.
    """
    try:
        from verl.utils.seqlen_balancing import karmarkar_karp
    except ImportError as error:
        raise ConfigError(f"Karmarkar-Karp is verl's: {error}; pip install 'verl>=0.9.1,<0.10'") from error
    return karmarkar_karp  # type: ignore[no-any-return]


def by_karmarkar_karp(costs: Costs, partition: Callable[..., list[list[int]]]) -> Assignment:
    """Groups of one size, trees dealt out by seconds; the best of all sizes, in the fewest passes that hold it.

    verl balances data-parallel ranks, whose sequence-parallel degree is the user's; so that is tried out, too.

    Raises:
        ValueError: no size holds every tree.
    """
    found: list[Assignment] = []
    for level in range(len(costs.degrees)):
        for num_passes in range(costs.fewest_passes, costs.fewest_passes + 4):
            one = _partitioned(costs, level, num_passes, partition)
            if one is not None:
                found.append(one)
                break
    if not found:
        raise ValueError("no group size holds every tree")
    return min(found, key=lambda one: evaluate(one, costs))


def _partitioned(
    costs: Costs, level: int, num_passes: int, partition: Callable[..., list[list[int]]]
) -> Assignment | None:
    """Trees over the groups of all passes, groups of like load sharing a pass; None: a tree or a group has no room."""
    seconds, degree = costs.seconds[:, level], costs.degrees[level]
    num_groups = costs.num_ranks // degree
    if not np.isfinite(seconds).all() or num_passes * num_groups > len(seconds):
        return None
    ticks = [round(value * TICKS_PER_SECOND) for value in seconds.tolist()]
    parts = partition(ticks, num_passes * num_groups, equal_size=False)
    parts = sorted(parts, key=lambda part: -sum(ticks[tree] for tree in part))
    places: dict[int, Place] = {}
    for number, part in enumerate(parts):
        if sum(costs.room[tree, level] for tree in part) > 1.0:
            return None
        for tree in part:
            places[tree] = Place(number // num_groups, level, number % num_groups * degree)
    return tuple(places[tree] for tree in range(len(seconds)))


@dataclass(frozen=True)
class Solved:
    """What a solver found under its limit."""

    assignment: Assignment | None
    status: str
    """The solver's word for each micro-batch."""
    bound_seconds: float = 0.0
    """That no solution of these micro-batches is below, fixed costs apart."""


def cp_sat() -> Any:
    """OR-tools' CP-SAT.

    Raises:
        ConfigError: OR-tools is not installed.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise ConfigError(f"FlexSP's problem is solved by OR-tools: {error}; {INSTALL}") from error
    return cp_model


def by_flexsp(
    costs: Costs, limit_seconds: float, workers: int, partition: Callable[..., list[list[int]]]
) -> Solved:
    """FlexSP's problem by CP-SAT: micro-batches of sorted trees, in each the best disjoint groups.

    As the paper has it, trees are sorted by length and cut into the fewest micro-batches that memory allows (one more
    where a micro-batch has no solution), and each is solved for itself with an equal part of the limit.
    """
    for num_passes in range(costs.fewest_passes, costs.fewest_passes + 4):
        order = sorted(range(len(costs.trees)), key=lambda tree: costs.trees[tree].num_tokens)
        parts = [part.tolist() for part in np.array_split(np.array(order), num_passes)]
        found = [
            solve_groups(costs, part, limit_seconds / num_passes, workers, _start(costs, part, partition))
            for part in parts
        ]
        status = ", ".join(one.status for one in found)
        if all(one.assignment is not None for one in found):
            places = {
                tree: Place(number, place.level, place.first_rank)
                for number, (part, one) in enumerate(zip(parts, found, strict=True))
                for tree, place in zip(part, one.assignment or (), strict=True)
            }
            bound = sum(one.bound_seconds for one in found)
            return Solved(tuple(places[tree] for tree in range(len(costs.trees))), status, bound)
        if any(one.status == "UNKNOWN" for one in found):
            break
    return Solved(None, status)


def _start(costs: Costs, part: Sequence[int], partition: Callable[..., list[list[int]]]) -> Assignment | None:
    """Karmarkar-Karp's groups of a micro-batch, where it needs no further pass."""
    of_part = replace(
        costs,
        trees=tuple(costs.trees[tree] for tree in part),
        seconds=costs.seconds[part],
        room=costs.room[part],
        chosen=tuple(costs.chosen[tree] for tree in part),
    )
    found = [_partitioned(of_part, level, 1, partition) for level in range(len(costs.degrees))]
    return min((one for one in found if one), key=lambda one: evaluate(one, of_part), default=None)


def solve_groups(
    costs: Costs, part: Sequence[int], limit_seconds: float, workers: int, start: Assignment | None
) -> Solved:
    """One micro-batch: which groups exist, and the group of each tree, so that the slowest group is done soonest.

    Of every degree d there are N / d groups to choose from. FlexSP's constraints: chosen groups take at most N ranks;
    each tree is in one chosen group; trees of a group fit into its memory together; T is no less than any group's
    seconds, which are the sum of its trees'. Minimised is T. Two cuts that lose no solution: groups of a degree are
    chosen in order, and T is no less than the trees' rank-seconds over N.

    Raises:
        ConfigError: OR-tools is not installed.
    """
    cp_model = cp_sat()
    model = cp_model.CpModel()
    ticks = (
        np.where(np.isfinite(costs.seconds[part]), costs.seconds[part] * TICKS_PER_SECOND, 0)
        .round()
        .astype(int)
    )
    room = np.ceil(costs.room[part] * ROOM_TICKS).astype(int)
    most = int(ticks.max(axis=1).sum())
    end = model.new_int_var(0, most, "T")
    groups = [
        (level, number)
        for level, degree in enumerate(costs.degrees)
        for number in range(min(costs.num_ranks // degree, len(part)))
    ]
    exists = {group: model.new_bool_var(f"exists{group}") for group in groups}
    is_in = {
        (i, group): model.new_bool_var(f"tree{i} in {group}")
        for i, tree in enumerate(part)
        for group in groups
        if np.isfinite(costs.seconds[tree, group[0]])
    }
    for i in range(len(part)):
        model.add_exactly_one(is_in[i, group] for group in groups if (i, group) in is_in)
    for level, number in groups:
        members = [(i, is_in[i, (level, number)]) for i in range(len(part)) if (i, (level, number)) in is_in]
        here = exists[level, number]
        for _, member in members:
            model.add_implication(member, here)
        model.add(sum(int(ticks[i, level]) * member for i, member in members) <= end)
        model.add(sum(int(room[i, level]) * member for i, member in members) <= ROOM_TICKS)
        if number:
            model.add_implication(here, exists[level, number - 1])
    model.add(
        sum(costs.degrees[level] * exists[level, number] for level, number in groups) <= costs.num_ranks
    )
    area = [int(ticks[i, level]) * costs.degrees[level] * member for (i, (level, _)), member in is_in.items()]
    model.add(sum(area) <= costs.num_ranks * end)
    model.minimize(end)
    if start is not None:
        at_start = [(place.level, place.first_rank // costs.degrees[place.level]) for place in start]
        for group in groups:
            model.add_hint(exists[group], group in at_start)
        for (i, group), member in is_in.items():
            model.add_hint(member, group == at_start[i])
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_seconds
    solver.parameters.num_workers = workers
    status = solver.solve(model)
    name = solver.status_name(status)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Solved(None, name)
    # Largest groups first, so that every block lies on its grid.
    first_rank, at = {}, 0
    for level, number in sorted(groups, reverse=True):
        if solver.value(exists[level, number]):
            first_rank[level, number] = at
            at += costs.degrees[level]
    return Solved(
        tuple(
            next(
                Place(0, group[0], first_rank[group])
                for group in groups
                if (i, group) in is_in and solver.value(is_in[i, group])
            )
            for i in range(len(part))
        ),
        name,
        solver.best_objective_bound / TICKS_PER_SECOND,
    )


OURS: tuple[tuple[str, Policy, Effort], ...] = (
    ("ours", "auto", "fast"),
    ("ours, thorough", "auto", "thorough"),
    ("NSP (re-implemented)", "nsp", "fast"),
    ("disjoint, heuristic", "disjoint", "fast"),
)


@dataclass(frozen=True)
class Settings:
    """What is compared."""

    profile: str = "h100"
    workloads: tuple[str, ...] = WORKLOADS
    sizes: tuple[tuple[int, int], ...] = SIZES
    limits_seconds: tuple[float, ...] = LIMITS_SECONDS
    workers: int = 1
    """Of the solver."""


def compare(
    workload: str, num_trees: int, num_ranks: int, settings: Settings, progress: Callable[[str], None]
) -> dict[str, Any]:
    """All methods on one batch."""
    profile = load_profile(settings.profile)
    trees = draw_batch(workload, num_trees, GROUP_SIZE, 0)
    costs = costs_of(trees, num_ranks, profile)
    methods: list[dict[str, Any]] = []

    def add(name: str, milliseconds: float, assignment: Assignment | None, **more: Any) -> None:
        found: dict[str, Any] = {"method": name, "solve_ms": milliseconds, **more}
        is_found = assignment is not None
        found["predicted_seconds"] = evaluate(assignment, costs) if is_found else None
        found["seconds_by_schedules"] = by_schedules(assignment, costs, profile) if is_found else None
        methods.append(found)
        progress(f"{workload} {num_trees} x {num_ranks}: {_line(found, methods[0])}")

    bound = 0.0
    for name, policy, effort in OURS:
        plan = plan_batch(trees, num_ranks, profile, RunOptions(), policy, None, effort)
        times = []
        for _ in range(OUR_REPEATS if policy == "auto" and effort == "fast" else 1):
            started = time.perf_counter()
            plan = plan_batch(trees, num_ranks, profile, RunOptions(), policy, None, effort)
            times.append((time.perf_counter() - started) * 1e3)
        assignment = assignment_of(plan, costs)
        # The planner's word for its own plan and what everything here is measured by must be the same.
        if not np.isclose(evaluate(assignment, costs), plan.predicted_seconds, rtol=1e-9):
            raise ValueError(
                f"{policy} predicts {plan.predicted_seconds}, its plan costs {evaluate(assignment, costs)}"
            )
        bound = plan.lower_bound_seconds
        add(name, statistics.median(times), assignment)
    partition = karmarkar_karp_of_verl()
    started = time.perf_counter()
    assignment = by_karmarkar_karp(costs, partition)
    add("Karmarkar-Karp (verl)", (time.perf_counter() - started) * 1e3, assignment)
    for limit in settings.limits_seconds:
        started = time.perf_counter()
        solved = by_flexsp(costs, limit, settings.workers, partition)
        milliseconds = (time.perf_counter() - started) * 1e3
        add(
            f"FlexSP (CP-SAT, {limit:g} s)",
            milliseconds,
            solved.assignment,
            solver_status=solved.status,
            solver_bound_seconds=_bound(solved, costs),
        )
    return {
        "workload": workload,
        "trees": num_trees,
        "group_size": GROUP_SIZE,
        "ranks": num_ranks,
        "lower_bound_seconds": bound,
        "methods": methods,
    }


def _bound(solved: Solved, costs: Costs) -> float | None:
    """With fixed costs, as ``evaluate`` has them."""
    if solved.assignment is None:
        return None
    num_passes = 1 + max(place.pass_number for place in solved.assignment)
    return solved.bound_seconds + num_passes * costs.fixed_seconds


def _line(one: dict[str, Any], first: dict[str, Any]) -> str:
    if one["predicted_seconds"] is None:
        return f"{one['method']:<24}{one['solve_ms']:>11.1f} ms   none found ({one['solver_status']})"
    ratios = [one[name] / first[name] for name in ("predicted_seconds", "seconds_by_schedules")]
    return (
        f"{one['method']:<24}{one['solve_ms']:>11.1f} ms{one['predicted_seconds']:>9.4f} s {ratios[0]:>6.3f}"
        f"   schedules{one['seconds_by_schedules']:>9.4f} s {ratios[1]:>6.3f}   {one.get('solver_status', '')}"
    ).rstrip()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Settings()

    def sizes(text: str) -> tuple[tuple[int, int], ...]:
        return tuple(
            (int(trees), int(ranks)) for trees, ranks in (part.split("x") for part in text.split(","))
        )

    def limits(text: str) -> tuple[float, ...]:
        return tuple(float(part) for part in text.split(","))

    parser.add_argument("--profile", default=default.profile)
    parser.add_argument("--workloads", type=lambda text: tuple(text.split(",")), default=default.workloads)
    parser.add_argument("--sizes", type=sizes, default=default.sizes, metavar="TREESxRANKS,...")
    parser.add_argument("--limits", type=limits, default=default.limits_seconds, metavar="SECONDS,...")
    parser.add_argument("--workers", type=int, default=default.workers, help="of the solver")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    settings = Settings(options.profile, options.workloads, options.sizes, options.limits, options.workers)
    try:
        # Before anything runs for minutes.
        cp_sat(), karmarkar_karp_of_verl()
        cases = [
            compare(workload, trees, ranks, settings, lambda line: print(line, flush=True))
            for trees, ranks in settings.sizes
            for workload in settings.workloads
        ]
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    record = {
        "profile": settings.profile,
        "solver": f"OR-tools {_version()} CP-SAT, {settings.workers} workers",
        "limits_seconds": settings.limits_seconds,
        "cases": cases,
    }
    if options.json:
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n")
    return 0


def _version() -> str:
    from importlib.metadata import version

    return version("ortools")


if __name__ == "__main__":
    sys.exit(main())
