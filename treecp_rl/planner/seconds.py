"""Schedules of a step, profile -> seconds, bytes and peak of its busiest rank: the measure of every plan.

Exact in what a lowered schedule says: each rank's tokens, pairs, kernel calls and bytes, stage by stage. Whatever
chooses among plans without lowering them (``forms``) is held against this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treecp_rl.plan import Node, Schedule
from treecp_rl.planner.calls import calls_of_stages
from treecp_rl.planner.cost import MemoryBudget, bytes_sent
from treecp_rl.planner.forms import Floats, RunOptions, move_bytes, pass_fixed_seconds, sync_seconds
from treecp_rl.planner.profile import Affine, ClusterProfile, TileCost


@dataclass(frozen=True, slots=True)
class Pass:
    """A schedule, and the nodes it was lowered from."""

    schedule: Schedule
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a step costs."""

    seconds: float
    forward_seconds: float
    """Of all passes' first forwards."""
    backward_seconds: float
    """The rest, recomputed forwards included."""
    moved_bytes: int
    """Sent by all ranks, all layers, as often as forward and backward run."""
    peak_bytes: int
    """Most bytes of a rank in any pass."""


def predict(passes: Sequence[Pass], profile: ClusterProfile, options: RunOptions) -> Prediction:
    """Cost of a step's passes, which run one after another; ranks meet at the end of every layer.

    A rank's layer takes its linear parts, its tiles, and what of its moves does not hide: a stage's moves travel under
    ``overlap`` of the tiles of the stage before. The slowest rank is the layer's time.
    """
    forward = backward = 0.0
    moved = peak = prefill = 0
    recomputed = 1.0 if options.checkpointing and options.needs_gradients else 0.0
    for one in passes:
        stages = stage_seconds(profile) * stages_with_moves(one.schedule).bit_count()
        there, back = (seconds + stages for seconds in rank_seconds(one, profile))
        forward += float(there.max())
        if options.needs_gradients:
            backward += float(back.max()) + recomputed * float(there.max())
            # The head's chunks are recomputed inside its backward, not with the layers.
            backward -= recomputed * _head_seconds(one, profile)
        sent = bytes_sent(one.schedule, profile.shape, needs_gradients=options.needs_gradients)
        times = 1 + int(recomputed)
        moved += profile.shape.num_layers * (times * sum(sent.forward) + sum(sent.backward))
        held = peak_bytes(one.schedule, profile, options)
        # A prefill's graph lives until its last round is done.
        prefill = prefill if one.schedule.resident else held
        peak = max(peak, held + prefill if one.schedule.resident else held)
    fixed = len(passes) * pass_fixed_seconds(profile, options) + sync_seconds(profile, options)
    return Prediction(forward + backward + fixed, forward, backward, moved, peak)


def peak_bytes(schedule: Schedule, profile: ClusterProfile, options: RunOptions) -> int:
    """Most bytes that a rank holds in a pass with gradients."""
    return max(memory_budget(profile, options).peak_bytes(schedule))


def memory_budget(profile: ClusterProfile, options: RunOptions) -> MemoryBudget:
    """What a rank of the profile's cluster may hold in a pass, for ``check``."""
    memory = profile.memory
    return MemoryBudget(
        memory.bytes_per_rank,
        profile.shape,
        1 if options.checkpointing else None,
        memory.checkpointed_bytes_per_token if options.checkpointing else memory.kept_bytes_per_token,
    )


def _head_seconds(one: Pass, profile: ClusterProfile) -> float:
    return profile.head_forward.per_token_s * float(_scored(one).max(initial=0.0))


def stage_seconds(profile: ClusterProfile) -> float:
    """Host time of one stage with moves, all layers, one direction; every rank of the pass has it."""
    return profile.shape.num_layers * profile.stage_s


def stages_with_moves(schedule: Schedule) -> int:
    """A bit for each stage in which something moves: trees that share a pass share their stages."""
    return sum(1 << number for number, stage in enumerate(schedule.stages) if stage.moves)


