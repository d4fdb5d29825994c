"""Lengths of a batch, ranks, profile -> BatchPlan: which trees share a pass, on which ranks each runs, and a bound.

All ranks of a domain run each pass together, so a pass takes as long as its busiest rank, and what a tree of degree d
adds is the same on all of its d ranks. Degrees form a chain in which each divides the next (NSP's SP tree, section
4.1.1), so that blocks of ranks nest. A pure function: equal inputs give equal plans on every rank, without a clock.

Lower bound: whatever the plan, some passes are needed for the tokens, every tree takes at least the least of d w(d)
rank-seconds, and one pass holds the longest tree. ``gap`` is the plan's distance from that.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from hashlib import sha256
from itertools import chain
from math import ceil
from typing import Literal

import numpy as np

from treecp_rl.errors import BatchError, ConfigError, PlanError
from treecp_rl.plan import Decision, Weights
from treecp_rl.planner.forms import (
    Bools,
    Candidate,
    CostTable,
    FeatureIndex,
    Floats,
    Ints,
    RunOptions,
    candidates,
    cost_table,
    pass_fixed_seconds,
    product,
    sync_seconds,
    token_pairs,
    weights_of,
)
from treecp_rl.planner.place import ZIGZAG_FLOOR
from treecp_rl.planner.profile import ClusterProfile
from treecp_rl.planner.search import (
    DEFAULT_OPTIONS,
    EVEN_PART,
    UNCUT_EXCESS,
    WRAPPED_CUT,
    TreeLengths,
    TreeSearch,
    fitting,
)

Policy = Literal["auto", "nsp", "disjoint", "static"]
Effort = Literal["fast", "thorough"]
POLICIES: tuple[Policy, ...] = ("auto", "nsp", "disjoint", "static")

MOST_LANES = 8
"""Lanes of ``heads`` that a batch considers: each number of lanes is an assignment of every tree's responses."""
MEMORY_PART = 0.9
"""Part of a rank's memory that a batch plans with: closed forms miss the lowered peak by some percent."""
GOOD_GAP = 0.0065
"""Gap at which the search stops."""
LEAST_GAIN = 0.002
"""Distance of the best layout from a missed target at which the search stops."""
LAST_STEP = 0.0005
"""Below the best layout, where the search looks once more."""
FIRST_EXCESS = 0.025
"""First target over the least seconds of a pass, less 1, where there is a tree a rank; many trees fill ranks better."""
EASY_EXCESS = 0.006
"""That a first layout mostly reaches from two trees a rank on; measured, not derived."""
LEAST_EXCESS = 0.002
LEAST_TRIES, MOST_TRIES, MOST_LAID = 3, 20, 384
"""Layouts that are tried, and trees a pass that are laid in all: many trees need fewer tries, and more time each."""
TREE_LIMITS = (1.0, 0.7, 0.35, 0.85, 0.5)
"""Limits of one tree over the target, in turn: the more, the more tries there are."""
MOST_LOOKS = 12
"""Blocks without room that are passed over before a tree is tried at another degree."""
SMALL_PART = 0.04
"""Trees of at most this part of the target are laid whole on single ranks, without looking at degrees."""
BOUND_STEPS = 12
"""Of bisection towards the lower bound: it is below the best by at most 0.1 / 2^12 of itself."""
EXTRA_PASSES = 4
"""Passes beyond the fewest possible, and one a tree, that are tried when trees do not fit."""
TIGHT_PART = 0.8
"""Part of all room from which on one pass more is tried even if the trees fit."""


@dataclass(frozen=True, slots=True)
class PlannedTree:
    """Where and how one tree of the batch runs."""

    tree: int
    """Its index in the batch."""
    candidate: Candidate
    first_rank: int
    seconds: float
    """That it adds on each of its ranks; of a tree with passes of its own, all of it."""
    round_of: tuple[int, ...] = ()
    """Split: round of each response."""
    placement: int | None = None
    """As in ``plan.Decision``, where schedules were looked at."""

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.candidate.degree)


@dataclass(frozen=True, slots=True)
class PlannedPass:
    """Trees that run in one pass, or one tree that has passes of its own."""

    trees: tuple[PlannedTree, ...]
    seconds: float

    @property
    def is_shared(self) -> bool:
        return self.trees[0].candidate.form == "fused"


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Passes of a batch, one after another, and how far from the best they can be."""

    policy: Policy
    num_ranks: int
    profile: str
    """Digest of the profile it was planned for."""
    passes: tuple[PlannedPass, ...]
    lower_bound_seconds: float
    weights: Weights | None
    """The profile's, for the placements of its trees; None: those of a mode that nobody planned."""
    sync_seconds: float = 0.0
    """Of the step whatever its passes, in the bound, too."""

    @property
    def predicted_seconds(self) -> float:
        return sum(one.seconds for one in self.passes) + self.sync_seconds

    @property
    def gap(self) -> float:
        """Predicted over lower bound, less 1: no plan of this space is better by more."""
        return max(0.0, self.predicted_seconds / self.lower_bound_seconds - 1)

    @property
    def trees(self) -> tuple[PlannedTree, ...]:
        """In the order of the batch."""
        return tuple(sorted(chain.from_iterable(one.trees for one in self.passes), key=lambda one: one.tree))

    def decision(self, planned: PlannedTree) -> Decision:
        """What lowering needs to know of one of its trees."""
        return replace(
            planned.candidate.decision,
            first_rank=planned.first_rank,
            weights=self.weights,
            placement=planned.placement,
        )

    @property
    def digest(self) -> str:
        """Eight hex digits that equal plans share."""
        parts = [f"{self.policy} {self.num_ranks} {self.profile}"]
        for one in self.passes:
            parts += [f"{t.tree} {t.first_rank} {t.candidate} {t.round_of} {t.placement}" for t in one.trees]
            parts.append("|")
        return sha256("\n".join(parts).encode()).hexdigest()[:8]


