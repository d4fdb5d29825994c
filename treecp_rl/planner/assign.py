"""Works of responses, lanes -> which lane runs which response: AugTree's AssignGrid (Eq. 6), with a bound.

Up to ``EXACT_UNITS`` units all that could be best is tried, a dynamic program over subsets saying what memory allows;
above, largest first, and branch and bound where a caller asks to close what is left. Lanes are alike, so that a
lane's work is all that counts; rounds only cut a lane where its memory ends, because Eq. 6 adds up all rounds of a
lane.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from treecp_rl.planner.forms import Bools, Floats, Ints

EXACT_UNITS = 8
"""U_max: most units of which all that could be best is tried."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """Units on lanes."""

    lane_of: tuple[int, ...]
    """Of each unit."""
    makespan: float
    """Work of the busiest lane."""
    lower_bound: float
    """No assignment has less, memory left aside."""

    @property
    def is_proven(self) -> bool:
        """Whether no assignment is better."""
        return self.makespan <= self.lower_bound * (1 + 1e-9)


@dataclass(frozen=True, slots=True)
class Grid:
    """Units on lanes and rounds, X in the paper."""

    lanes: Lanes
    round_of: tuple[int, ...]


def lower_bound(works: Sequence[float], lanes: int) -> float:
    """max(mean, largest unit, the s-th and (s+1)-th largest together): two of s + 1 units share a lane."""
    ordered = sorted(works, reverse=True)
    pair = ordered[lanes - 1] + ordered[lanes] if len(ordered) > lanes else 0.0
    return max(sum(ordered) / lanes, ordered[0], pair)


def assign(works: Sequence[float], lanes: int, num_nodes: int = 0) -> Lanes:
    """Assign units to lanes, the busiest lane being as light as possible.

    Args:
        works: of each unit, positive.
        lanes: s.
        num_nodes: nodes that branch and bound may visit above ``EXACT_UNITS`` units.
    """
    if lanes >= len(works):
        return Lanes(tuple(range(len(works))), max(works), max(works))
    if len(works) <= EXACT_UNITS:
        return FewUnits(works).assign(lanes)
    found, least = largest_first(works, lanes), lower_bound(works, lanes)
    makespan = max(loads_of(works, found, lanes))
    if num_nodes and makespan > least * (1 + 1e-9):
        found, makespan, is_optimal = _branch(works, lanes, found, makespan, least, num_nodes)
        least = makespan if is_optimal else least
    return Lanes(tuple(found), makespan, least)


def assign_grid(
    works: Sequence[float],
    tokens: Sequence[int],
    rounds: int,
    lanes: int,
    capacity: float,
    num_nodes: int = 0,
) -> Grid | None:
    """Assign units to lanes and rounds, no lane holding more than ``capacity`` tokens in a round.

    Up to ``EXACT_UNITS`` units the busiest lane is as light as memory allows; above, the lanes of ``assign`` are
    cut into rounds, and if they need too many, lanes are filled by tokens instead.

    Returns:
        None where no assignment was found.
    """
    free = assign(works, lanes, num_nodes)
    round_of = cut_into_rounds(tokens, free.lane_of, rounds, capacity)
    if round_of is not None:
        return Grid(free, round_of)
    if max(tokens) > capacity:
        return None
    if len(works) <= EXACT_UNITS:
        allowed = makespans(subset_sums(tokens, by_size(works)), rounds) <= capacity
        capped = FewUnits(works, allowed).assign(min(lanes, len(works)))
        if capped.makespan == np.inf:
            return None
        exact_rounds = [0] * len(works)
        for lane in set(capped.lane_of):
            units = [unit for unit, its in enumerate(capped.lane_of) if its == lane]
            cut = assign([tokens[unit] for unit in units], rounds)
            for unit, its_round in zip(units, cut.lane_of, strict=True):
                exact_rounds[unit] = its_round
        return Grid(Lanes(capped.lane_of, capped.makespan, free.lower_bound), tuple(exact_rounds))
    lane_of = largest_first(tokens, lanes)
    round_of = cut_into_rounds(tokens, lane_of, rounds, capacity)
    if round_of is None:
        return None
    makespan = max(loads_of(works, lane_of, lanes))
    return Grid(Lanes(tuple(lane_of), makespan, free.lower_bound), round_of)


def largest_first(works: Sequence[float], lanes: int) -> list[int]:
    """Each unit, the largest first, to the lightest lane: at most 4/3 - 1/(3 s) of the best (Graham 1969)."""
    return fill_largest_first(works, lanes, by_size(works))[0]


def fill_largest_first(
    works: Sequence[float], lanes: int, order: Sequence[int]
) -> tuple[list[int], tuple[float, int]]:
    """As ``largest_first``, and the work and number of the busiest lane.

    Args:
        order: units, largest first.
    """
    lane_of = [0] * len(works)
    # The largest find empty lanes.
    for lane, unit in enumerate(order[:lanes]):
        lane_of[unit] = lane
    heap = [(works[unit], lane) for lane, unit in enumerate(order[:lanes])]
    heap += [(0.0, lane) for lane in range(len(heap), lanes)]
    heapq.heapify(heap)
    replace = heapq.heapreplace
    for unit in order[lanes:]:
        load, lane = heap[0]
        replace(heap, (load + works[unit], lane))
        lane_of[unit] = lane
    return lane_of, max(heap)


def by_size(works: Sequence[float]) -> list[int]:
    """Units, largest first."""
    return sorted(range(len(works)), key=works.__getitem__, reverse=True)


def loads_of(works: Sequence[float], lane_of: Sequence[int], lanes: int) -> list[float]:
    """Work of each lane."""
    loads = [0.0] * lanes
    for work, lane in zip(works, lane_of, strict=True):
        loads[lane] += work
    return loads


class FewUnits:
    """The best lanes of at most ``EXACT_UNITS`` units, by trying every way that could be best."""

    def __init__(self, works: Sequence[float], allowed: Bools | None = None) -> None:
        """
        Args:
            allowed: [2^U] whether a subset may share a lane, the largest unit being bit 0; None: every one may.
        """
        self.order = by_size(works)
        self._sums = subset_sums(works, self.order)
        self._loads = self._sums if allowed is None else np.where(allowed, self._sums, np.inf)
        self._best: dict[int, tuple[list[int], list[float]]] = {}

    def lanes(self, lanes: int) -> tuple[list[int], list[float]]:
        """Units of each lane as bits, the largest unit being bit 0, and each lane's work; infinite: none is allowed.

        Args:
            lanes: at most as many as there are units.
        """
        if lanes not in self._best:
            ways = _ways(len(self.order), lanes)
            loads = self._loads.take(ways)
            chosen = int(np.maximum.reduce(loads).argmin())
            self._best[lanes] = ways[:, chosen].tolist(), loads[:, chosen].tolist()
        return self._best[lanes]

    def critical_lane(self, lanes: int) -> list[int]:
        """Units of the busiest lane."""
        subsets, loads = self.lanes(lanes)
        return units_of(subsets[loads.index(max(loads))], self.order)

    def assign(self, lanes: int) -> Lanes:
        """Lane of each unit, the busiest lane as light as can be; infinite work if no assignment is allowed."""
        lane_of = [0] * len(self.order)
        subsets, loads = self.lanes(lanes)
        for lane, subset in enumerate(subsets):
            for unit in units_of(subset, self.order):
                lane_of[unit] = lane
        return Lanes(tuple(lane_of), max(loads), max(loads))


def units_of(subset: int, order: Sequence[int]) -> list[int]:
    """Units of a subset's bits, the largest unit being bit 0."""
    return [unit for place, unit in enumerate(order) if subset >> place & 1]


