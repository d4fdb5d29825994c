"""Schedule -> Program: the plan as one rank sees it, in offsets of its own buffers.

A rank reads its own tokens (its segments, ascending, laid side by side) and what arrives: per stage and kind one
buffer, the arriving spans ascending. Tiles that lie side by side in those buffers become one kernel call.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from treecp_rl.errors import PlanError
from treecp_rl.plan import Move, MoveKind, Schedule, Stage, Tile

OWN = -1
"""The buffer of a rank's own tokens; any other number is the stage in which a buffer arrived."""


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


@dataclass(frozen=True, slots=True)
class Parcel:
    """A move seen from one end: the other rank, and the tokens here that are sent or filled."""

    kind: MoveKind
    peer: int
    place: Place


@dataclass(frozen=True, slots=True)
class RankStage:
    """A stage on one rank."""

    has_moves: bool
    """Whether any rank moves anything: then all ranks enter the exchange."""
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
        buffer_tokens: dict[tuple[MoveKind, int], int],
        kernel: str = "auto",
        group: Any = None,
    ) -> None:
        self.stages = tuple(stages)
        self.num_tokens = num_tokens
        """Own tokens, the T of the tensors this rank's layers see."""
        self.buffer_tokens = buffer_tokens
        """(kind, stage) -> tokens of the buffer that arrives then."""
        self.kernel = kernel
        self.group = group
        """Process group of the domain; None for a schedule of one rank."""


def compile_program(schedule: Schedule, rank: int = 0, kernel: str = "auto", group: Any = None) -> Program:
    """What ``rank`` does in each stage.

    Raises:
        PlanError: a tile reads tokens that the rank neither owns nor has received, or a token of the rank
            does not attend to itself.
    """
    own = _Buffer(OWN, [(s.start, s.stop) for s in schedule.segments if s.rank == rank])
    arrivals = _arrivals(schedule, rank)
    stages = []
    for index, stage in enumerate(schedule.stages):
        queries = [own, *(arrivals["q", i] for i in range(index + 1) if ("q", i) in arrivals)]
        keys = [own, *(arrivals["kv", i] for i in range(index + 1) if ("kv", i) in arrivals)]
        calls = [_locate_tile(tile, queries, keys, rank) for tile in stage.tiles if tile.rank == rank]
        stages.append(
            RankStage(
                has_moves=bool(stage.moves),
                sends=tuple(_outgoing(stage, rank, own, arrivals)),
                receives=tuple(_incoming(stage, index, rank, own, arrivals)),
                calls=tuple(_merge_calls(calls)),
            )
        )
    _require_diagonals(stages, own.num_tokens)
    buffer_tokens = {key: buffer.num_tokens for key, buffer in arrivals.items()}
    return Program(stages, own.num_tokens, buffer_tokens, kernel, group)


class _Buffer:
    """Global spans laid side by side."""

    def __init__(self, number: int, spans: Iterable[tuple[int, int]]) -> None:
        self.number = number
        self._offset_of: dict[tuple[int, int], int] = {}
        cursor = 0
        for span in sorted(spans):
            self._offset_of[span] = cursor
            cursor += span[1] - span[0]
        self.num_tokens = cursor

    def find(self, start: int, stop: int) -> Place | None:
        """Where a global span lies, if one of the buffer's spans (or several that adjoin) holds it."""
        exact = self._offset_of.get((start, stop))
        if exact is not None:
            return Place(self.number, exact, exact + stop - start)
        at, reached = None, start
        for (first, last), offset in self._offset_of.items():
            if first <= reached < last:
                at = offset + start - first if at is None else at
                reached = last
                if reached >= stop:
                    return Place(self.number, at, at + stop - start)
        return None


def _arrivals(schedule: Schedule, rank: int) -> dict[tuple[MoveKind, int], _Buffer]:
    spans: dict[tuple[MoveKind, int], list[tuple[int, int]]] = defaultdict(list)
    for index, stage in enumerate(schedule.stages):
        for move in stage.moves:
            if move.dst == rank and move.kind != "state":
                spans[move.kind, index].append((move.start, move.stop))
    return {key: _Buffer(key[1], found) for key, found in spans.items()}


def _find(buffers: Iterable[_Buffer], start: int, stop: int, what: str, rank: int) -> Place:
    for buffer in buffers:
        place = buffer.find(start, stop)
        if place is not None:
            return place
    raise PlanError(
        f"rank {rank} has no {what} of tokens [{start}, {stop}) when it needs them; run planner.check"
    )


def _locate_tile(tile: Tile, queries: Sequence[_Buffer], keys: Sequence[_Buffer], rank: int) -> Call:
    return Call(
        _find(queries, tile.query_start, tile.query_stop, "queries", rank),
        _find(keys, tile.key_start, tile.key_stop, "keys", rank),
        tile.causal,
    )


def _in_order(moves: Iterable[Move]) -> list[Move]:
    """Both ends list a stage's moves in this order, so that bytes need no labels."""
    return sorted(moves, key=lambda move: (move.kind, move.start, move.stop))


def _outgoing(
    stage: Stage, rank: int, own: _Buffer, arrivals: dict[tuple[MoveKind, int], _Buffer]
) -> Iterable[Parcel]:
    foreign_queries = [buffer for (kind, _), buffer in arrivals.items() if kind == "q"]
    for move in _in_order(move for move in stage.moves if move.src == rank):
        buffers = foreign_queries if move.kind == "state" else [own]
        yield Parcel(move.kind, move.dst, _find(buffers, move.start, move.stop, f"{move.kind} to send", rank))


def _incoming(
    stage: Stage, index: int, rank: int, own: _Buffer, arrivals: dict[tuple[MoveKind, int], _Buffer]
) -> Iterable[Parcel]:
    for move in _in_order(move for move in stage.moves if move.dst == rank):
        buffers = [own] if move.kind == "state" else [arrivals[move.kind, index]]
        yield Parcel(
            move.kind, move.src, _find(buffers, move.start, move.stop, f"room for {move.kind}", rank)
        )


def _merge_calls(calls: Sequence[Call]) -> list[Call]:
    """Causal calls as they are, first; rectangles joined along queries, then along keys.

    Keys of a rectangle may be joined in any order, so what adjoins in a buffer need not adjoin in a row.
    """
    causal = [call for call in calls if call.causal]
    rectangles = [(call.queries, call.keys) for call in calls if not call.causal]
    rectangles = _join(rectangles)
    rectangles = [(q, k) for k, q in _join([(k, q) for q, k in rectangles])]
    return causal + [Call(queries, keys, causal=False) for queries, keys in rectangles]


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


def _require_diagonals(stages: Sequence[RankStage], num_tokens: int) -> None:
    """Own causal calls are written, not merged, and come first: together they must hold each token once."""
    spans = sorted(
        (call.queries.start, call.queries.stop)
        for index, stage in enumerate(stages)
        for call in stage.calls
        if call.causal and call.queries.buffer == OWN and index == 0
    )
    cursor = 0
    for start, stop in spans:
        if start != cursor:
            break
        cursor = stop
    if cursor != num_tokens:
        raise PlanError(
            f"own token {cursor} of {num_tokens} does not attend to itself once in stage 0; run planner.check"
        )