def degree_chain(num_ranks: int) -> tuple[int, ...]:
    """Degrees on aligned groups, each dividing the next: 1, 2, 4 ... and odd factors last."""
    chain_, rest = [1], num_ranks
    factor = 2
    while rest > 1:
        while rest % factor:
            factor += 1
        chain_.append(chain_[-1] * factor)
        rest //= factor
    return tuple(chain_)


def plan_batch(
    trees: Sequence[TreeLengths],
    num_ranks: int,
    profile: ClusterProfile,
    options: RunOptions = DEFAULT_OPTIONS,
    policy: Policy = "auto",
    degree: int | None = None,
    effort: Effort = "fast",
) -> BatchPlan:
    """Plan a batch.

    Args:
        num_ranks: of the domain; all run every pass.
        policy: ``auto`` is ours; ``nsp`` a beam search over the SP tree (NSP, Algorithm 1), ``disjoint`` groups that
            keep their size during a pass (FlexSP), ``static`` groups of one size, each on the same costs.
        degree: of ``static``.
        effort: of ``auto``; ``thorough`` also tries what the other policies would do, and takes what is best.

    Raises:
        BatchError: no trees, or lengths that are none.
        ConfigError: a policy or degree that cannot be.
        PlanError: a tree that does not fit on all ranks by any plan; names it.
    """
    if not trees:
        raise BatchError("the batch has no trees; nothing to plan")
    if num_ranks < 1:
        raise ConfigError(f"a domain of {num_ranks} ranks; give at least 1")
    if policy not in POLICIES:
        raise ConfigError(f"no policy {policy!r}; choose from {', '.join(POLICIES)}")
    if (degree is not None) != (policy == "static"):
        raise ConfigError(
            f"policy {policy} with degree {degree}; a degree belongs to policy static, and it needs one"
        )
    degrees = degree_chain(num_ranks)
    if degree is not None and degree not in degrees:
        raise ConfigError(
            f"static degree {degree} on {num_ranks} ranks; choose from {', '.join(map(str, degrees))}"
        )
    tasks = _Tasks(trees, degrees, profile, options)
    fixed = pass_fixed_seconds(profile, options) * profile.factors.fused
    layouts: list[_Layout] = []
    if tasks.shared:
        layouts = [_layout(tasks, fixed, policy, degree)]
        if effort == "thorough" and policy == "auto":
            others: tuple[Policy, ...] = ("nsp", "disjoint")
            layouts += [_layout(tasks, fixed, other, None) for other in others]
    alone = [tasks.alone(index) for index in tasks.too_large]
    passes = [PlannedPass((one,), one.seconds) for one in alone]
    if layouts:
        passes += min(layouts, key=lambda layout: layout.seconds(fixed)).passes(tasks, fixed)
    sync = sync_seconds(profile, options)
    bound = sum(one.seconds for one in alone) + (tasks.lower_bound(fixed) if tasks.shared else 0.0) + sync
    # Its sums are in another order than the plan's, which may differ in the last digit.
    bound *= 1 - 1e-12
    weights = weights_of(profile, options)
    return BatchPlan(policy, num_ranks, _digest(profile), tuple(passes), bound, weights, sync)


@lru_cache(maxsize=16)
def _digest(profile: ClusterProfile) -> str:
    return profile.digest


