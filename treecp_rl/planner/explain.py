"""BatchPlan -> words, tables, JSON and a picture that a person can read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from treecp_rl.planner.forms import RunOptions, cost_table, token_pairs
from treecp_rl.planner.profile import ClusterProfile
from treecp_rl.planner.schedule_batch import BatchPlan, PlannedPass, PlannedTree
from treecp_rl.planner.search import TreeLengths, Workload, tree_features


@dataclass(frozen=True, slots=True)
class TreeFigures:
    """What one planned tree costs, by the closed forms."""

    computing_seconds: float
    exposed_seconds: float
    """Communication that nothing hides."""
    moved_bytes: float
    peak_bytes: float
    tokens_per_rank: float


@dataclass(frozen=True, slots=True)
class PassFigures:
    """What one pass costs."""

    busy_part: float
    """Mean load of the ranks over the busiest rank's, fixed costs apart."""
    moved_bytes: float
    peak_bytes: float
    """Of the fullest rank."""
    tokens_per_rank: float
    """Of the fullest rank."""


def tree_figures(
    planned: PlannedTree, tree: TreeLengths, profile: ClusterProfile, options: RunOptions
) -> TreeFigures:
    """Figures of one planned tree."""
    table = cost_table(profile, options, (planned.candidate,))
    features = tree_features(Workload(tree, token_pairs(profile)), table.index)
    rows = np.maximum(table.stacked @ features, table.floor)
    # A tree with passes of its own pays for them; in a shared pass all trees do together.
    fixed = float(table.fixed[0]) if planned.candidate.form == "fused" else 0.0
    return TreeFigures(
        computing_seconds=float(rows[0]) - fixed,
        exposed_seconds=float(rows[1:].sum()),
        moved_bytes=float(table.moved_bytes(features)[0]),
        peak_bytes=float(table.peak_bytes(features)[0]),
        tokens_per_rank=float(table.tokens_per_rank(features)[0]),
    )


def pass_figures(one: PlannedPass, figures: dict[int, TreeFigures], num_ranks: int) -> PassFigures:
    """Figures of one pass from its trees'."""
    load, peak, tokens = (np.zeros(num_ranks) for _ in range(3))
    for planned in one.trees:
        ranks, of_tree = slice(planned.first_rank, planned.ranks.stop), figures[planned.tree]
        load[ranks] += planned.seconds
        peak[ranks] += of_tree.peak_bytes
        tokens[ranks] += of_tree.tokens_per_rank
    return PassFigures(
        busy_part=float(load.mean() / load.max()),
        moved_bytes=sum(figures[planned.tree].moved_bytes for planned in one.trees),
        peak_bytes=float(peak.max()),
        tokens_per_rank=float(tokens.max()),
    )


def all_figures(
    plan: BatchPlan, trees: Sequence[TreeLengths], profile: ClusterProfile, options: RunOptions
) -> dict[int, TreeFigures]:
    """Figures of every tree, by its index."""
    return {one.tree: tree_figures(one, trees[one.tree], profile, options) for one in plan.trees}


def as_json(plan: BatchPlan, figures: dict[int, TreeFigures]) -> dict[str, Any]:
    """The plan as data; whoever took the time adds ``solve_seconds``."""
    number_of = {planned.tree: number for number, one in enumerate(plan.passes) for planned in one.trees}
    return {
        "policy": plan.policy,
        "ranks": plan.num_ranks,
        "predicted_seconds": plan.predicted_seconds,
        "lower_bound_seconds": plan.lower_bound_seconds,
        "gap": plan.gap,
        "digest": plan.digest,
        "profile_digest": plan.profile,
        "passes": [_pass_json(one, figures, plan.num_ranks) for one in plan.passes],
        "trees": [_tree_json(one, figures[one.tree], number_of[one.tree]) for one in plan.trees],
    }


def _pass_json(one: PlannedPass, figures: dict[int, TreeFigures], num_ranks: int) -> dict[str, Any]:
    of_pass = pass_figures(one, figures, num_ranks)
    return {
        "seconds": one.seconds,
        "trees": [planned.tree for planned in one.trees],
        "busy_part": of_pass.busy_part,
        "moved_bytes": round(of_pass.moved_bytes),
        "peak_bytes": round(of_pass.peak_bytes),
        "tokens_per_rank": round(of_pass.tokens_per_rank),
    }


def _tree_json(one: PlannedTree, figures: TreeFigures, number: int) -> dict[str, Any]:
    candidate = one.candidate
    return {
        "tree": one.tree,
        "pass": number,
        "form": candidate.form,
        "kind": candidate.kind,
        "degree": candidate.degree,
        "lanes": candidate.lanes,
        "rounds": candidate.rounds,
        "first_rank": one.first_rank,
        "seconds": one.seconds,
        "exposed_seconds": figures.exposed_seconds,
        "moved_bytes": round(figures.moved_bytes),
    }


def describe(
    plan: BatchPlan, figures: dict[int, TreeFigures], profile: ClusterProfile, solve_seconds: float
) -> str:
    """The plan in words and two tables."""
    lines = [
        f"plan {plan.digest}: {len(plan.trees)} trees on {plan.num_ranks} ranks in {len(plan.passes)} passes, "
        f"{plan.predicted_seconds:.3f} s predicted",
        f"no plan of this space takes less than {plan.lower_bound_seconds:.3f} s: gap {plan.gap:.2%}; "
        f"planned in {solve_seconds * 1e3:.1f} ms by policy {plan.policy}",
        f"profile {profile.name}: {profile.kind} of {profile.date}, {profile.model}",
        "",
        "pass    trees   seconds   busy   tokens/rank     peak GiB    moved GiB",
    ]
    for number, one in enumerate(plan.passes):
        of_pass = pass_figures(one, figures, plan.num_ranks)
        lines.append(
            f"{number:>4} {len(one.trees):>8} {one.seconds:>9.3f} {of_pass.busy_part:>6.0%} "
            f"{of_pass.tokens_per_rank:>13.0f} {_gib(of_pass.peak_bytes):>12} {_gib(of_pass.moved_bytes):>12}"
        )
    lines += ["", "trees   how", *_ways(plan)]
    return "\n".join(lines)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f}"


