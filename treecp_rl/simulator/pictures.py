"""Simulation -> the paper's figures as SVG files, one a figure and number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from treecp_rl.errors import ConfigError
from treecp_rl.simulator.charts import Chart, Panel, columns, short_count, svg
from treecp_rl.simulator.figures import Point, Simulation
from treecp_rl.simulator.methods import METHODS
from treecp_rl.simulator.solve_times import SolveTime

NAMES = tuple(method.name for method in METHODS)


def write_pictures(simulation: Simulation, folder: str) -> list[Path]:
    """Write every figure; the files' paths.

    Raises:
        ConfigError: no such folder.
    """
    if not Path(folder).is_dir():
        raise ConfigError(f"--pictures {folder}: no such folder; create it, or name another")
    written = []
    for name, chart in charts(simulation).items():
        path = Path(folder) / f"{name}.svg"
        path.write_text(svg(chart))
        written.append(path)
    return written


def charts(simulation: Simulation) -> dict[str, Chart]:
    """File names without ending -> charts."""
    found = {}
    for figure, draw in _FIGURES.items():
        for ranks in dict.fromkeys(point.ranks for point in simulation.points):
            points = [one for one in simulation.points if one.figure == figure and one.ranks == ranks]
            if points:
                where = f"{ranks} ranks, estimated {simulation.hardware}, scored by {points[0].measure}"
                found[f"fig{figure}_{ranks}ranks"] = draw(points, where)
    if simulation.solve_times:
        found["fig15b"] = _solve_times(simulation.solve_times)
    return found


def _step_time(points: Sequence[Point], where: str) -> Chart:
    return Chart(
        f"Fig. 10: predicted step time, {points[0].model}, G = {points[0].group_size}, {where}",
        "tokens of all rows",
        "seconds",
        tuple(
            _panel(shape, [one for one in points if one.shape == shape], lambda p: short_count(p.row_tokens))
            for shape in dict.fromkeys(one.shape for one in points)
        ),
        form="lines",
    )


def _moved(points: Sequence[Point], where: str) -> Chart:
    rows = [{name: _gib(value) for name, value in one.moved_bytes.items()} for one in points]
    panel = Panel(
        f"{short_count(points[0].row_tokens)} tokens",
        tuple(one.shape for one in points),
        columns(rows, NAMES),
    )
    title = f"Fig. 14: bytes that attention moves, {points[0].model}, G = {points[0].group_size}, {where}"
    return Chart(title, "workload", "GiB, all ranks and layers", (panel,), panel_width=720)


def _gib(num_bytes: float | None) -> float | None:
    return None if num_bytes is None else num_bytes / 2**30


def _models(points: Sequence[Point], where: str) -> Chart:
    return Chart(
        f"Fig. 16: predicted step time by model, {short_count(points[0].row_tokens)} tokens, {where}",
        "model",
        "seconds",
        tuple(
            _panel(shape, [one for one in points if one.shape == shape], lambda p: p.model)
            for shape in dict.fromkeys(one.shape for one in points)
        ),
        panel_width=520,
    )


def _group_sizes(points: Sequence[Point], where: str) -> Chart:
    return Chart(
        f"Fig. 18: predicted step time by group size, {points[0].model}, {where}",
        "responses of a group, G",
        "seconds",
        (_panel(points[0].shape, points, lambda p: str(p.group_size)),),
        form="lines",
        panel_width=720,
    )


def _panel(title: str, points: Sequence[Point], label: Callable[[Point], str]) -> Panel:
    return Panel(title, tuple(map(label, points)), columns([one.seconds for one in points], NAMES))


def _solve_times(times: Sequence[SolveTime]) -> Chart:
    blocks = sorted({one.attention_blocks for one in times})
    names = tuple(dict.fromkeys(one.planner for one in times))
    rows: list[dict[str, float | None]] = [
        {one.planner: one.milliseconds for one in times if one.attention_blocks == count} for count in blocks
    ]
    panel = Panel("one tree, G = 8, all degrees to 128", tuple(map(str, blocks)), columns(rows, names))
    return Chart(
        "Fig. 15b: time to plan, measured here; reported: the ends of the paper's curves",
        "attention blocks of 512 x 512 tokens in the replay",
        "milliseconds",
        (panel,),
        form="lines",
        panel_width=720,
    )


_FIGURES: dict[str, Callable[[Sequence[Point], str], Chart]] = {
    "10": _step_time,
    "14": _moved,
    "16": _models,
    "18": _group_sizes,
}
