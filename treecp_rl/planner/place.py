"""nodes of one tree -> segments: which rank owns which tokens.

Work is counted in query-key pairs; a token's linear layers count as so many pairs as the decision says.
"""

import heapq
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, chain, pairwise
from math import ceil
from operator import add
from typing import NamedTuple

from treecp_rl.plan import TOKEN_PAIRS, Node, RankLoad, Segment, Weights

ZIGZAG_FLOOR = 16
"""A chunk of a zigzag holds at least this many tokens; shorter nodes go to one rank whole."""
ROOT_ZIGZAG_FLOOR = 8
"""The same of a root that runs by itself, in a prefill: every rank waits for a prompt that is whole on another."""
WHOLE_ROOT_FLOOR = 128
"""A root with its responses beside it may stay whole unless a chunk would hold so many tokens, a block of
flash-attention's queries: the others have work of their own meanwhile, and chunks cost every rank more tiles."""
BLOCKS = (128, 64, 32, 16)
"""Zigzags are cut at multiples of the largest of these that keeps the ranks even. Kernels compute keys by blocks, 128
on GPUs, and by vectors, 16 in torch's CPU kernel: 126 keys take it up to 1.6 times as long as 128."""
BLOCK_TOLERANCE = 0.025
"""Tokens or pairs above the mean that a rank may take for that."""
BALANCE_TOLERANCE = 0.005
"""Work above the mean that a rank may take to keep a response whole."""
WORK_LIMIT = 1.01
"""Most work of a rank, over the mean, that ``place_whole`` is content with."""
TOKEN_LIMIT = 1.15
"""Most tokens of a rank, over the mean, that ``place_whole`` is content with: tokens are activation memory."""
STEADY_SHARE = 1 / 64
"""Part of a rank's share that short nodes may pile up on one rank of a zigzag before the next has its turn."""
SPAN_TOKEN_LIMIT = 1.25
"""The same of spans: who has early tokens has more of them. They win where a rank has few, and memory is not tight."""
SPAN_EXCESSES = (0.06, 0.2)
"""Work above a rank's share that a span may hold: the more, the fewer spans a node takes."""
MOST_WEIGHED = 3
"""Placements of a tree that are lowered to be weighed."""
MOST_STEPS = 500
"""Of one search for an even placement without cuts."""
CUT_SHARES = (1.0, 0.5, 0.25, 0.125, 0.0, float("inf"))
"""``place_whole`` cuts nodes zigzag whose work exceeds this part of a rank's share, until both limits hold. None
at all comes last: equal chunks of a short node may differ by more work than the limit allows."""


@dataclass(frozen=True, slots=True)
class Tree:
    """One replay tree of a pass, in depth-first order.

    A node and its only child attend as one longer node would, so they are one here; only the root stays as it
    is, because a replay pass looks for it where the prefill pass left it.
    """

    nodes: tuple[Node, ...]
    """Parents are indices into this tuple."""
    depths: tuple[int, ...]
    """Position of each node's first token in its rows."""
    ends: tuple[int, ...]
    """One past the index of each node's last descendant."""
    token_pairs: int = TOKEN_PAIRS
    """Pairs that count as much as one token's linear layers."""

    @property
    def root(self) -> Node:
        return self.nodes[0]

    @property
    def num_tokens(self) -> int:
        return self.root.subtree_stop - self.root.start

    def work(self, first_position: int, num_tokens: int) -> int:
        """Work of consecutive tokens of a row: each attends to all positions up to its own."""
        pairs = num_tokens * first_position + num_tokens * (num_tokens + 1) // 2
        return num_tokens * self.token_pairs + pairs

    def works(self) -> list[int]:
        """Work of each node's own tokens."""
        return [self.work(depth, _length(node)) for node, depth in zip(self.nodes, self.depths, strict=True)]

    def tokens_for(self, room: float, first_position: int) -> int:
        """Most consecutive tokens from ``first_position`` on whose work fits in ``room``."""
        per_token = self.token_pairs + first_position + 0.5
        return max(0, int(-per_token + (per_token * per_token + 2 * max(0.0, room)) ** 0.5))

    def children(self, index: int) -> list[int]:
        """Indices of a node's children."""
        found, child = [], index + 1
        while child < self.ends[index]:
            found.append(child)
            child = self.ends[child]
        return found