class _Tasks:
    """Trees as tasks: seconds and part of a pass's room of each at each degree, the best kind chosen."""

    def __init__(
        self,
        trees: Sequence[TreeLengths],
        degrees: tuple[int, ...],
        profile: ClusterProfile,
        options: RunOptions,
    ) -> None:
        self._trees, self._profile, self._options = trees, profile, options
        self.degrees, self.num_ranks = degrees, degrees[-1]
        most = max(len(tree.responses) for tree in trees)
        table, columns = _batch_table(profile, options, degrees, min(MOST_LANES, most))
        features = batch_features(trees, table.index, token_pairs(profile))
        seconds = table.marginal_seconds(features)
        limits = product(features, table.limits)
        at = table.index.position
        group = features[:, at["group"]][:, None]
        fits = fitting(table, features, limits, profile.memory.bytes_per_rank, options)
        fits &= np.array([one.lanes for one in table.candidates]) <= group
        room = self._room(limits, len(table.candidates))
        fits &= room <= 1.0
        seconds[~fits] = np.inf
        self._candidates = table.candidates
        best = np.stack([start + seconds[:, start:stop].argmin(axis=1) for start, stop in columns], axis=1)
        self._chosen_lists: list[list[int]] = best.tolist()
        rows = np.arange(len(trees))[:, None]
        self.seconds: Floats = seconds[rows, best]
        """[T, D] that a tree adds on each of its ranks; infinite where it does not fit."""
        self.room: Floats = room[rows, best]
        """[T, D] part of a rank's memory or tokens that it takes."""
        self.area: Floats = self.seconds * np.array(degrees, dtype=np.float64)
        fitting_somewhere = np.isfinite(self.seconds).any(axis=1)
        self.too_large = [int(i) for i in np.flatnonzero(~fitting_somewhere)]
        self.shared: list[int] = [int(i) for i in np.flatnonzero(fitting_somewhere)]

    def _room(self, limits: Floats, count: int) -> Floats:
        room: Floats = limits[:, :count] / (MEMORY_PART * self._profile.memory.bytes_per_rank)
        if self._options.tokens_per_rank is not None:
            room = np.maximum(room, limits[:, count:] / self._options.tokens_per_rank)
        return room

    @cached_property
    def least_seconds(self) -> float:
        """No plan's passes take less together, fixed costs apart."""
        return least_seconds(self.seconds[self.shared], self.area[self.shared], self.num_ranks)

    @cached_property
    def order(self) -> list[int]:
        """Shared trees, most rank-seconds first."""
        shared = np.array(self.shared)
        by_area: list[int] = shared[np.argsort(-self.area[shared].min(axis=1), kind="stable")].tolist()
        return by_area

    @cached_property
    def seconds_lists(self) -> list[list[float]]:
        seconds: list[list[float]] = self.seconds.tolist()
        return seconds

    @cached_property
    def room_lists(self) -> list[list[float]]:
        rooms: list[list[float]] = self.room.tolist()
        return rooms

    @cached_property
    def least_needs(self) -> list[list[float]]:
        """[T, D] least room that a tree or any that follows it in ``order`` takes."""
        least: list[list[float]] = np.minimum.accumulate(self.room[self.order][::-1], axis=0)[::-1].tolist()
        return least

    @cached_property
    def fewest_passes(self) -> int:
        """No plan has fewer."""
        return max(1, ceil(self.room_taken - 1e-9))

    @cached_property
    def room_taken(self) -> float:
        """Of one pass, by all trees where they take least."""
        room = np.where(np.isfinite(self.seconds), self.room * np.array(self.degrees), np.inf)
        return float(room[self.shared].min(axis=1).sum()) / self.num_ranks

    def lower_bound(self, fixed: float) -> float:
        return self.fewest_passes * fixed + self.least_seconds

    def planned(self, tree: int, level: int, first_rank: int) -> PlannedTree:
        candidate = self._candidates[self._chosen_lists[tree][level]]
        return PlannedTree(tree, candidate, first_rank, self.seconds_lists[tree][level])

    def alone(self, tree: int) -> PlannedTree:
        """A tree that exceeds every pass: split, in passes of its own.

        Raises:
            PlanError: it does not fit by any plan.
        """
        memory = int(MEMORY_PART * self._profile.memory.bytes_per_rank)
        try:
            choice = _split_search(self._profile, self.degrees, self._options, memory)(self._trees[tree])
        except PlanError as error:
            raise PlanError(f"tree {tree} of the batch: {error}") from error
        return PlannedTree(tree, choice.candidate, 0, choice.seconds, choice.round_of)


