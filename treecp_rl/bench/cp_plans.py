"""rows, kind -> the schedules of its step -> how even they are, and how many bytes they move.

Computed apart from the run, from the same functions and without a process group, so that what a run counted has
something to be held against.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from treecp_rl.engine.passes import Domain, PassOptions, PassPlan, plan_passes
from treecp_rl.engine.planning import Planner, planner_of
from treecp_rl.engine.shares import Setting, fused_share, prefill_share, replay_share
from treecp_rl.plan import TOKEN_PAIRS, Schedule
from treecp_rl.planner.batch import Mode
from treecp_rl.planner.cost import bytes_sent
from treecp_rl.planner.forms import RunOptions
from treecp_rl.planner.profile import ClusterProfile
from treecp_rl.planner.seconds import Pass, predict
from treecp_rl.tree import Row, pack

OUR_KINDS: tuple[Mode, ...] = ("gather", "gather_whole", "heads", "auto", "split")
BASELINE_KINDS: tuple[Mode, ...] = (
    "flat_ring",
    "reuse_ring",
    "dcp_fused",
    "tree_move_kv",
    "move_q",
    "split_tree_move_kv",
    "split_move_q",
)
"""Ring over rows (MegaN) and over the tree (MegaR), DCP as published, and AugTree's primitives in either form; all
packed: every row of a point runs in one pass, or in one prefill and one round."""
KINDS = OUR_KINDS + BASELINE_KINDS
_UNBOUNDED_TOKENS = 1 << 40


@dataclass(frozen=True)
class PlannedStep:
    """What a kind's step is, before it runs."""

    bytes_expected: int
    """All ranks, all layers, forward and backward."""
    work_imbalance: float
    """Sum over forwards of the busiest rank's work, over the same of the mean."""
    token_imbalance: float
    """Most tokens that a rank computes in all forwards, over the mean."""
    predicted_seconds: float
    """By the profile, from the schedules."""
    digest: str
    """Of the schedules: kinds that share it are one plan."""


RUN_OPTIONS = RunOptions(checkpointing=False)
"""Of every step here: layers are kept, and no token budget cuts anything."""


def passes_of(rows: Sequence[Row], kind: Mode, planner: Planner) -> PassPlan:
    """Every row in one pass, or every tree in one prefill and one round; ``auto`` as the planner chooses."""
    return plan_passes(rows, tokens_per_pass=_UNBOUNDED_TOKENS, mode=kind, planner=planner)


def planned_step(rows: Sequence[Row], kind: Mode, profile: ClusterProfile, world_size: int) -> PlannedStep:
    """Plan the step of a kind on one domain of ``world_size`` ranks, by the model and costs of a profile."""
    passes = list(_lowered(rows, kind, profile, world_size))
    schedules, shape = [one.schedule for one in passes], profile.shape
    works = [_work_by_rank(schedule) for schedule in schedules]
    tokens = [sum(ranks) for ranks in zip(*map(_tokens_by_rank, schedules), strict=True)]
    return PlannedStep(
        bytes_expected=sum(shape.num_layers * bytes_sent(schedule, shape).total for schedule in schedules),
        work_imbalance=sum(map(max, works)) * world_size / sum(map(sum, works)),
        token_imbalance=max(tokens) * world_size / sum(tokens),
        predicted_seconds=predict(passes, profile, RUN_OPTIONS).seconds,
        digest=" ".join(schedule.digest for schedule in schedules),
    )


def _lowered(rows: Sequence[Row], kind: Mode, profile: ClusterProfile, world_size: int) -> Iterator[Pass]:
    """The step's passes as the engine lowers them."""
    domain = Domain(0, world_size, None)  # type: ignore[arg-type]
    setting = Setting(PassOptions(mode=kind), profile.shape, recomputes=False, domain=domain)
    for one in passes_of(rows, kind, planner_of(profile, world_size, RUN_OPTIONS)).passes:
        whole = pack(one.trees)
        if not one.rounds:
            shares = [fused_share(whole, setting, one.decisions)]
        else:
            prefill, decision = prefill_share(whole, setting, *one.decisions)
            rounds = (replay_share(pack((piece,)), prefill, decision, setting) for piece in one.rounds)
            shares = [prefill, *(one.share for one in rounds)]
        for share in shares:
            yield Pass(share.schedule, share.packed.nodes)


def _tokens_by_rank(schedule: Schedule) -> list[int]:
    """Tokens that each rank computes."""
    tokens = [0] * schedule.world_size
    for segment in schedule.segments:
        if not any(start <= segment.start < stop for start, stop in schedule.resident):
            tokens[segment.rank] += segment.stop - segment.start
    return tokens


def _work_by_rank(schedule: Schedule) -> list[float]:
    """Query-key pairs that each rank computes, and its tokens' linear layers as so many pairs."""
    works = [float(TOKEN_PAIRS * tokens) for tokens in _tokens_by_rank(schedule)]
    for stage in schedule.stages:
        for tile in stage.tiles:
            works[tile.rank] += tile.num_pairs / tile.num_head_parts
    return works
