"""BatchPlan -> lowered passes, for checks, pictures and exact predictions; the engine lowers a pass with its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from treecp_rl.plan import Decision, Node
from treecp_rl.planner.lower import lower
from treecp_rl.planner.schedule_batch import BatchPlan, PlannedPass, PlannedTree
from treecp_rl.planner.search import TreeLengths
from treecp_rl.planner.seconds import Pass


def lower_plan(plan: BatchPlan, trees: Sequence[TreeLengths]) -> Iterator[tuple[PlannedPass, list[Pass]]]:
    """Each planned pass, and the passes of the engine that it is: one, or a prefill and rounds of replay.

    Raises:
        PlanError: a decision that no schedule has.
    """
    for one in plan.passes:
        if one.is_shared:
            chosen = [(trees[planned.tree], plan.decision(planned)) for planned in one.trees]
            yield one, [_lowered(chosen, plan.num_ranks)]
        else:
            (planned,) = one.trees
            yield one, _lower_split(planned, plan.decision(planned), trees[planned.tree], plan.num_ranks)


def nodes_of(trees: Iterable[TreeLengths]) -> tuple[Node, ...]:
    """Trees side by side on one token axis."""
    nodes: list[Node] = []
    start = 0
    for tree in trees:
        root, stop = len(nodes), start + tree.num_tokens
        nodes.append(Node(-1, start, start + tree.prompt, stop))
        start += tree.prompt
        for response in tree.responses:
            nodes.append(Node(root, start, start + response, start + response))
            start += response
    return tuple(nodes)


def _lowered(
    chosen: Sequence[tuple[TreeLengths, Decision]], num_ranks: int, resident: Sequence[int] = ()
) -> Pass:
    nodes = nodes_of(tree for tree, _ in chosen)
    decisions = [decision for _, decision in chosen]
    return Pass(lower(nodes, decisions, num_ranks, resident_trees=resident), nodes)


def _lower_split(planned: PlannedTree, decision: Decision, tree: TreeLengths, num_ranks: int) -> list[Pass]:
    root = (Node(-1, 0, tree.prompt, tree.prompt),)
    passes = [Pass(lower(root, [decision], num_ranks), root)]
    for number in range(max(planned.round_of) + 1):
        of_round = tuple(r for r, at in zip(tree.responses, planned.round_of, strict=True) if at == number)
        if of_round:
            passes.append(_lowered([(TreeLengths(tree.prompt, of_round), decision)], num_ranks, (0,)))
    return passes
