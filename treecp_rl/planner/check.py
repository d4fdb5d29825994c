"""Schedule -> nothing, or the reason why it must not run: proofs about a plan, before any collective.

What is proven: every token is owned once; every valid (query, key) pair is computed exactly once and no other;
every operand of a tile is owned by, or has arrived in one buffer at, the tile's rank; every moved token is read
where it arrives; every state of a moved query returns once, late enough; no rank exceeds its memory budget.
Collectives follow from the stage list, which is the same on all ranks, so their order agrees by construction.

Tiles and moves are checked as columns of integers: a proof of thousands of tiles takes milliseconds.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import lcm

import numpy as np
import numpy.typing as npt

from treecp_rl.errors import PlanError
from treecp_rl.plan import MOVE_KINDS, Move, MoveKind, Node, Schedule, Span, Tile
from treecp_rl.planner.cost import MemoryBudget

STATE_DELAY = 2
"""Stages from a tile to its state's return: stage i+1's moves are posted before stage i's tiles run."""

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def check(schedule: Schedule, nodes: Sequence[Node], budget: MemoryBudget | None = None) -> None:
    """Prove a schedule right for the trees it was lowered from.

    Args:
        budget: what a rank may hold; without one memory is not looked at.

    Raises:
        PlanError: the first rule that does not hold, with the span and rank where it fails.
    """
    forest = _Forest.of(schedule, nodes)
    owned = _owned(schedule)
    tiles, moves = _tile_table(schedule), _move_table(schedule)
    _check_fields(schedule, tiles, moves)
    parts = lcm(*np.unique(np.concatenate([tiles.num_parts, moves.num_parts])).tolist())
    for part in range(parts):
        # For one smallest part of the heads the rules know nothing of the others.
        some_tiles = tiles.where(part * tiles.num_parts // parts == tiles.part) if parts > 1 else tiles
        some_moves = moves.where(part * moves.num_parts // parts == moves.part) if parts > 1 else moves
        _check_coverage(forest, some_tiles)
        _check_traffic(schedule, owned, some_tiles, some_moves)
    if budget is not None:
        budget.require(schedule)


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Columns of a schedule's tiles."""

    stage: Ints
    rank: Ints
    query_start: Ints
    query_stop: Ints
    key_start: Ints
    key_stop: Ints
    causal: Ints
    part: Ints
    num_parts: Ints

    def where(self, chosen: Bools | Ints) -> "_Tiles":
        return _Tiles(*(getattr(self, name)[chosen] for name in self.__slots__))

    def describe(self, index: int) -> str:
        """One tile, with its stage, for a message."""
        stage, *row = [int(getattr(self, name)[index]) for name in self.__slots__]
        return f"stage {stage}: {Tile._make(row)}"


@dataclass(frozen=True, slots=True)
class _Moves:
    """Columns of a schedule's moves."""

    stage: Ints
    kind: Ints
    src: Ints
    dst: Ints
    start: Ints
    stop: Ints
    part: Ints
    num_parts: Ints

    def where(self, chosen: Bools | Ints) -> "_Moves":
        return _Moves(*(getattr(self, name)[chosen] for name in self.__slots__))

    def of_kind(self, kind: MoveKind) -> "_Moves":
        return self.where(self.kind == MOVE_KINDS.index(kind))

    def describe(self, index: int) -> str:
        """One move, with its stage, for a message."""
        stage, kind, *rest = [int(getattr(self, name)[index]) for name in self.__slots__]
        return f"stage {stage}: {Move(MOVE_KINDS[kind], *rest)}"


def _tile_table(schedule: Schedule) -> _Tiles:
    rows = chain.from_iterable(chain.from_iterable(stage.tiles for stage in schedule.stages))
    return _Tiles(*_columns(rows, [len(stage.tiles) for stage in schedule.stages], 8))


def _move_table(schedule: Schedule) -> _Moves:
    code = {kind: index for index, kind in enumerate(MOVE_KINDS)}
    rows = chain.from_iterable(
        (code[move.kind], *move[1:]) for stage in schedule.stages for move in stage.moves
    )
    return _Moves(*_columns(rows, [len(stage.moves) for stage in schedule.stages], 7))


def _columns(numbers: Iterable[int], per_stage: Sequence[int], width: int) -> Iterator[Ints]:
    total = sum(per_stage)
    table = np.fromiter(numbers, np.int64, total * width).reshape(total, width)
    yield np.repeat(np.arange(len(per_stage)), per_stage)
    yield from np.ascontiguousarray(table.T)


def _check_fields(schedule: Schedule, tiles: _Tiles, moves: _Moves) -> None:
    """Every number lies where numbers of its kind may lie."""
    for table, ranks, spans in (
        (tiles, [tiles.rank], [(tiles.query_start, tiles.query_stop), (tiles.key_start, tiles.key_stop)]),
        (moves, [moves.src, moves.dst], [(moves.start, moves.stop)]),
    ):
        for rank in ranks:
            _refuse(table, (rank < 0) | (rank >= schedule.world_size), "is on a rank outside the domain")
        for start, stop in spans:
            outside = (start < 0) | (stop > schedule.num_tokens) | (stop <= start)
            _refuse(table, outside, f"has a span that is empty or outside the pass's {schedule.num_tokens}")
        wrong_part = (table.part < 0) | (table.part >= table.num_parts)
        _refuse(table, wrong_part, "has a part of the heads that does not exist")
    _refuse(moves, moves.src == moves.dst, "goes nowhere")
    square = (tiles.query_start == tiles.key_start) & (tiles.query_stop == tiles.key_stop)
    _refuse(
        tiles, (tiles.causal != 0) & ~square, "is causal and not square: kernels disagree on its diagonal"
    )


def _refuse(table: _Tiles | _Moves, broken: Bools, reason: str) -> None:
    if broken.any():
        raise PlanError(f"{table.describe(int(np.argmax(broken)))} {reason}")


@dataclass(frozen=True, slots=True)
class _Forest:
    """Columns of the pass's nodes that hold tokens, ascending."""

    nodes: tuple[Node, ...]
    start: Ints
    depth: Ints
    """Position of each node's first token in its rows."""
    reaches: tuple[Ints, ...]
    """[i][n]: where the first of the subtrees of nodes n to n + 2**i - 1 ends."""
    pairs_before: Ints
    """Valid pairs of all queries before each node."""
    resident: tuple[Span, ...]
    num_tokens: int

    @classmethod
    def of(cls, schedule: Schedule, nodes: Sequence[Node]) -> "_Forest":
        depths: list[int] = []
        for node in nodes:
            parent = node.parent
            depths.append(depths[parent] + nodes[parent].stop - nodes[parent].start if parent >= 0 else 0)
        filled = [(node, depth) for node, depth in zip(nodes, depths, strict=True) if node.stop > node.start]
        cursor = 0
        for node, _ in filled:
            if node.start != cursor:
                raise PlanError(f"{node} does not start where the node before it ends, at {cursor}")
            cursor = node.stop
        if cursor != schedule.num_tokens:
            raise PlanError(f"the schedule has {schedule.num_tokens} tokens, its trees have {cursor}")
        roots = {(node.start, node.stop) for node in nodes if node.parent < 0}
        for span in schedule.resident:
            if span not in roots:
                raise PlanError(
                    f"tokens {span} are said to be resident, but only a whole root can be: {roots}"
                )
        resident = set(schedule.resident)
        length = np.array([node.stop - node.start for node, _ in filled], np.int64)
        depth = np.array([depth for _, depth in filled], np.int64)
        asks = np.array([(node.start, node.stop) not in resident for node, _ in filled], np.int64)
        pairs = (length * depth + length * (length + 1) // 2) * asks
        return cls(
            nodes=tuple(node for node, _ in filled),
            start=np.array([node.start for node, _ in filled], np.int64),
            depth=depth,
            reaches=_range_minima(np.array([node.subtree_stop for node, _ in filled], np.int64)),
            pairs_before=np.concatenate([np.zeros(1, np.int64), np.cumsum(pairs)]),
            resident=tuple(sorted(resident)),
            num_tokens=schedule.num_tokens,
        )

    def reach(self, start: Ints, stop: Ints) -> Ints:
        """One past the last token that attends to all of [start, stop) and lies behind it."""
        first = np.searchsorted(self.start, start, "right") - 1
        last = np.searchsorted(self.start, stop - 1, "right") - 1
        found = np.empty_like(start)
        level = np.frexp((last - first + 1).astype(np.float64))[1] - 1
        for i in np.unique(level).tolist():
            of_level = level == i
            minima = self.reaches[i]
            found[of_level] = np.minimum(minima[first[of_level]], minima[last[of_level] + 1 - (1 << i)])
        return found

    def num_pairs(self, borders: Ints) -> Ints:
        """Valid pairs of the queries between neighbouring borders, none for queries of resident spans."""
        node = np.searchsorted(self.start, borders, "right") - 1
        inside = borders - self.start[node]
        is_asked = self.pairs_before[node + 1] > self.pairs_before[node]
        before = self.pairs_before[node]
        before += (inside * self.depth[node] + inside * (inside + 1) // 2) * is_asked
        return before[1:] - before[:-1]

    def keys_of(self, query: int) -> list[Span]:
        """The keys a query is to attend to, for a message."""
        return merge_spans(
            (node.start, min(node.stop, query + 1))
            for node in self.nodes
            if node.start <= query < node.subtree_stop
        )


def _range_minima(values: Ints) -> tuple[Ints, ...]:
    levels = [values]
    while 2 << (len(levels) - 1) <= len(values):
        half = 1 << (len(levels) - 1)
        levels.append(np.minimum(levels[-1][:-half], levels[-1][half:]))
    return tuple(levels)


def _owned(schedule: Schedule) -> "_Owned":
    """What each rank owns, after a look whether every token is owned once."""
    cursor = 0
    for segment in sorted(schedule.segments, key=lambda segment: segment.start):
        if not 0 <= segment.rank < schedule.world_size:
            raise PlanError(f"{segment} lives on a rank outside the domain of {schedule.world_size}")
        if segment.start != cursor or segment.stop <= segment.start:
            raise PlanError(
                f"tokens are not owned exactly once: expected a segment from {cursor}, found {segment}"
            )
        cursor = segment.stop
    if cursor != schedule.num_tokens:
        raise PlanError(f"tokens {cursor} to {schedule.num_tokens} are owned by no rank")
    ranks, starts, stops = np.array([(s.rank, s.start, s.stop) for s in schedule.segments], np.int64).T
    at_start, at_stop = _axis(schedule).of_ranks(ranks, starts, stops)
    is_resident = np.zeros(len(starts), np.bool_)
    for first, last in schedule.resident:
        overlaps = (starts < last) & (stops > first)
        across = overlaps & ((starts < first) | (stops > last))
        if across.any():
            raise PlanError(
                f"{schedule.segments[int(np.argmax(across))]} holds tokens inside and outside of the resident "
                f"{(first, last)}: they lie in two buffers"
            )
        is_resident |= overlaps
    return _Owned(
        _Spans.union(at_start[~is_resident], at_stop[~is_resident]),
        _Spans.union(at_start[is_resident], at_stop[is_resident]),
    )


def _check_coverage(forest: _Forest, tiles: _Tiles) -> None:
    """All computed pairs are valid, none is computed twice, and there are as many as there are valid ones.

    The query axis is cut where any tile begins or ends: inside a cut all queries see the same tiles, so that
    two tiles of a cut share a pair exactly if their keys overlap.
    """
    for start, stop in forest.resident:
        again = (tiles.query_start < stop) & (tiles.query_stop > start)
        _refuse(tiles, again, f"computes queries of tokens {(start, stop)} again, which an earlier pass did")
    is_causal = tiles.causal != 0
    outside = (~is_causal & (tiles.query_start < tiles.key_stop)) | (
        tiles.query_stop > forest.reach(tiles.key_start, tiles.key_stop)
    )
    _refuse(tiles, outside, "holds pairs of a query and a key that it must not see")
    ends = np.array([0, forest.num_tokens], np.int64)
    borders = np.unique(np.concatenate([tiles.query_start, tiles.query_stop, ends]))
    tile, cut = _ranges(
        np.searchsorted(borders, tiles.query_start), np.searchsorted(borders, tiles.query_stop)
    )
    width = np.diff(borders)
    key_start = tiles.key_start[tile]
    key_stop = np.where(is_causal[tile], borders[cut + 1], tiles.key_stop[tile])
    order = np.lexsort((key_start, cut))
    tile, cut, key_start, key_stop = tile[order], cut[order], key_start[order], key_stop[order]
    twice = (cut[1:] == cut[:-1]) & (key_start[1:] < key_stop[:-1])
    if twice.any():
        index = int(np.argmax(twice)) + 1
        raise PlanError(
            f"queries {_span(borders, cut[index])} attend to a key twice: {tiles.describe(tile[index - 1])} "
            f"and {tiles.describe(tile[index])}"
        )
    pairs = width[cut] * (key_stop - key_start)
    pairs -= np.where(is_causal[tile], width[cut] * (width[cut] - 1) // 2, 0)
    computed = np.zeros(len(width), np.int64)
    np.add.at(computed, cut, pairs)
    expected = forest.num_pairs(borders)
    if not np.array_equal(computed, expected):
        index = int(np.argmax(computed != expected))
        seen = cut == index
        raise PlanError(
            f"queries {_span(borders, index)} compute {computed[index]} of their {expected[index]} pairs: they "
            f"attend to keys {merge_spans(_pairs(key_start[seen], key_stop[seen]))}, their first one should to "
            f"{forest.keys_of(int(borders[index]))}"
        )


def _check_traffic(schedule: Schedule, owned: "_Owned", tiles: _Tiles, moves: _Moves) -> None:
    """Every operand is at hand when its tile runs, nothing travels unread, and states return."""
    axis = _axis(schedule)
    operands: tuple[tuple[MoveKind, Ints, Ints], ...] = (
        ("kv", tiles.key_start, tiles.key_stop),
        ("q", tiles.query_start, tiles.query_stop),
    )
    for kind, start, stop in operands:
        arriving = moves.of_kind(kind)
        is_owned = owned.cover(*axis.of_ranks(arriving.src, arriving.start, arriving.stop))
        _refuse(arriving, ~is_owned, "leaves a rank that does not own these tokens")
        arrivals = _Arrivals.of(axis, arriving)
        away = ~owned.cover(*axis.of_ranks(tiles.rank, start, stop))
        readers = _Readers(kind, tiles.where(away), start[away], stop[away])
        arrivals.require_at_hand(readers, only_in_own_stage=schedule.resend)
        arrivals.require_all_read(readers)
        if kind == "q":
            _check_states(axis, owned, arrivals, readers, moves.of_kind("state"))


@dataclass(frozen=True, slots=True)
class _Axis:
    """Spans of tokens of many ranks, or of many stages' buffers on many ranks, side by side on one axis."""

    world_size: int
    stride: int

    def of_ranks(self, rank: Ints, start: Ints, stop: Ints) -> tuple[Ints, Ints]:
        return rank * self.stride + start, rank * self.stride + stop

    def of_buffers(self, stage: Ints, rank: Ints, start: Ints, stop: Ints) -> tuple[Ints, Ints]:
        return self.of_ranks(stage * self.world_size + rank, start, stop)

    def on_rank(self, rank: int, spans: "_Spans") -> list[Span]:
        """The tokens of one rank, for a message."""
        mine = spans.start // self.stride == rank
        shift = rank * self.stride
        return _pairs(spans.start[mine] - shift, spans.stop[mine] - shift)


def _axis(schedule: Schedule) -> _Axis:
    return _Axis(schedule.world_size, schedule.num_tokens + 1)


@dataclass(frozen=True, slots=True)
class _Spans:
    """Disjoint spans, ascending, neighbours joined."""

    start: Ints
    stop: Ints

    @classmethod
    def union(cls, start: Ints, stop: Ints) -> "_Spans":
        if not len(start):
            return cls(start, stop)
        order = np.argsort(start, kind="stable")
        start, stop = start[order], np.maximum.accumulate(stop[order])
        first = np.concatenate([[True], start[1:] > stop[:-1]])
        return cls(start[first], stop[np.concatenate([first[1:], [True]])])

    def cover(self, start: Ints, stop: Ints) -> Bools:
        """Which of the given spans lie inside one of these."""
        if not len(self.start):
            return np.zeros(len(start), np.bool_)
        index = np.searchsorted(self.start, start, "right") - 1
        return (index >= 0) & (stop <= self.stop[index])

    def equal(self, other: "_Spans") -> bool:
        return np.array_equal(self.start, other.start) and np.array_equal(self.stop, other.stop)


@dataclass(frozen=True, slots=True)
class _Owned:
    """What ranks own, in two buffers each."""

    computed: _Spans
    resident: _Spans

    def cover(self, start: Ints, stop: Ints) -> Bools:
        """Which of the given spans lie inside one buffer of their rank."""
        return self.computed.cover(start, stop) | self.resident.cover(start, stop)


@dataclass(frozen=True, slots=True)
class _Readers:
    """Tiles with an operand from elsewhere, and the operand's span."""

    kind: MoveKind
    tiles: _Tiles
    start: Ints
    stop: Ints


@dataclass(frozen=True, slots=True)
class _Arrivals:
    """Moves of one kind by destination and token, and the buffers that they fill."""

    axis: _Axis
    moves: _Moves
    start: Ints
    """On the axis of ranks, ascending, as ``moves`` are."""
    buffers: _Spans

    @classmethod
    def of(cls, axis: _Axis, moves: _Moves) -> "_Arrivals":
        start, _ = axis.of_ranks(moves.dst, moves.start, moves.stop)
        moves = moves.where(np.argsort(start, kind="stable"))
        start, stop = axis.of_ranks(moves.dst, moves.start, moves.stop)
        second = np.concatenate([np.zeros(min(1, len(start)), np.bool_), start[1:] < stop[:-1]])
        _refuse(moves, second, "brings tokens that have come already")
        buffers = _Spans.union(*axis.of_buffers(moves.stage, moves.dst, moves.start, moves.stop))
        return cls(axis, moves, start, buffers)

    def stage_of(self, rank: Ints, start: Ints, stop: Ints) -> Ints:
        """Stage in which each span arrived on its rank, in one buffer as a whole; -1 if it did not."""
        if not len(self.start):
            return np.full(len(start), -1)
        at, _ = self.axis.of_ranks(rank, start, stop)
        stage = self.moves.stage[np.maximum(0, np.searchsorted(self.start, at, "right") - 1)]
        whole = self.buffers.cover(*self.axis.of_buffers(stage, rank, start, stop))
        return np.where(whole, stage, -1)

    def require_at_hand(self, readers: _Readers, *, only_in_own_stage: bool) -> None:
        tiles = readers.tiles
        stage = self.stage_of(tiles.rank, readers.start, readers.stop)
        missing = (stage < 0) | (stage > tiles.stage)
        _refuse(tiles, missing, f"needs {readers.kind} that its rank has not received, in one buffer")
        if only_in_own_stage:
            _refuse(
                tiles,
                stage != tiles.stage,
                f"reads {readers.kind} of another stage: what is sent again is there for one stage alone",
            )

    def require_all_read(self, readers: _Readers) -> None:
        came = _Spans.union(*self.axis.of_ranks(self.moves.dst, self.moves.start, self.moves.stop))
        read = _Spans.union(*self.axis.of_ranks(readers.tiles.rank, readers.start, readers.stop))
        if not came.equal(read):
            unread = ~read.cover(came.start, came.stop)
            rank = int(came.start[np.argmax(unread)]) // self.axis.stride
            raise PlanError(
                f"rank {rank} receives {readers.kind} {self.axis.on_rank(rank, came)} and reads only "
                f"{self.axis.on_rank(rank, read)}"
            )


def _check_states(axis: _Axis, owned: _Owned, queries: _Arrivals, readers: _Readers, states: _Moves) -> None:
    """A query computed away from home: its state returns exactly once, after the last tile that adds to it."""
    at_home = owned.cover(*axis.of_ranks(states.dst, states.start, states.stop))
    _refuse(states, ~at_home, "returns states to a rank that does not own these tokens")
    start, stop = axis.of_ranks(states.src, states.start, states.stop)
    order = np.argsort(start, kind="stable")
    states, start, stop = states.where(order), start[order], stop[order]
    twice = np.concatenate([np.zeros(min(1, len(start)), np.bool_), start[1:] < stop[:-1]])
    _refuse(states, twice, "returns a state twice")
    computed = _Spans.union(*axis.of_ranks(readers.tiles.rank, readers.start, readers.stop))
    returned = _Spans.union(start, stop)
    if not computed.equal(returned):
        odd = np.concatenate(
            [
                computed.start[~returned.cover(computed.start, computed.stop)],
                returned.start[~computed.cover(returned.start, returned.stop)],
            ]
        )
        rank = int(odd[0]) // axis.stride
        raise PlanError(
            f"rank {rank} computes states {axis.on_rank(rank, computed)} of other ranks, and returns "
            f"{axis.on_rank(rank, returned)}"
        )
    apart = queries.stage_of(states.src, states.start, states.stop) < 0
    _refuse(states, apart, "returns states of queries that came in several buffers")
    lowest, highest = axis.of_ranks(readers.tiles.rank, readers.start, readers.stop)
    tile, state = _ranges(np.searchsorted(stop, lowest, "right"), np.searchsorted(start, highest, "left"))
    early = states.stage[state] < readers.tiles.stage[tile] + STATE_DELAY
    if early.any():
        index = int(np.argmax(early))
        raise PlanError(
            f"{states.describe(int(state[index]))} leaves before the tiles of stage "
            f"{readers.tiles.stage[tile[index]]} are computed"
        )


def merge_spans(spans: Iterable[Span]) -> list[Span]:
    """Union of half-open spans, ascending, neighbours joined, empty ones dropped."""
    merged: list[Span] = []
    for start, stop in sorted(spans):
        if stop <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _ranges(first: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """(i, j) for every i and every j of range(first[i], stop[i]), as two columns."""
    count = stop - first
    source = np.repeat(np.arange(len(count)), count)
    within = np.arange(len(source)) - np.repeat(np.cumsum(count) - count, count)
    return source, first[source] + within


def _span(borders: Ints, index: int) -> Span:
    return int(borders[index]), int(borders[index + 1])


def _pairs(start: Ints, stop: Ints) -> list[Span]:
    return list(zip(start.tolist(), stop.tolist(), strict=True))
