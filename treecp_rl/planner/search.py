"""One tree's lengths -> the best candidate: AugTree's Algorithm 1, in the paper's plan space or in ours.

Every candidate of every degree is scored at once (``forms``), what does not fit is left out, and the first of the
cheapest wins, which is what Algorithm 1's loop returns. Exhaustive over its candidates; a placement of responses on
lanes is exact for few of them and bounded beyond (``assign``).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import ceil

import numpy as np

from treecp_rl.errors import BatchError, PlanError
from treecp_rl.planner.assign import (
    EXACT_UNITS,
    FewUnits,
    Grid,
    Lanes,
    assign,
    assign_grid,
    by_size,
    fill_largest_first,
    loads_of,
    lower_bound,
)
from treecp_rl.planner.cost import in_gib
from treecp_rl.planner.forms import (
    Bools,
    Candidate,
    CostTable,
    FeatureIndex,
    Floats,
    RunOptions,
    Space,
    candidates,
    cost_table,
    token_pairs,
)
from treecp_rl.planner.place import ZIGZAG_FLOOR
from treecp_rl.planner.profile import ClusterProfile

DEFAULT_OPTIONS = RunOptions()


@dataclass(frozen=True, slots=True)
class TreeLengths:
    """One group: tokens of its prompt and of each response.

    Raises:
        BatchError: no response, or a length below 1.
    """

    prompt: int
    responses: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.responses:
            raise BatchError(f"a tree with a prompt of {self.prompt} tokens has no response; drop the group")
        if self.prompt < 1 or min(self.responses) < 1:
            raise BatchError(
                f"prompt {self.prompt} with responses of {min(self.responses)} to {max(self.responses)} tokens: "
                "every length must be 1 or more; drop empty rows"
            )

    @property
    def num_tokens(self) -> int:
        """Unique tokens of the tree."""
        return self.prompt + sum(self.responses)


@dataclass(frozen=True, slots=True)
class TreeChoice:
    """What is best for one tree alone."""

    candidate: Candidate
    seconds: float
    peak_bytes: float
    moved_bytes: float
    lane_of: tuple[int, ...]
    """Lane of each response."""
    round_of: tuple[int, ...]
    """Round of each response."""
    lanes_gap: float
    """Work of the busiest lane over its proven lower bound, less 1."""
    num_candidates: int


class Workload:
    """One tree's works, and what has been worked out about its lanes."""

    def __init__(self, tree: TreeLengths, token_pairs: float) -> None:
        self.tree = tree
        self.token_pairs = token_pairs
        per_token = token_pairs + tree.prompt + 0.5
        self.works = [r * (per_token + 0.5 * r) for r in tree.responses]
        """w_k of each response, in pairs: linear layers, the prompt's keys, its own."""
        self._filled: dict[int, tuple[list[int], tuple[float, int]]] = {}

    @property
    def prompt_work(self) -> float:
        return self.tree.prompt * (self.token_pairs + 0.5 * self.tree.prompt)

    def critical_lane(self, lanes: int) -> list[int]:
        """Units of the busiest of fewer lanes than units."""
        if len(self.works) <= EXACT_UNITS:
            return self._few_units.critical_lane(lanes)
        lane_of, (_, busiest) = self._fill(lanes)
        return [i for i, lane in enumerate(lane_of) if lane == busiest]

    @property
    def single(self) -> Grid:
        """All responses in one lane and one round."""
        work, nobody = sum(self.works), (0,) * len(self.works)
        return Grid(Lanes(nobody, work, work), nobody)

    def assign(self, lanes: int, polish_nodes: int) -> Lanes:
        """Lane of each unit."""
        if lanes >= len(self.works) or (polish_nodes and len(self.works) > EXACT_UNITS):
            return assign(self.works, lanes, polish_nodes)
        if len(self.works) <= EXACT_UNITS:
            return self._few_units.assign(lanes)
        lane_of, (makespan, _) = self._fill(lanes)
        return Lanes(tuple(lane_of), makespan, lower_bound(self.works, lanes))

    def _fill(self, lanes: int) -> tuple[list[int], tuple[float, int]]:
        if lanes not in self._filled:
            self._filled[lanes] = fill_largest_first(self.works, lanes, self._order)
        return self._filled[lanes]

    @cached_property
    def _order(self) -> list[int]:
        return by_size(self.works)

    @cached_property
    def _few_units(self) -> FewUnits:
        return FewUnits(self.works)


