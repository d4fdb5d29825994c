"""Segments, stages -> kernel calls of each rank and stage: a schedule's tiles, joined as the executor joins them.

A rank's buffers (its own tokens, what is resident, what arrives in a stage) lay spans side by side that may be far
apart in the pass. Rectangles that adjoin there are one call, so ranks have fewer calls than tiles, down to a quarter.
``attention.program`` makes the calls; this counts them, without offsets.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Literal

from treecp_rl.plan import Segment, Span, Stage

Follower = dict[int, int | None]
"""Stop of each span of a rank's buffers -> start of the span that lies behind it in its buffer."""

Operand = Literal["kv", "q"]
_OPERANDS: tuple[Operand, ...] = ("kv", "q")


def calls_of_stages(
    segments: Iterable[Segment], stages: Sequence[Stage], resident: Sequence[Span] = ()
) -> list[dict[int, int]]:
    """Of each stage the kernel calls of each rank, both as ``attention.program`` compiles the schedule."""
    followers = _followers(segments, stages, resident)
    borders = sorted({border for span in resident for border in span})
    return [_calls(stage, followers, borders) for stage in stages]


def _calls(
    stage: Stage, followers: dict[tuple[int, Operand], Follower], borders: Sequence[int]
) -> dict[int, int]:
    calls: dict[int, int] = defaultdict(int)
    rectangles: dict[tuple[int, int], dict[Span, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for tile in stage.tiles:
        if tile.causal:
            calls[tile.rank] += 1
        else:
            queries, of_rank = (tile.query_start, tile.query_stop), rectangles[tile.rank, tile.head_part]
            # Keys that begin in a resident root and go on behind it are two, which others may join apart.
            first, last = bisect_right(borders, tile.key_start), bisect_left(borders, tile.key_stop)
            for keys in pairwise((tile.key_start, *borders[first:last], tile.key_stop)):
                of_rank[keys].append(queries)
    for (rank, _), queries_of in rectangles.items():
        of_queries, of_keys = followers[rank, "q"], followers[rank, "kv"]
        keys_of: dict[Span, list[Span]] = defaultdict(list)
        for keys, spans in queries_of.items():
            for run in _joined(spans, of_queries):
                keys_of[run].append(keys)
        calls[rank] += sum(len(_joined(spans, of_keys)) for spans in keys_of.values())
    return calls


def _joined(spans: list[Span], follower: Follower) -> list[Span]:
    """Spans of one rank, those joined that adjoin in a buffer: (start of the first, stop of the last)."""
    if len(spans) == 1:
        return spans
    stops = dict(spans)
    next_of = {start: follower.get(stop, stop) for start, stop in spans}
    firsts = stops.keys() - {after for start, after in next_of.items() if after != start}
    runs = []
    for first in firsts:
        last = first
        while (after := next_of[last]) is not None and after in stops:
            last = after
        runs.append((first, stops[last]))
    return runs


def _followers(
    segments: Iterable[Segment], stages: Sequence[Stage], resident: Sequence[Span]
) -> dict[tuple[int, Operand], Follower]:
    """Of each rank for its queries and for its keys: some tokens arrive as both."""
    spans: dict[tuple[int, Operand, object], list[Span]] = defaultdict(list)
    for segment in segments:
        is_resident = any(start <= segment.start < stop for start, stop in resident)
        for operand in _OPERANDS:
            spans[segment.rank, operand, is_resident].append((segment.start, segment.stop))
    for number, stage in enumerate(stages):
        for move in stage.moves:
            if move.kind != "state":
                spans[move.dst, move.kind, (number, move.head_part)].append((move.start, move.stop))
    followers: dict[tuple[int, Operand], Follower] = defaultdict(dict)
    for (rank, operand, _), of_buffer in spans.items():
        of_buffer.sort()
        starts = [start for start, _ in of_buffer[1:]]
        followers[rank, operand].update(zip((stop for _, stop in of_buffer), [*starts, None], strict=True))
    return followers
