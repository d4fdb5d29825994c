"""rows -> passes -> scores -> loss -> backward: one step over replay trees, top to bottom.

A tree that fits the token budget runs in a fused pass, prompt and responses together. One that does not is split:
its prompt runs first and leaves its K/V, responses replay against them in rounds, and the prompt's backward comes
last, with what all rounds have added to its K/V and scores.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from hashlib import sha256

import torch
import torch.distributed as dist

from treecp_rl.attention.huggingface import PROGRAM_KEY
from treecp_rl.collectives import max_over_ranks, require_equal_digest, share_scores, sum_over_ranks
from treecp_rl.engine.head import scoring_head
from treecp_rl.engine.planning import Pass, Planner, apply_plan, lengths_of
from treecp_rl.engine.shares import (
    Domain,
    PassOptions,
    RankShare,
    RoundShare,
    Setting,
    fused_share,
    independent_round,
    prefill_share,
    replay_share,
    shape_of,
)
from treecp_rl.errors import PlanError
from treecp_rl.lost_ranks import naming_lost_ranks
from treecp_rl.planner.batch import Mode, is_fused, is_split, pack_into_passes
from treecp_rl.planner.schedule_batch import BatchPlan
from treecp_rl.tree import PackedTrees, ReplayTree, Row, Share, dummy_pack, fold, pack, split_tree

__all__ = [
    "Domain",
    "Pass",
    "PassOptions",
    "PassPlan",
    "RowScores",
    "StepReport",
    "plan_passes",
    "run_passes",
]


@dataclass(frozen=True)
class PassPlan:
    """The passes of one batch of rows on one rank, those with most rounds first."""

    passes: tuple[Pass, ...]
    num_groups: int
    num_groups_without_reuse: int
    num_groups_cut: int
    """Trees over the token budget whose prompt is computed more than once."""
    chosen: BatchPlan | None = None
    """What the planner chose, if it was asked."""

    @property
    def trees(self) -> tuple[ReplayTree, ...]:
        return tuple(tree for one in self.passes for tree in one.trees)

    @property
    def num_groups_replayed(self) -> int:
        """Trees that run as a prefill and rounds of replay."""
        return sum(bool(one.rounds) for one in self.passes)


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
    """What a step computed: this rank, or its whole domain where ranks share passes."""

    tokens_computed: int
    tokens_flat: int
    """Tokens the same rows would have computed one by one."""
    pad_tokens: int
    """Tokens of dummy passes, run only to stay in lockstep with other ranks."""
    num_passes: int
    """Forwards of the model."""
    num_groups: int
    num_rows: int
    num_groups_without_reuse: int
    """Groups of a single row: nothing to share."""
    num_groups_cut: int
    """Trees over the token budget, so that their prompt was computed more than once."""
    num_groups_replayed: int
    """Trees run as a prefill and rounds of replay."""
    moved_bytes: int
    """Sent between the ranks of the domain, forward and backward, all layers."""
    scores: tuple[RowScores, ...]
    """Detached scores of every pass when no loss was given, else empty."""


def plan_passes(
    rows: Sequence[Row],
    *,
    share: Share = "prompt",
    tokens_per_pass: int,
    mode: Mode = "auto",
    planner: Planner | None = None,
) -> PassPlan:
    """Fold rows into replay trees, and choose passes for them: by the planner, or by a rule.

    The rule: bin-pack the trees under a token budget, and split those that exceed it.

    Args:
        rows: this rank's rows, in any order.
        share: what is computed once, see ``tree.fold``.
        tokens_per_pass: most packed tokens of one forward. Of a split tree, prompt and one round together.
        mode: "split..." splits every tree; a forced fused kind cuts a tree that exceeds the budget into several,
            each of which computes the prompt again; "flat_ring" shares nothing.
        planner: chooses where ``mode`` is "auto". It knows its own budget.

    Raises:
        RowTooLong: one row alone exceeds the budget.
        PlanError: the planner finds no plan for a tree.
    """
    share = "none" if mode == "flat_ring" else share
    trees = fold(rows, share)
    if mode == "auto" and planner is not None and trees:
        return _planned(trees, rows, share, planner)
    pieces = [split_tree(tree, rows, share, tokens_per_pass) for tree in trees]
    splits = [
        Pass((tree,), cut)
        for tree, cut in zip(trees, pieces, strict=True)
        if len(tree.nodes) > 1 and (is_split(mode) or (len(cut) > 1 and not is_fused(mode)))
    ]
    split_trees = {id(one.trees[0]) for one in splits}
    fused = [cut for tree, cut in zip(trees, pieces, strict=True) if id(tree) not in split_trees]
    flat = [piece for cut in fused for piece in cut]
    bins = pack_into_passes([tree.num_tokens for tree in flat], tokens_per_pass)
    return PassPlan(
        passes=(
            *sorted(splits, key=lambda one: -len(one.rounds)),
            *(Pass(tuple(flat[index] for index in chosen)) for chosen in bins),
        ),
        num_groups=len(trees),
        num_groups_without_reuse=sum(len(tree.rows) == 1 for tree in trees),
        num_groups_cut=sum(len(cut) > 1 for cut in fused),
    )


def _planned(trees: Sequence[ReplayTree], rows: Sequence[Row], share: Share, planner: Planner) -> PassPlan:
    chosen = planner(tuple(lengths_of(tree) for tree in trees))
    passes = apply_plan(chosen, trees, rows, share)
    return PassPlan(
        passes=tuple(sorted(passes, key=lambda one: -len(one.rounds))),
        num_groups=len(trees),
        num_groups_without_reuse=sum(len(tree.rows) == 1 for tree in trees),
        num_groups_cut=0,
        chosen=chosen,
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
) -> StepReport:
    """Run every pass of a plan; with a loss, accumulate its gradients.

    Every rank of ``group`` must call this together: each makes the forwards and backwards of the busiest rank in
    the same order, so that the collectives inside a sharded model always meet. Surplus passes run one dummy
    token whose loss is exactly zero and attached.

    Args:
        model: a causal LM made ready by ``capabilities.prepare_model``, sharded or not.
        plan: this rank's passes.
        loss_fn: called once a pass, or once a round of a split tree, with the rows of it; returns their share of
            the loss, normalised over the whole batch so that shares add up. None: forward only.
        options: what to compute of each token, and how.
        group: ranks whose passes run in lockstep; None is the default group, if one exists.
        domain: ranks that hold these same rows and share each pass; None: this rank alone. Their gradients
            average to the batch's, as a sharded model's do over all of its ranks.
        forward_context: entered around each forward and loss (autocast).
        sync_context: entered around each forward and backward with ``is_last`` (gradient synchronisation).

    Returns:
        The counts of the step and, without a loss, the detached scores.

    Raises:
        PlanError: the ranks of a domain hold different plans, or a plan needs more memory than it may.
        RankLost: a rank ended in mid-step; names it.
    """
    with naming_lost_ranks():
        recomputes = bool(getattr(model, "is_gradient_checkpointing", False))
        setting = Setting(options, shape_of(model), recomputes, domain)
        slots = _fill_slots(plan, setting, group)
        if domain is not None:
            _require_equal_plans(slots, domain)
        runner = _Runner(model, loss_fn, options, torch.device(device), domain, forward_context)
        for index, slot in enumerate(slots):
            is_last = index == len(slots) - 1
            with torch.set_grad_enabled(loss_fn is not None):
                if slot.prefill is None:
                    with sync_context(is_last):
                        runner.run_fused(slot.rounds[0].share)
                else:
                    with sync_context(False):
                        prompt = runner.run_prefill(slot.prefill)
                        for one in slot.rounds:
                            runner.run_round(one, prompt)
                    with sync_context(is_last):
                        runner.finish_prefill(slot.prefill, prompt)
        return _report(plan, slots, runner.collected, domain)


@dataclass(frozen=True)
class _Slot:
    """The same forwards and backwards on every rank: a fused pass, or a prefill with its rounds."""

    prefill: RankShare | None
    rounds: tuple[RoundShare, ...]

    @property
    def shares(self) -> tuple[RankShare, ...]:
        rounds = tuple(one.share for one in self.rounds)
        return rounds if self.prefill is None else (self.prefill, *rounds)


def _fill_slots(plan: PassPlan, setting: Setting, group: dist.ProcessGroup | None) -> tuple[_Slot, ...]:
    """This rank's passes in the slots that all ranks agree on, dummies where it has none.

    Slot i has as many rounds as any rank's i-th pass; passes are sorted by rounds, so each fits its slot.

    Raises:
        PlanError: on every rank, if a pass of any rank cannot run.
    """
    slots, failure = [], None
    try:
        slots = [_slot_of(one, setting) for one in plan.passes]
    except Exception as error:
        failure = error
    # Nobody is left waiting in a collective by a rank that cannot come.
    some_failed, *rounds = max_over_ranks(
        [int(failure is not None), *(len(one.rounds) for one in plan.passes)], group
    )
    if failure is not None:
        raise failure
    if some_failed:
        raise PlanError("another rank refused a pass of its plan; its message says why")
    dummies = [_Slot(None, (_dummy_round(setting),)) for _ in range(len(rounds) - len(slots))]
    return tuple(
        _widened(slot, count, setting) for slot, count in zip([*slots, *dummies], rounds, strict=True)
    )


def _slot_of(one: Pass, setting: Setting) -> _Slot:
    if not one.rounds:
        share = fused_share(pack(one.trees), setting, one.decisions)
        return _Slot(None, (independent_round(share),))
    prefill, decision = prefill_share(pack(one.trees), setting, *one.decisions)
    rounds = (replay_share(pack((piece,)), prefill, decision, setting) for piece in one.rounds)
    return _Slot(prefill, tuple(rounds))


def _widened(slot: _Slot, num_rounds: int, setting: Setting) -> _Slot:
    """The same work in a slot of ``num_rounds``: dummies fill up what it lacks."""
    if not num_rounds:
        return slot
    prefill = slot.prefill or _dummy_round(setting).share
    missing = num_rounds - len(slot.rounds)
    return _Slot(prefill, (*slot.rounds, *(_dummy_round(setting) for _ in range(missing))))


def _dummy_round(setting: Setting) -> RoundShare:
    return independent_round(fused_share(dummy_pack(), setting))


def _require_equal_plans(slots: Sequence[_Slot], domain: Domain) -> None:
    digests = "".join(share.schedule.digest for slot in slots for share in slot.shares)
    require_equal_digest(sha256(digests.encode()).hexdigest()[:8], domain.group)


@dataclass(frozen=True)
class _Prompt:
    """A prefill whose backward is still to come."""

    scores: torch.Tensor
    """[Q,n] scores of the pairs that the prompt predicts, with their graph."""
    leaf: torch.Tensor
    """The same without: rounds read these, and leave their gradients here."""


class _Runner:
    """Forwards, losses and backwards of one step on one rank."""

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Callable[[RowScores], torch.Tensor] | None,
        options: PassOptions,
        device: torch.device,
        domain: Domain | None,
        forward_context: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.model, self.loss_fn, self.options, self.device = model, loss_fn, options, device
        self.domain, self.forward_context = domain, forward_context
        self.collected: list[RowScores] = []

    def run_fused(self, share: RankShare) -> None:
        """Forward, loss and backward of a whole pass."""
        with self.forward_context():
            loss = self._loss(share, self._scores(share))
        self._backward(loss)

    def run_prefill(self, share: RankShare) -> _Prompt:
        """Forward of a prompt; its K/V become leaves on the way."""
        with self.forward_context():
            scores = self._scores(share)
        return _Prompt(scores, scores.detach().requires_grad_(scores.requires_grad))

    def run_round(self, one: RoundShare, prompt: _Prompt) -> None:
        """Forward, loss and backward of a round; gradients end at the prompt's leaves."""
        with self.forward_context():
            scores = self._scores(one.share)
            if len(one.borrowed_pairs):
                borrowed = prompt.leaf[:, one.prompt_pairs.to(self.device)]
                scores = scores.index_copy(1, one.borrowed_pairs.to(self.device), borrowed)
            loss = self._loss(one.share, scores)
        self._backward(loss)

    def finish_prefill(self, share: RankShare, prompt: _Prompt) -> None:
        """Backward of a prompt, from its scores and, layer by layer, from the gradients of its K/V."""
        if share.program.leaves is not None:
            share.program.leaves.close()
        if prompt.scores.requires_grad:
            grad = prompt.leaf.grad
            prompt.scores.backward(torch.zeros_like(prompt.scores) if grad is None else grad)

    def _scores(self, share: RankShare) -> torch.Tensor:
        """One forward of the model: [Q,N] scores of all pairs of the pass, zero where another pass has them."""
        local = share.local.to(self.device)
        with scoring_head(self.model.get_output_embeddings(), local, self.options.head):
            output = self.model(
                input_ids=local.input_ids.unsqueeze(0),
                position_ids=local.position_ids.unsqueeze(0),
                attention_mask=None,
                use_cache=False,
                logits_to_keep=local.scored_positions,
                **{PROGRAM_KEY: share.program},
            )
        own, pairs = output.logits.squeeze(0), share.pairs.to(self.device)
        num_pairs = len(share.packed.pair_label)
        if self.domain is not None:
            return share_scores(own, pairs, num_pairs, self.domain.group)
        if len(pairs) == num_pairs:
            return own
        return own.new_zeros(len(own), num_pairs).index_copy(1, pairs, own)

    def _loss(self, share: RankShare, pair_scores: torch.Tensor) -> torch.Tensor | None:
        """The loss of a pass's rows; without a loss function their scores are collected instead."""
        if not share.packed.row_indices:
            return None if self.loss_fn is None else pair_scores.sum() * 0.0
        scores = _unfold(share.packed.to(self.device), pair_scores, self.options)
        if self.loss_fn is not None:
            return self.loss_fn(scores)
        self.collected.append(scores)
        return None

    def _backward(self, loss: torch.Tensor | None) -> None:
        if loss is not None:
            # A rank's gradient is its own pairs' part of the loss; the average over ranks must be the sum.
            (loss if self.domain is None else loss * self.domain.size).backward()


