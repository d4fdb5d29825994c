"""schedule, byte budget -> trees whose attention outputs are saved through activation checkpointing.

A checkpointed layer runs attention twice. Saving a tree's outputs spares the second time, so the budget goes to the
trees that cost most attention for a byte (NSP, section 4.3). Every rank decides from the whole pass, so all decide
alike.
"""

from bisect import bisect_right
from collections.abc import Sequence

from treecp_rl.plan import Node, Schedule, Span
from treecp_rl.planner.cost import ModelShape


def choose_saved(
    schedule: Schedule, nodes: Sequence[Node], shape: ModelShape, budget_bytes: int
) -> tuple[Span, ...]:
    """Packed spans of the trees to save, ascending.

    Args:
        shape: of the model, for the bytes of an attention output and its log-sum-exp.
        budget_bytes: most bytes that any rank may save in the pass.
    """
    bytes_per_token = shape.num_layers * (shape.query_bytes(1, shape.itemsize) + shape.scalar_bytes(1))
    trees = [(node.start, node.subtree_stop) for node in nodes if node.parent < 0]
    pairs = _pairs_of(trees, schedule)
    used = [0] * schedule.world_size
    saved = []
    for number in sorted(range(len(trees)), key=lambda i: (-pairs[i] / _length(trees[i]), i)):
        more = _bytes_by_rank(trees[number], schedule, bytes_per_token)
        if all(a + b <= budget_bytes for a, b in zip(used, more, strict=True)):
            used = [a + b for a, b in zip(used, more, strict=True)]
            saved.append(trees[number])
    return tuple(sorted(saved))


def _length(span: Span) -> int:
    return span[1] - span[0]


def _pairs_of(trees: Sequence[Span], schedule: Schedule) -> list[int]:
    """Query-key pairs of each tree."""
    tree_of = {start: number for number, (start, _) in enumerate(trees)}
    starts = sorted(tree_of)
    pairs = [0] * len(trees)
    for stage in schedule.stages:
        for tile in stage.tiles:
            pairs[tree_of[starts[bisect_right(starts, tile.query_start) - 1]]] += tile.num_pairs
    return pairs


def _bytes_by_rank(tree: Span, schedule: Schedule, bytes_per_token: int) -> list[int]:
    owned = [0] * schedule.world_size
    for segment in schedule.segments:
        shared = min(segment.stop, tree[1]) - max(segment.start, tree[0])
        owned[segment.rank] += max(0, shared) * bytes_per_token
    return owned
