"""[Node], [Decision] -> Schedule: how decisions become segments, moves, tiles and stages.

A lowering is three choices: who owns which tokens (``place``), on which rank a tile is computed, and in which
stage its operands arrive. Depth-first packing puts all readers of a key into one span of the token axis, which
ends at the key's reach: so a worker's tiles are its spans of queries, met with each key, cut at the key's end
and its reach. All trees of a pass lie on one token axis, so their stage lists are simply zipped.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise, zip_longest
from typing import NamedTuple

from treecp_rl.errors import PlanError
from treecp_rl.plan import Decision, Move, Node, RankLoad, Schedule, Segment, Span, Stage, Tile
from treecp_rl.planner.calls import calls_of_stages
from treecp_rl.planner.check import STATE_DELAY
from treecp_rl.planner.place import (
    Placement,
    Tree,
    place_blocks,
    place_in_parts,
    place_lanes,
    place_uncut,
    place_whole,
    place_zigzag,
    placement,
    placements,
    trees_of,
    weighed_placements,
)


def lower_local(nodes: Sequence[Node], *, roots_are_resident: bool = False) -> Schedule:
    """Whole trees on one rank: a causal tile per node, and per inner node one rectangle over its descendants.

    Depth-first packing makes a node's descendants contiguous, so that two tiles a node cover every valid
    (query, key) pair exactly once. Causal tiles come first: they cover each query once, so their results
    are written and only the rectangles' results are merged.
    """
    causal = [
        Tile(0, node.start, node.stop, node.start, node.stop, causal=True)
        for node in nodes
        if node.stop > node.start and not (roots_are_resident and node.parent < 0)
    ]
    ancestors = [
        Tile(0, node.stop, node.subtree_stop, node.start, node.stop, causal=False)
        for node in nodes
        if node.stop > node.start and node.subtree_stop > node.stop
    ]
    num_tokens = max((node.subtree_stop for node in nodes), default=0)
    resident = _roots(trees_of(nodes)) if roots_are_resident else ()
    borders = sorted({0, num_tokens, *chain.from_iterable(resident)})
    return Schedule(
        world_size=1,
        num_tokens=num_tokens,
        segments=tuple(Segment(0, start, stop) for start, stop in pairwise(borders)),
        stages=(Stage(moves=(), tiles=tuple(causal + ancestors)),),
        resident=resident,
    )


def lower(
    nodes: Sequence[Node],
    decisions: Sequence[Decision],
    world_size: int,
    *,
    resident_trees: Collection[int] = (),
    resend: bool = False,
    streaming: bool = True,
) -> Schedule:
    """Lower one decision per tree of the pass, in the order of the trees.

    Args:
        resident_trees: numbers of the trees that replay: their prompts' K/V lie where a prefill pass computed them.
        resend: backward has what moved sent again instead of keeping it.
        streaming: the trees' stages run side by side, so that one tree's moves travel under another's tiles;
            otherwise one tree after another, which holds one tree's moved K/V at a time.

    Raises:
        PlanError: a decision names ranks that do not exist, more ranks than its tree has tokens, or lanes that
            do not divide its degree.
    """
    trees = trees_of(nodes)
    if len(trees) != len(decisions):
        raise PlanError(f"{len(trees)} trees need {len(trees)} decisions, got {len(decisions)}")
    segments: list[Segment] = []
    moves: dict[int, list[Move]] = defaultdict(list)
    tiles: dict[int, list[Tile]] = defaultdict(list)
    first_stage = 0
    for number, (one, decision) in enumerate(zip(trees, decisions, strict=True)):
        weights = decision.weights
        tree = one if weights is None else replace(one, token_pairs=weights.token_pairs)
        root_is_resident = number in resident_trees
        _require_ranks(tree, decision, world_size)
        (_, owned), stages = _lowered(tree, decision, root_is_resident)
        segments += owned
        for stage, found in stages.moves.items():
            moves[first_stage + stage].extend(found)
        for stage, computed in stages.tiles.items():
            tiles[first_stage + stage].extend(computed)
        if not streaming:
            first_stage = max([first_stage, *moves, *tiles]) + 1
    last = max([0, *moves, *tiles])
    return Schedule(
        world_size=world_size,
        num_tokens=max((node.subtree_stop for node in nodes), default=0),
        segments=tuple(sorted(segments, key=lambda segment: (segment.rank, segment.start))),
        stages=tuple(Stage(tuple(moves[i]), tuple(tiles[i])) for i in range(last + 1)),
        resident=_roots(trees[number] for number in sorted(resident_trees)),
        resend=resend,
    )


def weighed_placement(nodes: Sequence[Node], decision: Decision) -> int | None:
    """Number of the placement that lowering takes for a tree alone; None where its kind has no choice.

    Raises:
        PlanError: as ``lower``.
    """
    if decision.kind != "gather" or decision.weights is None:
        return None
    (one,) = trees_of(nodes)
    tree = replace(one, token_pairs=decision.weights.token_pairs)
    _require_ranks(tree, decision, decision.ranks.stop)
    return _lowered(tree, decision, root_is_resident=False)[0].number


def _lowered(tree: Tree, decision: Decision, root_is_resident: bool) -> "tuple[Placement, _Stages]":
    lowered = [
        (placed, _stages(tree, _pieces(tree, placed.segments), decision, root_is_resident))
        for placed in _placements(tree, decision, root_is_resident)
    ]
    # Most kinds have one placement, and nothing to weigh.
    if len(lowered) == 1:
        return lowered[0]
    resident = _roots([tree]) if root_is_resident else ()
    return min(lowered, key=partial(_preference, decision, resident))


def _roots(trees: Iterable[Tree]) -> tuple[Span, ...]:
    return tuple((tree.root.start, tree.root.stop) for tree in trees)


def _require_ranks(tree: Tree, decision: Decision, world_size: int) -> None:
    if not 0 <= decision.first_rank <= world_size - decision.degree or decision.degree < 1:
        raise PlanError(
            f"{decision} needs ranks {decision.first_rank}..{decision.ranks.stop - 1} of a domain of {world_size}; "
            "lower the degree or enlarge the domain"
        )
    if decision.kind == "local" and decision.degree != 1:
        raise PlanError(f"local runs on 1 rank, the decision has {decision.degree}; use gather")
    if decision.degree % decision.lanes:
        raise PlanError(f"{decision.lanes} lanes do not divide degree {decision.degree}")
    if decision.degree > tree.num_tokens:
        raise PlanError(
            f"degree {decision.degree} for a tree of {tree.num_tokens} tokens; choose at most {tree.num_tokens}"
        )


def _preference(
    decision: Decision, resident: Sequence[Span], lowered: "tuple[Placement, _Stages]"
) -> tuple[float, ...]:
    """What to choose by, least first: the busiest rank's cost, or among even placements what moves and tiles are."""
    ((_, owned), stages), weights = lowered, decision.weights
    if weights is None:
        return (stages.num_moved_tokens, stages.most_tiles)
    tokens, pairs = Counter[int](), Counter[int]()
    for segment in owned:
        if not any(start <= segment.start < stop for start, stop in resident):
            tokens[segment.rank] += segment.stop - segment.start
    for tile in chain.from_iterable(stages.tiles.values()):
        pairs[tile.rank] += tile.num_pairs
    calls = stages.calls(owned, resident)
    arrive: dict[int, float] = defaultdict(float)
    leave: dict[int, float] = defaultdict(float)
    for move in chain.from_iterable(stages.moves.values()):
        moved = move.num_tokens * weights.moved_pairs(move.src, move.dst)
        arrive[move.dst] += moved
        leave[move.src] += moved
    loads = (
        RankLoad(tokens[rank], pairs[rank], max(arrive[rank], leave[rank]), calls[rank])
        for rank in decision.ranks
    )
    return (weights.busiest(loads),)