class TreeSearch:
    """Searches trees one by one; tables of coefficients are kept for each group size."""

    def __init__(
        self,
        profile: ClusterProfile,
        degrees: tuple[int, ...],
        options: RunOptions = DEFAULT_OPTIONS,
        space: Space = "full",
        memory_bytes: int | None = None,
    ) -> None:
        """
        Args:
            degrees: CP degrees D to try, ascending.
            space: ``augtree`` is Algorithm 1's, ``full`` adds fused passes, gather and heads, ``split`` has only the
                full space's splits.
            memory_bytes: that a rank may hold; None: the profile's.
        """
        self._profile, self._options, self._space, self._degrees = profile, options, space, degrees
        self._memory_bytes = profile.memory.bytes_per_rank if memory_bytes is None else memory_bytes
        self._token_pairs = token_pairs(profile)
        self._tables: dict[int, tuple[CostTable, CostTable]] = {}

    def table(self, num_responses: int) -> CostTable:
        """Coefficients of all candidates of such a tree."""
        return self._both_tables(num_responses)[1]

    def _both_tables(self, num_responses: int) -> tuple[CostTable, CostTable]:
        """Of candidates of one round, and of all."""
        if num_responses not in self._tables:
            chosen = candidates(self._space, self._degrees, num_responses, self._profile.shape.num_kv_heads)
            in_one_round = tuple(one for one in chosen if one.rounds == 1)
            self._tables[num_responses] = (
                cost_table(self._profile, self._options, in_one_round),
                cost_table(self._profile, self._options, chosen),
            )
        return self._tables[num_responses]

    def __call__(self, tree: TreeLengths, polish_nodes: int = 0) -> TreeChoice:
        """The candidate with the least predicted seconds that fits.

        Args:
            polish_nodes: of branch and bound over the chosen placement where it is not proven best; 1000 take
                about 4 ms.

        Raises:
            PlanError: no candidate fits; says what the leanest needs.
        """
        in_one_round, table = self._both_tables(len(tree.responses))
        workload = Workload(tree, self._token_pairs)
        features = tree_features(workload, table.index)
        # Rounds only ever add seconds: they matter where the fastest does not fit without.
        found = self._first_settled(
            workload,
            in_one_round,
            in_one_round.seconds(features),
            features,
            polish_nodes,
            stops_at_misfit=True,
        )
        if found is None:
            limits = table.limits @ features
            fits = fitting(table, features, limits, self._memory_bytes, self._options)
            seconds = np.where(fits, table.seconds(features), np.inf)
            found = self._first_settled(workload, table, seconds, features, polish_nodes)
            if found is None:
                raise no_fit(tree, table, features, self._memory_bytes, self._options)
        return found

    def _first_settled(
        self,
        workload: Workload,
        table: CostTable,
        seconds: Floats,
        features: Floats,
        polish_nodes: int,
        *,
        stops_at_misfit: bool = False,
    ) -> TreeChoice | None:
        """The fastest candidate with its lanes and rounds as memory lets them be.

        Args:
            seconds: [C] of candidates, infinite of those that are known not to fit; changed.
            stops_at_misfit: whether to give up where the fastest does not fit; else the next is tried.

        Returns:
            None: none fits, or it gave up.
        """
        settled: dict[int, Grid] = {}
        while True:
            best = int(seconds.argmin())
            if seconds[best] == np.inf or (
                stops_at_misfit and not self._fits(table, best, features, workload.tree)
            ):
                return None
            if best in settled:
                return self._choice(table, best, float(seconds[best]), features, settled[best])
            grid = self._as_scored(workload, table, best, features, polish_nodes)
            if grid is not None:
                return self._choice(table, best, float(seconds[best]), features, grid)
            # The table takes lanes as if memory let them be, and rounds as even: at most too fast.
            capacity = self._capacity(workload, table, best, features)
            grid = self._grid(workload, table.candidates[best], capacity, polish_nodes)
            if grid is not None:
                settled[best] = grid
                seconds[best] = self._seconds(workload, table, best, features, grid)
            elif stops_at_misfit:
                return None
            else:
                seconds[best] = np.inf

    def _choice(
        self, table: CostTable, best: int, seconds: float, features: Floats, grid: Grid
    ) -> TreeChoice:
        return TreeChoice(
            table.candidates[best],
            seconds,
            float(table.limits[best] @ features),
            float(table.moved[best] @ features),
            grid.lanes.lane_of,
            grid.round_of,
            grid.lanes.makespan / grid.lanes.lower_bound - 1,
            len(self.table(len(grid.round_of)).candidates),
        )

    def _fits(self, table: CostTable, one: int, features: Floats, tree: TreeLengths) -> bool:
        """As ``fitting``, of one candidate."""
        room = self._options.tokens_per_rank
        return (
            table.degree[one] <= (tree.prompt if table.is_split[one] else tree.num_tokens)
            and float(table.limits[one] @ features) <= self._memory_bytes
            and (room is None or float(table.limits[len(table.candidates) + one] @ features) <= room)
        )

    def _as_scored(
        self, workload: Workload, table: CostTable, best: int, features: Floats, polish_nodes: int
    ) -> Grid | None:
        """The placement that the table's seconds are of, where each lane fits: none holds more than the busiest, whose
        bytes the table's are, or than memory lets it."""
        one = table.candidates[best]
        if one.form == "flat" or one.rounds * one.lanes == 1:
            return workload.single
        if one.rounds > 1 or polish_nodes:
            return None
        free = workload.assign(one.lanes, 0)
        tokens = loads_of(workload.tree.responses, free.lane_of, one.lanes)
        most = max(tokens)
        is_as_busiest = most <= features[table.index.position[f"lane/{one.lanes}"]]
        if not is_as_busiest and most > self._capacity(workload, table, best, features):
            return None
        return Grid(free, (0,) * len(workload.works))

    def _grid(self, workload: Workload, one: Candidate, capacity: float, polish_nodes: int) -> Grid | None:
        """Lane and round of each response; None: they need more rounds, or one needs more memory."""
        tokens = workload.tree.responses
        rounds = one.rounds if one.form == "split" else 1
        if one.lanes == 1 and sum(tokens) <= capacity:
            return workload.single
        if rounds == 1 and one.lanes > 1:
            free = workload.assign(one.lanes, polish_nodes)
            if max(loads_of(tokens, free.lane_of, one.lanes)) <= capacity:
                return Grid(free, (0,) * len(tokens))
        return assign_grid(workload.works, tokens, rounds, one.lanes, capacity, polish_nodes)

    def _capacity(self, workload: Workload, table: CostTable, best: int, features: Floats) -> float:
        """Most response tokens of a lane in a round: what memory leaves beside the prompt, or the token budget."""
        one = table.candidates[best]
        # Either all responses are alike to a rank, or its lane's are.
        of_all, of_lane = (table.index.position[name] for name in ("responses", f"lane/{one.lanes}"))
        bounds = [(best, float(self._memory_bytes))]
        if self._options.tokens_per_rank is not None:
            bounds.append((len(table.candidates) + best, float(self._options.tokens_per_rank)))
        room = np.inf
        for number, limit in bounds:
            row = table.limits[number]
            a, b = float(row[of_all]), float(row[of_lane])
            used = a * float(features[of_all]) + b * float(features[of_lane])
            room = min(room, (limit - float(row @ features) + used) / (a + b))
        return room / one.rounds * (1 + 1e-12)

    def _seconds(
        self, workload: Workload, table: CostTable, best: int, features: Floats, grid: Grid
    ) -> float:
        """Of a candidate with its lanes as they are."""
        one, index = table.candidates[best], table.index
        start = int(table.starts[best])
        stop = int(table.starts[best + 1]) if best + 1 < len(table.starts) else len(table.floor)
        if one.lanes > 1:
            features = features.copy()
            responses = workload.tree.responses
            loads = loads_of(workload.works, grid.lanes.lane_of, one.lanes)
            busiest = loads.index(max(loads))
            lane = [r for r, at in zip(responses, grid.lanes.lane_of, strict=True) if at == busiest]
            features[index.position[f"lane/{one.lanes}"]] = sum(lane)
            features[index.position[f"lane_cross/{one.lanes}"]] = workload.tree.prompt * sum(lane)
            features[index.position[f"lane_pairs/{one.lanes}"]] = 0.5 * sum(r * (r + 1) for r in lane)
        rows = np.maximum(table.stacked[start:stop] @ features, table.floor[start:stop])
        return float(rows.sum())


