"""Trees, ranks, profile -> seconds of each method on the same costs: the paper's, honest packed baselines, and ours.

A method chooses a plan for a tree; the plan is lowered to the schedules that the engine would run, and these are scored
by ``planner.seconds``, whatever the method. On more ranks than lowering is quick for, closed forms score all of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from treecp_rl.errors import PlanError
from treecp_rl.plan import Decision, Kind
from treecp_rl.planner.forms import (
    Candidate,
    RunOptions,
    Space,
    cost_table,
    powers_of_two,
    token_pairs,
    weights_of,
)
from treecp_rl.planner.lower import lower
from treecp_rl.planner.lower_plan import lower_plan, nodes_of
from treecp_rl.planner.profile import ClusterProfile, Form
from treecp_rl.planner.schedule_batch import BatchPlan, PlannedPass, PlannedTree, Policy, plan_batch
from treecp_rl.planner.search import DEFAULT_OPTIONS, TreeLengths, TreeSearch, Workload, tree_features
from treecp_rl.planner.seconds import Pass, predict

MOST_DEGREE = 128
"""Largest degree that Algorithm 1 tries for one tree."""
MOST_LOWERED_RANKS = 64
"""Ranks up to which methods are scored by lowered schedules: a ring's tiles grow with the square of the ranks."""
Measure = Literal["schedules", "closed forms"]


@dataclass(frozen=True, slots=True)
class Cluster:
    """What a method runs on."""

    profile: ClusterProfile
    num_ranks: int
    options: RunOptions = DEFAULT_OPTIONS

    @property
    def measure(self) -> Measure:
        """What scores plans on it."""
        return "schedules" if self.num_ranks <= MOST_LOWERED_RANKS else "closed forms"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a method does with a tree: a candidate, and the round of each response (flat: the pass of each row)."""

    candidate: Candidate
    round_of: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Method:
    """One way to train a tree on all ranks of a cluster."""

    name: str
    what: str
    choose: Callable[[TreeLengths, Cluster], Plan]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a plan costs."""

    seconds: float
    moved_bytes: float
    """Sent by all ranks, all layers, as often as forward and backward run."""


def outcome(tree: TreeLengths, plan: Plan, cluster: Cluster) -> Outcome:
    """The plan by the cluster's measure.

    Raises:
        PlanError: a plan that has no schedule, or as ``score_closed`` where closed forms are the measure.
    """
    if cluster.measure == "schedules":
        found = predict(_passes(tree, plan, cluster), cluster.profile, cluster.options)
        return Outcome(found.seconds, float(found.moved_bytes))
    return score_closed(tree, plan, cluster)


def score_closed(tree: TreeLengths, plan: Plan, cluster: Cluster) -> Outcome:
    """The plan by closed forms, on any number of ranks.

    Raises:
        PlanError: a kind that has none.
    """
    if plan.candidate.kind == "dcp_fused":
        raise PlanError(f"dcp_fused has no closed form; schedules score up to {MOST_LOWERED_RANKS} ranks")
    table = cost_table(cluster.profile, cluster.options, (plan.candidate,))
    features = tree_features(Workload(tree, token_pairs(cluster.profile)), table.index)
    return Outcome(float(table.seconds(features)[0]), float(table.moved_bytes(features)[0]))


def _passes(tree: TreeLengths, plan: Plan, cluster: Cluster) -> list[Pass]:
    """The schedules that the engine would run."""
    if plan.candidate.form == "flat":
        return [
            _flat_pass(
                [row for row, at in zip(_rows(tree), plan.round_of, strict=True) if at == number],
                plan,
                cluster,
            )
            for number in range(max(plan.round_of) + 1)
        ]
    planned = PlannedTree(0, plan.candidate, 0, 0.0, plan.round_of)
    one = PlannedPass((planned,), 0.0)
    weights = weights_of(cluster.profile, cluster.options)
    plan_of_one = BatchPlan("auto", cluster.num_ranks, "", (one,), 0.0, weights)
    ((_, passes),) = lower_plan(plan_of_one, [tree])
    return passes


def _flat_pass(rows: Sequence[TreeLengths], plan: Plan, cluster: Cluster) -> Pass:
    """Rows side by side, each over all ranks of the plan."""
    nodes = nodes_of(rows)
    decision = Decision(plan.candidate.kind, degree=plan.candidate.degree)
    return Pass(lower(nodes, [decision] * len(rows), cluster.num_ranks), nodes)


def _rows(tree: TreeLengths) -> list[TreeLengths]:
    return [TreeLengths(tree.prompt, (response,)) for response in tree.responses]


def _packed(tree: TreeLengths, candidate: Candidate) -> Plan:
    """All in one pass, or in one round."""
    return Plan(candidate, (0,) * len(tree.responses))


def _one_by_one(tree: TreeLengths, form: Form, kind: Kind, cluster: Cluster) -> Plan:
    """A call a response."""
    count = len(tree.responses)
    return Plan(Candidate(form, kind, cluster.num_ranks, 1, count), tuple(range(count)))


def _flat(tree: TreeLengths, cluster: Cluster) -> Plan:
    return _one_by_one(tree, "flat", "ring", cluster)


def _flat_packed(tree: TreeLengths, cluster: Cluster) -> Plan:
    return _packed(tree, Candidate("flat", "ring", cluster.num_ranks))


def _reuse(tree: TreeLengths, cluster: Cluster) -> Plan:
    return _one_by_one(tree, "split", "tree_move_kv", cluster)


def _reuse_packed(tree: TreeLengths, cluster: Cluster) -> Plan:
    return _packed(tree, Candidate("split", "tree_move_kv", cluster.num_ranks))


def _fused(kind: Kind) -> Callable[[TreeLengths, Cluster], Plan]:
    def choose(tree: TreeLengths, cluster: Cluster) -> Plan:
        here: Kind = kind if cluster.num_ranks > 1 else "local"
        return _packed(tree, Candidate("fused", here, cluster.num_ranks))

    return choose


def _best(space: Space) -> Callable[[TreeLengths, Cluster], Plan]:
    def choose(tree: TreeLengths, cluster: Cluster) -> Plan:
        degrees = powers_of_two(min(MOST_DEGREE, cluster.num_ranks))
        found = TreeSearch(cluster.profile, degrees, cluster.options, space)(tree)
        return Plan(found.candidate, found.round_of)

    return choose


METHODS = (
    Method("MegaN", "ring over every row, one call a row (the paper's)", _flat),
    Method("MegaN packed", "the same rows in one call", _flat_packed),
    Method("MegaR", "prompt once, ring, one call a response (the paper's)", _reuse),
    Method("MegaR packed", "prompt once, ring, all responses in one call", _reuse_packed),
    Method("fused ring", "prompt and responses in one call, ring", _fused("ring")),
    Method("DCP fused", "blocks of prompt and responses dealt out by work, one call", _fused("dcp_fused")),
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
