"""Schedule -> Program: the plan as one rank sees it, in offsets of its own buffers.

A rank reads its own tokens (its segments, ascending, laid side by side), the K/V an earlier pass left with it,
and what arrives: per stage, kind and part of the heads one buffer, the arriving spans ascending. Tiles that lie
side by side in those buffers become one kernel call.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from treecp_rl.attention.leaves import Leaves
from treecp_rl.collectives import Traffic
from treecp_rl.errors import PlanError
from treecp_rl.plan import Move, MoveKind, Schedule, Span, Stage, Tile

OWN = -1
"""The buffer of a rank's own tokens; numbers from 0 on are the stage in which a buffer arrived."""
RESIDENT = -2
"""The buffer of the rank's K/V leaves."""

Heads = tuple[int, int]
"""(part, number of parts) of the heads."""
ALL_HEADS: Heads = (0, 1)

BufferKey = tuple[MoveKind, int, Heads]
"""What arrived, in which stage."""


@dataclass(frozen=True, slots=True)
class Place:
    """A span of tokens of one buffer."""

    buffer: int
    start: int
    stop: int

    @property
    def span(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True, slots=True)
class Call:
    """One kernel call."""

    queries: Place
    keys: Place
    causal: bool
    heads: Heads = ALL_HEADS


@dataclass(frozen=True, slots=True)
class Parcel:
    """A move seen from one end: the other rank, and the tokens here that are sent or filled."""

    kind: MoveKind
    peer: int
    place: Place
    heads: Heads = ALL_HEADS


@dataclass(frozen=True, slots=True)
class RankStage:
    """A stage on one rank. What is said of the exchange is the same on all ranks, so that they enter it alike."""

    has_moves: bool
    """Whether any rank moves anything."""
    has_operands: bool
    """Whether any rank moves K/V or queries."""
    is_sparse: bool
    """Whether so few ranks move something that they had better do it among themselves."""
    sends: tuple[Parcel, ...]
    receives: tuple[Parcel, ...]
    calls: tuple[Call, ...]


class Program:
    """A schedule compiled for one rank; travels through the model as one opaque keyword.

    Deliberately not a dataclass: FSDP2 rebuilds dataclass arguments of a wrapped module's forward, and a copy
    would no longer be the object that the attention layers share.
    """

    def __init__(
        self,
        stages: Sequence[RankStage],
        num_tokens: int,
        buffer_tokens: dict[BufferKey, int],
        kernel: str = "auto",
        group: Any = None,
        resend: bool = False,
    ) -> None:
        self.stages = tuple(stages)
        self.num_tokens = num_tokens
        """Own tokens, the T of the tensors this rank's layers see."""
        self.buffer_tokens = buffer_tokens
        """(kind, stage, heads) -> tokens of the buffer that arrives then."""
        self.kernel = kernel
        self.group = group
        """Process group of the domain; None for a schedule of one rank."""
        self.resend = resend
        self.diagonal_borders = _diagonal_borders(self.stages)
        """Where stage 0's own causal calls of all heads begin and end, if they adjoin from token 0 on."""
        self.writes_diagonals = self.diagonal_borders[-1] == num_tokens > 0
        """Whether they hold each own token: then their results need no merge."""
        self.forward_traffic, self.backward_traffic = Traffic(), Traffic()

        self.leaves: Leaves | None = None
        """K/V that a prefill pass leaves here, and replay passes read."""
        self.captured: slice | None = None
        """Prefill: the own tokens whose K/V become leaves."""

        self.saved: tuple[slice, ...] = ()
        """Own tokens whose attention output is saved, so that a checkpointed layer's recomputation has it."""
        self.recomputation: Program | None = None
        """What such a recomputation still has to run."""
        self.saved_outputs: dict[int, Any] = {}
        """Layer -> (out, lse) of the saved tokens, between its forward and its backward."""


def compile_program(
    schedule: Schedule,
    rank: int = 0,
    kernel: str = "auto",
    group: Any = None,
    saved: Sequence[Span] = (),
) -> Program:
    """What ``rank`` does in each stage.

    Args:
        saved: packed tokens whose attention outputs outlive a checkpointed layer's forward.

    Raises:
        PlanError: a tile reads tokens that the rank neither owns nor has received.
    """
    program = _compile(schedule, rank, kernel, group)
    if saved:
        own = _own_buffer(schedule, rank)
        places = [own.find(*span) for span in sorted(_intersect(own.spans, saved))]
        program.saved = tuple(place.span for place in places if place is not None)
        program.recomputation = _compile(_without_outputs(schedule, saved), rank, kernel, group)
        program.recomputation.forward_traffic = program.forward_traffic
    return program


