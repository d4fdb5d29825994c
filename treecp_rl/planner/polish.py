"""Small batch -> its BatchPlan -> schedules of every way to run each tree -> a plan that is best by schedule.

Closed forms miss a schedule by some percent, which on few ranks is as much as plans differ. So where lowering is cheap,
each tree is lowered alone in every way that may be best, what it costs each of its ranks is added up, and trees change
their way and place while their pass gets shorter. A pure function of lengths, as all planning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from treecp_rl.plan import Kind
from treecp_rl.planner.batch import lanes_of
from treecp_rl.planner.forms import Candidate, Floats, RunOptions, pass_fixed_seconds, run_times
from treecp_rl.planner.lower import lower, weighed_placement
from treecp_rl.planner.lower_plan import lower_plan, nodes_of
from treecp_rl.planner.profile import ClusterProfile
from treecp_rl.planner.schedule_batch import (
    BatchPlan,
    PlannedPass,
    PlannedTree,
    degree_chain,
    least_seconds,
    plan_batch,
)
from treecp_rl.planner.search import TreeLengths
from treecp_rl.planner.seconds import Pass, predict, rank_seconds, stage_seconds, stages_with_moves

MOST_POLISHED = 32
"""Trees times ranks: a rank lowers its batch in one way, a polished plan looks at about ten."""
POLISHED_KINDS: tuple[Kind, ...] = (
    "gather",
    "gather_whole",
    "dcp_fused",
    "move_q",
    "ring",
    "heads",
    "tree_move_kv",
)
"""Ways of a fused tree on several ranks."""
MOST_LOWERED = 2
"""Layouts of a pass that are lowered: where nothing overlaps, what trees cost adds up exactly."""
MOST_SWEEPS = 4
"""Over the trees of a pass; it mostly settles in two."""


def plan_for_run(
    trees: Sequence[TreeLengths], num_ranks: int, profile: ClusterProfile, options: RunOptions
) -> BatchPlan:
    """The plan that a run takes: by closed forms, and by schedules where that takes little of a step.

    That is where the batch is small, and for updates: plans of log-probs are needed as soon as lengths are known. A
    polished plan's seconds are those of its schedules, and so is its bound: that of the ways that were looked at.

    Raises:
        BatchError, ConfigError, PlanError: as ``plan_batch``.
    """
    plan = plan_batch(trees, num_ranks, profile, options)
    is_small = num_ranks > 1 and len(trees) * num_ranks <= MOST_POLISHED
    return _polished(plan, trees, profile, options) if is_small and options.needs_gradients else plan


@dataclass(frozen=True, slots=True)
class _Way:
    """A tree lowered alone."""

    candidate: Candidate
    forward: Floats
    """[degree] seconds of its ranks, all layers, as often as forward runs."""
    backward: Floats
    stages: int
    """A bit for each stage with moves."""
    placement: int | None
    """So that ranks need not weigh again what was weighed here."""

    @property
    def seconds(self) -> float:
        return float(self.forward.max() + self.backward.max())

    @property
    def area(self) -> float:
        """Rank-seconds."""
        return float(self.forward.sum() + self.backward.sum())


@dataclass(frozen=True, slots=True)
class _Places:
    """Every way of a tree on every aligned block of ranks; P of them."""

    ways: tuple[_Way, ...]
    """[P], with repeats."""
    first_ranks: tuple[int, ...]
    forward: Floats
    """[P, ranks] what it adds to each rank of the domain."""
    backward: Floats

    def planned(self, tree: int, place: int) -> PlannedTree:
        way = self.ways[place]
        return PlannedTree(tree, way.candidate, self.first_ranks[place], way.seconds, placement=way.placement)

    def index(self, candidate: Candidate, first_rank: int) -> int:
        """The place of a candidate; 0, which is rank 0 alone, where it is not among the ways."""
        for place, (way, first) in enumerate(zip(self.ways, self.first_ranks, strict=True)):
            if way.candidate == candidate and first == first_rank:
                return place
        return 0

    def on_all_ranks(self, kind: Kind) -> int:
        """The place of a kind on all ranks; 0 where the tree has no such way."""
        num_ranks = self.forward.shape[1]
        for place, way in enumerate(self.ways):
            if way.candidate.kind == kind and way.candidate.degree == num_ranks:
                return place
        return 0


Layout = dict[int, int]
"""Place of each tree of a pass."""


def _polished(
    plan: BatchPlan, trees: Sequence[TreeLengths], profile: ClusterProfile, options: RunOptions
) -> BatchPlan:
    if not all(one.is_shared for one in plan.passes):
        return plan
    ways_of = {tree: _ways(tree, plan, profile, options) for tree in set(trees)}
    polish = _Polish([ways_of[tree] for tree in trees], plan.num_ranks, profile, options)
    layouts = [polish.layouts(one) for one in plan.passes]
    found = [replace(plan, passes=tuple(map(polish.placed, plan.passes)))]
    for number in range(MOST_LOWERED):
        chosen = [of_pass[min(number, len(of_pass) - 1)] for of_pass in layouts]
        found.append(replace(plan, passes=tuple(map(polish.planned, chosen))))
    timed = [_timed(one, trees, profile, options) for one in found]
    best = min((one for one in timed if one is not None), key=lambda one: one.predicted_seconds, default=plan)
    bound = polish.lower_bound(sum(tree.num_tokens for tree in trees)) + plan.sync_seconds
    return replace(best, lower_bound_seconds=min(bound, best.predicted_seconds))


def _timed(
    plan: BatchPlan, trees: Sequence[TreeLengths], profile: ClusterProfile, options: RunOptions
) -> BatchPlan | None:
    """The plan with the seconds of its schedules; None where they do not fit."""
    passes = []
    bare = replace(profile, gradient_sync_s=0.0)
    for one, lowered in lower_plan(plan, trees):
        prediction = predict(lowered, bare, options)
        if prediction.peak_bytes > profile.memory.bytes_per_rank:
            return None
        passes.append(replace(one, seconds=profile.factors.fused * prediction.seconds))
    return replace(plan, passes=tuple(passes))


def _ways(
    tree: TreeLengths, plan: BatchPlan, profile: ClusterProfile, options: RunOptions
) -> tuple[_Way, ...]:
    """Every fused way of a tree; one rank first."""
    times_forward, times_backward = run_times(options)
    nodes = nodes_of([tree])
    ways = []
    for candidate in _candidates(tree, plan.num_ranks, profile.shape.num_kv_heads):
        decision = replace(candidate.decision, weights=plan.weights)
        decision = replace(decision, placement=weighed_placement(nodes, decision))
        lowered = Pass(lower(nodes, [decision], candidate.degree), nodes)
        forward, backward = rank_seconds(lowered, profile)
        stages = stages_with_moves(lowered.schedule)
        seconds = times_forward * forward, times_backward * backward
        ways.append(_Way(candidate, *seconds, stages, decision.placement))
    return tuple(ways)


def _places(ways: Sequence[_Way], num_ranks: int) -> _Places:
    found = [(way, first) for way in ways for first in range(0, num_ranks, way.candidate.degree)]
    forward, backward = np.zeros((len(found), num_ranks)), np.zeros((len(found), num_ranks))
    for place, (way, first) in enumerate(found):
        ranks = slice(first, first + way.candidate.degree)
        forward[place, ranks], backward[place, ranks] = way.forward, way.backward
    return _Places(tuple(way for way, _ in found), tuple(first for _, first in found), forward, backward)


def _candidates(tree: TreeLengths, num_ranks: int, num_kv_heads: int) -> list[Candidate]:
    """On one rank, and by every kind on every degree; ``heads`` where a lane has several ranks."""
    found = [Candidate("fused", "local", 1)]
    for degree in degree_chain(num_ranks)[1:]:
        for kind in POLISHED_KINDS:
            lanes = lanes_of(kind, degree, num_kv_heads)
            if degree <= tree.num_tokens and not (kind == "heads" and lanes == degree):
                found.append(Candidate("fused", kind, degree, lanes))
    return found


class _Polish:
    """Moves trees of a pass, as if what they cost a rank added up."""

    def __init__(
        self, ways: Sequence[Sequence[_Way]], num_ranks: int, profile: ClusterProfile, options: RunOptions
    ) -> None:
        self._ways, self._num_ranks, self._options = ways, num_ranks, options
        self._places = [_places(of_tree, num_ranks) for of_tree in ways]
        self._fixed = pass_fixed_seconds(profile, options)
        self._stage = sum(run_times(options)) * stage_seconds(profile)
        self._factor = profile.factors.fused

    def planned(self, layout: Layout) -> PlannedPass:
        """A pass whose seconds nobody knows yet."""
        trees = [self._places[tree].planned(tree, place) for tree, place in layout.items()]
        return PlannedPass(tuple(sorted(trees, key=lambda one: (one.first_rank, one.tree))), 0.0)

    def placed(self, one: PlannedPass) -> PlannedPass:
        """The pass with placements that were weighed for its trees' candidates."""
        trees = []
        for planned in one.trees:
            ways = [way for way in self._ways[planned.tree] if way.candidate == planned.candidate]
            trees.append(replace(planned, placement=ways[0].placement) if ways else planned)
        return replace(one, trees=tuple(trees))

    def layouts(self, one: PlannedPass) -> list[Layout]:
        """Layouts of a pass that no single tree improves, shortest first: found from the pass as it is, from nothing,
        and from each kind on all ranks."""
        trees = [planned.tree for planned in one.trees]
        planned = {
            planned.tree: self._places[planned.tree].index(planned.candidate, planned.first_rank)
            for planned in one.trees
        }
        starts = [planned, self._greedily(trees)]
        if len(trees) > 1:
            starts += [
                {tree: self._places[tree].on_all_ranks(kind) for tree in trees} for kind in POLISHED_KINDS
            ]
        settled = [self._settled(start) for start in starts]
        return [layout for _, layout in sorted(settled, key=lambda found: found[0])]

    def _greedily(self, trees: Sequence[int]) -> Layout:
        """Largest tree first, each where the pass is then shortest."""
        layout: Layout = {}
        for tree in sorted(trees, key=lambda tree: (-self._ways[tree][0].seconds, tree)):
            layout[tree], _ = self._best(tree, layout)
        return layout

    def _settled(self, start: Layout) -> tuple[float, Layout]:
        """Trees change their place, one after another, until none makes the pass shorter; and its seconds."""
        layout, least = dict(start), inf
        for _ in range(MOST_SWEEPS):
            before = least
            for tree in start:
                place, seconds = self._best(
                    tree, {other: at for other, at in layout.items() if other != tree}
                )
                if seconds < least:
                    layout[tree], least = place, seconds
            if least >= before:
                break
        return least, layout

    def _best(self, tree: int, others: Layout) -> tuple[int, float]:
        """Where the pass is shortest with this tree, of equal places that of least rank-seconds; and its seconds."""
        forward, backward = np.zeros(self._num_ranks), np.zeros(self._num_ranks)
        stages = 0
        for other, at in others.items():
            places = self._places[other]
            forward += places.forward[at]
            backward += places.backward[at]
            stages |= places.ways[at].stages
        own = self._places[tree]
        seconds = (forward + own.forward).max(axis=1) + (backward + own.backward).max(axis=1)
        seconds += self._stage * np.array([(stages | way.stages).bit_count() for way in own.ways])
        place = int(np.lexsort(([way.area for way in own.ways], seconds))[0])
        return place, float(seconds[place])

    def lower_bound(self, num_tokens: int) -> float:
        """No plan of these ways takes less."""
        most = max(map(len, self._ways))
        seconds, area = (np.full((len(self._ways), most), inf) for _ in range(2))
        for tree, ways in enumerate(self._ways):
            seconds[tree, : len(ways)] = [way.seconds for way in ways]
            area[tree, : len(ways)] = [way.area for way in ways]
        room = self._options.tokens_per_rank
        fewest = 1 if room is None else max(1, -(-num_tokens // (room * self._num_ranks)))
        return self._factor * (fewest * self._fixed + least_seconds(seconds, area, self._num_ranks))
