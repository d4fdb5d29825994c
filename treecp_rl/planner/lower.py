"""[Node] -> Schedule: how a decision becomes segments, moves and tiles, one function a primitive."""

from collections.abc import Sequence

from treecp_rl.plan import Node, Schedule, Segment, Stage, Tile


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