def search(
    tree: TreeLengths,
    profile: ClusterProfile,
    degrees: tuple[int, ...],
    options: RunOptions = DEFAULT_OPTIONS,
    space: Space = "full",
    polish_nodes: int = 0,
) -> TreeChoice:
    """``TreeSearch`` for one tree."""
    return TreeSearch(profile, degrees, options, space)(tree, polish_nodes)


def tree_features(workload: Workload, index: FeatureIndex) -> Floats:
    """[F] of one tree. Plain Python: for a tree's few numbers it is faster than numpy."""
    prompt, responses = workload.tree.prompt, workload.tree.responses
    group, total = len(responses), sum(responses)
    own_pairs = 0.5 * (sum([r * r for r in responses]) + total)
    prompt_pairs = 0.5 * prompt * (prompt + 1)
    tokens, pairs = [total], [own_pairs]
    largest = max(responses)
    for s in index.lanes[1:]:
        of_lane = [responses[i] for i in workload.critical_lane(s)] if s < group else [largest]
        tokens.append(sum(of_lane))
        pairs.append(0.5 * (sum([r * r for r in of_lane]) + tokens[-1]))
    row = [1.0, prompt, prompt_pairs, total, prompt * total, own_pairs, group, group * prompt]
    row.append(group * prompt_pairs)
    row += tokens
    row += [prompt * count for count in tokens]
    row += pairs
    per_token = workload.token_pairs + prompt
    # As exact as the choice between lanes and cuts is: a lane's work in terms of its tokens and pairs.
    lane_works = [per_token * count + own for count, own in zip(tokens, pairs, strict=True)]
    row += _zigzag_features(workload, index, lane_works)
    return np.array(row, dtype=np.float64)