def rank_seconds(one: Pass, profile: ClusterProfile) -> tuple[Floats, Floats]:
    """[world] seconds of each rank, all layers, forward and backward; fixed costs of the pass and its stages apart."""
    p = profile
    pairs, calls = _pairs_and_calls(one.schedule)
    computed, scored, num_moves = _computed(one), _scored(one), _num_moves(one.schedule)

    def direction(dense: Affine, head: Affine, attention: TileCost, is_backward: bool) -> Floats:
        tiles = attention.per_tile_s * calls + attention.per_pair_s * pairs
        moves = _move_seconds(one.schedule, profile, is_backward)
        # Stage i's moves hide under stage i - 1's tiles, in backward too: gradients of stage i's operands leave then.
        before = np.vstack([np.zeros((1, tiles.shape[1])), tiles[:-1]])
        exposed = np.maximum(0.0, moves - p.overlap * before)
        attention_s = tiles.sum(axis=0) + exposed.sum(axis=0) + p.move_s * num_moves
        layer = dense.per_token_s * computed + attention_s
        total: Floats = p.shape.num_layers * layer + head.per_token_s * scored
        return total

    return (
        direction(p.dense_forward, p.head_forward, p.attention_forward, is_backward=False),
        direction(p.dense_backward, p.head_backward, p.attention_backward, is_backward=True),
    )


def _pairs_and_calls(schedule: Schedule) -> tuple[Floats, Floats]:
    """[stages, world] pairs of all heads, and kernel calls, of each rank."""
    pairs, calls = (np.zeros((len(schedule.stages), schedule.world_size)) for _ in range(2))
    of_stages = calls_of_stages(schedule.segments, schedule.stages, schedule.resident)
    for i, (stage, of_ranks) in enumerate(zip(schedule.stages, of_stages, strict=True)):
        for tile in stage.tiles:
            pairs[i, tile.rank] += tile.num_pairs / tile.num_head_parts
        for rank, num_calls in of_ranks.items():
            calls[i, rank] = num_calls
    return pairs, calls


def _move_seconds(schedule: Schedule, profile: ClusterProfile, is_backward: bool) -> Floats:
    """[stages, world] seconds of each rank's busier direction."""
    kv, q, state = move_bytes(profile.shape, is_backward)
    per_token = {"kv": kv, "q": q, "state": state}
    again = move_bytes(profile.shape, False)
    num_stages, world = len(schedule.stages), schedule.world_size
    # [out or in, within or between nodes, stage, rank]
    num_bytes = np.zeros((2, 2, num_stages, world))
    for i, stage in enumerate(schedule.stages):
        for move in stage.moves:
            tier = int(move.src // profile.ranks_per_node != move.dst // profile.ranks_per_node)
            size = per_token[move.kind] * move.num_tokens / move.num_head_parts
            num_bytes[0, tier, i, move.src] += size
            num_bytes[1, tier, i, move.dst] += size
            if is_backward and schedule.resend and move.kind != "state":
                more = again[0 if move.kind == "kv" else 1] * move.num_tokens / move.num_head_parts
                num_bytes[0, tier, i, move.dst] += more
                num_bytes[1, tier, i, move.src] += more
    busiest = num_bytes.max(axis=0)
    seconds = np.zeros((num_stages, world))
    for tier, link in enumerate((profile.node_link, profile.cluster_link)):
        seconds += link.per_byte_s * busiest[tier] + link.latency_s * (busiest[tier] > 0)
    return seconds


def _num_moves(schedule: Schedule) -> Floats:
    """[world] moves that each rank sends or receives."""
    ends = [rank for stage in schedule.stages for move in stage.moves for rank in (move.src, move.dst)]
    counts = np.bincount(np.array(ends, dtype=np.int64), minlength=schedule.world_size)
    return counts.astype(np.float64)


def _computed(one: Pass) -> Floats:
    """[world] tokens that each rank computes."""
    tokens = np.zeros(one.schedule.world_size)
    for segment in one.schedule.segments:
        if not any(start <= segment.start < stop for start, stop in one.schedule.resident):
            tokens[segment.rank] += segment.stop - segment.start
    return tokens


def _scored(one: Pass) -> Floats:
    """[world] tokens below the prompts; the one before each of them scores it, mostly on the same rank."""
    roots = sorted((node.start, node.stop) for node in one.nodes if node.parent < 0)
    starts = np.array([start for start, _ in roots])
    scored = np.zeros(one.schedule.world_size)
    for segment in one.schedule.segments:
        inside = min(segment.stop, roots[int(np.searchsorted(starts, segment.start, side="right")) - 1][1])
        scored[segment.rank] += segment.stop - max(segment.start, inside)
    return scored
