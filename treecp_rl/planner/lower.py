"""[Node], [Decision] -> Schedule: how decisions become segments, moves, tiles and stages.

A lowering is three choices: who owns which tokens (``place``), on which rank a tile is computed, and in which
stage its operands arrive. All trees of a pass lie on one token axis, so their stage lists are simply zipped.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from treecp_rl.errors import PlanError
from treecp_rl.plan import Decision, Move, Node, Schedule, Segment, Span, Stage, Tile
from treecp_rl.planner.check import STATE_DELAY
from treecp_rl.planner.place import Tree, place_blocks, place_lanes, place_whole, place_zigzag, trees_of


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
    return Schedule(
        world_size=1,
        num_tokens=num_tokens,
        segments=(Segment(0, 0, num_tokens),),
        stages=(Stage(moves=(), tiles=tuple(causal + ancestors)),),
        resident=_roots(trees_of(nodes)) if roots_are_resident else (),
    )


def lower(
    nodes: Sequence[Node],
    decisions: Sequence[Decision],
    world_size: int,
    *,
    roots_are_resident: bool = False,
    resend: bool = False,
    streaming: bool = True,
) -> Schedule:
    """Lower one decision per tree of the pass, in the order of the trees.

    Args:
        roots_are_resident: a replay pass: the prompts' K/V lie where the prefill pass computed them.
        resend: backward has what moved sent again instead of keeping it.
        streaming: the trees' stages run side by side, so that one tree's moves travel under another's tiles;
            otherwise one tree after another, which holds one tree's moved K/V at a time.

    Raises:
        PlanError: a decision names ranks that do not exist, or lanes that do not divide its degree.
    """
    trees = trees_of(nodes)
    if len(trees) != len(decisions):
        raise PlanError(f"{len(trees)} trees need {len(trees)} decisions, got {len(decisions)}")
    segments: list[Segment] = []
    moves: dict[int, list[Move]] = defaultdict(list)
    tiles: dict[int, list[Tile]] = defaultdict(list)
    first_stage = 0
    for tree, decision in zip(trees, decisions, strict=True):
        _require_ranks(decision, world_size)
        owned = _place(tree, decision, roots_are_resident)
        segments += owned
        pieces = sorted(owned, key=lambda segment: segment.start)
        stages = _stages(tree, pieces, decision, roots_are_resident)
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
        resident=_roots(trees) if roots_are_resident else (),
        resend=resend,
    )


def _roots(trees: Sequence[Tree]) -> tuple[Span, ...]:
    return tuple((tree.nodes[0].start, tree.nodes[0].stop) for tree in trees)


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


def _place(tree: Tree, decision: Decision, root_is_resident: bool) -> list[Segment]:
    ranks = list(decision.ranks)
    if decision.kind == "ring":
        return place_zigzag(tree, ranks, root_is_resident)
    if decision.kind in ("tree_move_kv", "heads"):
        return place_lanes(tree, ranks, decision.lanes, root_is_resident)
    if decision.kind == "dcp_fused":
        if root_is_resident:
            raise PlanError(
                "dcp_fused has no split form: its blocks leave a prompt where no replay looks for it"
            )
        return place_blocks(tree, ranks)
    return place_whole(tree, ranks, root_is_resident)


def _meetings(tree: Tree, pieces: Sequence[Segment]) -> Iterator[tuple[Segment, list[Segment], int]]:
    """Every query piece, the pieces before it that it attends to, and how many of those are the root's.

    A piece attends to its node's earlier pieces, its ancestors' pieces, and causally to itself.
    """
    path_of: list[list[Segment]] = []
    cursor = 0
    for node in tree.nodes:
        path = [] if node.parent < 0 else list(path_of[node.parent - tree.first])
        num_root = 0 if node.parent < 0 else len(path_of[0])
        while cursor < len(pieces) and pieces[cursor].start < node.stop:
            yield pieces[cursor], path, num_root
            path.append(pieces[cursor])
            cursor += 1
        path_of.append(path)


class _Stages:
    """Moves and tiles of one tree, by stage; a move is made once however many tiles read it."""

    def __init__(self) -> None:
        self.moves: dict[int, dict[Move, None]] = defaultdict(dict)
        self.tiles: dict[int, list[Tile]] = defaultdict(list)

    def meet(
        self, worker: int, query: Segment, key: Segment, stage: int, part: int = 0, parts: int = 1
    ) -> None:
        """Compute ``query`` x ``key`` on ``worker``; whichever of the two lives elsewhere arrives in ``stage``."""
        if query.rank == key.rank == worker:
            stage = 0
        if key.rank != worker:
            self.moves[stage][Move("kv", key.rank, worker, key.start, key.stop, part, parts)] = None
        if query.rank != worker:
            self.moves[stage][Move("q", query.rank, worker, query.start, query.stop, part, parts)] = None
            back = Move("state", worker, query.rank, query.start, query.stop, part, parts)
            self.moves[stage + STATE_DELAY][back] = None
        self.tiles[stage].append(
            Tile(worker, query.start, query.stop, key.start, key.stop, query is key, part, parts)
        )


def _stages(tree: Tree, pieces: Sequence[Segment], decision: Decision, root_is_resident: bool) -> _Stages:
    """What one tree's ranks do: who computes each meeting, and in which stage."""
    stages = _Stages()
    degree, in_ring = decision.degree, decision.kind in ("ring", "tree_move_kv")
    for query, keys, num_root in _meetings(tree, pieces):
        if root_is_resident and query.start < tree.nodes[0].stop:
            continue
        if decision.kind == "heads":
            lane = _lane_of(query.rank, decision)
            for part, worker in enumerate(lane):
                for key in (query, *keys):
                    stages.meet(worker, query, key, 1, part, len(lane))
            continue
        stages.meet(query.rank, query, query, 0)
        for index, key in enumerate(keys):
            worker = key.rank if decision.kind == "move_q" and index < num_root else query.rank
            stages.meet(worker, query, key, (query.rank - key.rank) % degree if in_ring else 1)
    return stages


def _lane_of(rank: int, decision: Decision) -> range:
    per_lane = decision.degree // decision.lanes
    first = rank - (rank - decision.first_rank) % per_lane
    return range(first, first + per_lane)
