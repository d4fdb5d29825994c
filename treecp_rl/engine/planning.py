"""replay trees -> lengths -> the planner's BatchPlan -> trees, rounds and decisions of each pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from treecp_rl.errors import PlanError
from treecp_rl.plan import Decision
from treecp_rl.planner.forms import RunOptions
from treecp_rl.planner.polish import plan_for_run
from treecp_rl.planner.profile import ClusterProfile
from treecp_rl.planner.schedule_batch import BatchPlan, PlannedTree
from treecp_rl.planner.search import TreeLengths
from treecp_rl.tree import ReplayTree, Row, Share, fold

Planner = Callable[[Sequence[TreeLengths]], BatchPlan]
"""Plans trees of these lengths for the ranks of a domain, with their numbers in the sequence."""


@dataclass(frozen=True)
class Pass:
    """Trees that run together: fused, or one tree split into a prefill and rounds of replay."""

    trees: tuple[ReplayTree, ...]
    rounds: tuple[ReplayTree, ...] = ()
    """Split: the tree cut by rows, every piece with the prompt; empty for a fused pass."""
    decisions: tuple[Decision, ...] = ()
    """The planner's, of each tree; empty: by the mode."""


def planner_of(profile: ClusterProfile, num_ranks: int, options: RunOptions) -> Planner:
    """A planner that solves every batch itself."""

    def plan(trees: Sequence[TreeLengths]) -> BatchPlan:
        return plan_for_run(trees, num_ranks, profile, options)

    return plan


def lengths_of(tree: ReplayTree) -> TreeLengths:
    """A tree as the planner sees it: its prompt, and all that is below each child of it as one response.

    A tree without responses counts its last prompt token as one: it takes the same work.
    """
    below = [0] * len(tree.nodes)
    for index in range(len(tree.nodes) - 1, 0, -1):
        below[index] += len(tree.nodes[index].tokens)
        if tree.nodes[index].parent > 0:
            below[tree.nodes[index].parent] += below[index]
    responses = tuple(below[child] for child in _children(tree))
    prompt = len(tree.nodes[0].tokens)
    return TreeLengths(prompt, responses) if responses else TreeLengths(max(1, prompt - 1), (1,))


def apply_plan(
    plan: BatchPlan, trees: Sequence[ReplayTree], rows: Sequence[Row], share: Share
) -> tuple[Pass, ...]:
    """The plan's passes over these trees, in its order.

    Raises:
        PlanError: the plan is of other trees.
    """
    planned = sorted(one.tree for one in plan.trees)
    if planned != list(range(len(trees))):
        raise PlanError(f"a plan of trees {planned} for a batch of {len(trees)} trees")
    passes = []
    for one in plan.passes:
        chosen = tuple(trees[planned.tree] for planned in one.trees)
        decisions = tuple(_decision(plan, planned, trees[planned.tree]) for planned in one.trees)
        rounds = () if one.is_shared else _rounds(one.trees[0], chosen[0], rows, share)
        passes.append(Pass(chosen, rounds, decisions))
    return tuple(passes)


def _children(tree: ReplayTree) -> list[int]:
    return [index for index, node in enumerate(tree.nodes) if node.parent == 0]


def _decision(plan: BatchPlan, planned: PlannedTree, tree: ReplayTree) -> Decision:
    decision = plan.decision(planned)
    # What was counted as a prompt and a response of one token may be a single token.
    return decision if decision.degree <= tree.num_tokens else Decision("local", planned.first_rank)


def _rounds(
    planned: PlannedTree, tree: ReplayTree, rows: Sequence[Row], share: Share
) -> tuple[ReplayTree, ...]:
    """The tree cut by rows as its responses were dealt out; a row that ends with the prompt comes first."""
    round_of = dict(zip(_children(tree), planned.round_of, strict=True))
    members: dict[int, list[int]] = {number: [] for number in sorted(set(planned.round_of))}
    for path in tree.rows:
        number = round_of[path.nodes[1]] if len(path.nodes) > 1 else min(members)
        members[number].append(path.row)
    return tuple(piece for run in members.values() for piece in fold(rows, share, members=sorted(run)))
