"""Schedule -> nothing, or the reason why it must not run: proofs about a plan, before any collective.

What is proven: every token is owned once; every valid (query, key) pair is computed exactly once and no other;
every operand of a tile is owned by, or has arrived at, the tile's rank; every moved token is read where it
arrives; every state of a moved query returns once, late enough. Collectives follow from the stage list, which
is the same on all ranks, so their order agrees by construction.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import lcm

from treecp_rl.errors import PlanError
from treecp_rl.plan import Move, MoveKind, Node, Schedule, Span, Stage, Tile

STATE_DELAY = 2
"""Stages from a tile to its state's return: stage i+1's moves are posted before stage i's tiles run."""


def check(schedule: Schedule, nodes: Sequence[Node]) -> None:
    """Prove a schedule right for the trees it was lowered from.

    Raises:
        PlanError: the first rule that does not hold, with the span and rank where it fails.
    """
    _check_ownership(schedule)
    for heads in _by_heads(schedule):
        _check_coverage(heads, nodes)
        _check_operands(heads)
        _check_states(heads)


def _by_heads(schedule: Schedule) -> Iterator[Schedule]:
    """The schedule as each smallest part of the heads sees it: for one part the rules know nothing of others."""
    parts = lcm(*{item.num_head_parts for stage in schedule.stages for item in (*stage.tiles, *stage.moves)})
    if parts == 1:
        yield schedule
        return
    for part in range(parts):

        def here(item: Tile | Move, part: int = part) -> bool:
            return part * item.num_head_parts // parts == item.head_part

        stages = tuple(
            Stage(tuple(filter(here, stage.moves)), tuple(filter(here, stage.tiles)))
            for stage in schedule.stages
        )
        yield replace(schedule, stages=stages)


def _check_ownership(schedule: Schedule) -> None:
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


def _check_coverage(schedule: Schedule, nodes: Sequence[Node]) -> None:
    """Cut the query axis where any tile or node begins or ends; inside a cut all queries see the same keys."""
    tiles = [tile for stage in schedule.stages for tile in stage.tiles]
    for tile in tiles:
        square = (tile.query_start, tile.query_stop) == (tile.key_start, tile.key_stop)
        if tile.causal and not square:
            raise PlanError(f"{tile} is causal and not square: kernels disagree about its diagonal")
    borders = sorted(
        {border for tile in tiles for border in (tile.query_start, tile.query_stop)}
        | {border for node in nodes for border in (node.start, node.stop)}
    )
    keys_of: list[list[Span]] = [[] for _ in borders]
    diagonals = [0] * len(borders)
    for tile in tiles:
        for cut in range(bisect_left(borders, tile.query_start), bisect_left(borders, tile.query_stop)):
            if tile.causal:
                diagonals[cut] += 1
                if borders[cut] > tile.key_start:
                    keys_of[cut].append((tile.key_start, borders[cut]))
            else:
                keys_of[cut].append((tile.key_start, tile.key_stop))
    resident = set(schedule.resident)
    for node, ancestors in zip(nodes, _ancestor_spans(nodes), strict=True):
        asks = (node.start, node.stop) not in resident
        for cut in range(bisect_left(borders, node.start), bisect_left(borders, node.stop)):
            queries = (borders[cut], borders[cut + 1])
            if not asks:
                if diagonals[cut] or keys_of[cut]:
                    raise PlanError(f"queries {queries} belong to an earlier pass, and are computed again")
                continue
            expected = [*ancestors, (node.start, borders[cut])]
            if diagonals[cut] != 1:
                raise PlanError(f"queries {queries} attend to themselves {diagonals[cut]} times, not once")
            _require_same_keys(queries, keys_of[cut], expected)


def _ancestor_spans(nodes: Sequence[Node]) -> list[list[Span]]:
    spans: list[list[Span]] = []
    for node in nodes:
        parent = node.parent
        spans.append([] if parent < 0 else [*spans[parent], (nodes[parent].start, nodes[parent].stop)])
    return spans


def _require_same_keys(queries: Span, computed: list[Span], expected: Iterable[Span]) -> None:
    union = merge_spans(computed)
    if _num_tokens(computed) != _num_tokens(union):
        raise PlanError(f"queries {queries} attend to a key twice: {sorted(computed)}")
    if union != merge_spans(expected):
        raise PlanError(f"queries {queries} attend to keys {union}, they should to {merge_spans(expected)}")