def _compile(schedule: Schedule, rank: int, kernel: str, group: Any) -> Program:
    own = _own_buffer(schedule, rank)
    resident = _Buffer(RESIDENT, _intersect(_segments(schedule, rank), schedule.resident))
    arrivals = _arrivals(schedule, rank)
    stages = []
    for index, stage in enumerate(schedule.stages):
        calls = [
            _locate_tile(part, index, own, resident, arrivals)
            for tile in stage.tiles
            if tile.rank == rank
            for part in _cut_keys(tile, schedule.resident)
        ]
        routes = {(move.src, move.dst) for move in stage.moves}
        stages.append(
            RankStage(
                has_moves=bool(routes),
                has_operands=any(move.kind != "state" for move in stage.moves),
                is_sparse=2 * len(routes) <= schedule.world_size,
                sends=tuple(_outgoing(stage, rank, own, resident, arrivals)),
                receives=tuple(_incoming(stage, index, rank, own, arrivals)),
                calls=tuple(_merge_calls(calls)),
            )
        )
    buffer_tokens = {key: buffer.num_tokens for key, buffer in arrivals.items()}
    return Program(stages, own.num_tokens, buffer_tokens, kernel, group, schedule.resend)


class _Buffer:
    """Global spans laid side by side."""

    def __init__(self, number: int, spans: Iterable[Span]) -> None:
        self.number = number
        self.spans = sorted(spans)
        self._starts = [start for start, _ in self.spans]
        self._offsets: list[int] = []
        self.num_tokens = 0
        for start, stop in self.spans:
            self._offsets.append(self.num_tokens)
            self.num_tokens += stop - start

    def find(self, start: int, stop: int) -> Place | None:
        """Where a global span lies, if one of the buffer's spans (or several that adjoin) holds it."""
        index = bisect_right(self._starts, start) - 1
        if index < 0 or start >= self.spans[index][1]:
            return None
        at = self._offsets[index] + start - self.spans[index][0]
        while self.spans[index][1] < stop:
            index += 1
            if index == len(self.spans) or self.spans[index][0] != self.spans[index - 1][1]:
                return None
        return Place(self.number, at, at + stop - start)


def _segments(schedule: Schedule, rank: int) -> list[Span]:
    return [(segment.start, segment.stop) for segment in schedule.segments if segment.rank == rank]


def _own_buffer(schedule: Schedule, rank: int) -> _Buffer:
    """The tokens whose queries this rank's layers see: all it owns but what is resident."""
    segments = _segments(schedule, rank)
    resident = set(_intersect(segments, schedule.resident))
    return _Buffer(OWN, [span for span in segments if span not in resident])


