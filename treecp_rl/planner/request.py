"""Lengths of a step, in any order -> PlanRequest -> BatchPlan -> the caller's order.

Whoever knows the lengths of a step can ask for its plan: the trainer before its ranks have the rows, and the ranks.
So that both ask for the same, a request holds its trees and their responses in one order, whatever the rows' order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256

from treecp_rl.planner.forms import RunOptions
from treecp_rl.planner.polish import plan_for_run
from treecp_rl.planner.profile import ClusterProfile
from treecp_rl.planner.schedule_batch import BatchPlan, PlannedPass, PlannedTree
from treecp_rl.planner.search import TreeLengths


@dataclass(frozen=True)
class PlanRequest:
    """All that a plan depends on; equal requests have equal plans wherever they are solved."""

    trees: tuple[TreeLengths, ...]
    """Most tokens first, the longest response of each first."""
    num_ranks: int
    profile: ClusterProfile
    options: RunOptions

    @property
    def key(self) -> str:
        """Sixteen hex digits that equal requests share."""
        lengths = [(tree.prompt, *tree.responses) for tree in self.trees]
        text = f"{self.num_ranks} {self.profile.digest} {sorted(asdict(self.options).items())} {lengths}"
        return sha256(text.encode()).hexdigest()[:16]

    def solve(self) -> BatchPlan:
        """Plan here and now.

        Raises:
            PlanError: a tree that does not fit by any plan.
        """
        return plan_for_run(self.trees, self.num_ranks, self.profile, self.options)


@dataclass(frozen=True)
class ArrangedRequest:
    """A request, and where its trees and responses come from."""

    request: PlanRequest
    tree_of: tuple[int, ...]
    """The caller's number of each tree of the request."""
    response_of: tuple[tuple[int, ...], ...]
    """The caller's number of each response of each tree of the request."""

    def restore(self, plan: BatchPlan) -> BatchPlan:
        """The request's plan with the caller's numbers."""
        passes = (PlannedPass(tuple(map(self._restored, one.trees)), one.seconds) for one in plan.passes)
        return replace(plan, passes=tuple(passes))

    def _restored(self, planned: PlannedTree) -> PlannedTree:
        round_of = [0] * len(planned.round_of)
        for response, number in zip(self.response_of[planned.tree], planned.round_of, strict=False):
            round_of[response] = number
        return replace(planned, tree=self.tree_of[planned.tree], round_of=tuple(round_of))


def arrange(
    trees: Sequence[TreeLengths], num_ranks: int, profile: ClusterProfile, options: RunOptions
) -> ArrangedRequest:
    """A request for trees in any order."""
    responses = [
        sorted(range(len(tree.responses)), key=lambda i, tree=tree: -tree.responses[i])  # type: ignore[misc]
        for tree in trees
    ]
    arranged = [
        TreeLengths(tree.prompt, tuple(tree.responses[i] for i in order))
        for tree, order in zip(trees, responses, strict=True)
    ]
    order = sorted(
        range(len(trees)),
        key=lambda i: (-arranged[i].num_tokens, arranged[i].prompt, arranged[i].responses),
    )
    return ArrangedRequest(
        PlanRequest(tuple(arranged[i] for i in order), num_ranks, profile, options),
        tuple(order),
        tuple(tuple(responses[i]) for i in order),
    )
