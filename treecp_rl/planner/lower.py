"""[Node], [Decision] -> Schedule: how decisions become segments, moves, tiles and stages.

A lowering is three choices: who owns which tokens (``place``), on which rank a tile is computed, and in which
stage its operands arrive. All trees of a pass lie on one token axis, so their stage lists are simply zipped.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from treecp_rl.errors import PlanError
from treecp_rl.plan import Decision, Move, Node, Schedule, Segment, Stage, Tile
from treecp_rl.planner.check import STATE_DELAY
from treecp_rl.planner.place import Tree, place_lanes, place_whole, place_zigzag, trees_of


def lower_local(nodes: Sequence[Node]) -> Schedule:
    """Whole trees on one rank: a causal tile per node, and per inner node one rectangle over its descendants.

    Depth-first packing makes a node's descendants contiguous, so that two tiles a node cover every valid
    (query, key) pair exactly once. Causal tiles come first: they cover each query once, so their results
    are written and only the rectangles' results are merged.
    """
    causal = [
        Tile(0, node.start, node.stop, node.start, node.stop, causal=True)
        for node in nodes
        if node.stop > node.start
    ]
    ancestors = [
        Tile(0, node.stop, node.subtree_stop, node.start, node.stop, causal=False)
        for node in nodes
        if node.stop > node.start and node.subtree_stop > node.stop
    ]
    num_tokens = max((node.subtree_stop for node in nodes), default=0)
    return Schedule(
        world_size=1,
        num_tokens=num_tokens,
        segments=(Segment(0, 0, num_tokens),),
        stages=(Stage(moves=(), tiles=tuple(causal + ancestors)),),
    )


def lower(nodes: Sequence[Node], decisions: Sequence[Decision], world_size: int) -> Schedule:
    """Lower one decision per tree of the pass, in the order of the trees.

    Raises:
        PlanError: a decision names ranks that do not exist, or lanes that do not divide its degree.
    """
    trees = trees_of(nodes)
    if len(trees) != len(decisions):
        raise PlanError(f"{len(trees)} trees need {len(trees)} decisions, got {len(decisions)}")
    segments: list[Segment] = []
    stages: dict[int, tuple[list[Move], list[Tile]]] = defaultdict(lambda: ([], []))
    for tree, decision in zip(trees, decisions, strict=True):
        _require_ranks(decision, world_size)
        owned = _place(tree, decision)
        segments += owned
        pieces = sorted(owned, key=lambda segment: segment.start)
        for stage, (moves, tiles) in _stages(tree, pieces, decision).items():
            stages[stage][0].extend(moves)
            stages[stage][1].extend(tiles)
    last = max(stages, default=0)
    return Schedule(
        world_size=world_size,
        num_tokens=max((node.subtree_stop for node in nodes), default=0),
        segments=tuple(sorted(segments, key=lambda segment: (segment.rank, segment.start))),
        stages=tuple(Stage(tuple(stages[i][0]), tuple(stages[i][1])) for i in range(last + 1)),
    )


def _require_ranks(decision: Decision, world_size: int) -> None:
    if decision.degree < 1 or decision.first_rank < 0 or decision.ranks.stop > world_size:
        raise PlanError(
            f"{decision.kind} on ranks {decision.first_rank}..{decision.ranks.stop - 1} of a domain of {world_size}; "
            "lower the degree or enlarge the domain"
        )
    if decision.kind == "local" and decision.degree != 1:
        raise PlanError(f"local runs on 1 rank, the decision has {decision.degree}; use gather")
    if decision.degree % decision.lanes:
        raise PlanError(f"{decision.lanes} lanes do not divide degree {decision.degree}")


def _place(tree: Tree, decision: Decision) -> list[Segment]:
    ranks = list(decision.ranks)
    if decision.kind == "ring":
        return place_zigzag(tree, ranks)
    if decision.kind == "tree_move_kv":
        return place_lanes(tree, ranks, decision.lanes)
    return place_whole(tree, ranks)


@dataclass(frozen=True, slots=True)
class _Meeting:
    """Two owned pieces of one tree whose queries and keys must meet."""

    query: Segment
    key: Segment
    causal: bool
    key_is_root: bool


def _meetings(tree: Tree, pieces: Sequence[Segment]) -> Iterator[_Meeting]:
    """Every query piece with the key pieces it attends to: its own node's up to itself, and its ancestors'."""
    of_node: list[list[Segment]] = [[] for _ in tree.nodes]
    cursor = 0
    for index, node in enumerate(tree.nodes):
        while cursor < len(pieces) and pieces[cursor].start < node.stop:
            of_node[index].append(pieces[cursor])
            cursor += 1
    for index, node in enumerate(tree.nodes):
        seen: list[tuple[int, Segment]] = []
        parent = node.parent
        while parent >= 0:
            local = parent - tree.first
            seen.extend((local, piece) for piece in of_node[local])
            parent = tree.nodes[local].parent
        for query in of_node[index]:
            yield _Meeting(query, query, causal=True, key_is_root=False)
            for local, key in seen:
                yield _Meeting(query, key, causal=False, key_is_root=local == 0)
            seen.append((index, query))


def _stages(
    tree: Tree, pieces: Sequence[Segment], decision: Decision
) -> dict[int, tuple[list[Move], list[Tile]]]:
    """Stage -> moves and tiles of one tree."""
    stages: dict[int, tuple[list[Move], list[Tile]]] = defaultdict(lambda: ([], []))
    moved: set[tuple[int, Move]] = set()

    def move_once(stage: int, move: Move) -> None:
        if (stage, move) not in moved:
            moved.add((stage, move))
            stages[stage][0].append(move)

    for meeting in _meetings(tree, pieces):
        query, key = meeting.query, meeting.key
        if query.rank == key.rank:
            stage, worker = 0, query.rank
        elif decision.kind == "move_q" and meeting.key_is_root and query.start >= tree.nodes[0].stop:
            stage, worker = 1, key.rank
            move_once(stage, Move("q", query.rank, worker, query.start, query.stop))
            move_once(stage + STATE_DELAY, Move("state", worker, query.rank, query.start, query.stop))
        else:
            hops = (query.rank - key.rank) % decision.degree
            stage, worker = (hops if decision.kind in ("ring", "tree_move_kv") else 1), query.rank
            move_once(stage, Move("kv", key.rank, worker, key.start, key.stop))
        tile = Tile(worker, query.start, query.stop, key.start, key.stop, meeting.causal)
        stages[stage][1].append(tile)
    return stages
