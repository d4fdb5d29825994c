"""rows -> passes -> scores -> loss -> backward: one step over replay trees, top to bottom."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from hashlib import sha256

import torch
import torch.distributed as dist

from treecp_rl.attention.huggingface import PROGRAM_KEY
from treecp_rl.attention.program import Program, compile_program
from treecp_rl.collectives import max_over_ranks, require_equal_digest, share_scores
from treecp_rl.engine.head import HeadOptions, scoring_head
from treecp_rl.plan import Decision, Schedule
from treecp_rl.planner.batch import Mode, decide, pack_into_passes
from treecp_rl.planner.check import check
from treecp_rl.planner.lower import lower, lower_local
from treecp_rl.tree import PackedTrees, ReplayTree, Row, Share, dummy_pack, fold, pack, split_tree

Pass = tuple[ReplayTree, ...]
"""The trees of one forward (+ backward) of the model."""


@dataclass(frozen=True)
class PassOptions:
    """How passes run."""

    head: HeadOptions = field(default_factory=HeadOptions)
    kernel: str = "auto"
    """Attention kernel by name; "auto" takes the fast one of the device."""
    mode: Mode = "auto"
    """How a pass is cut over the ranks of a domain, see ``planner.batch.decide``."""


@dataclass(frozen=True)
class Domain:
    """The ranks that share one plan, seen from one of them. They hold the same rows."""

    rank: int
    size: int
    group: dist.ProcessGroup


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
    domain: Domain | None = None,
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
        domain: ranks that hold these same rows and share each pass; None: this rank alone. Their gradients
            average to the batch's, as a sharded model's do over all of its ranks.
        forward_context: entered around each forward and loss (autocast).
        sync_context: entered around each pass with ``is_last`` (gradient synchronisation).
        backward: how a loss is differentiated (a gradient scaler's, say).

    Returns:
        The counts of the step and, without a loss, the detached scores.
    """
    num_passes = max_over_ranks(len(plan.passes), group)
    packs = [pack(trees) for trees in plan.passes] + [dummy_pack()] * (num_passes - len(plan.passes))
    shares = [rank_share(packed, options, domain) for packed in packs]
    if domain is not None:
        digests = "".join(share.schedule.digest for share in shares)
        require_equal_digest(sha256(digests.encode()).hexdigest()[:8], domain.group)
    collected: list[RowScores] = []
    for index, (packed, share) in enumerate(zip(packs, shares, strict=True)):
        packed = packed.to(device)
        with sync_context(index == num_passes - 1), torch.set_grad_enabled(loss_fn is not None):
            with forward_context():
                pair_scores = forward_pass(model, share, options, device)
                if domain is not None:
                    pair_scores = share_scores(
                        pair_scores, share.pairs.to(device), len(packed.pair_label), domain.group
                    )
                scores = unfold_scores(packed, pair_scores, options)
                if loss_fn is not None:
                    loss = loss_fn(scores) if scores.row_indices else pair_scores.sum() * 0.0
            if loss_fn is not None:
                # A rank's gradient is its own pairs' part of the loss; the average over ranks must be the sum.
                backward(loss if domain is None else loss * domain.size)
            elif scores.row_indices:
                collected.append(scores)
    return _report(plan, shares, collected)


@dataclass(frozen=True)
class RankShare:
    """What one rank runs of a pass."""

    local: PackedTrees
    """Its tokens, and the pairs they predict."""
    pairs: torch.Tensor
    """[n] the pass's number of each of those pairs."""
    program: Program
    schedule: Schedule
    """Of the whole pass, equal on all ranks of the domain."""
    pad_tokens: int
    """Tokens here that serve no row."""


def rank_share(packed: PackedTrees, options: PassOptions, domain: Domain | None) -> RankShare:
    """Decide and lower a pass for the domain, and cut out this rank's part."""
    is_dummy = not packed.row_indices
    if domain is None or domain.size == 1:
        schedule = lower_local(packed.nodes)
        program = compile_program(schedule, kernel=options.kernel)
        pairs = torch.arange(len(packed.pair_label))
        return RankShare(packed, pairs, program, schedule, packed.num_tokens if is_dummy else 0)
    roots = [node for node in packed.nodes if node.parent < 0]
    decisions = decide([node.subtree_stop - node.start for node in roots], domain.size, options.mode)
    schedule = lower(packed.nodes, decisions, domain.size)
    idle = sorted(set(range(domain.size)) - {segment.rank for segment in schedule.segments})
    if idle:
        # A layer cannot run on zero tokens, and every rank must enter every layer.
        packed = packed.with_idle_tokens(len(idle))
        decisions = (*decisions, *(Decision("local", first_rank=rank) for rank in idle))
        schedule = lower(packed.nodes, decisions, domain.size)
    check(schedule, packed.nodes)
    own = [torch.arange(s.start, s.stop) for s in schedule.segments if s.rank == domain.rank]
    local, pairs = packed.cut(torch.cat(own))
    program = compile_program(schedule, domain.rank, options.kernel, domain.group)
    pad_tokens = local.num_tokens if is_dummy else int(domain.rank in idle)
    return RankShare(local, pairs, program, schedule, pad_tokens)


def forward_pass(
    model: torch.nn.Module, share: RankShare, options: PassOptions, device: torch.device | str
) -> torch.Tensor:
    """One forward of the model over a rank's tokens: [Q,n] scores of its pairs, Q as in the head's options."""
    local = share.local.to(device)
    with scoring_head(model.get_output_embeddings(), local, options.head):
        output = model(
            input_ids=local.input_ids.unsqueeze(0),
            position_ids=local.position_ids.unsqueeze(0),
            attention_mask=None,
            use_cache=False,
            logits_to_keep=local.scored_positions,
            **{PROGRAM_KEY: share.program},
        )
    return output.logits.squeeze(0)


def unfold_scores(packed: PackedTrees, pair_scores: torch.Tensor, options: PassOptions) -> RowScores:
    """[Q,N] pair scores -> per-row tensors in the caller's row order."""
    per_row = {
        name: packed.unfold(values) for name, values in zip(options.head.quantities, pair_scores, strict=True)
    }
    return RowScores(row_indices=packed.row_indices, **per_row)


def _report(plan: PassPlan, shares: Sequence[RankShare], scores: Sequence[RowScores]) -> StepReport:
    trees = [tree for trees_of_pass in plan.passes for tree in trees_of_pass]
    return StepReport(
        tokens_computed=sum(tree.num_tokens for tree in trees),
        tokens_flat=sum(tree.num_flat_tokens for tree in trees),
        pad_tokens=sum(share.pad_tokens for share in shares),
        num_passes=len(shares),
        num_groups=plan.num_groups,
        num_rows=sum(len(tree.rows) for tree in trees),
        num_groups_without_reuse=plan.num_groups_without_reuse,
        num_groups_cut=plan.num_groups_cut,
        scores=tuple(scores),
    )
