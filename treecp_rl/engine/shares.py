"""packed trees -> decisions -> schedule -> what one rank of the domain runs of a pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from treecp_rl.attention.leaves import Leaves
from treecp_rl.attention.program import Program, compile_program
from treecp_rl.engine.head import HeadOptions
from treecp_rl.errors import PlanError
from treecp_rl.plan import Decision, Node, Schedule, Span
from treecp_rl.planner.batch import Mode, decide
from treecp_rl.planner.check import check
from treecp_rl.planner.cost import MemoryBudget, ModelShape
from treecp_rl.planner.lower import lower, lower_local
from treecp_rl.planner.recompute import choose_saved
from treecp_rl.tree import PackedTrees


@dataclass(frozen=True)
class PassOptions:
    """How passes run."""

    head: HeadOptions = field(default_factory=HeadOptions)
    kernel: str = "auto"
    """Attention kernel by name; "auto" takes the fast one of the device."""
    mode: Mode = "auto"
    """Form and kind of every tree's plan, see ``planner.batch.Mode``."""
    streaming: bool = True
    """Whether one tree's moves travel under another's tiles, see ``planner.lower``."""
    resend: bool = False
    """Whether backward has K/V and queries sent again instead of keeping what arrived."""
    save_attention_bytes: int = 0
    """Attention outputs kept through activation checkpointing, most bytes a rank and pass."""
    offload_leaves: bool = False
    """Whether a prompt's K/V wait in host memory between the passes of a split tree."""
    attention_bytes_per_rank: int | None = None
    """What attention may hold on a rank in a pass; a plan that needs more is refused. None: not looked at."""


@dataclass(frozen=True)
class Domain:
    """The ranks that share one plan, seen from one of them. They hold the same rows."""

    rank: int
    size: int
    group: dist.ProcessGroup


def shape_of(model: torch.nn.Module) -> ModelShape:
    """What plans need to know of a model's attention."""
    config, itemsize = model.config, next(model.parameters()).dtype.itemsize
    heads = config.num_attention_heads
    return ModelShape(
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        itemsize=itemsize,
        accumulate_itemsize=max(4, itemsize),
    )


@dataclass(frozen=True)
class Setting:
    """Where passes run: the same for all passes of a step."""

    options: PassOptions
    shape: ModelShape
    recomputes: bool
    """Whether layers are checkpointed: their forward runs again in backward."""
    domain: Domain | None

    @property
    def domain_size(self) -> int:
        return 1 if self.domain is None else self.domain.size

    @property
    def budget(self) -> MemoryBudget | None:
        """What attention may hold on a rank."""
        limit = self.options.attention_bytes_per_rank
        num_kept_layers = 1 if self.recomputes else None
        return None if limit is None else MemoryBudget(limit, self.shape, num_kept_layers)

    def decide(self, tokens: Sequence[int]) -> tuple[Decision, ...]:
        return decide(tokens, self.domain_size, self.options.mode, self.shape.num_kv_heads)


@dataclass(frozen=True)
class RankShare:
    """What one rank runs of a pass."""

    packed: PackedTrees
    """The whole pass, on every rank of the domain."""
    local: PackedTrees
    """This rank's tokens, and the pairs they predict."""
    pairs: torch.Tensor
    """[n] the pass's number of each of those pairs."""
    program: Program
    schedule: Schedule
    """Of the whole pass, equal on all ranks of the domain."""
    num_pad_tokens: int
    """Tokens here that only keep the rank in step."""


@dataclass(frozen=True)
class RoundShare:
    """What one rank runs of a round. A replay borrows the scores of pairs that the prompt's last token predicts."""

    share: RankShare
    borrowed_pairs: torch.Tensor
    """[m] the round's numbers of those pairs."""
    prompt_pairs: torch.Tensor
    """[m] their numbers in the prefill pass."""


def fused_share(packed: PackedTrees, setting: Setting, decisions: Sequence[Decision] = ()) -> RankShare:
    """A rank's part of a fused pass; one that serves no row is a dummy.

    Args:
        decisions: of each tree; none: by the mode.
    """
    if not decisions:
        roots = [node for node in packed.nodes if node.parent < 0]
        decisions = setting.decide([node.subtree_stop - node.start for node in roots])
    saved_bytes = setting.options.save_attention_bytes if setting.recomputes else 0
    return _share(packed, decisions, setting, saved_bytes=saved_bytes, is_dummy=not packed.row_indices)


def prefill_share(
    whole: PackedTrees, setting: Setting, decision: Decision | None = None
) -> tuple[RankShare, Decision]:
    """A rank's part of a tree's prompt, whose K/V become leaves, and the decision that its rounds follow.

    Args:
        whole: the one tree; its prompt's last token scores the first token of each response.
        decision: None, or of more ranks than the prompt has tokens: by the mode.
    """
    prompt = prompt_of(whole)
    if decision is None or decision.degree > prompt.num_tokens:
        (decision,) = setting.decide([prompt.num_tokens])
    share = _share(prompt, [decision], setting)
    own = _own_spans(share.schedule, setting.domain)
    num_root = sum(stop - start for start, stop in own if stop <= prompt.num_tokens)
    share.program.leaves = Leaves(offload=setting.options.offload_leaves)
    share.program.captured = slice(0, num_root)
    return share, decision


