"""nodes of one tree -> segments: which rank owns which tokens.

Work is counted in query-key pairs; a token's linear layers count as ``TOKEN_PAIRS`` pairs, the ratio at which
a planner without a measured profile weighs the two.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from treecp_rl.plan import Node, Segment

TOKEN_PAIRS = 1856
"""Pairs taken to cost as much as one token's linear layers: an assumption until a profile says better."""
ZIGZAG_FLOOR = 16
"""A chunk of a zigzag holds at least this many tokens; shorter nodes go to one rank whole."""
BALANCE_TOLERANCE = 0.005
"""Work above the mean that a rank may take to keep a response whole."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Nodes [first, stop) of the pass, one tree; parents are indices into the pass's nodes."""

    nodes: tuple[Node, ...]
    first: int
    """Index of the tree's root among the pass's nodes."""

    def depth_of(self) -> tuple[int, ...]:
        """Position of each node's first token in its rows."""
        depths: list[int] = []
        for node in self.nodes:
            if node.parent < 0:
                depths.append(0)
            else:
                parent = node.parent - self.first
                depths.append(depths[parent] + self.nodes[parent].stop - self.nodes[parent].start)
        return tuple(depths)


def trees_of(nodes: Sequence[Node]) -> tuple[Tree, ...]:
    """Cut a pass's nodes at the roots."""
    roots = [index for index, node in enumerate(nodes) if node.parent < 0]
    stops = [*roots[1:], len(nodes)]
    return tuple(Tree(tuple(nodes[a:b]), a) for a, b in zip(roots, stops, strict=True))


def work(first_position: int, num_tokens: int) -> int:
    """Work of consecutive tokens of a row: each attends to all positions up to its own."""
    return num_tokens * TOKEN_PAIRS + num_tokens * first_position + num_tokens * (num_tokens + 1) // 2


