"""The data of a plan: nodes -> segments, tiles and moves -> stages -> schedule. Stdlib only.

A pass has ONE token axis: the packed tokens of all its replay trees, each tree in depth-first order, so
that a node's descendants directly follow it. Everything below addresses half-open spans of that axis;
nothing names a tree. A plan is data and one executor runs any plan.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from typing import Literal, NamedTuple


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a replay tree on the pass's token axis.

    Example: a prompt of 5 tokens with responses of 2 and 3 tokens is
    ``Node(-1, 0, 5, 10), Node(0, 5, 7, 7), Node(0, 7, 10, 10)``.
    """

    parent: int
    """Index of the parent in the same tuple of nodes, -1 for a root."""
    start: int
    """First packed token of the node."""
    stop: int
    """One past the node's last packed token."""
    subtree_stop: int
    """One past the last packed token of the node's last descendant."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Packed tokens [start, stop) live on ``rank`` of the domain."""

    rank: int
    start: int
    stop: int


class Tile(NamedTuple):
    """One block of valid query-key pairs, computed on ``rank``.

    Full rectangles attend every key of the span to every query; causal tiles are square
    (``key_start == query_start``), so top-left and bottom-right alignment agree.
    """

    rank: int
    query_start: int
    query_stop: int
    key_start: int
    key_stop: int
    causal: bool
    head_part: int = 0
    """Which of ``num_head_parts`` equal parts of the heads the tile computes."""
    num_head_parts: int = 1

    @property
    def num_pairs(self) -> int:
        """Valid query-key pairs in the tile, of each of its heads."""
        num_queries = self.query_stop - self.query_start
        if self.causal:
            return num_queries * (num_queries + 1) // 2
        return num_queries * (self.key_stop - self.key_start)


MoveKind = Literal["kv", "q", "state"]
MOVE_KINDS: tuple[MoveKind, ...] = ("kv", "q", "state")


class Move(NamedTuple):
    """Packed tokens [start, stop) of ``kind`` go from rank ``src`` to rank ``dst``."""

    kind: MoveKind
    src: int
    dst: int
    start: int
    stop: int
    head_part: int = 0
    """Which of ``num_head_parts`` equal parts of the heads travels."""
    num_head_parts: int = 1

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Stage:
    """Moves to post, and the tiles that are computed once the previous stage's moves have arrived."""

    moves: tuple[Move, ...]
    tiles: tuple[Tile, ...]


Span = tuple[int, int]
"""Packed tokens [start, stop)."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The lowered form of a decision: what the executor runs in every layer of a pass."""

    world_size: int
    """Ranks of the domain."""
    num_tokens: int
    """Packed tokens of the pass, all ranks together."""
    segments: tuple[Segment, ...]
    stages: tuple[Stage, ...]
    resident: tuple[Span, ...] = ()
    """Tokens whose K/V an earlier pass left on their ranks: they are read here and ask nothing."""
    resend: bool = False
    """Whether backward has K/V and queries sent again; otherwise what arrived is kept until then."""

    @property
    def digest(self) -> str:
        """Eight hex digits that equal schedules share; ranks compare it before the first collective."""
        head = [self.world_size, self.num_tokens, int(self.resend), len(self.segments), len(self.resident)]
        numbers = array("q", head)
        for segment in self.segments:
            numbers.extend((segment.rank, segment.start, segment.stop))
        for span in self.resident:
            numbers.extend(span)
        for stage in self.stages:
            numbers.extend((len(stage.moves), len(stage.tiles)))
            for move in stage.moves:
                numbers.append(MOVE_KINDS.index(move.kind))
                numbers.extend(move[1:])
            numbers.extend(chain.from_iterable(stage.tiles))
        return sha256(numbers.tobytes()).hexdigest()[:8]


TOKEN_PAIRS = 1856
"""Pairs taken to cost as much as one token's linear layers where no profile says."""

Kind = Literal["local", "gather", "gather_whole", "heads", "ring", "tree_move_kv", "move_q", "dcp_fused"]


class RankLoad(NamedTuple):
    """What a rank does in a layer."""

    tokens: int
    pairs: int
    """Query-key pairs."""
    moved_pairs: float
    """What arrives at the rank or leaves it, whichever is more, in pairs."""
    calls: float
    """Of kernels."""


class ForwardShares(NamedTuple):
    """Parts that forward takes, in the order of ``RankLoad``; the rest is backward's."""

    tokens: float
    pairs: float
    moves: float
    calls: float


@dataclass(frozen=True, slots=True)
class Weights:
    """What a rank's part of a layer costs beside query-key pairs, each in so many pairs."""

    token_pairs: int
    """Of the linear layers of a token."""
    near_token_pairs: float
    """Of a token's K/V that arrive from a rank of the same node."""
    far_token_pairs: float
    """The same from another node."""
    tile_pairs: float
    """Of a kernel call: a tile, or several that the executor joins."""
    ranks_per_node: int
    forward: ForwardShares
    """Tokens may take more of forward than pairs do, so that who has more tokens is the last there."""

    def moved_pairs(self, src: int, dst: int) -> float:
        """Of a token's K/V from one rank to another."""
        is_near = src // self.ranks_per_node == dst // self.ranks_per_node
        return self.near_token_pairs if is_near else self.far_token_pairs

    def busiest(self, loads: Iterable[RankLoad]) -> float:
        """Of the last rank in forward and the last in backward, which may be two: ranks meet after each layer."""
        of_token, of_pair, of_move, of_call = self.forward
        forward = backward = 0.0
        for tokens, pairs, moved, calls in loads:
            in_tokens, in_calls = self.token_pairs * tokens, self.tile_pairs * calls
            there = of_token * in_tokens + of_pair * pairs + of_move * moved + of_call * in_calls
            forward = max(forward, there)
            backward = max(backward, in_tokens + pairs + moved + in_calls - there)
        return forward + backward


@dataclass(frozen=True, slots=True)
class Decision:
    """What the planner chooses for one tree of a pass: which ranks, and what travels between them.

    ``local``: whole on one rank. ``gather``: prompt zigzag over the ranks (whole if short), and responses that alone
    exceed a rank's share; whole responses placed by work, the remainder cut between tokens; with weights also every
    rank's part of a node in one span; K/V moved once. ``heads``:
    placed as ``tree_move_kv``, but inside a lane each rank computes an equal part of the heads for all of the
    lane's tokens (Ulysses), so that queries and K/V of that part travel once and states come back. ``ring``:
    every node zigzag over the ranks, K/V stage by stage. ``tree_move_kv``: prompt zigzag over all ranks,
    responses zigzag inside ``lanes`` (AugTree, section 3.2). ``move_q``: responses placed as in ``gather``, but
    queries travel to the prompt's K/V and states come back (section 3.3). ``dcp_fused``: nodes cut into equal
    blocks which are dealt out by work, K/V moved once (DCP's plan space as published, a baseline).
    """

    kind: Kind
    first_rank: int = 0
    degree: int = 1
    lanes: int = 1
    """Lanes side by side, s in the paper; divides ``degree``. Read by ``tree_move_kv`` and ``heads``."""
    weights: Weights | None = None
    """What ``gather`` weighs placements with; None: they must be even in work and in tokens."""
    placement: int | None = None
    """Number of ``gather``'s, where they were weighed before; else each lowering weighs them."""

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.degree)