def _ways(plan: BatchPlan) -> list[str]:
    """How many trees run in each way, most first."""
    ways = Counter(one.candidate for one in plan.trees)
    lines = []
    for candidate, count in sorted(ways.items(), key=lambda item: (-item[1], item[0].degree, item[0].kind)):
        more = f", {candidate.lanes} lanes" if candidate.lanes > 1 else ""
        more += f", {candidate.rounds} rounds" if candidate.form == "split" else ""
        ranks = "1 rank" if candidate.degree == 1 else f"{candidate.degree} ranks"
        lines.append(f"{count:>5}   {candidate.form} {candidate.kind} on {ranks}{more}")
    return lines


ROW_HEIGHT, LABEL_WIDTH, WIDTH, TOP = 14, 64, 1120, 44
MOST_ROWS = 128
"""Ranks that a picture shows; of more, every so many."""
COLOURS = {
    "local": "#4c78a8",
    "gather": "#54a24b",
    "gather_whole": "#9d755d",
    "dcp_fused": "#ff9da6",
    "heads": "#b279a2",
    "ring": "#eeca3b",
    "tree_move_kv": "#72b7b2",
    "move_q": "#f58518",
}
EXPOSED, IDLE = "#d62728", "#e6e6e6"


def picture(plan: BatchPlan, figures: dict[int, TreeFigures]) -> str:
    """SVG: a row a rank, passes from left to right; colours are kinds of plan, red exposed moves, grey idle.

    Trees of a pass stand one after another although their stages run interleaved: widths are what counts.
    """
    step = max(1, -(-plan.num_ranks // MOST_ROWS))
    ranks = range(0, plan.num_ranks, step)
    scale = (WIDTH - LABEL_WIDTH) / plan.predicted_seconds
    shapes = [_legend(plan), *(_rank_label(row, rank) for row, rank in enumerate(ranks))]
    start = 0.0
    for number, one in enumerate(plan.passes):
        shapes += _pass_shapes(one, number, start, scale, ranks, figures)
        start += one.seconds
    height = TOP + len(ranks) * ROW_HEIGHT + 24
    title = (
        f"{len(plan.trees)} trees, {plan.num_ranks} ranks, {plan.predicted_seconds:.3f} s, gap {plan.gap:.1%}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + 8}" height="{height}" '
        'font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="white"/><text x="{LABEL_WIDTH}" y="14">{escape(title)}</text>'
        + "".join(shapes)
        + "</svg>\n"
    )


def _legend(plan: BatchPlan) -> str:
    kinds = sorted({one.candidate.kind for one in plan.trees})
    entries = [*((kind, COLOURS[kind]) for kind in kinds), ("exposed moves", EXPOSED), ("idle", IDLE)]
    parts, x = [], LABEL_WIDTH
    for name, colour in entries:
        parts.append(_box(x, 22, 12, 12, colour) + f'<text x="{x + 16}" y="32">{escape(name)}</text>')
        x += 34 + 7 * len(name)
    return "".join(parts)


def _rank_label(row: int, rank: int) -> str:
    return f'<text x="2" y="{TOP + row * ROW_HEIGHT + 10}">rank {rank}</text>'


def _box(x: float, y: float, width: float, height: float, colour: str, title: str = "") -> str:
    inside = f"<title>{escape(title)}</title>" if title else ""
    return f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}" fill="{colour}">{inside}</rect>'


def _pass_shapes(
    one: PlannedPass, number: int, start: float, scale: float, ranks: range, figures: dict[int, TreeFigures]
) -> list[str]:
    left = LABEL_WIDTH + start * scale
    bottom = TOP + len(ranks) * ROW_HEIGHT
    shapes = [
        _box(left, TOP + row * ROW_HEIGHT, one.seconds * scale, ROW_HEIGHT - 2, IDLE)
        for row in range(len(ranks))
    ]
    filled = dict.fromkeys(ranks, 0.0)
    for planned in one.trees:
        of_tree = figures[planned.tree]
        total = max(of_tree.computing_seconds + of_tree.exposed_seconds, 1e-12)
        title = (
            f"tree {planned.tree}: {planned.candidate.form} {planned.candidate.kind}, {planned.seconds:.4f} s"
        )
        for row, rank in enumerate(ranks):
            if rank not in planned.ranks:
                continue
            x, y, width = left + filled[rank] * scale, TOP + row * ROW_HEIGHT, planned.seconds * scale
            exposed = width * of_tree.exposed_seconds / total
            colour = COLOURS[planned.candidate.kind]
            shapes.append(_box(x, y, max(0.3, width - exposed - 0.4), ROW_HEIGHT - 2, colour, title))
            if exposed > 0.2:
                shapes.append(_box(x + width - exposed, y, exposed, ROW_HEIGHT - 2, EXPOSED, title))
            filled[rank] += planned.seconds
    shapes.append(f'<line x1="{left:.2f}" y1="{TOP - 4}" x2="{left:.2f}" y2="{bottom}" stroke="black"/>')
    shapes.append(f'<text x="{left + 2:.2f}" y="{bottom + 14}">pass {number}: {one.seconds:.3f} s</text>')
    return shapes