EVEN_PART = 0.03
"""Part of a tree's work by which lanes may differ when filled largest first and still be taken as even: the engine's
own search finds evener ones (``place.placements``), which it then chooses over cutting responses."""
UNCUT_EXCESS = 0.1
"""Part of a share that a rank takes on rather than have a response cut. Measured, not derived."""
WRAPPED_CUT = 0.1
"""Where whole responses are uneven and none is long, some are wrapped around the ranks: of the tiles that a long
response's cut adds, so many for each rank. Measured, not derived."""


def _zigzag_features(workload: Workload, index: FeatureIndex, lane_works: list[float]) -> list[float]:
    """Long responses, and those that ``gather`` cuts: over ranks of their own, or over those of an even lane."""
    ordered, works = sorted(workload.tree.responses), sorted(workload.works)
    group, of_responses = len(works), sum(works)
    work = of_responses + workload.prompt_work
    sums = [0, *accumulate(reversed(ordered))]
    long = [group - bisect_left(ordered, floor) for floor in index.zigzag_floors]
    limit = of_responses + EVEN_PART * work
    even = [s for s, w in zip(index.lanes, lane_works, strict=True) if s > 1 and s * w <= limit]
    busiest = dict(zip(index.lanes, lane_works, strict=True))
    cut: list[float] = []
    cut_tokens: list[float] = []
    for d, num_long in zip(index.degrees, long, strict=True):
        share = work / d
        first = max(group - num_long, bisect_right(works, share))
        if first == group:
            is_uneven = d * busiest.get(d, works[-1]) > limit
            cut.append(WRAPPED_CUT * (d - 1) if is_uneven else 0.0)
            cut_tokens.append(0.0)
            continue
        count, tokens = cut_in_parts(ordered[first:], works[first:], share, d)
        lanes = even[bisect_right(even, d) - 1] if even and even[0] <= d else 1
        if lanes > 1:
            per_lane = d // lanes
            in_lanes = (group - bisect_left(ordered, 2 * per_lane * ZIGZAG_FLOOR)) if per_lane > 1 else 0
            lane_tokens = sums[in_lanes] * (per_lane - 1) / (d - 1)
            if lane_tokens <= tokens:
                count, tokens = in_lanes / lanes, lane_tokens
        cut.append(count)
        cut_tokens.append(tokens)
    return [*long, *[sums[n] for n in long], *cut, *cut_tokens]


