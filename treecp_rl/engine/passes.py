"""rows -> passes -> scores -> loss -> backward: one step over replay trees, top to bottom."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from treecp_rl.attention.program import compile_program
from treecp_rl.attention.huggingface import PROGRAM_KEY
from treecp_rl.collectives import max_over_ranks
from treecp_rl.engine.head import HeadOptions, scoring_head
from treecp_rl.planner.batch import pack_into_passes
from treecp_rl.planner.lower import lower_local
from treecp_rl.tree import PackedTrees, ReplayTree, Row, Share, dummy_pack, fold, pack, split_tree

Pass = tuple[ReplayTree, ...]
"""The trees of one forward (+ backward) of the model."""


@dataclass(frozen=True)
class PassOptions:
    """How passes run."""

    head: HeadOptions = field(default_factory=HeadOptions)
    kernel: str = "auto"
    """Attention kernel by name; "auto" takes the fast one of the device."""


@dataclass(frozen=True)
class RowScores:
    """What a loss sees of one pass. Lists follow ``row_indices``; row i has R_i response tokens."""

    row_indices: tuple[int, ...]
    log_probs: list[torch.Tensor]
    """[R_i] log-probability of every response token."""
    entropy: list[torch.Tensor] | None = None
    """[R_i] entropy of the distribution each response token was drawn from."""
    sum_pi_squared: list[torch.Tensor] | None = None
    """[R_i] sum of squared probabilities of that distribution."""


@dataclass(frozen=True)
class StepReport:
    """What a step computed, this rank."""

    tokens_computed: int
    tokens_flat: int
    """Tokens the same rows would have computed one by one."""
    pad_tokens: int
    """Tokens of dummy passes, run only to stay in lockstep with other ranks."""
    num_passes: int
    num_groups: int
    num_rows: int
    num_groups_without_reuse: int
    """Groups of a single row: nothing to share."""
    num_groups_cut: int
    """Trees over the token budget, so that their prompt was computed more than once."""
    scores: tuple[RowScores, ...]
    """Detached scores of every pass when no loss was given, else empty."""


@dataclass(frozen=True)
class PassPlan:
    """The passes of one batch of rows on one rank."""

    passes: tuple[Pass, ...]
    num_groups: int
    num_groups_without_reuse: int
    num_groups_cut: int


def plan_passes(rows: Sequence[Row], *, share: Share = "prompt", tokens_per_pass: int) -> PassPlan:
    """Fold rows into replay trees and bin-pack the trees under a token budget.

    Args:
        rows: this rank's rows, in any order.
        share: what is computed once, see ``tree.fold``.
        tokens_per_pass: most packed tokens of one forward. A tree that exceeds it is cut by rows.

    Raises:
        RowTooLong: one row alone exceeds the budget.
    """
    trees = fold(rows, share)
    pieces = [split_tree(tree, rows, share, tokens_per_pass) for tree in trees]
    flat = [piece for cut in pieces for piece in cut]
    bins = pack_into_passes([tree.num_tokens for tree in flat], tokens_per_pass)
    return PassPlan(
        passes=tuple(tuple(flat[index] for index in trees_of_pass) for trees_of_pass in bins),
        num_groups=len(trees),
        num_groups_without_reuse=sum(len(tree.rows) == 1 for tree in trees),
        num_groups_cut=sum(len(cut) > 1 for cut in pieces),
    )


def run_passes(
    model: torch.nn.Module,
    plan: PassPlan,
    loss_fn: Callable[[RowScores], torch.Tensor] | None,
    options: PassOptions,
    *,
    device: torch.device | str = "cpu",
    group: dist.ProcessGroup | None = None,
    forward_context: Callable[[], AbstractContextManager[None]] = nullcontext,
    sync_context: Callable[[bool], AbstractContextManager[None]] = lambda is_last: nullcontext(),
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
) -> StepReport:
    """Run every pass of a plan; with a loss, accumulate its gradients.

    Every rank of ``group`` must call this together: each makes as many passes as the busiest rank, so that
    the collectives inside a sharded model always meet. Surplus passes run one dummy token whose loss is
    exactly zero and attached.

    Args:
        model: a causal LM made ready by ``capabilities.prepare_model``, sharded or not.
        plan: this rank's passes.
        loss_fn: called once a pass with that pass's rows; returns their share of the loss, normalised over
            the whole batch so that shares add up. None: forward only.
        options: what to compute of each token.
        group: ranks whose passes run in lockstep; None is the default group, if one exists.
        forward_context: entered around each forward and loss (autocast).
        sync_context: entered around each pass with ``is_last`` (gradient synchronisation).
        backward: how a loss is differentiated (a gradient scaler's, say).

    Returns:
        The counts of the step and, without a loss, the detached scores.
    """
    num_passes = max_over_ranks(len(plan.passes), group)
    collected: list[RowScores] = []
    pad_tokens = 0
    for index in range(num_passes):
        is_dummy = index >= len(plan.passes)
        packed = (dummy_pack() if is_dummy else pack(plan.passes[index])).to(device)
        pad_tokens += packed.num_tokens if is_dummy else 0
        with sync_context(index == num_passes - 1), torch.set_grad_enabled(loss_fn is not None):
            with forward_context():
                pair_scores = forward_pass(model, packed, options)
                if loss_fn is not None:
                    loss = (
                        pair_scores.sum() * 0.0
                        if is_dummy
                        else loss_fn(unfold_scores(packed, pair_scores, options))
                    )
            if loss_fn is not None:
                backward(loss)
            elif not is_dummy:
                collected.append(unfold_scores(packed, pair_scores, options))
    return _report(plan, num_passes, pad_tokens, collected)


def forward_pass(model: torch.nn.Module, packed: PackedTrees, options: PassOptions) -> torch.Tensor:
    """One forward of the model over packed trees: [Q,N] scores, Q as in ``options.head.quantities``."""
    program = compile_program(lower_local(packed.nodes), kernel=options.kernel)
    with scoring_head(model.get_output_embeddings(), packed, options.head):
        output = model(
            input_ids=packed.input_ids.unsqueeze(0),
            position_ids=packed.position_ids.unsqueeze(0),
            attention_mask=None,
            use_cache=False,
            logits_to_keep=packed.scored_positions,
            **{PROGRAM_KEY: program},
        )
    return output.logits.squeeze(0)


def unfold_scores(packed: PackedTrees, pair_scores: torch.Tensor, options: PassOptions) -> RowScores:
    """[Q,N] pair scores -> per-row tensors in the caller's row order."""
    per_row = {
        name: packed.unfold(values) for name, values in zip(options.head.quantities, pair_scores, strict=True)
    }
    return RowScores(row_indices=packed.row_indices, **per_row)


def _report(plan: PassPlan, num_passes: int, pad_tokens: int, scores: Sequence[RowScores]) -> StepReport:
    trees = [tree for trees_of_pass in plan.passes for tree in trees_of_pass]
    return StepReport(
        tokens_computed=sum(tree.num_tokens for tree in trees),
        tokens_flat=sum(tree.num_flat_tokens for tree in trees),
        pad_tokens=pad_tokens,
        num_passes=num_passes,
        num_groups=plan.num_groups,
        num_rows=sum(len(tree.rows) for tree in trees),
        num_groups_without_reuse=plan.num_groups_without_reuse,
        num_groups_cut=plan.num_groups_cut,
        scores=tuple(scores),
    )