def _check_operands(schedule: Schedule) -> None:
    """Every operand is at hand when its tile runs, and nothing travels unread."""
    owned: dict[int, list[Span]] = defaultdict(list)
    for segment in schedule.segments:
        owned[segment.rank].append((segment.start, segment.stop))
    at_hand = {rank: merge_spans(spans) for rank, spans in owned.items()}
    arrived: dict[tuple[MoveKind, int], list[Span]] = defaultdict(list)
    read: dict[tuple[MoveKind, int], set[Span]] = defaultdict(set)
    for index, stage in enumerate(schedule.stages):
        arriving: dict[tuple[MoveKind, int], list[Span]] = defaultdict(list)
        for move in stage.moves:
            if move.kind == "state":
                continue
            if move.src == move.dst or not _covers(at_hand.get(move.src, []), (move.start, move.stop)):
                raise PlanError(f"stage {index}: {move} leaves a rank that does not own these tokens")
            arriving[move.kind, move.dst].append((move.start, move.stop))
        for (kind, rank), spans in arriving.items():
            both = [*arrived[kind, rank], *spans]
            if _num_tokens(merge_spans(both)) != _num_tokens(both):
                raise PlanError(
                    f"stage {index}: rank {rank} receives some {kind} of {sorted(spans)} a second time"
                )
            arrived[kind, rank] = merge_spans(both)
        # What is sent again in backward arrives there for the tiles of its own stage alone.
        readable = (
            {key: merge_spans(spans) for key, spans in arriving.items()} if schedule.resend else arrived
        )
        for tile in stage.tiles:
            operands: tuple[tuple[MoveKind, Span], ...] = (
                ("q", (tile.query_start, tile.query_stop)),
                ("kv", (tile.key_start, tile.key_stop)),
            )
            for kind, span in operands:
                if _covers(at_hand.get(tile.rank, []), span):
                    continue
                if not _covers(readable.get((kind, tile.rank), []), span):
                    raise PlanError(
                        f"stage {index}: {tile} needs {kind} {span}, which rank {tile.rank} has not received"
                    )
                read[kind, tile.rank].add(span)
    for (kind, rank), spans in arrived.items():
        if spans != merge_spans(read[kind, rank]):
            raise PlanError(
                f"rank {rank} receives {kind} {spans} and reads only {merge_spans(read[kind, rank])}"
            )


def _check_states(schedule: Schedule) -> None:
    """A query computed away from home: its state returns exactly once, after the last tile that adds to it."""
    owner = sorted((segment.start, segment.stop, segment.rank) for segment in schedule.segments)
    last_tile: dict[tuple[int, int], dict[Span, int]] = defaultdict(dict)
    for index, stage in enumerate(schedule.stages):
        for tile in stage.tiles:
            home = owner[
                bisect_right(owner, (tile.query_start, schedule.num_tokens, schedule.world_size)) - 1
            ][2]
            if home != tile.rank:
                last_tile[tile.rank, home][tile.query_start, tile.query_stop] = index
    returned: dict[tuple[int, int], list[Span]] = defaultdict(list)
    for index, stage in enumerate(schedule.stages):
        for move in stage.moves:
            if move.kind != "state":
                continue
            route = (move.src, move.dst)
            if _overlaps(returned[route], move):
                raise PlanError(f"stage {index}: {move} returns a state twice")
            returned[route].append((move.start, move.stop))
            for (start, stop), stage_of_tile in last_tile[route].items():
                if start < move.stop and move.start < stop and index < stage_of_tile + STATE_DELAY:
                    raise PlanError(
                        f"stage {index}: {move} leaves before the tiles of stage {stage_of_tile} are computed"
                    )
    for route, tiles in last_tile.items():
        if merge_spans(returned[route]) != merge_spans(tiles):
            raise PlanError(
                f"rank {route[0]} computes states {merge_spans(tiles)} of rank {route[1]}, and "
                f"returns {merge_spans(returned[route])}"
            )
    for route, spans in returned.items():
        if route not in last_tile and spans:
            raise PlanError(f"rank {route[0]} returns states {merge_spans(spans)} that it never computed")


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


def _num_tokens(spans: Iterable[Span]) -> int:
    return sum(stop - start for start, stop in spans)


def _covers(spans: Sequence[Span], span: Span) -> bool:
    """Whether one of the merged ``spans`` contains ``span``."""
    index = bisect_right(spans, (span[0], 1 << 62)) - 1
    return index >= 0 and spans[index][0] <= span[0] and span[1] <= spans[index][1]


def _overlaps(spans: Sequence[Span], move: Move) -> bool:
    return any(start < move.stop and move.start < stop for start, stop in spans)