def cut_in_parts(responses: list[int], works: list[float], share: float, degree: int) -> tuple[float, float]:
    """Responses that are cut over as many ranks of their own as they fill, a share of work each, and their ends on one
    more: how many a rank holds a part of, and their tokens as if they were cut over all ranks.

    A zigzag's ranks lack three quarters of what the others hold, and who holds the ends lacks all else.
    """
    count, tokens = 0, 0.0
    others = max(1, degree - 1)
    for response, work in zip(responses, works, strict=True):
        of_share = work / share
        ranks = int(of_share)
        if of_share > ranks + UNCUT_EXCESS:
            count += ranks + 1
            lacking = ranks + 1 / 3
        else:
            count += ranks
            lacking = ranks - 1
        tokens += response * lacking if lacking < others else response * others
    return count / degree, tokens / others


def fitting(
    table: CostTable, features: Floats, limits: Floats, memory_bytes: float, options: RunOptions
) -> Bools:
    """[..., C] which candidates a tree with ``features`` [..., F] and ``limits`` [..., 2 C] may take."""
    count = len(table.candidates)
    fits: Bools = limits[..., :count] <= memory_bytes
    fits &= table.has_tokens(features)
    if options.tokens_per_rank is not None:
        fits &= limits[..., count:] <= options.tokens_per_rank
    return fits


def no_fit(
    tree: TreeLengths, table: CostTable, features: Floats, memory_bytes: float, options: RunOptions
) -> PlanError:
    """What to say of a tree that nothing fits."""
    count, limits = len(table.candidates), table.limits @ features
    possible = table.has_tokens(features)
    leanest = int(np.where(possible, limits[:count], np.inf).argmin())
    need, have = float(limits[leanest]), memory_bytes
    ranks = int(table.degree.max())
    if options.tokens_per_rank is not None and need <= have:
        tokens = float(np.where(possible, limits[count:], np.inf).min())
        if tokens <= options.tokens_per_rank:
            longest = tree.prompt + max(tree.responses)
            return PlanError(
                f"a tree with a row of {longest} tokens (prompt {tree.prompt}) has no rounds of at most "
                f"{options.tokens_per_rank} tokens a rank on {ranks} ranks; raise tokens_per_rank to "
                f"{-(-longest // ranks)} or more, or the ranks"
            )
        return PlanError(
            f"a tree of {tree.num_tokens} tokens needs {ceil(tokens)} tokens a rank on {ranks} ranks, the budget is "
            f"{options.tokens_per_rank}; raise tokens_per_rank or the ranks"
        )
    if need <= have:
        return PlanError(
            f"a tree of {tree.num_tokens} tokens (longest response {max(tree.responses)}) has no rounds that fit "
            f"{in_gib(have)} a rank; raise the ranks, now {ranks}, or shorten its rows"
        )
    return PlanError(
        f"a tree of {tree.num_tokens} tokens (prompt {tree.prompt}) needs {in_gib(need)} a rank by its "
        f"leanest plan ({table.candidates[leanest]}), a rank has {in_gib(have)}; raise the ranks, now "
        f"{ranks}, or shorten its rows"
    )
