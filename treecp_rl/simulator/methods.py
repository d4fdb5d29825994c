"""Trees, ranks, profile -> seconds of each method on the same costs: the paper's, honest packed baselines, and ours.

Every method is scored by the closed forms that our own plans are scored by, so that ratios compare plans, not models.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from treecp_rl.errors import PlanError
from treecp_rl.plan import Kind
from treecp_rl.planner.forms import Candidate, RunOptions, Space, cost_table, powers_of_two, token_pairs
from treecp_rl.planner.profile import ClusterProfile
from treecp_rl.planner.schedule_batch import Policy, plan_batch
from treecp_rl.planner.search import DEFAULT_OPTIONS, TreeLengths, TreeSearch, Workload, tree_features

MOST_DEGREE = 128
"""Largest degree that Algorithm 1 tries for one tree."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """What a method runs on."""

    profile: ClusterProfile
    num_ranks: int
    options: RunOptions = DEFAULT_OPTIONS


@dataclass(frozen=True, slots=True)
class Method:
    """One way to train a tree on all ranks of a cluster."""

    name: str
    what: str
    seconds: Callable[[TreeLengths, Cluster], float]


def score(tree: TreeLengths, candidate: Candidate, cluster: Cluster) -> float:
    """Seconds of one candidate, whatever it needs."""
    table = cost_table(cluster.profile, cluster.options, (candidate,))
    features = tree_features(Workload(tree, token_pairs(cluster.profile)), table.index)
    return float(table.seconds(features)[0])


def _rows(tree: TreeLengths) -> list[TreeLengths]:
    return [TreeLengths(tree.prompt, (response,)) for response in tree.responses]


def _flat(tree: TreeLengths, cluster: Cluster) -> float:
    """Every row on its own, a call a row."""
    rounds = len(tree.responses)
    return score(tree, Candidate("flat", "ring", cluster.num_ranks, 1, rounds), cluster)


def _flat_packed(tree: TreeLengths, cluster: Cluster) -> float:
    return score(tree, Candidate("flat", "ring", cluster.num_ranks), cluster)


def _reuse(tree: TreeLengths, cluster: Cluster) -> float:
    """The prompt once, then a call a response, all by ring."""
    rounds = len(tree.responses)
    return score(tree, Candidate("split", "tree_move_kv", cluster.num_ranks, 1, rounds), cluster)


def _reuse_packed(tree: TreeLengths, cluster: Cluster) -> float:
    return score(tree, Candidate("split", "tree_move_kv", cluster.num_ranks), cluster)


def _fused_ring(tree: TreeLengths, cluster: Cluster) -> float:
    kind: Kind = "ring" if cluster.num_ranks > 1 else "local"
    return score(tree, Candidate("fused", kind, cluster.num_ranks), cluster)


def _best(space: Space) -> Callable[[TreeLengths, Cluster], float]:
    def seconds(tree: TreeLengths, cluster: Cluster) -> float:
        degrees = powers_of_two(min(MOST_DEGREE, cluster.num_ranks))
        return TreeSearch(cluster.profile, degrees, cluster.options, space)(tree).seconds

    return seconds


METHODS = (
    Method("MegaN", "ring over every row, one call a row (the paper's)", _flat),
    Method("MegaN packed", "the same rows in one call", _flat_packed),
    Method("MegaR", "prompt once, ring, one call a response (the paper's)", _reuse),
    Method("MegaR packed", "prompt once, ring, all responses in one call", _reuse_packed),
    Method("fused ring", "prompt and responses in one call, ring", _fused_ring),
    Method("AugTree", "Algorithm 1", _best("augtree")),
    Method("treecp", "Algorithm 1 over our space", _best("full")),
)


def one_by_one(trees: Sequence[TreeLengths], cluster: Cluster, degree: int, *, shared_passes: bool) -> float:
    """Seconds of a batch on fixed groups of ``degree`` ranks, each tree in calls of its own, longest first.

    Args:
        shared_passes: our fused passes; otherwise Algorithm 1's choice of splits and rings.
    """
    search = TreeSearch(cluster.profile, (degree,), cluster.options, "full" if shared_passes else "augtree")
    seconds = sorted((search(tree).seconds for tree in trees), reverse=True)
    groups = [0.0] * (cluster.num_ranks // degree)
    for one in seconds:
        heapq.heapreplace(groups, groups[0] + one)
    return max(groups)


@dataclass(frozen=True, slots=True)
class Alternative:
    """What a batch would cost otherwise."""

    name: str
    seconds: float | None
    """None: it does not fit."""
    num_passes: int | None
    note: str


def alternatives(trees: Sequence[TreeLengths], cluster: Cluster) -> list[Alternative]:
    """Peers' policies, fixed degrees, trees one by one, and rows without sharing."""
    found = []
    peers: tuple[tuple[str, Policy], ...] = (
        ("NSP's beam search", "nsp"),
        ("disjoint groups (FlexSP)", "disjoint"),
    )
    for name, policy in peers:
        found.append(_planned(name, trees, cluster, policy, None, "fused passes, pooled"))
    for degree in (d for d in (1, 2, 4, 8, 16) if cluster.num_ranks % d == 0 and d <= cluster.num_ranks):
        found.append(
            _planned(f"groups of {degree}", trees, cluster, "static", degree, "fused passes, pooled")
        )
    group = max(d for d in (1, 2, 4, 8) if cluster.num_ranks % d == 0)
    for shared, note in ((True, "one tree a call, our kinds"), (False, "one tree a call, AugTree's kinds")):
        try:
            seconds = one_by_one(trees, cluster, group, shared_passes=shared)
            found.append(Alternative(f"groups of {group}, tree by tree", seconds, None, note))
        except PlanError as error:
            found.append(Alternative(f"groups of {group}, tree by tree", None, None, str(error)))
    rows = [row for tree in trees for row in _rows(tree)]
    found.append(
        _planned("no sharing", rows, cluster, "auto", None, "every row its own prompt, same planner")
    )
    return found


def _planned(
    name: str, trees: Sequence[TreeLengths], cluster: Cluster, policy: Policy, degree: int | None, note: str
) -> Alternative:
    try:
        plan = plan_batch(trees, cluster.num_ranks, cluster.profile, cluster.options, policy, degree)
    except PlanError as error:
        return Alternative(name, None, None, str(error))
    return Alternative(name, plan.predicted_seconds, len(plan.passes), note)