def subset_sums(works: Sequence[float], order: Sequence[int]) -> Floats:
    """[2^U] work of each subset, the largest unit being bit 0."""
    sums: Floats = _membership(len(works)) @ np.array([works[unit] for unit in order], dtype=np.float64)
    return sums


@lru_cache(maxsize=EXACT_UNITS)
def _membership(num_units: int) -> Floats:
    """[2^U, U]"""
    return (np.arange(1 << num_units)[:, None] >> np.arange(num_units) & 1).astype(np.float64)


@lru_cache(maxsize=EXACT_UNITS**2)
def _ways(num_units: int, lanes: int) -> Ints:
    """[s, N] ways to deal units out to lanes, as subsets, of which one is best whatever the works are.

    No lane is empty, and who has a lane to itself is larger than who shares one: to change the two would not make the
    busiest lane busier. Of 1701 ways to deal 8 units out to 4 lanes that leaves 236.
    """
    found: list[tuple[int, ...]] = []

    def deal(rest: int, to_fill: int, subsets: tuple[int, ...]) -> None:
        """Two units or more to each lane."""
        if not to_fill:
            if not rest:
                found.append(subsets)
            return
        largest = rest & -rest
        others = part = rest ^ largest
        while part:
            deal(others ^ part, to_fill - 1, (*subsets, largest | part))
            part = (part - 1) & others

    for alone in range(lanes + 1):
        rest = (1 << num_units) - (1 << alone)
        deal(rest, lanes - alone, tuple(1 << unit for unit in range(alone)))
    return np.array(found).T.copy()