def replay_share(piece: PackedTrees, prompt: RankShare, decision: Decision, setting: Setting) -> RoundShare:
    """A rank's part of a round: a tree over some of the prompt's responses, run against the prompt's leaves."""
    share = _share(piece, [decision], setting, resident_trees=(0,))
    share.program.leaves = prompt.program.leaves
    root_stop = piece.nodes[0].stop
    _require_same_placement(prompt.schedule, share.schedule, root_stop)
    borrowed = (piece.scored_positions[piece.pair_position] < root_stop).nonzero().squeeze(1)
    # Equal labels after the same prompt are one pair, so the label finds it.
    labels, pair_of = torch.sort(prompt.packed.pair_label, stable=True)
    found = torch.searchsorted(labels, piece.pair_label[borrowed])
    return RoundShare(share, borrowed, pair_of[found])


def independent_round(share: RankShare) -> RoundShare:
    """A pass that reads no leaves, run where another rank replays."""
    none = torch.empty(0, dtype=torch.int64)
    return RoundShare(share, none, none)


def prompt_of(whole: PackedTrees) -> PackedTrees:
    """One tree's prompt as a pass of its own, with the pairs that it predicts, and no rows."""
    stop = whole.nodes[0].stop
    prompt, _ = whole.cut(torch.arange(stop))
    return replace(prompt, nodes=(Node(-1, 0, stop, stop),))


def _share(
    packed: PackedTrees,
    decisions: Sequence[Decision],
    setting: Setting,
    *,
    resident_trees: tuple[int, ...] = (),
    saved_bytes: int = 0,
    is_dummy: bool = False,
) -> RankShare:
    """Lower a pass for the domain, and cut out this rank's part."""
    domain, rank, group = setting.domain, 0, None
    idle: list[int] = []
    if domain is None or domain.size == 1:
        schedule = lower_local(packed.nodes, roots_are_resident=bool(resident_trees))
        if setting.budget is not None:
            setting.budget.require(schedule)
    else:
        rank, group = domain.rank, domain.group
        packed, schedule, idle = _lower(packed, decisions, setting, resident_trees)
        check(schedule, packed.nodes, setting.budget)
    own = [torch.arange(start, stop) for start, stop in _own_spans(schedule, domain)]
    local, pairs = packed.cut(torch.cat(own))
    saved = choose_saved(schedule, packed.nodes, setting.shape, saved_bytes) if saved_bytes else ()
    program = compile_program(schedule, rank, setting.options.kernel, group, saved)
    num_pad_tokens = local.num_tokens if is_dummy else int(rank in idle)
    return RankShare(packed, local, pairs, program, schedule, num_pad_tokens)


def _lower(
    packed: PackedTrees,
    decisions: Sequence[Decision],
    setting: Setting,
    resident_trees: tuple[int, ...],
) -> tuple[PackedTrees, Schedule, list[int]]:
    """The pass and its schedule, with one token more for every rank that would have none."""
    world_size = setting.domain_size

    def lowered(decisions: Sequence[Decision]) -> Schedule:
        return lower(
            packed.nodes,
            decisions,
            world_size,
            resident_trees=resident_trees,
            resend=setting.options.resend,
            streaming=setting.options.streaming,
        )

    schedule = lowered(decisions)
    idle = [rank for rank in range(world_size) if not _spans_of(schedule, rank)]
    if idle:
        # A layer cannot run on zero tokens, and every rank must enter every layer.
        packed = packed.with_idle_tokens(len(idle))
        schedule = lowered((*decisions, *(Decision("local", first_rank=rank) for rank in idle)))
    return packed, schedule, idle


def _own_spans(schedule: Schedule, domain: Domain | None) -> list[Span]:
    return _spans_of(schedule, 0 if domain is None or schedule.world_size == 1 else domain.rank)


def _spans_of(schedule: Schedule, rank: int) -> list[Span]:
    """What a rank computes of a pass, ascending."""
    return [
        (segment.start, segment.stop)
        for segment in sorted(schedule.segments, key=lambda segment: segment.start)
        if segment.rank == rank and not any(a <= segment.start < b for a, b in schedule.resident)
    ]


def _require_same_placement(prefill: Schedule, replay: Schedule, root_stop: int) -> None:
    def of_root(schedule: Schedule) -> list[tuple[int, int, int]]:
        return sorted((s.start, s.stop, s.rank) for s in schedule.segments if s.stop <= root_stop)

    if of_root(prefill) != of_root(replay):
        raise PlanError(
            f"a replay looks for its prompt at {of_root(replay)}, its prefill left it at {of_root(prefill)}"
        )
