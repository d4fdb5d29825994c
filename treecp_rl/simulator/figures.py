"""The paper's figures on estimated clusters -> tables: every method's seconds, and bytes where the figure shows them.

Predictions of the planner's cost model, not measurements. MegaN and MegaR appear as the paper runs them, a call a row,
and packed, as a fair user would.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from treecp_rl.errors import ConfigError, PlanError
from treecp_rl.planner.estimates import MODELS, estimate_profile
from treecp_rl.planner.forms import Candidate, Space, cost_table, token_pairs
from treecp_rl.planner.search import TreeLengths, TreeSearch, Workload, tree_features
from treecp_rl.simulator.methods import METHODS, Cluster
from treecp_rl.simulator.workloads import SHAPES, shaped_group

BUDGETS = (16384, 32768, 65536, 131072, 262144)
GROUP_SIZES = (8, 16, 32, 64)
DEFAULT_MODEL = "Qwen2.5-7B"


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
    seconds: dict[str, float | None]
    """Of each method; None: it does not fit."""
    moved_bytes: dict[str, float] | None = None


FIGURES = ("10", "14", "16", "18")


def simulate(hardware: str, ranks: Sequence[int], figures: Sequence[str] = FIGURES) -> list[Point]:
    """Points of the figures.

    Raises:
        ConfigError: no such figure or hardware.
    """
    if unknown := sorted(set(figures) - set(FIGURES)):
        raise ConfigError(f"no figure {', '.join(unknown)}; choose from {', '.join(FIGURES)}")
    return [point for figure in figures for count in ranks for point in _points(figure, hardware, count)]


def _points(figure: str, hardware: str, ranks: int) -> Iterator[Point]:
    if figure == "18":
        for group_size in GROUP_SIZES:
            # 32k tokens for eight responses: more responses, more tokens.
            yield _point(
                figure, hardware, "LongAlign", DEFAULT_MODEL, ranks, group_size, 32768 * group_size // 8
            )
        return
    models = list(MODELS) if figure == "16" else [DEFAULT_MODEL]
    budgets = BUDGETS if figure == "10" else (262144,) if figure == "14" else (131072,)
    for model in models:
        for shape in SHAPES:
            for budget in budgets:
                yield _point(figure, hardware, shape, model, ranks, 8, budget)


def _point(
    figure: str, hardware: str, shape: str, model: str, ranks: int, group_size: int, row_tokens: int
) -> Point:
    cluster = Cluster(estimate_profile(hardware, model), ranks)
    tree = shaped_group(shape, row_tokens, group_size)
    seconds: dict[str, float | None] = {}
    for method in METHODS:
        try:
            seconds[method.name] = method.seconds(tree, cluster)
        except PlanError:
            seconds[method.name] = None
    moved = _moved(tree, cluster) if figure == "14" else None
    return Point(figure, shape, model, ranks, group_size, row_tokens, seconds, moved)


def _moved(tree: TreeLengths, cluster: Cluster) -> dict[str, float]:
    """Bytes that all ranks send, all layers, at the cluster's full degree; of AugTree and ours, what they choose."""
    ranks = cluster.num_ranks
    chosen = {
        "MegaN packed": Candidate("flat", "ring", ranks),
        "MegaR packed": Candidate("split", "tree_move_kv", ranks),
        "MoveQ": Candidate("split", "move_q", ranks),
    }
    spaces: tuple[tuple[str, Space], ...] = (("AugTree", "augtree"), ("treecp", "full"))
    for name, space in spaces:
        search = TreeSearch(cluster.profile, (ranks,), cluster.options, space)
        try:
            chosen[name] = search(tree).candidate
        except PlanError:
            continue
    moved = {}
    for name, candidate in chosen.items():
        table = cost_table(cluster.profile, cluster.options, (candidate,))
        features = tree_features(Workload(tree, token_pairs(cluster.profile)), table.index)
        moved[name] = float(table.moved_bytes(features)[0])
    return moved


def as_json(points: Sequence[Point], hardware: str) -> dict[str, Any]:
    """The points as data."""
    return {
        "hardware": hardware,
        "kind": "estimate",
        "methods": {method.name: method.what for method in METHODS},
        "points": [asdict(point) for point in points],
    }


def render(points: Sequence[Point], hardware: str) -> str:
    """A table a figure: seconds of ours, and the other methods' over ours."""
    names = [method.name for method in METHODS[:-1]]
    lines = [f"predictions for an estimated {hardware} cluster, not measurements; other methods over treecp"]
    for figure in dict.fromkeys(point.figure for point in points):
        lines += ["", f"AugTree's Fig. {figure}", _head(names)]
        lines += [_row(point, names) for point in points if point.figure == figure]
    return "\n".join(lines)


def _head(names: Sequence[str]) -> str:
    heads = "".join(f"{name:>14}" for name in names)
    return f"{'shape':<13}{'model':<14}{'ranks':>6}{'G':>4}{'tokens':>9}{'treecp s':>10}{heads}"


def _row(point: Point, names: Sequence[str]) -> str:
    ours = point.seconds["treecp"]
    cells = ""
    for name in names:
        theirs = point.seconds[name]
        cells += f"{'-':>14}" if theirs is None or ours is None else f"{theirs / ours:>13.2f}x"
    seconds = "-" if ours is None else f"{ours:.3f}"
    what = f"{point.shape:<13}{point.model:<14}{point.ranks:>6}{point.group_size:>4}{point.row_tokens:>9}"
    moved = ""
    if point.moved_bytes:
        moved = "   GiB " + ", ".join(
            f"{name} {value / 2**30:.1f}" for name, value in point.moved_bytes.items()
        )
    return f"{what}{seconds:>10}{cells}{moved}"