def _intersect(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Parts of ``spans`` that lie in one of ``others``."""
    found = [(max(a, c), min(b, d)) for a, b in spans for c, d in others]
    return [span for span in found if span[0] < span[1]]


def _arrivals(schedule: Schedule, rank: int) -> dict[BufferKey, _Buffer]:
    spans: dict[BufferKey, list[Span]] = defaultdict(list)
    for index, stage in enumerate(schedule.stages):
        for move in stage.moves:
            if move.dst == rank and move.kind != "state":
                spans[move.kind, index, _heads_of(move)].append((move.start, move.stop))
    return {key: _Buffer(key[1], found) for key, found in spans.items()}


def _heads_of(item: Move | Tile) -> Heads:
    return item.head_part, item.num_head_parts


def _find(buffers: Iterable[_Buffer | None], start: int, stop: int, what: str) -> Place:
    for buffer in buffers:
        place = buffer.find(start, stop) if buffer is not None else None
        if place is not None:
            return place
    raise PlanError(f"no {what} of tokens [{start}, {stop}) here when needed; run planner.check")


def _cut_keys(tile: Tile, resident: Sequence[Span]) -> Iterable[Tile]:
    """Leaves are a buffer of their own, so keys that begin among them and go on behind them are two calls."""
    borders = {border for span in resident for border in span if tile.key_start < border < tile.key_stop}
    for start, stop in pairwise(sorted({tile.key_start, tile.key_stop, *borders})):
        yield tile._replace(key_start=start, key_stop=stop)


def _locate_tile(
    tile: Tile, index: int, own: _Buffer, resident: _Buffer, arrivals: dict[BufferKey, _Buffer]
) -> Call:
    heads = _heads_of(tile)

    def arrived(kind: MoveKind) -> Iterable[_Buffer | None]:
        return (arrivals.get((kind, stage, heads)) for stage in range(index, -1, -1))

    return Call(
        _find((own, *arrived("q")), tile.query_start, tile.query_stop, "queries"),
        _find((own, resident, *arrived("kv")), tile.key_start, tile.key_stop, "keys"),
        tile.causal,
        heads,
    )


def _in_order(moves: Iterable[Move]) -> list[Move]:
    """Both ends list a stage's moves in this order, so that bytes need no labels."""
    return sorted(moves, key=lambda move: (move.kind, move.start, move.stop, _heads_of(move)))


def _outgoing(
    stage: Stage, rank: int, own: _Buffer, resident: _Buffer, arrivals: dict[BufferKey, _Buffer]
) -> Iterable[Parcel]:
    for move in _in_order(move for move in stage.moves if move.src == rank):
        heads = _heads_of(move)
        buffers = [own, resident]
        if move.kind == "state":
            buffers = [buffer for (kind, _, part), buffer in arrivals.items() if (kind, part) == ("q", heads)]
        place = _find(buffers, move.start, move.stop, f"{move.kind} to send")
        yield Parcel(move.kind, move.dst, place, heads)


def _incoming(
    stage: Stage, index: int, rank: int, own: _Buffer, arrivals: dict[BufferKey, _Buffer]
) -> Iterable[Parcel]:
    for move in _in_order(move for move in stage.moves if move.dst == rank):
        heads = _heads_of(move)
        buffer = own if move.kind == "state" else arrivals[move.kind, index, heads]
        place = _find([buffer], move.start, move.stop, f"room for {move.kind}")
        yield Parcel(move.kind, move.src, place, heads)


def _merge_calls(calls: Sequence[Call]) -> list[Call]:
    """Causal calls as they are, first; rectangles joined along queries, then along keys.

    Keys of a rectangle may be joined in any order, so what adjoins in a buffer need not adjoin in a row.
    """
    merged = [call for call in calls if call.causal]
    for heads in dict.fromkeys(call.heads for call in calls):
        rectangles = [(c.queries, c.keys) for c in calls if not c.causal and c.heads == heads]
        rectangles = _join(rectangles)
        rectangles = [(q, k) for k, q in _join([(k, q) for q, k in rectangles])]
        merged += [Call(queries, keys, causal=False, heads=heads) for queries, keys in rectangles]
    return merged


def _join(pairs: Iterable[tuple[Place, Place]]) -> list[tuple[Place, Place]]:
    """Join pairs with an equal second place whose first places adjoin."""
    firsts_of: dict[tuple[Place, int], list[Place]] = defaultdict(list)
    for first, second in pairs:
        firsts_of[second, first.buffer].append(first)
    joined = []
    for (second, buffer), firsts in firsts_of.items():
        firsts.sort(key=lambda place: place.start)
        run = firsts[0]
        for place in firsts[1:]:
            if place.start == run.stop:
                run = Place(buffer, run.start, place.stop)
            else:
                joined.append((run, second))
                run = place
        joined.append((run, second))
    return joined


def _diagonal_borders(stages: Sequence[RankStage]) -> tuple[int, ...]:
    spans = sorted(
        (call.queries.start, call.queries.stop)
        for call in (stages[0].calls if stages else ())
        if call.causal and call.queries.buffer == OWN and call.heads == ALL_HEADS
    )
    borders = [0]
    for start, stop in spans:
        if start != borders[-1]:
            return (0,)
        borders.append(stop)
    return tuple(borders)


def _without_outputs(schedule: Schedule, saved: Sequence[Span]) -> Schedule:
    """The schedule without the tiles and states of queries whose outputs are saved.

    Their operands still travel, because backward reads them, unless backward has them sent again anyway.
    """

    def is_saved(start: int, stop: int) -> bool:
        return any(first <= start and stop <= last for first, last in saved)

    stages = []
    for stage in schedule.stages:
        tiles = [tile for tile in stage.tiles if not is_saved(tile.query_start, tile.query_stop)]
        moves = [
            move
            for move in stage.moves
            if not is_saved(move.start, move.stop) or (move.kind != "state" and not schedule.resend)
        ]
        stages.append(Stage(tuple(moves), tuple(tiles)))
    return replace(schedule, stages=tuple(stages))