def _placements(tree: Tree, decision: Decision, root_is_resident: bool) -> list[Placement]:
    """Ways to place a tree."""
    ranks, weights, number = list(decision.ranks), decision.weights, decision.placement
    if decision.kind == "gather" and weights is not None:
        chosen = None if number is None else placement(tree, ranks, number, root_is_resident)
        return [chosen] if chosen else weighed_placements(tree, ranks, weights, root_is_resident)
    if decision.kind == "gather":
        found = placements(tree, ranks, root_is_resident)
    else:
        found = [_place(tree, decision, root_is_resident)]
    return [Placement(number, segments) for number, segments in enumerate(found)]


def _place(tree: Tree, decision: Decision, root_is_resident: bool) -> list[Segment]:
    ranks = list(decision.ranks)
    if decision.kind == "ring":
        return place_zigzag(tree, ranks, root_is_resident)
    if decision.kind in ("tree_move_kv", "heads"):
        return place_lanes(tree, ranks, decision.lanes, root_is_resident)
    if decision.kind == "gather_whole":
        return place_uncut(tree, ranks, root_is_resident)
    if decision.kind == "dcp_fused":
        if root_is_resident:
            raise PlanError(
                "dcp_fused has no split form: its blocks leave a prompt where no replay looks for it"
            )
        return place_blocks(tree, ranks)
    if decision.weights is not None:
        return place_in_parts(tree, ranks, root_is_resident)
    return place_whole(tree, ranks, root_is_resident)