def least_seconds(seconds: Floats, area: Floats, num_ranks: int) -> float:
    """No plan runs all trees in less, fixed costs apart.

    The least T for which every tree has a way of at most T seconds, and their rank-seconds in the cheapest such ways
    fit into T on all ranks: a plan of T seconds has both (Ludwig and Tiwari 1994).

    Args:
        seconds: [T, W] of each tree's ways on their busiest rank, infinite where there is none.
        area: [T, W] rank-seconds of the same.
    """
    seconds, area = np.ascontiguousarray(seconds.T), np.ascontiguousarray(area.T)
    low = max(float(area.min(axis=0).sum()) / num_ranks, float(seconds.min(axis=0).max()))
    high = low

    def is_enough(total: float) -> bool:
        within = np.where(seconds <= total, area, np.inf).min(axis=0)
        return float(within.sum()) <= num_ranks * total

    while not is_enough(high):
        low, high = high, high * 1.1
    for _ in range(BOUND_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return low


@lru_cache(maxsize=16)
def _batch_table(
    profile: ClusterProfile, options: RunOptions, degrees: tuple[int, ...], most_lanes: int
) -> tuple[CostTable, list[tuple[int, int]]]:
    """Fused candidates, and the columns of each degree."""
    found: list[Candidate] = []
    columns: list[tuple[int, int]] = []
    for degree in degrees:
        space = candidates("full", (degree,), most_lanes, profile.shape.num_kv_heads)
        fused = [one for one in space if one.form == "fused" and one.kind != "tree_move_kv"]
        columns.append((len(found), len(found) + len(fused)))
        found += fused
    return cost_table(profile, options, tuple(found)), columns


@lru_cache(maxsize=16)
def _split_search(
    profile: ClusterProfile, degrees: tuple[int, ...], options: RunOptions, memory: int
) -> TreeSearch:
    return TreeSearch(profile, degrees, options, "split", memory)


def batch_features(trees: Sequence[TreeLengths], index: FeatureIndex, pairs_per_token: float) -> Floats:
    """[T, F] as ``tree_features``, but that lanes are filled largest first."""
    group = np.array([len(tree.responses) for tree in trees])
    prompt = np.array([tree.prompt for tree in trees], dtype=np.float64)
    flat = list(chain.from_iterable([tree.responses for tree in trees]))
    place = np.arange(int(group.max())) < group[:, None]
    descending = np.zeros(place.shape)
    descending[place] = flat
    descending.sort(axis=1)
    # [G, T]: sums over the responses of a tree then run along rows.
    responses = np.ascontiguousarray(descending[:, ::-1].T)
    squares = responses * responses
    per_token = pairs_per_token + prompt
    works = responses * (per_token + 0.5) + 0.5 * squares
    total = responses.sum(axis=0)
    own = 0.5 * (squares.sum(axis=0) + total)
    prompt_pairs = 0.5 * prompt * (prompt + 1)
    lanes = [(total, own), *(_critical_lanes(responses, works, s) for s in index.lanes[1:])]
    lane_tokens, lane_pairs = (np.stack(both) for both in zip(*lanes, strict=True))
    prompt_work = prompt * (pairs_per_token + 0.5 * prompt)
    zigzags = _batch_zigzags(responses, works, prompt_work, lane_tokens * per_token + lane_pairs, index)
    columns = [np.ones_like(prompt), prompt, prompt_pairs, total, prompt * total, own, group]
    columns += [group * prompt, group * prompt_pairs]
    rows = np.concatenate([columns, lane_tokens, prompt * lane_tokens, lane_pairs, *zigzags])
    return np.ascontiguousarray(rows.T)


def _critical_lanes(responses: Floats, works: Floats, lanes: int) -> tuple[Floats, Floats]:
    """[T] tokens and own pairs of each tree's busiest lane, filled largest first; ``responses`` [G, T] descend."""
    width, num_trees = responses.shape
    if lanes >= width:
        return responses[0], 0.5 * (responses[0] * responses[0] + responses[0])
    load, trees = works[:lanes].copy(), np.arange(num_trees)
    lane_of = np.empty((width, num_trees), dtype=np.int64)
    lane_of[:lanes] = np.arange(lanes)[:, None]
    for unit in range(lanes, width):
        lane = lane_of[unit] = load.argmin(axis=0)
        load[lane, trees] += works[unit]
    is_in = lane_of == load.argmax(axis=0)
    of_lane = responses * is_in
    tokens = of_lane.sum(axis=0)
    return tokens, 0.5 * ((of_lane * of_lane).sum(axis=0) + tokens)


def _batch_zigzags(
    responses: Floats, works: Floats, prompt_work: Floats, lane_works: Floats, index: FeatureIndex
) -> list[Floats]:
    """[D, T] each: long responses and their tokens, those that ``gather`` cuts and theirs."""
    degrees, lanes = np.array(index.degrees)[:, None], np.array(index.lanes)
    floors, floor_of = np.unique(
        np.concatenate([index.zigzag_floors, (2 * ZIGZAG_FLOOR * (degrees // lanes)).ravel()]),
        return_inverse=True,
    )
    lane_floor_of = floor_of[len(degrees) :].reshape(len(degrees), len(lanes))
    trees = np.arange(responses.shape[1])
    num_over = (responses[:, None, :] >= floors[:, None]).sum(axis=0)
    sums = np.concatenate([np.zeros((1, len(trees))), responses.cumsum(axis=0)])
    of_responses = works.sum(axis=0)
    work = of_responses + prompt_work
    long = num_over[floor_of[: len(degrees)]]
    cut = np.minimum(long, (works[:, None, :] > work / degrees).sum(axis=0))
    # The most lanes that are even and at most d; one lane is even.
    limit = of_responses + EVEN_PART * work
    is_even = lane_works * lanes[:, None] <= limit
    chosen = np.zeros_like(cut)
    for position, s in enumerate(index.lanes[1:], 1):
        chosen[is_even[position] & (s <= degrees)] = position
    busiest = np.stack(
        [lane_works[index.lanes.index(d)] if d in index.lanes else works[0] for d in index.degrees]
    )
    is_wrapped = (cut == 0) & (busiest * degrees > limit)
    chosen[cut == 0] = 0
    in_lanes, rows = chosen > 0, np.arange(len(degrees))[:, None]
    per_lane = degrees // lanes[chosen]
    whole = num_over[lane_floor_of[rows, chosen], trees] * (per_lane > 1)
    lane_tokens = sums[whole, trees] * ((per_lane - 1) / np.maximum(degrees - 1, 1))
    count, tokens = _batch_parts(responses, works, work / degrees, cut, degrees)
    in_lanes &= lane_tokens <= tokens
    count = np.where(in_lanes, whole / lanes[chosen], count) + WRAPPED_CUT * (degrees - 1) * is_wrapped
    return [long.astype(np.float64), sums[long, trees], count, np.where(in_lanes, lane_tokens, tokens)]


def _batch_parts(
    responses: Floats, works: Floats, share: Floats, num_cut: Ints, degrees: Ints
) -> tuple[Floats, Floats]:
    """[D, T] each, as ``search.cut_in_parts`` of a tree's first ``num_cut`` responses."""
    count, tokens = np.zeros_like(share), np.zeros_like(share)
    for number in range(int(num_cut.max())):
        of_share = works[number] / share
        ranks = np.floor(of_share)
        has_ends = of_share > ranks + UNCUT_EXCESS
        is_cut = number < num_cut
        count += is_cut * (ranks + has_ends) / degrees
        part = np.minimum(1.0, (ranks - 1 + has_ends * 4 / 3) / np.maximum(1, degrees - 1))
        tokens += is_cut * responses[number] * part
    return count, tokens


@dataclass(slots=True)
class _Layout:
    """Where each shared tree lies."""

    num_passes: int
    level: dict[int, int] = field(default_factory=dict)
    """Index of its degree."""
    place: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Pass and first rank."""
    pass_seconds: list[float] = field(default_factory=list)
    """Of the busiest rank, fixed costs apart."""

    def seconds(self, fixed: float) -> float:
        return sum(self.pass_seconds) + self.num_passes * fixed

    def passes(self, tasks: _Tasks, fixed: float) -> list[PlannedPass]:
        trees: list[list[PlannedTree]] = [[] for _ in range(self.num_passes)]
        for (number, first_rank), tree in sorted([(place, tree) for tree, place in self.place.items()]):
            trees[number].append(tasks.planned(tree, self.level[tree], first_rank))
        return [
            PlannedPass(tuple(one), fixed + seconds)
            for one, seconds in zip(trees, self.pass_seconds, strict=True)
            if one
        ]


def _layout(tasks: _Tasks, fixed: float, policy: Policy, degree: int | None) -> _Layout:
    """The policy's best layout in the fewest passes that hold it, or one more."""
    best: _Layout | None = None
    fewest = tasks.fewest_passes
    solve = {"auto": _by_target, "nsp": _by_beam, "disjoint": _in_groups, "static": _in_groups}[policy]
    tried = 0
    for num_passes in range(fewest, fewest + EXTRA_PASSES + len(tasks.shared)):
        layout = solve(tasks, num_passes, fixed, degree)
        if layout is None:
            continue
        tried += 1
        if best is None or layout.seconds(fixed) < best.seconds(fixed):
            best = layout
        # A pass more is of use where room was short, and costs its fixed seconds.
        is_tight = tasks.room_taken > TIGHT_PART * num_passes
        if not is_tight or tried == 2 or best.seconds(fixed) - tasks.lower_bound(fixed) <= fixed:
            break
    if best is None:
        raise PlanError(
            f"policy {policy} found no passes for {len(tasks.shared)} trees on {tasks.num_ranks} ranks"
            + (f" at degree {degree}: a tree needs more ranks; raise the degree" if degree else "")
        )
    return best


def _by_target(tasks: _Tasks, num_passes: int, fixed: float, degree: int | None) -> _Layout | None:
    """Ours: bisection on the seconds of a pass, each target tried with long and shorter limits for one tree.

    A target is met or missed by a greedy layout, so that a missed one may still be possible (as in MULTIFIT, Coffman
    et al. 1978); the best layout is kept, whichever target it came from.
    """
    least = tasks.least_seconds
    trees_a_rank = len(tasks.shared) / (num_passes * tasks.num_ranks)
    missed, ratio = 1.0, 1.0 + _first_excess(trees_a_rank)
    num_tries = max(LEAST_TRIES, min(MOST_TRIES, MOST_LAID * num_passes // len(tasks.shared)))
    limits = list(TREE_LIMITS[: max(2, num_tries // 4)])
    best: _Layout | None = None
    best_ratio, num_missed = np.inf, 0
    for _ in range(num_tries):
        target = ratio * least / num_passes
        layout = _lay(tasks, target, limits[0] * target, num_passes, best_ratio * least / num_passes)
        if layout is None:
            # Room is short whatever the target; one more pass has it.
            return best
        reached = sum(layout.pass_seconds) / least
        is_met = reached <= ratio * (1 + 1e-9)
        if reached < best_ratio:
            best, best_ratio = layout, reached
        if not is_met:
            limits.append(limits.pop(0))
            num_missed += 1
            if num_missed < len(limits) and ratio < best_ratio:
                continue
            missed = max(missed, min(ratio, best_ratio))
        if best_ratio <= max(1 + GOOD_GAP, missed + LEAST_GAIN):
            break
        num_missed = 0
        ratio = (missed + best_ratio) / 2
    if num_tries > LEAST_TRIES and best_ratio > 1 + GOOD_GAP:
        # Bisection ends at a distance from the best; a little below it there may be one more.
        for limit in TREE_LIMITS[:2]:
            target = best_ratio * (1 - LAST_STEP) * least / num_passes
            layout = _lay(tasks, target, limit * target, num_passes, best_ratio * least / num_passes)
            if layout is not None and sum(layout.pass_seconds) < best_ratio * least:
                best, best_ratio = layout, sum(layout.pass_seconds) / least
    return best


def _first_excess(trees_a_rank: float) -> float:
    fair = max(EASY_EXCESS, FIRST_EXCESS / trees_a_rank**2)
    return max(LEAST_EXCESS, min(fair, FIRST_EXCESS / trees_a_rank))


def _lay(
    tasks: _Tasks, target: float, limit: float, num_passes: int, most_seconds: float = np.inf
) -> _Layout | None:
    """Largest tree first, each at the smallest degree that meets the target, on the fullest block that does.

    Where none does, the degree and block that exceed it least are taken. None: a tree finds no room.

    Args:
        target: seconds of a pass.
        limit: of a tree, where it has a degree that meets it: short trees are easier to balance, and dearer.
        most_seconds: of a pass; a layout of one pass that takes as long is of no use and given up.
    """
    blocks = _Blocks(tasks.degrees, num_passes * tasks.num_ranks)
    layout = _Layout(num_passes)
    order, room_of, least_needs = tasks.order, tasks.room_lists, tasks.least_needs
    limits = np.maximum(limit, tasks.seconds.min(axis=1))[:, None]
    seconds_of = np.where(tasks.seconds <= limits, tasks.seconds, np.inf).tolist()
    # From here on every tree is small: leaves suffice to level them.
    is_large = np.flatnonzero(tasks.seconds[order, 0] > SMALL_PART * target)
    num_large = int(is_large[-1]) + 1 if len(is_large) else 0
    for at, tree in enumerate(order[:num_large]):
        seconds, needs = seconds_of[tree], room_of[tree]
        chosen = blocks.meeting(target, seconds, needs, least_needs[at])
        if chosen is None:
            chosen = blocks.exceeding_least(seconds, needs)
            if chosen is None:
                return None
            if num_passes == 1:
                # What the pass takes now, the trees to come may take as well.
                target = blocks.loads[chosen[0]][chosen[1]] + seconds[chosen[0]]
                if target >= most_seconds:
                    layout.pass_seconds = [np.inf]
                    return layout
        level, block = chosen
        blocks.put(level, block, seconds[level], needs[level])
        layout.level[tree] = level
        layout.place[tree] = divmod(block * tasks.degrees[level], tasks.num_ranks)
    return _fill_leaves(tasks, order[num_large:], blocks, layout, target)


def _fill_leaves(
    tasks: _Tasks, order: list[int], blocks: _Blocks, layout: _Layout, target: float
) -> _Layout | None:
    """The small trees, each whole on the fullest rank that meets the target."""
    seconds, needs = tasks.seconds[:, 0].tolist(), tasks.room[:, 0].tolist()
    num_ranks = tasks.num_ranks
    for tree in order:
        need = needs[tree]
        rank = blocks.fullest(0, target - seconds[tree], need, 0.0)
        if rank is None:
            rank = blocks.lightest(0, need)
            if rank is None:
                return None
        blocks.put_whole(rank, seconds[tree], need)
        layout.level[tree], layout.place[tree] = 0, divmod(rank, num_ranks)
    loads = blocks.loads[0]
    layout.pass_seconds = [max(loads[first : first + num_ranks]) for first in range(0, len(loads), num_ranks)]
    return layout


class _Blocks:
    """Ranks of all passes side by side, and for each degree the load and room of its aligned blocks.

    A block's load is that of its busiest rank, its room that of its fullest. Blocks of a degree are kept sorted by
    load: loads in one list, which block each is in another.
    """

    def __init__(self, degrees: tuple[int, ...], num_slots: int) -> None:
        self._degrees = degrees
        counts = [num_slots // degree for degree in degrees]
        self.loads = [[0.0] * count for count in counts]
        self.rooms = [[0.0] * count for count in counts]
        self._sorted = [[0.0] * count for count in counts]
        self._block_at = [list(range(count)) for count in counts]
        self._is_out = [bytearray(count) for count in counts]

    def meeting(
        self, target: float, seconds: list[float], needs: list[float], least_needs: list[float]
    ) -> tuple[int, int] | None:
        """Level and block of the smallest degree at which a tree of ``seconds`` meets the target."""
        for level, of_tree in enumerate(seconds):
            if of_tree > target:
                continue
            found = self.fullest(level, target - of_tree, needs[level], least_needs[level])
            if found is not None:
                return level, found
        return None

    def exceeding_least(self, seconds: list[float], needs: list[float]) -> tuple[int, int] | None:
        """Level and block at which a tree ends first."""
        chosen, least = None, np.inf
        for level, of_tree in enumerate(seconds):
            found = self.lightest(level, needs[level]) if of_tree < np.inf else None
            if found is not None and self.loads[level][found] + of_tree < least:
                chosen, least = (level, found), self.loads[level][found] + of_tree
        return chosen

    def fullest(self, level: int, most_load: float, need: float, least_need: float) -> int | None:
        """The block of most load up to ``most_load`` with room for ``need``, or None after ``MOST_LOOKS`` without.

        Args:
            least_need: blocks without room for that are left out from now on.
        """
        block_at, rooms = self._block_at[level], self.rooms[level]
        at = bisect_right(self._sorted[level], most_load) - 1
        last = at - MOST_LOOKS
        while at >= 0 and at > last:
            block = block_at[at]
            if rooms[block] + need <= 1.0:
                return block
            if rooms[block] + least_need > 1.0:
                del self._sorted[level][at], block_at[at]
                self._is_out[level][block] = 1
            at -= 1
        return None

    def lightest(self, level: int, need: float) -> int | None:
        """The least loaded block with room for ``need``."""
        rooms = self.rooms[level]
        return next((block for block in self._block_at[level] if rooms[block] + need <= 1.0), None)

    def put(self, level: int, block: int, seconds: float, need: float) -> None:
        """Add a tree to all ranks of a block."""
        degree = self._degrees[level]
        for lower in range(level + 1):
            factor = degree // self._degrees[lower]
            loads, rooms = self.loads[lower], self.rooms[lower]
            for inner in range(block * factor, (block + 1) * factor):
                rooms[inner] += need
                self._raise(lower, inner, loads[inner] + seconds)
        load, room, first = self.loads[level][block], self.rooms[level][block], block * degree
        for upper in range(level + 1, len(self._degrees)):
            outer = first // self._degrees[upper]
            is_fuller, is_longer = room > self.rooms[upper][outer], load > self.loads[upper][outer]
            if is_fuller:
                self.rooms[upper][outer] = room
            if is_longer:
                self._raise(upper, outer, load)
            elif not is_fuller:
                # Nor is any block around this one.
                break

    def put_whole(self, rank: int, seconds: float, need: float) -> None:
        """Add a tree to a rank where blocks of ranks do not matter any more."""
        self.rooms[0][rank] += need
        self._raise(0, rank, self.loads[0][rank] + seconds)

    def _raise(self, level: int, block: int, load: float) -> None:
        loads = self.loads[level]
        before, loads[block] = loads[block], load
        if self._is_out[level][block]:
            return
        ordered, block_at = self._sorted[level], self._block_at[level]
        at = bisect_left(ordered, before)
        if block_at[at] != block:
            at = block_at.index(block, at)
        del ordered[at], block_at[at]
        at = bisect_right(ordered, load, at)
        ordered.insert(at, load)
        block_at.insert(at, block)


BEAM_PREFIX = 128
BEAM_WIDTH = 16


def _by_beam(tasks: _Tasks, num_passes: int, fixed: float, degree: int | None) -> _Layout | None:
    """The best of NSP's plans over its largest admissible degree, which is the user's to set there."""
    best: _Layout | None = None
    for most in range(1, len(tasks.degrees) + 1):
        layout = _beam(tasks, num_passes, most)
        if layout is not None and (best is None or layout.seconds(fixed) < best.seconds(fixed)):
            best = layout
    return best


def _beam(tasks: _Tasks, num_passes: int, num_levels: int) -> _Layout | None:
    """NSP's Algorithm 1: the longest ``BEAM_PREFIX`` trees by beam search over the SP tree's nodes, the rest on leaves.

    Passes are further copies of the SP tree. Of a level's nodes only the least loaded with room is tried, since nodes
    of equal load lead to equal states. States of equal critical load are ordered by total load.
    """
    order = tasks.order
    slots = num_passes * tasks.num_ranks
    loads, rooms = np.zeros((1, slots)), np.zeros((1, slots))
    history: list[list[tuple[int, int]]] = [[]]
    for tree in order[:BEAM_PREFIX]:
        found: list[tuple[float, float, int, int, int]] = []
        for level, width in enumerate(tasks.degrees[:num_levels]):
            seconds, need = float(tasks.seconds[tree, level]), float(tasks.room[tree, level])
            if not np.isfinite(seconds):
                continue
            block = loads.reshape(len(loads), -1, width).max(axis=2)
            taken = rooms.reshape(len(rooms), -1, width).max(axis=2)
            block = np.where(taken + need <= 1.0, block, np.inf)
            least = block.argmin(axis=1)
            for state, node in enumerate(least.tolist()):
                if np.isfinite(block[state, node]):
                    critical = max(float(loads[state].max()), float(block[state, node]) + seconds)
                    total = float(loads[state].sum()) + width * seconds
                    found.append((critical, total, state, level, node))
        if not found:
            return None
        found.sort()
        kept = found[:BEAM_WIDTH]
        states = [state for _, _, state, _, _ in kept]
        loads, rooms = loads[states].copy(), rooms[states].copy()
        history = [[*history[state], (level, node)] for _, _, state, level, node in kept]
        for row, (_, _, _, level, node) in enumerate(kept):
            width = tasks.degrees[level]
            loads[row, node * width : (node + 1) * width] += tasks.seconds[tree, level]
            rooms[row, node * width : (node + 1) * width] += tasks.room[tree, level]
    return _complete(tasks, order, loads, rooms, history, num_passes)


def _complete(
    tasks: _Tasks,
    order: list[int],
    loads: Floats,
    rooms: Floats,
    history: list[list[tuple[int, int]]],
    num_passes: int,
) -> _Layout | None:
    """The tail, tree by tree, on the least loaded leaf with room; where a leaf cannot hold it, on the least node."""
    rows = np.arange(len(loads))
    for tree in order[BEAM_PREFIX:]:
        level = int(np.isfinite(tasks.seconds[tree]).argmax())
        width = tasks.degrees[level]
        seconds, need = tasks.seconds[tree, level], tasks.room[tree, level]
        block = loads.reshape(len(loads), -1, width).max(axis=2)
        taken = rooms.reshape(len(rooms), -1, width).max(axis=2)
        block = np.where(taken + need <= 1.0, block, np.inf)
        node = block.argmin(axis=1)
        for row in rows.tolist():
            span = slice(int(node[row]) * width, (int(node[row]) + 1) * width)
            loads[row, span] += seconds if np.isfinite(block[row, node[row]]) else np.inf
            rooms[row, span] += need
            history[row].append((level, int(node[row])))
    best = int(loads.max(axis=1).argmin())
    if not np.isfinite(loads[best].max()):
        return None
    layout = _Layout(num_passes, pass_seconds=loads[best].reshape(num_passes, -1).max(axis=1).tolist())
    for tree, (level, node) in zip(order, history[best], strict=True):
        first = node * tasks.degrees[level]
        layout.level[tree], layout.place[tree] = level, divmod(first, tasks.num_ranks)
    return layout


def _in_groups(tasks: _Tasks, num_passes: int, fixed: float, degree: int | None) -> _Layout | None:
    """Groups that keep their size during a pass: one size (``degree``), or the best of two sizes (FlexSP)."""
    best: _Layout | None = None
    for groups in _group_sizes(tasks, degree):
        layout = _fill_groups(tasks, groups, num_passes)
        if layout is not None and (best is None or layout.seconds(fixed) < best.seconds(fixed)):
            best = layout
    return best


def _group_sizes(tasks: _Tasks, degree: int | None) -> list[list[int]]:
    """Levels of the groups of a pass, largest first: all of one size, or of two sizes in eighths of the ranks."""
    if degree is not None:
        return [[tasks.degrees.index(degree)] * (tasks.num_ranks // degree)]
    found = []
    for small, few in enumerate(tasks.degrees):
        for large in range(small, len(tasks.degrees)):
            many = tasks.degrees[large]
            step = max(1, tasks.num_ranks // many // 8)
            counts = range(step, tasks.num_ranks // many, step) if large > small else [0]
            for count in counts:
                found.append([large] * count + [small] * ((tasks.num_ranks - count * many) // few))
    return found


def _fill_groups(tasks: _Tasks, groups: list[int], num_passes: int) -> _Layout | None:
    """Longest tree first to the group that would be done with it first."""
    levels = np.array(groups * num_passes)
    widths = np.array(tasks.degrees)[levels]
    firsts = (widths.cumsum() - widths) % tasks.num_ranks
    passes = np.repeat(np.arange(num_passes), len(groups))
    loads, rooms = np.zeros(len(levels)), np.zeros(len(levels))
    layout = _Layout(num_passes)
    for tree in tasks.order:
        done = loads + tasks.seconds[tree, levels]
        full: Bools = rooms + tasks.room[tree, levels] > 1.0
        done[full] = np.inf
        group = int(done.argmin())
        if not np.isfinite(done[group]):
            return None
        loads[group] = done[group]
        rooms[group] += tasks.room[tree, levels[group]]
        layout.level[tree] = int(levels[group])
        layout.place[tree] = int(passes[group]), int(firsts[group])
    layout.pass_seconds = [float(loads[passes == number].max()) for number in range(num_passes)]
    return layout