@lru_cache(maxsize=EXACT_UNITS)
def _splits(num_units: int) -> tuple[Ints, Ints, Ints]:
    """Every (part, rest) of each subset in turn, and where a subset's begin.

    A part holds its subset's lowest unit, so that no split is counted twice.
    """
    sets = np.arange(1 << num_units)
    parts, firsts = [0], [0]
    for whole in range(1, 1 << num_units):
        firsts.append(len(parts))
        low, rest = whole & -whole, whole & (whole - 1)
        part = rest
        while True:
            parts.append(part | low)
            if not part:
                break
            part = (part - 1) & rest
    counts = np.diff([*firsts, len(parts)])
    return np.array(parts), np.repeat(sets, counts) ^ np.array(parts), np.array(firsts)


def makespans(sums: Floats, lanes: int) -> Floats:
    """[2^U] least work of the busiest of so many lanes for each subset, by dynamic programming over subsets."""
    if lanes == 1:
        return sums
    parts, rests, firsts = _splits(len(sums).bit_length() - 1)
    many, few = makespans(sums, lanes - lanes // 2), makespans(sums, lanes // 2)
    best: Floats = np.minimum.reduceat(np.maximum(many.take(parts), few.take(rests)), firsts)
    return best


def _branch(
    works: Sequence[float], lanes: int, found: list[int], makespan: float, least: float, num_nodes: int
) -> tuple[list[int], float, bool]:
    """Depth first, largest unit first, lightest lane first; of equally loaded lanes only one is tried."""
    order = sorted(range(len(works)), key=works.__getitem__, reverse=True)
    best, budget = list(found), num_nodes
    loads, chosen = [0.0] * lanes, [0] * len(works)

    def visit(depth: int) -> bool:
        """Whether the subtree was searched to its end, or the bound reached."""
        nonlocal best, makespan, budget
        if depth == len(order):
            makespan = max(loads)
            best = list(chosen)
            return True
        budget -= 1
        if budget < 0:
            return False
        unit, tried = order[depth], set()
        for lane in sorted(range(lanes), key=loads.__getitem__):
            load = loads[lane]
            if load + works[unit] >= makespan * (1 - 1e-12) or load in tried:
                continue
            tried.add(load)
            loads[lane], chosen[unit] = load + works[unit], lane
            is_done = visit(depth + 1)
            loads[lane] = load
            if not is_done:
                return False
            if makespan <= least * (1 + 1e-9):
                return True
        return True

    is_optimal = visit(0)
    return best, makespan, is_optimal


def cut_into_rounds(
    tokens: Sequence[int], lane_of: Sequence[int], rounds: int, capacity: float
) -> tuple[int, ...] | None:
    """Round of each unit, so that no lane holds more than ``capacity`` tokens in a round; None: none was found.

    Lanes are cut one by one, since memory is a lane's own: evenly, and first fit where even rounds do not fit.
    """
    round_of = [0] * len(tokens)
    for lane in set(lane_of):
        units = [unit for unit, its in enumerate(lane_of) if its == lane]
        of_lane = [tokens[unit] for unit in units]
        cut = largest_first(of_lane, rounds)
        if max(loads_of(of_lane, cut, rounds)) > capacity:
            first = _first_fit(of_lane, capacity)
            if first is None or max(first) >= rounds:
                return None
            cut = first
        for unit, its_round in zip(units, cut, strict=True):
            round_of[unit] = its_round
    return tuple(round_of)


def _first_fit(tokens: Sequence[int], capacity: float) -> list[int] | None:
    """Bin of each unit, largest first; None: one is larger than a bin."""
    room: list[float] = []
    found = [0] * len(tokens)
    for unit in sorted(range(len(tokens)), key=tokens.__getitem__, reverse=True):
        if tokens[unit] > capacity:
            return None
        fit = next((i for i, left in enumerate(room) if left >= tokens[unit]), len(room))
        if fit == len(room):
            room.append(capacity)
        room[fit] -= tokens[unit]
        found[unit] = fit
    return found
