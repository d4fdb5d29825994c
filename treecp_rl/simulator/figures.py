"""The paper's figures on estimated clusters -> tables: every method's seconds and bytes, and the time to plan.

Predictions of the planner's cost model, not measurements, Fig. 15b apart. MegaN and MegaR appear as the paper runs
them, a call a row, and packed, as a fair user would; DCP as it is published, prompt and responses in one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from treecp_rl.errors import ConfigError, PlanError
from treecp_rl.planner.estimates import MODELS, estimate_profile
from treecp_rl.simulator.methods import METHODS, Cluster, Measure, Plan, outcome
from treecp_rl.simulator.solve_times import SolveTime, solve_times
from treecp_rl.simulator.workloads import SHAPES, shaped_group

BUDGETS = (16384, 32768, 65536, 131072, 262144)
GROUP_SIZES = (8, 16, 32, 64)
DEFAULT_MODEL = "Qwen2.5-7B"
MODEL_SHAPES = ("LongAlign", "OpenThoughts")
"""Of Fig. 16."""
FIGURES = ("10", "14", "15b", "16", "18")


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a figure."""

    figure: str
    shape: str
    model: str
    ranks: int
    group_size: int
    row_tokens: int
    """Of all rows of the step, prompts counted once a row."""
    measure: Measure
    """What scored the methods."""
    seconds: dict[str, float | None]
    """Of each method; None: it does not fit, or the measure cannot score it."""
    moved_bytes: dict[str, float | None]
    """Sent by all ranks, all layers."""
    chosen: dict[str, str]
    """Plan of each method."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """What was asked for."""

    hardware: str
    points: tuple[Point, ...]
    solve_times: tuple[SolveTime, ...]
    """Of Fig. 15b, which is measured."""


def simulate(hardware: str, ranks: Sequence[int], figures: Sequence[str] = FIGURES) -> Simulation:
    """Points of the figures.

    Raises:
        ConfigError: no such figure or hardware, or fewer than one rank.
    """
    if unknown := sorted(set(figures) - set(FIGURES)):
        raise ConfigError(f"no figure {', '.join(unknown)}; choose from {', '.join(FIGURES)}")
    if min(ranks, default=0) < 1:
        raise ConfigError(f"ranks {', '.join(map(str, ranks))}: each must be 1 or more")
    points = [point for figure in figures for count in ranks for point in _points(figure, hardware, count)]
    times = solve_times(estimate_profile(hardware, DEFAULT_MODEL)) if "15b" in figures else []
    return Simulation(hardware, tuple(points), tuple(times))


def _points(figure: str, hardware: str, ranks: int) -> Iterator[Point]:
    if figure == "15b":
        return
    if figure == "18":
        for group_size in GROUP_SIZES:
            # 32k tokens for eight responses: more responses, more tokens.
            tokens = 32768 * group_size // 8
            yield _point(figure, hardware, "LongAlign", DEFAULT_MODEL, ranks, group_size, tokens)
        return
    models = list(MODELS) if figure == "16" else [DEFAULT_MODEL]
    shapes = MODEL_SHAPES if figure == "16" else tuple(SHAPES)
    budgets = BUDGETS if figure == "10" else (262144,) if figure == "14" else (32768,)
    for model in models:
        for shape in shapes:
            for budget in budgets:
                yield _point(figure, hardware, shape, model, ranks, 8, budget)


def _point(
    figure: str, hardware: str, shape: str, model: str, ranks: int, group_size: int, row_tokens: int
) -> Point:
    cluster = Cluster(estimate_profile(hardware, model), ranks)
    tree = shaped_group(shape, row_tokens, group_size)
    seconds: dict[str, float | None] = dict.fromkeys(method.name for method in METHODS)
    moved, chosen = dict(seconds), {}
    for method in METHODS:
        try:
            plan = method.choose(tree, cluster)
            found = outcome(tree, plan, cluster)
        except PlanError as error:
            chosen[method.name] = str(error)
            continue
        seconds[method.name], moved[method.name] = found.seconds, found.moved_bytes
        chosen[method.name] = _words(plan)
    return Point(figure, shape, model, ranks, group_size, row_tokens, cluster.measure, seconds, moved, chosen)


def _words(plan: Plan) -> str:
    """The paper's (d, pi, (b, s))."""
    one = plan.candidate
    return f"{one.form} {one.kind} d={one.degree} b={one.rounds} s={one.lanes}"


def as_json(simulation: Simulation) -> dict[str, Any]:
    """The points as data."""
    return {
        "hardware": simulation.hardware,
        "kind": "estimate",
        "methods": {method.name: method.what for method in METHODS},
        "points": [asdict(point) for point in simulation.points],
        "solve_times": [asdict(one) for one in simulation.solve_times],
    }


def render(simulation: Simulation) -> str:
    """A table a figure: seconds of ours, and the other methods' over ours; of Fig. 14 bytes; of Fig. 15b times."""
    names = [method.name for method in METHODS[:-1]]
    lines = [
        f"predictions for an estimated {simulation.hardware} cluster, not measurements; other methods over treecp"
    ]
    points = simulation.points
    for figure in dict.fromkeys(point.figure for point in points):
        lines += ["", f"AugTree's Fig. {figure}", _head(names, has_bytes=figure == "14")]
        lines += [_row(point, names) for point in points if point.figure == figure]
    if simulation.solve_times:
        lines += ["", "AugTree's Fig. 15b: milliseconds to plan one tree, measured here unless reported"]
        lines += _times_table(simulation.solve_times)
    return "\n".join(lines)


def _head(names: Sequence[str], *, has_bytes: bool) -> str:
    heads = "".join(f"{name:>14}" for name in names)
    ours = "treecp GiB" if has_bytes else "treecp s"
    return f"{'shape':<13}{'model':<14}{'ranks':>6}{'G':>4}{'tokens':>9}{ours:>11}{heads}  scored by"


def _row(point: Point, names: Sequence[str]) -> str:
    has_bytes = point.figure == "14"
    values = point.moved_bytes if has_bytes else point.seconds
    ours = values["treecp"]
    cells = ""
    for name in names:
        theirs = values[name]
        cells += f"{'-':>14}" if theirs is None or not ours else f"{theirs / ours:>13.2f}x"
    own = "-" if ours is None else f"{ours / 2**30:.2f}" if has_bytes else f"{ours:.3f}"
    what = f"{point.shape:<13}{point.model:<14}{point.ranks:>6}{point.group_size:>4}{point.row_tokens:>9}"
    return f"{what}{own:>11}{cells}  {point.measure}"


def _times_table(times: Sequence[SolveTime]) -> list[str]:
    blocks = sorted({one.attention_blocks for one in times})
    lines = [f"{'attention blocks':<20}" + "".join(f"{count:>10}" for count in blocks)]
    for planner in dict.fromkeys(one.planner for one in times):
        found = {one.attention_blocks: one.milliseconds for one in times if one.planner == planner}
        cells = "".join(f"{found[count]:>10.3f}" if count in found else f"{'-':>10}" for count in blocks)
        lines.append(f"{planner:<20}{cells}")
    return lines
