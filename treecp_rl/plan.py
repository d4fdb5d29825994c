"""The data of a plan: nodes -> segments, tiles and moves -> stages -> schedule. Stdlib only.

A pass has ONE token axis: the packed tokens of all its replay trees, each tree in depth-first order, so
that a node's descendants directly follow it. Everything below addresses half-open spans of that axis;
nothing names a tree. A plan is data and one executor runs any plan.
"""

from dataclasses import dataclass
from hashlib import sha256
from typing import Literal


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


@dataclass(frozen=True, slots=True)
class Tile:
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

    @property
    def num_pairs(self) -> int:
        """Valid query-key pairs in the tile."""
        num_queries = self.query_stop - self.query_start
        if self.causal:
            return num_queries * (num_queries + 1) // 2
        return num_queries * (self.key_stop - self.key_start)


MoveKind = Literal["kv", "q", "state"]


@dataclass(frozen=True, slots=True)
class Move:
    """Packed tokens [start, stop) of ``kind`` go from rank ``src`` to rank ``dst``."""

    kind: MoveKind
    src: int
    dst: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Stage:
    """Moves to post, and the tiles that are computed once the previous stage's moves have arrived."""

    moves: tuple[Move, ...]
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The lowered form of a decision: what the executor runs in every layer of a pass."""

    world_size: int
    """Ranks of the domain."""
    num_tokens: int
    """Packed tokens of the pass, all ranks together."""
    segments: tuple[Segment, ...]
    stages: tuple[Stage, ...]

    @property
    def digest(self) -> str:
        """Eight hex digits that equal schedules share; ranks compare it before the first collective."""
        return sha256(repr(self).encode()).hexdigest()[:8]


Kind = Literal["local", "gather", "ring", "tree_move_kv", "move_q"]


@dataclass(frozen=True, slots=True)
class Decision:
    """What the planner chooses for one tree of a fused pass: which ranks, and what travels between them.

    ``local``: whole on one rank. ``gather``: prompt zigzag over the ranks, whole responses placed by work, the
    remainder cut between tokens, prompt K/V moved once. ``ring``: every node zigzag over the ranks, K/V
    stage by stage (with ``share="none"`` this is flattened ring context parallelism). ``tree_move_kv``: prompt
    zigzag over all ranks, responses zigzag inside ``lanes`` (AugTree, section 3.2). ``move_q``: responses
    placed as in ``gather``, but queries travel to the prompt's K/V and states come back (section 3.3).
    """

    kind: Kind
    first_rank: int = 0
    degree: int = 1
    lanes: int = 1
    """Lanes side by side, s in the paper; divides ``degree``. Read by ``tree_move_kv`` alone."""

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.degree)