def zigzag(start: int, stop: int, ranks: Sequence[int], light: int) -> list[Segment]:
    """2d chunks, rank i owning the i-th from either end, so that causal work is even.

    A span too short for that goes whole to rank ``light``.
    """
    chunks = 2 * len(ranks)
    if len(ranks) == 1 or stop - start < chunks * ZIGZAG_FLOOR:
        return [Segment(light, start, stop)]
    borders = [start + (stop - start) * i // chunks for i in range(chunks + 1)]
    owners = [*ranks, *reversed(ranks)]
    return [Segment(owners[i], borders[i], borders[i + 1]) for i in range(chunks)]


def _place_root(tree: Tree, ranks: Sequence[int], load: "_Load", is_resident: bool) -> list[Segment]:
    """The root as every kind places it, so that a replay pass finds a prompt where its prefill left it.

    A resident root costs its ranks nothing any more.
    """
    segments = zigzag(tree.nodes[0].start, tree.nodes[0].stop, ranks, ranks[0])
    if not is_resident:
        load.add(segments, tree.nodes[0], 0)
    return segments


def place_zigzag(tree: Tree, ranks: Sequence[int], root_is_resident: bool = False) -> list[Segment]:
    """Every node zigzag over all ranks; nodes too short for it go whole to the rank with the least work."""
    load = _Load(ranks)
    segments = _place_root(tree, ranks, load, root_is_resident)
    for node, depth in zip(tree.nodes[1:], tree.depth_of()[1:], strict=True):
        placed = zigzag(node.start, node.stop, ranks, load.lightest())
        load.add(placed, node, depth)
        segments += placed
    return segments


def place_lanes(
    tree: Tree, ranks: Sequence[int], lanes: int, root_is_resident: bool = False
) -> list[Segment]:
    """Root zigzag over all ranks, each path below it zigzag over the ranks of one lane, largest path first."""
    per_lane = len(ranks) // lanes
    lane_ranks = [ranks[lane * per_lane : (lane + 1) * per_lane] for lane in range(lanes)]
    lane_load = [(0, lane) for lane in range(lanes)]
    depths = tree.depth_of()
    load = _Load(ranks)
    segments = _place_root(tree, ranks, load, root_is_resident)
    paths = [_below(tree, child) for child in _children(tree, 0)]
    works = [sum(work(depths[i], _length(tree.nodes[i])) for i in path) for path in paths]
    for path in sorted(range(len(paths)), key=lambda path: (-works[path], path)):
        busy, lane = heapq.heappop(lane_load)
        heapq.heappush(lane_load, (busy + works[path], lane))
        for index in paths[path]:
            node = tree.nodes[index]
            placed = zigzag(node.start, node.stop, lane_ranks[lane], load.lightest(lane_ranks[lane]))
            load.add(placed, node, depths[index])
            segments += placed
    return segments


def place_whole(tree: Tree, ranks: Sequence[int], root_is_resident: bool = False) -> list[Segment]:
    """Root zigzag; subtrees below it whole, largest first; what would unbalance is cut between tokens.

    The cut part is laid along the ranks' remaining room (McNaughton's wrap-around), so that every rank ends
    within ``BALANCE_TOLERANCE`` of the mean, and at most d - 1 cuts are made.
    """
    depths = tree.depth_of()
    load = _Load(ranks)
    segments = _place_root(tree, ranks, load, root_is_resident)
    node_work = [work(depth, _length(node)) for node, depth in zip(tree.nodes, depths, strict=True)]
    target = sum(node_work[1:] if root_is_resident else node_work) / len(ranks)
    pending = [(sum(node_work[i] for i in _below(tree, child)), child) for child in _children(tree, 0)]
    heap = [(-total, child) for total, child in pending]
    heapq.heapify(heap)
    left: list[int] = []
    while heap:
        total, top = heapq.heappop(heap)
        rank = load.lightest()
        if load.of(rank) - total <= target * (1 + BALANCE_TOLERANCE):
            for index in _below(tree, top):
                node = tree.nodes[index]
                load.add([Segment(rank, node.start, node.stop)], node, depths[index])
                segments.append(Segment(rank, node.start, node.stop))
        else:
            left.append(top)
            for child in _children(tree, top):
                heapq.heappush(heap, (-sum(node_work[i] for i in _below(tree, child)), child))
    segments += _wrap_around(tree, depths, sorted(left), load, target)
    return segments


DCP_BLOCK_TOKENS = 512
"""Block of DCP's published configuration."""


def place_blocks(tree: Tree, ranks: Sequence[int]) -> list[Segment]:
    """Every node cut into blocks, the heaviest block first to the rank with the least work."""
    load = _Load(ranks)
    blocks = []
    for node, depth in zip(tree.nodes, tree.depth_of(), strict=True):
        for start in range(node.start, node.stop, DCP_BLOCK_TOKENS):
            stop = min(node.stop, start + DCP_BLOCK_TOKENS)
            blocks.append((work(depth + start - node.start, stop - start), start, stop, node, depth))
    segments = []
    for _, start, stop, node, depth in sorted(blocks, key=lambda block: (-block[0], block[1])):
        placed = [Segment(load.lightest(), start, stop)]
        load.add(placed, node, depth)
        segments += placed
    return segments


def _wrap_around(
    tree: Tree, depths: Sequence[int], left: Sequence[int], load: "_Load", target: float
) -> list[Segment]:
    """Fill the ranks' room up to the mean, one after another, cutting nodes where a rank is full."""
    segments: list[Segment] = []
    for index in left:
        node, depth = tree.nodes[index], depths[index]
        start = node.start
        while start < node.stop:
            rank = load.lightest()
            room = target - load.of(rank)
            position = depth + start - node.start
            stop = min(node.stop, start + max(1, _tokens_for(room, position)))
            rest = node.stop - stop
            if (
                0 < rest < ZIGZAG_FLOOR
                and work(position, node.stop - start) <= room + target * BALANCE_TOLERANCE
            ):
                stop = node.stop
            placed = [Segment(rank, start, stop)]
            load.add(placed, node, depth)
            segments += placed
            start = stop
    return segments


def _tokens_for(room: float, position: int) -> int:
    """Most consecutive tokens from ``position`` on whose work fits in ``room``."""
    per_token = TOKEN_PAIRS + position + 0.5
    return max(0, int(-per_token + (per_token * per_token + 2 * max(0.0, room)) ** 0.5))


class _Load:
    """Work of each rank so far."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._work = dict.fromkeys(ranks, 0)

    def of(self, rank: int) -> int:
        return self._work[rank]

    def lightest(self, among: Iterable[int] | None = None) -> int:
        """The rank with the least work, the lowest of several."""
        return min(self._work if among is None else among, key=lambda rank: (self._work[rank], rank))

    def add(self, segments: Sequence[Segment], node: Node, depth: int) -> None:
        for segment in segments:
            position = depth + segment.start - node.start
            self._work[segment.rank] += work(position, segment.stop - segment.start)


def _length(node: Node) -> int:
    return node.stop - node.start


def _children(tree: Tree, index: int) -> list[int]:
    return [i for i, node in enumerate(tree.nodes) if node.parent == tree.first + index]


def _below(tree: Tree, index: int) -> list[int]:
    """A node and its descendants: depth-first order keeps them together."""
    stop = tree.nodes[index].subtree_stop
    found = []
    for i in range(index, len(tree.nodes)):
        if tree.nodes[i].start >= stop and i > index:
            break
        found.append(i)
    return found