class _Piece(NamedTuple):
    """Adjoining tokens of one rank that have the same readers behind them."""

    rank: int
    start: int
    stop: int
    reach: int
    """One past the last packed token that attends to the piece: its readers are itself and [stop, reach)."""


def _pieces(tree: Tree, segments: Iterable[Segment]) -> list[_Piece]:
    """Segments ascending, joined where that changes no tile; the root's stay apart from what is below it."""
    pieces: list[_Piece] = []
    node = 0
    for segment in sorted(segments, key=lambda segment: segment.start):
        while tree.nodes[node].stop <= segment.start:
            node += 1
        piece = _Piece(segment.rank, segment.start, segment.stop, tree.nodes[node].subtree_stop)
        before = pieces[-1] if pieces else None
        if (
            before
            and (before.rank, before.stop, before.reach) == (piece.rank, piece.start, piece.reach)
            and piece.start != tree.root.stop
        ):
            pieces[-1] = before._replace(stop=piece.stop)
        else:
            pieces.append(piece)
    return pieces


@dataclass(slots=True)
class _Key:
    """Adjoining pieces as one worker sees them: at hand in the same stage, in one buffer, with one reach."""

    start: int
    stop: int
    reach: int
    stage: int
    asks: bool
    """Whether the worker computes the key's own tokens as queries, too."""
    pieces: list[_Piece]


class _Query(NamedTuple):
    """Adjoining queries as one worker sees them, in one buffer."""

    start: int
    stop: int
    stage: int
    """0 for the worker's own, 1 for those that travel; keys that meet these arrive no later than in stage 1."""


def _keys(pieces: Iterable[_Piece], seen_by: Callable[[_Piece], tuple[int, bool]]) -> list[_Key]:
    """Pieces as a worker sees them, ``seen_by`` giving the stage in which it has one, and whether it asks."""
    keys: list[_Key] = []
    last: tuple[int, int, tuple[int, bool]] | None = None
    for piece in pieces:
        seen = seen_by(piece)
        if last == (piece.start, piece.reach, seen):
            keys[-1].stop = piece.stop
            keys[-1].pieces.append(piece)
        else:
            keys.append(_Key(piece.start, piece.stop, piece.reach, *seen, [piece]))
        last = piece.stop, piece.reach, seen
    return keys


def _is_joined_by(key: _Key, following: _Key) -> bool:
    """Whether both lie side by side in one buffer. A worker's own keys do, unless one is resident and asks not."""
    is_one_buffer = key.stage > 0 or key.asks == following.asks
    return is_one_buffer and (following.start, following.stage) == (key.stop, key.stage)


def _runs(pieces: Iterable[_Piece], first: int) -> list[Segment]:
    """Longest spans of one rank's tokens from packed token ``first`` on."""
    runs: list[Segment] = []
    for piece in pieces:
        if piece.start < first:
            continue
        if runs and (runs[-1].rank, runs[-1].stop) == (piece.rank, piece.start):
            runs[-1] = Segment(piece.rank, runs[-1].start, piece.stop)
        else:
            runs.append(Segment(piece.rank, piece.start, piece.stop))
    return runs


def _queries(runs: Iterable[Segment], worker: int) -> list[_Query]:
    """Runs as a worker sees them: its own are there from the start, others arrive in stage 1."""
    queries: list[_Query] = []
    for run in runs:
        stage = int(run.rank != worker)
        if queries and (queries[-1].stop, queries[-1].stage) == (run.start, stage):
            queries[-1] = queries[-1]._replace(stop=run.stop)
        else:
            queries.append(_Query(run.start, run.stop, stage))
    return queries