def trees_of(nodes: Sequence[Node]) -> tuple[Tree, ...]:
    """Cut a pass's nodes at the roots."""
    roots = [index for index, node in enumerate(nodes) if node.parent < 0]
    stops = [*roots[1:], len(nodes)]
    return tuple(_tree(nodes[first:stop], first) for first, stop in zip(roots, stops, strict=True))


def _tree(nodes: Sequence[Node], first: int) -> Tree:
    joined: list[Node] = []
    depths: list[int] = []
    index_of: list[int] = []
    for node in nodes:
        parent = index_of[node.parent - first] if node.parent >= 0 else -1
        above = joined[parent] if parent > 0 else None
        if above and (above.stop, above.subtree_stop) == (node.start, node.subtree_stop):
            joined[parent] = Node(above.parent, above.start, node.stop, above.subtree_stop)
            index_of.append(parent)
            continue
        depths.append(depths[parent] + _length(joined[parent]) if parent >= 0 else 0)
        index_of.append(len(joined))
        joined.append(Node(parent, node.start, node.stop, node.subtree_stop))
    ends = list(range(1, len(joined) + 1))
    for index in range(len(joined) - 1, 0, -1):
        parent = joined[index].parent
        ends[parent] = max(ends[parent], ends[index])
    return Tree(tuple(joined), tuple(depths), tuple(ends))


class _Load:
    """What each rank carries so far, and the segments it carries it for."""

    def __init__(self, tree: Tree, ranks: Sequence[int]) -> None:
        self._tree = tree
        self.work = dict.fromkeys(ranks, 0)
        self.tokens = dict.fromkeys(ranks, 0)
        self.segments: list[Segment] = []
        self._steady = -1
        self._starts = [node.start for node in tree.nodes]

    def lightest(self, among: Iterable[int] | None = None) -> int:
        """The rank with the least work, the lowest of several."""
        return min(self.work if among is None else among, key=lambda rank: (self.work[rank], rank))

    def steady(self, among: Sequence[int], slack: float) -> int:
        """The lightest rank, or the one this named before while it carries at most ``slack`` more: short nodes
        that follow one another then lie on one rank, and are read and moved as one."""
        light = self.lightest(among)
        if self._steady not in among or self.work[self._steady] > self.work[light] + slack:
            self._steady = light
        return self._steady

    def place(self, index: int, segments: Sequence[Segment], *, is_free: bool = False) -> None:
        """Give segments of node ``index`` to their ranks; free ones were computed in an earlier pass."""
        self.segments.extend(segment for segment in segments if segment.stop > segment.start)
        if is_free:
            return
        shift = self._tree.depths[index] - self._tree.nodes[index].start
        for rank, start, stop in ((s.rank, s.start, s.stop) for s in segments):
            self.work[rank] += self._tree.work(start + shift, stop - start)
            self.tokens[rank] += stop - start

    def estimated_cost(self, weights: Weights) -> float:
        """Of the busiest rank, in pairs: its work, the K/V that it lacks or sends of its nodes and of the root, and
        about as many kernel calls as its runs of tokens meet runs of keys."""
        owners: list[dict[int, int]] = [defaultdict(int) for _ in self._tree.nodes]
        own_runs: dict[tuple[int, int], int] = defaultdict(int)
        for segment in self.segments:
            node = bisect_right(self._starts, segment.start) - 1
            owners[node][segment.rank] += segment.stop - segment.start
            own_runs[segment.rank, node] += 1
        arrive, leave, calls = (dict.fromkeys(self.work, 0.0) for _ in range(3))
        for node, held in enumerate(owners):
            for rank in held if node else calls:
                for other, tokens in held.items():
                    if other != rank:
                        moved = tokens * weights.moved_pairs(other, rank)
                        arrive[rank] += moved
                        leave[other] += moved
        for (rank, node), runs in own_runs.items():
            # Rectangles of all nodes with the root are joined: about as many whatever a rank holds.
            calls[rank] += runs * (runs + 1) / 2 + (runs if len(owners[node]) > 1 else 0)
        return weights.busiest(
            RankLoad(
                self.tokens[rank],
                work - self.tokens[rank] * self._tree.token_pairs,
                max(arrive[rank], leave[rank]),
                calls[rank],
            )
            for rank, work in self.work.items()
        )

    def excess(self) -> float:
        """The larger of the excesses of work and tokens over their means, in units of their limits'."""
        return max(
            _excess(self.work.values()) / (WORK_LIMIT - 1), _excess(self.tokens.values()) / (TOKEN_LIMIT - 1)
        )