def _unfold(packed: PackedTrees, pair_scores: torch.Tensor, options: PassOptions) -> RowScores:
    """[Q,N] pair scores -> per-row tensors in the caller's row order."""
    per_row = {
        name: packed.unfold(values) for name, values in zip(options.head.quantities, pair_scores, strict=True)
    }
    return RowScores(row_indices=packed.row_indices, **per_row)


def _report(
    plan: PassPlan, slots: Sequence[_Slot], scores: Sequence[RowScores], domain: Domain | None
) -> StepReport:
    shares = [share for slot in slots for share in slot.shares]
    traffic = [t for share in shares for t in (share.program.forward_traffic, share.program.backward_traffic)]
    counts = [sum(share.num_pad_tokens for share in shares), sum(t.sent_bytes for t in traffic)]
    pad_tokens, moved_bytes = counts if domain is None else sum_over_ranks(counts, domain.group)
    computed = sum(tree.num_tokens for one in plan.passes if not one.rounds for tree in one.trees)
    for one in plan.passes:
        if one.rounds:
            prompt = len(one.trees[0].nodes[0].tokens)
            computed += prompt + sum(piece.num_tokens - prompt for piece in one.rounds)
    return StepReport(
        tokens_computed=computed,
        tokens_flat=sum(tree.num_flat_tokens for tree in plan.trees),
        pad_tokens=pad_tokens,
        num_passes=len(shares),
        num_groups=plan.num_groups,
        num_rows=sum(len(tree.rows) for tree in plan.trees),
        num_groups_without_reuse=plan.num_groups_without_reuse,
        num_groups_cut=plan.num_groups_cut,
        num_groups_replayed=plan.num_groups_replayed,
        moved_bytes=moved_bytes,
        scores=tuple(scores),
    )