class _Stages:
    """Moves and tiles of one tree, by stage."""

    def __init__(self) -> None:
        self.moves: dict[int, list[Move]] = defaultdict(list)
        self.tiles: dict[int, list[Tile]] = defaultdict(list)

    @property
    def num_moved_tokens(self) -> int:
        return sum(move.num_tokens for moves in self.moves.values() for move in moves)

    @property
    def most_tiles(self) -> int:
        """Of a rank."""
        return max(Counter(tile.rank for tiles in self.tiles.values() for tile in tiles).values(), default=0)

    def calls(self, owned: Iterable[Segment], resident: Sequence[Span]) -> Counter[int]:
        """Kernel calls of each rank."""
        last = max([-1, *self.moves, *self.tiles])
        stages = [Stage(tuple(self.moves[i]), tuple(self.tiles[i])) for i in range(last + 1)]
        total: Counter[int] = Counter()
        for of_stage in calls_of_stages(owned, stages, resident):
            total.update(of_stage)
        return total

    def meet(
        self, worker: int, keys: Sequence[_Key], queries: Sequence[_Query], part: int = 0, parts: int = 1
    ) -> None:
        """Compute ``queries`` x ``keys`` on ``worker``, and have the keys sent there that are read.

        Rectangles of the same queries whose keys adjoin and arrive together become one.
        """
        starts, stops = [query.start for query in queries], [query.stop for query in queries]
        growing: dict[Span, int] = {}
        for key, following in zip_longest(keys, keys[1:]):
            begin, end, reach = key.start, key.stop, key.reach
            if key.asks:
                self.tiles[key.stage].append(Tile(worker, begin, end, begin, end, True, part, parts))
            first = bisect_right(stops, end) if reach > end else len(queries)
            readers = queries[first : bisect_left(starts, reach, first)]
            goes_on = following is not None and _is_joined_by(key, following)
            grown, growing = growing, {}
            for start, stop, stage in readers:
                tiles = self.tiles[stage or key.stage]
                start, stop = start if start > end else end, stop if stop < reach else reach
                index = grown.get((start, stop)) if grown else None
                if index is None:
                    index = len(tiles)
                    tiles.append(Tile(worker, start, stop, begin, end, False, part, parts))
                else:
                    grown_from = tiles[index].key_start
                    tiles[index] = Tile(worker, start, stop, grown_from, end, False, part, parts)
                if goes_on:
                    growing[start, stop] = index
            if key.stage > 0 and (key.asks or readers):
                self.moves[key.stage].extend(
                    Move("kv", piece.rank, worker, piece.start, piece.stop, part, parts)
                    for piece in key.pieces
                )

    def lend(self, worker: int, runs: Iterable[Segment], part: int = 0, parts: int = 1) -> None:
        """Have queries sent to ``worker`` for stage 1, and their states sent back."""
        for run in runs:
            if run.rank != worker:
                there = Move("q", run.rank, worker, run.start, run.stop, part, parts)
                self.moves[1].append(there)
                self.moves[1 + STATE_DELAY].append(there._replace(kind="state", src=worker, dst=run.rank))


def _stages(tree: Tree, pieces: Sequence[_Piece], decision: Decision, root_is_resident: bool) -> _Stages:
    """What one tree's ranks do: who computes which queries with which keys, and when these arrive."""
    stages = _Stages()
    first_query = tree.root.stop if root_is_resident else tree.root.start
    if decision.kind == "heads":
        _compute_parts_of_heads(stages, pieces, decision, first_query)
        return stages
    if decision.kind == "move_q":
        _compute_at_the_root(stages, tree, pieces, decision)
        # What is left for the root's keys are the root's own queries.
        pieces = [
            piece._replace(reach=tree.root.stop) if piece.start < tree.root.stop else piece
            for piece in pieces
        ]
    in_ring = decision.kind in ("ring", "tree_move_kv")
    runs = _runs(pieces, first_query)
    for worker in decision.ranks:

        def seen(piece: _Piece, worker: int = worker) -> tuple[int, bool]:
            if piece.rank == worker:
                return 0, piece.start >= first_query
            return (worker - piece.rank) % decision.degree if in_ring else 1, False

        own = [run for run in runs if run.rank == worker]
        stages.meet(worker, _keys(pieces, seen), _queries(own, worker))
    return stages


def _compute_at_the_root(stages: _Stages, tree: Tree, pieces: Sequence[_Piece], decision: Decision) -> None:
    """Queries below the root travel to the root's keys."""
    runs = _runs(pieces, tree.root.stop)
    for worker in decision.ranks:
        own = [piece for piece in pieces if piece.rank == worker and piece.start < tree.root.stop]
        if own and runs:
            keys = _keys(own, lambda _: (0, False))
            stages.meet(worker, keys, _queries(runs, worker))
            stages.lend(worker, runs)


def _compute_parts_of_heads(
    stages: _Stages, pieces: Sequence[_Piece], decision: Decision, first_query: int
) -> None:
    """Each rank of a lane computes one part of the heads for all of the lane's queries."""
    runs = _runs(pieces, first_query)
    for worker in decision.ranks:
        lane = _lane_of(worker, decision)

        def seen(piece: _Piece, worker: int = worker, lane: range = lane) -> tuple[int, bool]:
            return int(piece.rank != worker), piece.rank in lane and piece.start >= first_query

        lanes_runs = [run for run in runs if run.rank in lane]
        part, parts = worker - lane.start, len(lane)
        queries = _queries(lanes_runs, worker)
        stages.meet(worker, _keys(pieces, seen), queries, part, parts)
        stages.lend(worker, lanes_runs, part, parts)


def _lane_of(rank: int, decision: Decision) -> range:
    per_lane = decision.degree // decision.lanes
    first = rank - (rank - decision.first_rank) % per_lane
    return range(first, first + per_lane)