def _excess(loads: Iterable[int]) -> float:
    per_rank = list(loads)
    total = sum(per_rank)
    return max(per_rank) * len(per_rank) / total - 1 if total else 0.0


def zigzag(
    start: int, stop: int, ranks: Sequence[int], light: int, floor: int = ZIGZAG_FLOOR
) -> list[Segment]:
    """2d chunks, rank i owning the i-th from either end, so that causal work is even.

    A span whose chunks would have less than ``floor`` tokens goes whole to rank ``light``.
    """
    if len(ranks) == 1 or stop - start < 2 * len(ranks) * floor:
        return [Segment(light, start, stop)]
    chunks = pairwise(_zigzag_borders(stop - start, len(ranks)))
    owners = chain(ranks, reversed(ranks))
    return [Segment(rank, start + a, start + b) for rank, (a, b) in zip(owners, chunks, strict=True)]


@lru_cache(maxsize=4096)
def _zigzag_borders(length: int, num_ranks: int) -> tuple[int, ...]:
    """Of 2d chunks: of about equal length."""
    chunks = 2 * num_ranks
    return _at_blocks([length * i // chunks for i in range(chunks + 1)], _is_even_zigzag)


def _at_blocks(exact: Sequence[int], is_even: Callable[[Sequence[int]], bool]) -> tuple[int, ...]:
    """Borders at multiples of the largest of ``BLOCKS`` that leaves the ranks even, else the exact ones."""
    length, count = exact[-1], len(exact) - 1
    for block in BLOCKS:
        borders = (0, *(block * round(border / block) for border in exact[1:-1]), length)
        if block * count <= length and is_even(borders):
            return borders
    return tuple(exact)


def _is_even_zigzag(borders: Sequence[int]) -> bool:
    """Whether no rank of a zigzag has more tokens or causal pairs than ``BLOCK_TOLERANCE`` above the mean."""
    for sums in (borders, [border * border for border in borders]):
        chunks = [after - before for before, after in pairwise(sums)]
        most = max(map(add, chunks, reversed(chunks)))
        if most * len(chunks) / 2 > sums[-1] * (1 + BLOCK_TOLERANCE):
            return False
    return True


def _is_long(num_tokens: int, ranks: Sequence[int]) -> bool:
    return num_tokens >= 2 * len(ranks) * ZIGZAG_FLOOR


def _with_root(tree: Tree, ranks: Sequence[int], is_resident: bool, floor: int = ROOT_ZIGZAG_FLOOR) -> _Load:
    """The root as every kind places it, so that a replay pass finds a prompt where its prefill left it.

    A resident root costs its ranks nothing any more.
    """
    load = _Load(tree, ranks)
    chunks = zigzag(tree.root.start, tree.root.stop, ranks, ranks[0], floor)
    load.place(0, chunks, is_free=is_resident)
    return load


def _root_floors(tree: Tree, ranks: Sequence[int], root_is_resident: bool) -> tuple[int, ...]:
    """Floors of the root's zigzag that lead to different placements; a prefill's and a replay's must agree."""
    is_alone = root_is_resident or len(tree.nodes) == 1
    floors = (ROOT_ZIGZAG_FLOOR,) if is_alone else (WHOLE_ROOT_FLOOR, ROOT_ZIGZAG_FLOOR)
    chunks = 2 * len(ranks)
    differ = len({tree.root.stop - tree.root.start < chunks * floor for floor in floors}) > 1
    return floors if differ else floors[-1:]


def place_zigzag(tree: Tree, ranks: Sequence[int], root_is_resident: bool = False) -> list[Segment]:
    """Every node zigzag over all ranks; nodes too short for it go whole to a rank with about the least work."""
    load = _with_root(tree, ranks, root_is_resident)
    slack = _subtree_work(tree, frozenset())[0] / len(ranks) * STEADY_SHARE
    for index, node in enumerate(tree.nodes[1:], 1):
        load.place(index, zigzag(node.start, node.stop, ranks, load.steady(ranks, slack)))
    return load.segments


def place_lanes(
    tree: Tree, ranks: Sequence[int], lanes: int, root_is_resident: bool = False
) -> list[Segment]:
    """Root zigzag over all ranks, each path below it zigzag over the ranks of one lane, largest path first."""
    return _place_lanes(tree, ranks, lanes, root_is_resident).segments


def _place_lanes(tree: Tree, ranks: Sequence[int], lanes: int, root_is_resident: bool) -> _Load:
    per_lane = len(ranks) // lanes
    lane_ranks = [ranks[lane * per_lane : (lane + 1) * per_lane] for lane in range(lanes)]
    lane_load = [(0, lane) for lane in range(lanes)]
    load = _with_root(tree, ranks, root_is_resident)
    works = _subtree_work(tree, frozenset())
    for top in sorted(tree.children(0), key=lambda child: (-works[child], child)):
        busy, lane = heapq.heappop(lane_load)
        heapq.heappush(lane_load, (busy + works[top], lane))
        for index in range(top, tree.ends[top]):
            node = tree.nodes[index]
            light = load.steady(lane_ranks[lane], works[0] / len(ranks) * STEADY_SHARE)
            load.place(index, zigzag(node.start, node.stop, lane_ranks[lane], light))
    return load


def placements(tree: Tree, ranks: Sequence[int], root_is_resident: bool = False) -> list[list[Segment]]:
    """Placements of ``gather`` to choose among: ``place_whole``'s, and the other zigzags that are even.

    A cut moves the K/V before it, a whole subtree moves nothing of its own. And what a rank holds beside its root
    chunks decides how much of the root must come to it: the first rank needs all of it anyhow.
    """
    first, *others = (place() for place in _zigzags(tree, ranks, root_is_resident))
    assert first is not None
    return [first.segments, *(load.segments for load in others if load and load.excess() <= 1)]


class Placement(NamedTuple):
    """One way of ``gather``."""

    number: int
    """Of the ways that trees with as long a prompt have on as many ranks."""
    segments: list[Segment]


def weighed_placements(
    tree: Tree, ranks: Sequence[int], weights: Weights, root_is_resident: bool = False
) -> list[Placement]:
    """Placements of ``gather`` to choose among by cost: the cheapest by estimate, even or not."""
    loads = [place() for place in _ways(tree, ranks, root_is_resident)]
    distinct = {frozenset(load.segments): (i, load) for i, load in reversed([*enumerate(loads)]) if load}
    cheapest = sorted(distinct.values(), key=lambda found: (found[1].estimated_cost(weights), found[0]))
    return [Placement(number, load.segments) for number, load in cheapest[:MOST_WEIGHED]]


def placement(
    tree: Tree, ranks: Sequence[int], number: int, root_is_resident: bool = False
) -> Placement | None:
    """One of those; None where the tree has none of that number: it may branch deeper than was planned."""
    ways = _ways(tree, ranks, root_is_resident)
    load = ways[number]() if number < len(ways) else None
    return None if load is None else Placement(number, load.segments)


Place = Callable[[], _Load | None]
"""Places a tree; None where that way has no placement of it."""


def _ways(tree: Tree, ranks: Sequence[int], root_is_resident: bool) -> list[Place]:
    """Of ``gather``, even or not."""
    given = tree, ranks, root_is_resident
    found = _zigzags(*given)
    found += [partial(_place_largest_first, *given, floor) for floor in _root_floors(*given)]
    if len(tree.nodes) > 1:
        # A root by itself is a prefill's, which leaves it where its replay looks for it.
        found.append(partial(_place_in_order, *given))
        found += [partial(_place_in_spans, *given, excess) for excess in SPAN_EXCESSES]
        found.append(partial(_place_root_in_spans, *given))
    return found


def _zigzags(tree: Tree, ranks: Sequence[int], root_is_resident: bool) -> list[Place]:
    """Ways with the root zigzag or, if short, whole: ``place_whole``'s, without cuts, with long responses on ranks of
    their own, in lanes."""
    given = tree, ranks, root_is_resident
    floors = _root_floors(*given)
    found: list[Place] = [partial(_place_whole, *given, floor) for floor in (ROOT_ZIGZAG_FLOOR, *floors[:-1])]
    found += [
        partial(_place_uncut, *given, fills_up, floor) for floor in floors for fills_up in (False, True)
    ]
    found += [partial(_place_in_parts, *given, floor) for floor in floors]
    lanes = (count for count in range(2, len(ranks)) if len(ranks) % count == 0)
    found += [partial(_place_lanes, tree, ranks, count, root_is_resident) for count in lanes]
    return found


def place_uncut(tree: Tree, ranks: Sequence[int], root_is_resident: bool = False) -> list[Segment]:
    """Every subtree below the root whole, largest first, whatever the balance.

    The root is zigzag, or whole if short and the balance is worse by no more than ``WORK_LIMIT`` allows.
    """
    floors = _root_floors(tree, ranks, root_is_resident)
    first, *others = (_place_largest_first(tree, ranks, root_is_resident, floor) for floor in floors)
    return min([first, *others], key=lambda load: load.excess() + (load is not first)).segments


def _place_largest_first(tree: Tree, ranks: Sequence[int], root_is_resident: bool, floor: int) -> _Load:
    load = _with_root(tree, ranks, root_is_resident, floor)
    works = _subtree_work(tree, frozenset())
    for top in sorted(tree.children(0), key=lambda top: (-works[top], top)):
        rank = load.lightest()
        for index in range(top, tree.ends[top]):
            load.place(index, [Segment(rank, tree.nodes[index].start, tree.nodes[index].stop)])
    return load


def _place_uncut(
    tree: Tree, ranks: Sequence[int], root_is_resident: bool, fills_up: bool, root_floor: int
) -> _Load | None:
    """Every subtree below the root whole, no rank above ``WORK_LIMIT``; None if a short search finds none.

    Args:
        fills_up: ranks are tried in their order, else the lightest first.
        root_floor: fewest tokens of a chunk of the root's zigzag.
    """
    load = _with_root(tree, ranks, root_is_resident, root_floor)
    works = _subtree_work(tree, frozenset())
    tops = sorted(tree.children(0), key=lambda top: (-works[top], top))
    room = WORK_LIMIT * (sum(load.work.values()) + sum(works[top] for top in tops)) / len(ranks)
    loads = [load.work[rank] for rank in ranks]
    chosen: list[int] = []
    steps = 0

    def fit(index: int) -> bool:
        """Depth first: place subtree ``index`` and all after it."""
        nonlocal steps
        if index == len(tops):
            return True
        order = range(len(ranks)) if fills_up else sorted(range(len(ranks)), key=lambda i: (loads[i], i))
        tried = set()
        for i in order:
            steps += 1
            if steps > MOST_STEPS:
                return False
            if loads[i] in tried or loads[i] + works[tops[index]] > room:
                continue
            tried.add(loads[i])
            loads[i] += works[tops[index]]
            chosen.append(i)
            if fit(index + 1):
                return True
            chosen.pop()
            loads[i] -= works[tops[index]]
        return False

    if len(tops) > MOST_STEPS or not fit(0):
        return None
    for top, i in zip(tops, chosen, strict=True):
        for index in range(top, tree.ends[top]):
            node = tree.nodes[index]
            load.place(index, [Segment(ranks[i], node.start, node.stop)])
    return load


def place_whole(tree: Tree, ranks: Sequence[int], root_is_resident: bool = False) -> list[Segment]:
    """Root zigzag; subtrees below it whole, largest first; what would unbalance is cut.

    A node that alone exceeds a rank's share is cut zigzag, like the root. Whole subtrees follow, and what does
    not fit is laid along the ranks' remaining room (McNaughton's wrap-around, at most d - 1 cuts). Late tokens
    of long nodes cost more than early ones, so even work may mean uneven tokens: then shorter nodes are cut
    zigzag too, until a rank exceeds the mean by at most ``WORK_LIMIT`` and ``TOKEN_LIMIT``; where no choice
    reaches both, the one that comes closest is taken.
    """
    return _place_whole(tree, ranks, root_is_resident, ROOT_ZIGZAG_FLOOR).segments


def _place_whole(tree: Tree, ranks: Sequence[int], root_is_resident: bool, root_floor: int) -> _Load:
    best, least, tried = None, float("inf"), set()
    for share in CUT_SHARES:
        cut = _nodes_to_cut(tree, ranks, share, root_is_resident)
        if cut in tried:
            continue
        tried.add(cut)
        load = _place_around(tree, ranks, cut, root_is_resident, root_floor)
        if load.excess() < least:
            best, least = load, load.excess()
        if least <= 1:
            break
    assert best is not None
    return best


def place_in_parts(tree: Tree, ranks: Sequence[int], root_is_resident: bool = False) -> list[Segment]:
    """Root zigzag, long responses over ranks of their own; where there are none, as ``place_whole``."""
    load = _place_in_parts(tree, ranks, root_is_resident, ROOT_ZIGZAG_FLOOR)
    return place_whole(tree, ranks, root_is_resident) if load is None else load.segments


def _place_in_parts(
    tree: Tree, ranks: Sequence[int], root_is_resident: bool, root_floor: int
) -> _Load | None:
    """A response of more work than a rank's share zigzag over as many ranks of its own as it fills; its ends, and all
    shorter responses, on the ranks that are left. None where responses branch, or none is long.

    A response's K/V then travel within its part, not to all ranks. Both ends: together they have the work per token
    of what is between them, so that even work means even tokens.
    """
    tops = tree.children(0)
    if len(tops) + 1 < len(tree.nodes):
        return None
    load = _with_root(tree, ranks, root_is_resident, root_floor)
    works = _subtree_work(tree, frozenset())
    target = (sum(load.work.values()) + sum(works[top] for top in tops)) / len(ranks)
    # Ranks with a whole root have less room, and are for the rest.
    free = sorted(ranks, key=lambda rank: (load.work[rank], rank))
    rest: list[tuple[_Run, ...]] = []
    for top in sorted(tops, key=lambda top: (-works[top], top)):
        node, own = tree.nodes[top], free[: _ranks_filled(works[top], target, free, load)]
        if not own:
            rest.append((_Run(top, node.start, node.stop),))
            continue
        free = free[len(own) :]
        more = works[top] - sum(target - load.work[rank] for rank in own)
        # Work of n tokens at either end: n (2 token_pairs + 2 depth + length + 1).
        end = max(0, int(more / (2 * tree.token_pairs + 2 * tree.depths[top] + _length(node) + 1)))
        start, stop = node.start + end, node.stop - end
        load.place(top, zigzag(start, stop, own, own[0]))
        if end:
            rest.append((_Run(top, node.start, start), _Run(top, stop, node.stop)))
    if len(free) == len(ranks):
        return None
    _lay_largest_first(tree, rest, load, free or list(ranks), target)
    return load


class _Run(NamedTuple):
    """Consecutive tokens of one node."""

    node: int
    start: int
    stop: int


def _ranks_filled(total: int, target: float, free: Sequence[int], load: _Load) -> int:
    """How many of the ``free`` ranks, in their order, ``total`` fills up to ``target``."""
    count = 0
    for rank in free:
        total -= int(target - load.work[rank])
        if total < -target * BALANCE_TOLERANCE:
            break
        count += 1
    return count


def _lay_largest_first(
    tree: Tree, parts: Iterable[tuple[_Run, ...]], load: _Load, ranks: Sequence[int], target: float
) -> None:
    """Parts whole where they fit, the rest wrapped around the room of all ranks."""

    def work_of(part: tuple[_Run, ...]) -> int:
        shifts = (tree.depths[run.node] - tree.nodes[run.node].start for run in part)
        return sum(
            tree.work(run.start + shift, run.stop - run.start)
            for run, shift in zip(part, shifts, strict=True)
        )

    left: list[_Run] = []
    for part in sorted(parts, key=lambda part: (-work_of(part), part)):
        rank = load.lightest(ranks)
        if load.work[rank] + work_of(part) <= target * (1 + BALANCE_TOLERANCE):
            for run in part:
                load.place(run.node, [Segment(rank, run.start, run.stop)])
        else:
            left += part
    _wrap_around(tree, sorted(left), load, target)


def _nodes_to_cut(tree: Tree, ranks: Sequence[int], share: float, root_is_resident: bool) -> frozenset[int]:
    """Nodes below the root that are long enough for a zigzag and exceed ``share`` of a rank's work."""
    if len(ranks) == 1:
        return frozenset()
    works = tree.works()
    limit = share * sum(works[1:] if root_is_resident else works) / len(ranks)
    return frozenset(
        index
        for index in range(1, len(works))
        if works[index] > limit and _is_long(_length(tree.nodes[index]), ranks)
    )


def _subtree_work(tree: Tree, without: frozenset[int]) -> list[int]:
    """Work of each node and its descendants, some left out."""
    works = [0 if index in without else work for index, work in enumerate(tree.works())]
    sums = [0, *accumulate(works)]
    return [sums[end] - sums[index] for index, end in enumerate(tree.ends)]


def _place_around(
    tree: Tree, ranks: Sequence[int], cut: frozenset[int], root_is_resident: bool, root_floor: int
) -> _Load:
    """Root and ``cut`` zigzag, the other subtrees whole where they fit, the rest wrapped around."""
    load = _with_root(tree, ranks, root_is_resident, root_floor)
    for index in sorted(cut):
        node = tree.nodes[index]
        load.place(index, zigzag(node.start, node.stop, ranks, ranks[0]))
    return _fill_around(tree, load, cut)


def _fill_around(tree: Tree, load: _Load, cut: frozenset[int]) -> _Load:
    """Beside the root and the ``cut`` nodes, which are placed, the other subtrees whole where they fit, the rest
    wrapped around."""
    works = _subtree_work(tree, cut)
    tops = tree.children(0)
    target = (sum(load.work.values()) + sum(works[top] for top in tops)) / len(load.work)
    heap = [(-works[top], top) for top in tops]
    heapq.heapify(heap)
    left: list[int] = []
    while heap:
        total, top = heapq.heappop(heap)
        rank = load.lightest()
        if load.work[rank] - total <= target * (1 + BALANCE_TOLERANCE):
            for index in range(top, tree.ends[top]):
                if index not in cut:
                    load.place(index, [Segment(rank, tree.nodes[index].start, tree.nodes[index].stop)])
            continue
        if top not in cut:
            left.append(top)
        for child in tree.children(top):
            heapq.heappush(heap, (-works[child], child))
    runs = [_Run(index, tree.nodes[index].start, tree.nodes[index].stop) for index in sorted(left)]
    _wrap_around(tree, runs, load, target)
    return load


def _wrap_around(tree: Tree, runs: Iterable[_Run], load: _Load, target: float) -> None:
    """Fill the ranks' room up to the mean, one after another, cutting runs where a rank is full."""
    rank = load.lightest()
    for index, start, end in runs:
        node = tree.nodes[index]
        while start < end:
            position = tree.depths[index] + start - node.start
            if not tree.tokens_for(target - load.work[rank], position):
                rank = load.lightest()
            room = target - load.work[rank]
            stop = min(end, start + max(1, tree.tokens_for(room, position)))
            is_crumb = 0 < end - stop < ZIGZAG_FLOOR
            if is_crumb and tree.work(position, end - start) <= room + target * BALANCE_TOLERANCE:
                stop = end
            load.place(index, [Segment(rank, start, stop)])
            start = stop


def _place_in_order(tree: Tree, ranks: Sequence[int], root_is_resident: bool) -> _Load | None:
    """Nodes one after another along the ranks.

    By spans: consecutive tokens of a node on one rank, where a zigzag gives it two chunks. Work is as even, and a rank
    makes fewer kernel calls and reads less of a node that others hold, too; but who has early tokens has more of them.
    None where that is too many. A resident root lies where its prefill left it.
    """
    load = _lay_in_order(tree, *_before_spans(tree, ranks, root_is_resident))
    return load if _is_lean(load) else None


def _place_in_spans(tree: Tree, ranks: Sequence[int], root_is_resident: bool, excess: float) -> _Load | None:
    """Nodes below the root in as few spans as a rank's share and ``excess`` demand, the root along the room beside
    them."""
    load, nodes = _before_spans(tree, ranks, root_is_resident)
    works = tree.works()
    limit = (1 + excess) * sum(works[index] for index in nodes) / len(ranks)
    load = _deal_spans(tree, load, {index: ceil(works[index] / limit) for index in range(1, len(works))})
    load = load if root_is_resident else _lay_in_order(tree, load, [0])
    return load if _is_lean(load) else None


def _place_root_in_spans(tree: Tree, ranks: Sequence[int], root_is_resident: bool) -> _Load | None:
    """The root in a span on each rank, subtrees below it whole where they fit."""
    if root_is_resident:
        return None
    load = _fill_around(tree, _deal_spans(tree, _Load(tree, ranks), {0: len(ranks)}), frozenset())
    return load if _is_lean(load) else None


def _before_spans(tree: Tree, ranks: Sequence[int], root_is_resident: bool) -> tuple[_Load, range]:
    """What is placed already, and the nodes that are not."""
    if root_is_resident:
        return _with_root(tree, ranks, root_is_resident), range(1, len(tree.nodes))
    return _Load(tree, ranks), range(len(tree.nodes))


def _is_lean(load: _Load) -> bool:
    return _excess(load.tokens.values()) <= SPAN_TOKEN_LIMIT - 1


def _deal_spans(tree: Tree, load: _Load, counts: Mapping[int, int]) -> _Load:
    """Nodes in so many spans of equal work each, the heaviest first to the rank with the least work."""
    spans = []
    for index, count in counts.items():
        start, depth = tree.nodes[index].start, tree.depths[index]
        for first, stop in pairwise(_span_borders(tree, index, count)):
            spans.append((-tree.work(depth + first, stop - first), start + first, start + stop, index))
    for _, first, stop, index in sorted(spans):
        load.place(index, [Segment(load.lightest(), first, stop)])
    return load


def _span_borders(tree: Tree, index: int, count: int) -> tuple[int, ...]:
    """Of so many spans of a node, from its start; they are of equal work but for blocks."""
    length, depth = _length(tree.nodes[index]), tree.depths[index]
    total = tree.work(depth, length)

    def is_even(borders: Sequence[int]) -> bool:
        most = max(tree.work(depth + first, stop - first) for first, stop in pairwise(borders))
        return most * count <= total * (1 + BLOCK_TOLERANCE)

    inner = [tree.tokens_for(total * i / count, depth) for i in range(1, count)]
    return _at_blocks([0, *inner, length], is_even)


def _lay_in_order(tree: Tree, load: _Load, nodes: Sequence[int]) -> _Load:
    """Nodes one after another along the ranks, so that all carry the same in the end, or what they do already."""
    works = tree.works()
    level = _level(list(load.work.values()), sum(works[index] for index in nodes))
    open_ranks = [rank for rank, work in load.work.items() if work < level]
    along = iter(open_ranks)
    rank = next(along)
    room = level - load.work[rank]
    for index in nodes:
        node, depth = tree.nodes[index], tree.depths[index]
        start = node.start
        while start < node.stop:
            position = depth + start - node.start
            # The last has room for the rest, but for rounding.
            is_last = rank == open_ranks[-1]
            fitting = tree.tokens_for(room, position)
            stop = node.stop if is_last else _cut_near(tree, index, start, fitting, level)
            load.place(index, [Segment(rank, start, stop)])
            room -= tree.work(position, stop - start)
            start = stop
            if start < node.stop:
                rank = next(along)
                room += level - load.work[rank]
    return load


def _level(loads: Sequence[int], work: int) -> float:
    """What the least of the loads reach when so much work is spread over them to make them even."""
    total, level = work, 0.0
    for count, load in enumerate(sorted(loads), 1):
        if level and load >= level:
            break
        total += load
        level = total / count
    return level


def _cut_near(tree: Tree, index: int, start: int, num_tokens: int, level: float) -> int:
    """Where to cut a node that has room for so many tokens from ``start`` on: at an end or at a block if near."""
    node, exact = tree.nodes[index], start + num_tokens
    if exact >= node.stop:
        return node.stop
    of_token = tree.token_pairs + tree.depths[index] + exact - node.start
    reach = BLOCK_TOLERANCE / 2 * level / of_token
    blocks = (node.start + block * round((exact - node.start) / block) for block in BLOCKS)
    near = (cut for cut in (node.stop, start, *blocks) if abs(cut - exact) <= reach)
    return max(start, next(near, exact))


DCP_BLOCK_TOKENS = 512
"""Block of DCP's published configuration."""


def place_blocks(tree: Tree, ranks: Sequence[int]) -> list[Segment]:
    """Every node cut into blocks, the heaviest block first to the rank with the least work."""
    load = _Load(tree, ranks)
    blocks = []
    for index, (node, depth) in enumerate(zip(tree.nodes, tree.depths, strict=True)):
        for start in range(node.start, node.stop, DCP_BLOCK_TOKENS):
            stop = min(node.stop, start + DCP_BLOCK_TOKENS)
            blocks.append((-tree.work(depth + start - node.start, stop - start), start, stop, index))
    for _, start, stop, index in sorted(blocks):
        load.place(index, [Segment(load.lightest(), start, stop)])
    return load.segments


def _length(node: Node) -> int:
    return node.stop - node.start
