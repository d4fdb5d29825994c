"""profile, candidates -> coefficients; coefficients x features of trees -> seconds, bytes, peaks of every candidate.

Every term of a candidate's cost is linear in a few features of a tree (its prompt, the sum of its responses, pairs of
each), and so are the differences whose positive part is exposed communication. So a candidate is a few rows of
coefficients, and all candidates of all trees are one matrix product. Formulas below read as in ``docs/planner.md``:
P, R... are unit vectors, and a sum of them is a row.

A tree here is a prompt and G responses. What ``seconds`` computes from a lowered schedule is the measure of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Literal

import numpy as np
import numpy.typing as npt

from treecp_rl.plan import Decision, ForwardShares, Kind, Weights
from treecp_rl.planner.cost import ModelShape
from treecp_rl.planner.place import ZIGZAG_FLOOR
from treecp_rl.planner.profile import ClusterProfile, Form, Link

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

Space = Literal["full", "augtree", "split"]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a run trains, as far as costs depend on it."""

    checkpointing: bool = True
    """Layers are checkpointed: forward runs again in backward, and one layer's attention is held at a time."""
    needs_gradients: bool = True
    """False: log-probs only."""
    tokens_per_rank: int | None = None
    """Most tokens of a pass, over the ranks of the domain; None leaves it to memory."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What can be chosen for a tree apart from its ranks: the paper's (d, pi, (b, s))."""

    form: Form
    kind: Kind
    degree: int
    lanes: int = 1
    """s: lanes side by side."""
    rounds: int = 1
    """b: replay passes after a split tree's prefill; passes of a flat tree."""

    @property
    def decision(self) -> Decision:
        return Decision(self.kind, degree=self.degree, lanes=self.lanes)

    @property
    def placed_lanes(self) -> int:
        """Lanes whose busiest one its costs are of: whole responses have a rank each."""
        return self.degree if self.kind == "gather_whole" else self.lanes


def powers_of_two(most: int) -> tuple[int, ...]:
    """1, 2, 4 ... up to ``most``."""
    return tuple(1 << i for i in range(most.bit_length()) if 1 << i <= most)


ROUNDS = (1, 2, 4, 8)
"""Numbers of rounds that are tried; a tree of fewer responses takes fewer. Where only a split fits, more are."""


@lru_cache(maxsize=64)
def candidates(
    space: Space, degrees: tuple[int, ...], num_responses: int, num_kv_heads: int
) -> tuple[Candidate, ...]:
    """Every candidate of a space, in the order of the search: degree by degree, as Algorithm 1 goes.

    ``augtree``: ring over rows on their own (b = 0), and splits by TreeMoveKV with s | d lanes or by MoveQ.
    ``full``: also fused passes of every kind, and splits by gather and heads. ``split``: only the splits of these.
    """
    found: list[Candidate] = []
    rounds = tuple(b for b in ROUNDS if b <= num_responses)
    if space == "split":
        rounds = tuple(sorted({*powers_of_two(num_responses), num_responses}))
    for degree in degrees:
        if space != "split":
            found.append(Candidate("flat", "ring", degree))
        lanes = [s for s in powers_of_two(degree) if degree % s == 0 and s <= num_responses]
        if space == "full":
            found += _fused(degree, lanes, num_kv_heads)
        for b in rounds:
            found += [
                Candidate("split", "tree_move_kv", degree, s, b) for s in lanes if b * s <= num_responses
            ]
            found.append(Candidate("split", "move_q", degree, 1, b))
            if space != "augtree":
                found.append(Candidate("split", "gather", degree, 1, b))
                heads = _heads_lanes(degree, num_kv_heads)
                if heads <= num_responses and degree > 1 and heads < degree:
                    found.append(Candidate("split", "heads", degree, heads, b))
    return tuple(found)


def _fused(degree: int, lanes: Sequence[int], num_kv_heads: int) -> list[Candidate]:
    if degree == 1:
        return [Candidate("fused", "local", 1)]
    kinds: list[Kind] = ["gather", "ring", "move_q"]
    if degree <= MOST_EVEN_LANES:
        kinds.append("gather_whole")
    found = [Candidate("fused", kind, degree) for kind in kinds]
    found += [Candidate("fused", "tree_move_kv", degree, s) for s in lanes if s > 1]
    heads = _heads_lanes(degree, num_kv_heads)
    if heads < degree and heads in lanes:
        found.append(Candidate("fused", "heads", degree, heads))
    return found


def _heads_lanes(degree: int, num_kv_heads: int) -> int:
    """Fewest lanes of ``heads``: each part of the heads must be whole."""
    return degree // gcd(degree, num_kv_heads)


class FeatureIndex:
    """Where each feature of a tree stands in its vector. Pairs are query-key pairs of one head."""

    def __init__(self, degrees: tuple[int, ...], lanes: tuple[int, ...]) -> None:
        self.degrees = degrees
        """Degrees, and ranks of a lane, whose zigzags some candidate needs."""
        self.lanes = lanes
        names = list(_TREE_FEATURES)
        names += [f"{what}/{s}" for what in _LANE_FEATURES for s in lanes]
        names += [f"{what}/{d}" for what in _ZIGZAG_FEATURES for d in degrees]
        self.position = {name: i for i, name in enumerate(names)}
        self.size = len(names)
        self.zigzag_floors = [2 * d * ZIGZAG_FLOOR for d in degrees]
        """Fewest tokens of a node that is cut over so many ranks."""

    def unit(self, name: str) -> Floats:
        row = np.zeros(self.size)
        row[self.position[name]] = 1.0
        return row


_TREE_FEATURES = (
    "one",
    "prompt",
    "prompt_pairs",
    "responses",
    "cross_pairs",
    "response_pairs",
    "group",
    "prompts",
    "prompts_pairs",
)
"""1, P, P(P+1)/2, sum R, P sum R, sum R(R+1)/2, G, G P, G P(P+1)/2."""
_LANE_FEATURES = ("lane", "lane_cross", "lane_pairs")
"""Of the lane with most work: its R, P R and R(R+1)/2."""
_ZIGZAG_FEATURES = ("long", "long_tokens", "cut", "cut_tokens")
"""Responses long enough for a zigzag over d ranks; those that gather cuts, and what of them a rank lacks, in terms of
tokens cut over all ranks."""


@dataclass(slots=True)
class _Exchange:
    """Tokens that a rank receives in one kind of exchange of a layer, forward, over all passes of a phase."""

    group: int
    """Consecutive ranks among which they travel."""
    kv: Floats
    q: Floats
    states: Floats


@dataclass(slots=True)
class _Moves:
    """Exchanges that hide under the same computing."""

    exchanges: list[_Exchange]
    latencies: float
    hidden_under: Floats
    """Pairs that the rank computes meanwhile."""
    hidden_calls: Floats
    """Kernel calls that it makes meanwhile."""
    link: Link | None = None
    """What carries them; None: the mix that a group of that size has."""


@dataclass(slots=True)
class _Phase:
    """Rows of all passes of one kind of a candidate, for one layer of the busiest rank."""

    tokens: Floats
    scored: Floats
    pairs: Floats
    calls: Floats
    moves: list[_Moves]
    stages: float
    """Stages with moves."""
    arrived_kv: Floats
    """Tokens of K/V that arrive at a rank in one pass, of all heads."""
    arrived_q: Floats
    total_kv: Floats
    """Tokens of K/V that all ranks receive in all passes, of all heads."""
    total_q: Floats


_CUTTING_KINDS = ("gather", "move_q")
MOST_EVEN_LANES = 8
"""Most lanes in which these are expected to lay long responses instead of cutting them over all ranks."""
NUM_EXPOSED = 8
"""Rows of exposed communication: a prefill's and the main passes', two groups of moves each, forward and backward."""


@dataclass(frozen=True, slots=True)
class CostTable:
    """Coefficients of all candidates of a space."""

    candidates: tuple[Candidate, ...]
    index: FeatureIndex
    stacked: Floats
    """[N, F] seconds, factors included: of each candidate a row of what is busy, then what is exposed if positive."""
    floor: Floats
    """[N] least value of each of these rows."""
    starts: Ints
    """[C] first of each candidate's rows."""
    fixed: Floats
    """[C] seconds of the passes themselves, whatever runs in them."""
    limits: Floats
    """[2 * C, F] of the busiest rank: peak bytes, then mean tokens a rank of a pass."""
    moved: Floats
    """[C, F] bytes sent by all ranks, all layers, all times that forward and backward run."""
    degree: Floats
    """[C] ranks, which is also the fewest tokens of a pass."""
    is_split: Bools
    """[C] whether the prompt has a pass of its own."""

    def seconds(self, features: Floats) -> Floats:
        """[..., C] predicted seconds of trees with ``features`` [..., F], each tree alone in its passes."""
        rows = product(features, self.stacked)
        np.maximum(rows, self.floor, out=rows)
        total: Floats = np.add.reduceat(rows, self.starts, axis=-1)
        return total

    def marginal_seconds(self, features: Floats) -> Floats:
        """[..., C] seconds that a tree adds to a pass on each of its ranks."""
        return self.seconds(features) - self.fixed

    def has_tokens(self, features: Floats) -> Bools:
        """[..., C] whether each pass has a token for each rank, but for rounds, which hold the prompt again."""
        prompt = features[..., self.index.position["prompt"]][..., None]
        responses = features[..., self.index.position["responses"]][..., None]
        enough: Bools = self.degree <= prompt + np.where(self.is_split, 0.0, responses)
        return enough

    def peak_bytes(self, features: Floats) -> Floats:
        """[..., C] most bytes that a rank holds for the tree."""
        peaks: Floats = features @ self.limits[: len(self.candidates)].T
        return peaks

    def tokens_per_rank(self, features: Floats) -> Floats:
        """[..., C] packed tokens of the tree's largest pass, over its ranks."""
        tokens: Floats = features @ self.limits[len(self.candidates) :].T
        return tokens

    def moved_bytes(self, features: Floats) -> Floats:
        """[..., C] bytes that all ranks send."""
        moved: Floats = features @ self.moved.T
        return moved


SERIAL_PRODUCTS = 2**18 - 1
"""Most products of a matrix multiplication that BLAS does not spread over threads (OpenBLAS)."""


def product(features: Floats, rows: Floats) -> Floats:
    """[..., N] features [..., F] times rows [N, F], in blocks that stay on one thread.

    Threads that wait for one another on a busy machine take a hundred times as long as such a small product.
    """
    if features.ndim == 1:
        single: Floats = rows @ features
        return single
    found = np.empty((len(features), len(rows)))
    step = max(1, SERIAL_PRODUCTS // rows.size)
    for first in range(0, len(features), step):
        np.matmul(features[first : first + step], rows.T, out=found[first : first + step])
    return found


@lru_cache(maxsize=128)
def cost_table(profile: ClusterProfile, options: RunOptions, chosen: tuple[Candidate, ...]) -> CostTable:
    """Coefficients of ``chosen``; kept for equal arguments, because a run asks once a batch."""
    degrees = tuple(sorted({one.degree // part for one in chosen for part in (1, one.placed_lanes)}))
    lanes = {1} | {one.placed_lanes for one in chosen}
    if any(one.kind in _CUTTING_KINDS for one in chosen):
        lanes |= set(powers_of_two(min(MOST_EVEN_LANES, degrees[-1])))
    index = FeatureIndex(degrees, tuple(sorted(lanes)))
    rows = [_Rows(one, index, profile, options) for one in chosen]
    stacked: list[Floats] = []
    starts: list[int] = []
    for one in rows:
        starts.append(len(stacked))
        stacked.append(one.factor * (one.busy + one.fixed * index.unit("one")))
        stacked += [one.factor * row for row in one.exposed if row.any()]
    floor = np.zeros(len(stacked))
    floor[starts] = -np.inf
    return CostTable(
        candidates=chosen,
        index=index,
        stacked=np.stack(stacked),
        floor=floor,
        starts=np.array(starts),
        fixed=np.array([one.factor * one.fixed for one in rows]),
        limits=np.stack([one.peak for one in rows] + [one.tokens for one in rows]),
        moved=np.stack([one.moved for one in rows]),
        degree=np.array([float(one.degree) for one in chosen]),
        is_split=np.array([one.form == "split" for one in chosen]),
    )


def token_pairs(profile: ClusterProfile) -> float:
    """Pairs that cost as much as one token's linear layers."""
    return profile.dense_forward.per_token_s / profile.attention_forward.per_pair_s


def weights_of(profile: ClusterProfile, options: RunOptions) -> Weights:
    """What placements weigh by a profile."""
    forward, backward = run_times(options)
    p = profile
    pair = forward * p.attention_forward.per_pair_s, backward * p.attention_backward.per_pair_s
    token = forward * p.dense_forward.per_token_s, backward * p.dense_backward.per_token_s
    call = forward * p.attention_forward.per_tile_s, backward * p.attention_backward.per_tile_s
    kv_bytes = forward * move_bytes(p.shape, False)[0], backward * move_bytes(p.shape, True)[0]
    near, far = (link.per_byte_s * sum(kv_bytes) / sum(pair) for link in (p.node_link, p.cluster_link))
    # What costs nothing may count anywhere.
    shares = ForwardShares(*(there / (there + back or 1.0) for there, back in (token, pair, kv_bytes, call)))
    token_pairs, call_pairs = sum(token) / sum(pair), sum(call) / sum(pair)
    return Weights(round(token_pairs), near, far, call_pairs, p.ranks_per_node, shares)


def pass_fixed_seconds(profile: ClusterProfile, options: RunOptions) -> float:
    """Seconds of a pass that do not depend on what runs in it."""
    forward, backward = run_times(options)
    layer = forward * (profile.layer_forward_s + profile.dense_forward.fixed_s)
    layer += backward * (profile.layer_backward_s + profile.dense_backward.fixed_s)
    head = profile.head_forward.fixed_s + backward * profile.head_backward.fixed_s
    return profile.shape.num_layers * layer + head


def sync_seconds(profile: ClusterProfile, options: RunOptions) -> float:
    """Seconds of a step that do not depend on its passes."""
    return profile.gradient_sync_s if options.needs_gradients else 0.0


def run_times(options: RunOptions) -> tuple[float, float]:
    """How often a layer's forward and its backward run."""
    if not options.needs_gradients:
        return 1.0, 0.0
    return (2.0 if options.checkpointing else 1.0), 1.0


def move_bytes(shape: ModelShape, is_backward: bool) -> tuple[int, int, int]:
    """Bytes of one token's K/V, query and state: as sent forward, or as answered in backward."""
    narrow, wide = shape.itemsize, shape.accumulate_itemsize
    if is_backward:
        state = shape.query_bytes(1, narrow) + 2 * shape.scalar_bytes(1)
        return 2 * shape.key_bytes(1, wide), shape.query_bytes(1, wide), state
    state = shape.query_bytes(1, wide) + shape.scalar_bytes(1)
    return 2 * shape.key_bytes(1, narrow), shape.query_bytes(1, narrow), state


class _Rows:
    """Coefficients of one candidate."""

    def __init__(
        self, candidate: Candidate, index: FeatureIndex, profile: ClusterProfile, options: RunOptions
    ) -> None:
        self._profile, self._options, self._shape = profile, options, profile.shape
        self._one = index.unit("one")
        self.busy, self.peak, self.moved = (np.zeros(index.size) for _ in range(3))
        self.exposed = [np.zeros(index.size) for _ in range(NUM_EXPOSED)]
        phases = _Phases(candidate, index, profile)
        if candidate.form == "split":
            prefill, replay = phases.prefill(), phases.replay()
            self._add(prefill, 0)
            self._add(replay, 4)
            self.peak = self._peak(prefill, 1) + self._peak(replay, candidate.rounds) + self._leaves(phases)
            self.tokens = prefill.tokens + replay.tokens / candidate.rounds
        else:
            main = phases.flat() if candidate.form == "flat" else phases.fused()
            self._add(main, 4)
            self.peak = self._peak(main, candidate.rounds)
            self.tokens = main.tokens / candidate.rounds
        self.factor: float = getattr(profile.factors, candidate.form)
        num_passes = candidate.rounds + (candidate.form == "split")
        self.fixed = num_passes * pass_fixed_seconds(profile, options)

    def _add(self, phase: _Phase, first_exposed: int) -> None:
        p, layers = self._profile, self._shape.num_layers
        forward, backward = run_times(self._options)
        dense = forward * p.dense_forward.per_token_s + backward * p.dense_backward.per_token_s
        pair = forward * p.attention_forward.per_pair_s + backward * p.attention_backward.per_pair_s
        tile = forward * p.attention_forward.per_tile_s + backward * p.attention_backward.per_tile_s
        head = p.head_forward.per_token_s + backward * p.head_backward.per_token_s
        self.busy += layers * (dense * phase.tokens + pair * phase.pairs + tile * phase.calls)
        self.busy += layers * (forward + backward) * p.stage_s * phase.stages * self._one
        self.busy += head * phase.scored
        for group, moves in enumerate(phase.moves):
            for is_backward, times in enumerate((forward, backward)):
                cost = p.attention_backward if is_backward else p.attention_forward
                hidden = cost.per_pair_s * moves.hidden_under + cost.per_tile_s * moves.hidden_calls
                row = layers * times * (self._seconds(moves, bool(is_backward)) - p.overlap * hidden)
                self.exposed[first_exposed + 2 * group + is_backward] += row
        for is_backward, times in enumerate((forward, backward)):
            kv, q, state = move_bytes(self._shape, bool(is_backward))
            self.moved += layers * times * (kv * phase.total_kv + (q + state) * phase.total_q)

    def _seconds(self, moves: _Moves, is_backward: bool) -> Floats:
        """Of a layer's exchanges that hide together, one direction."""
        kv, q, state = move_bytes(self._shape, is_backward)
        seconds, latency = np.zeros_like(self._one), 0.0
        for one in moves.exchanges:
            per_byte_s, latency_s = self._link(one.group) if moves.link is None else (
                moves.link.per_byte_s, moves.link.latency_s
            )  # fmt: skip
            seconds = seconds + per_byte_s * (kv * one.kv + q * one.q + state * one.states)
            latency = max(latency, latency_s)
        return seconds + moves.latencies * latency * self._one

    def _link(self, group: int) -> tuple[float, float]:
        """Seconds a byte and latency of bytes that go evenly to the other ranks of an aligned group."""
        p = self._profile
        within = min(group, p.ranks_per_node)
        if group <= within:
            return p.node_link.per_byte_s, p.node_link.latency_s
        inside = (within - 1) / (group - 1)
        per_byte = inside * p.node_link.per_byte_s + (1 - inside) * p.cluster_link.per_byte_s
        return per_byte, p.cluster_link.latency_s + (p.node_link.latency_s if inside else 0.0)

    def _peak(self, phase: _Phase, passes: int) -> Floats:
        """As ``cost.peak_attention_bytes`` of a pass with gradients, and activations outside of attention."""
        shape, memory = self._shape, self._profile.memory
        is_lean = self._options.checkpointing
        layers = 1 if is_lean else shape.num_layers
        other = memory.checkpointed_bytes_per_token if is_lean else memory.kept_bytes_per_token
        q, kv, scalar = shape.query_bytes(1, 1), shape.key_bytes(1, 1), shape.scalar_bytes(1)
        narrow, wide = shape.itemsize, shape.accumulate_itemsize
        own = layers * (2 * (q + kv) * narrow + scalar) + (q + 2 * kv) * wide + other
        held = phase.tokens / passes * own
        held = held + phase.arrived_kv * (2 * kv * (layers * narrow + wide))
        return held + phase.arrived_q * (layers * q * narrow + q * wide + 2 * q * narrow + scalar)

    def _leaves(self, phases: _Phases) -> Floats:
        """K/V of the prompt and their gradients, of every layer."""
        shape = self._shape
        width = shape.itemsize + shape.accumulate_itemsize
        return phases.prompt / phases.degree * (2 * shape.num_layers * shape.key_bytes(1, width))


class _Phases:
    """One candidate's passes in terms of features. Symbols: d ranks, s lanes of ``per_lane`` ranks, b rounds."""

    def __init__(self, candidate: Candidate, index: FeatureIndex, profile: ClusterProfile) -> None:
        self._kind = candidate.kind
        self._profile = profile
        self.degree, self._lanes, self._rounds = candidate.degree, candidate.placed_lanes, candidate.rounds
        self._per_lane = self.degree // self._lanes
        self._one, self._zero = index.unit("one"), np.zeros(index.size)
        (
            _,
            self.prompt,
            self._prompt_pairs,
            self._responses,
            self._cross,
            self._response_pairs,
            self._group,
            self._prompts,
            self._prompts_pairs,
        ) = map(index.unit, _TREE_FEATURES)
        self._lane, self._lane_cross, self._lane_pairs = (
            index.unit(f"{what}/{self._lanes}") for what in _LANE_FEATURES
        )
        self._long, self._long_tokens, _, _ = (
            index.unit(f"{what}/{self._per_lane}") for what in _ZIGZAG_FEATURES
        )
        _, _, self._cut, self._cut_tokens = (index.unit(f"{what}/{self.degree}") for what in _ZIGZAG_FEATURES)

    def fused(self) -> _Phase:
        """Prompt and responses in one pass."""
        return self._main(self._prompt_pairs, prompts=self.prompt, is_replay=False)

    def replay(self) -> _Phase:
        """All rounds of a split tree, which read the prompt where it lies."""
        return self._main(self._zero, prompts=self._zero, is_replay=True)

    def prefill(self) -> _Phase:
        """A split tree's prompt."""
        d = self.degree
        arrives = self.prompt * ((d - 1) / d)
        calls = self._one * (1 if d == 1 else 4 if d == 2 else 5)
        phase = self._phase(self.prompt / d, self._zero, self._prompt_pairs / d, calls)
        if d == 1:
            return phase
        if self._kind == "heads":
            phase.calls = self._one * self._heads_calls
            return self._by_heads(phase, self.prompt, self._zero, self._zero, 1)
        phase.arrived_kv, phase.total_kv = arrives, self.prompt * (3 * (d - 1) / 4)
        if self._kind == "tree_move_kv":
            phase.calls = self._one * (d + 2)
            return self._in_ring(phase, arrives, 1)
        return self._at_once(phase, arrives, self._zero, self._prompt_pairs / d**2, 1)

    def flat(self) -> _Phase:
        """A ring over every row on its own: the prompt is computed and moved G times."""
        d = self.degree
        tokens = self._prompts + self._responses
        pairs = self._prompts_pairs + self._cross + self._response_pairs
        calls = (2 * d + 1) * self._group + min(d, 4) * self._long + (self._group - self._long) / d
        phase = self._phase(tokens / d, self._responses / d, pairs / d, calls if d > 1 else self._group)
        arrives = (self._prompts + self._long_tokens) * ((d - 1) / d)
        phase.arrived_kv = arrives / self._rounds
        phase.total_kv = (d - 1) * (self._prompts + 0.75 * self._long_tokens)
        return self._in_ring(phase, arrives, self._rounds)

    def _main(self, prompt_pairs: Floats, *, prompts: Floats, is_replay: bool) -> _Phase:
        if self._kind in ("tree_move_kv", "heads"):
            return self._in_lanes(prompt_pairs, prompts, is_replay)
        if self._kind == "gather_whole":
            return self._uncut(prompt_pairs, prompts, is_replay)
        d, b = self.degree, self._rounds
        pairs = prompt_pairs + self._cross + self._response_pairs
        calls = self._whole_calls(is_replay)
        phase = self._phase((prompts + self._responses) / d, self._responses / d, pairs / d, calls)
        if d == 1:
            return phase
        all_prompt = self.prompt * ((d - 1) / d)
        if self._kind == "ring":
            phase.calls = (2 * d + 1) * self._one + (d + 2) * self._long + (self._group - self._long) / d
            arrives = all_prompt + self._long_tokens * ((d - 1) / d)
            phase.arrived_kv = arrives
            phase.total_kv = (d - 1) * (b * self.prompt + 0.75 * self._long_tokens)
            return self._in_ring(phase, arrives, 1)
        hidden = (prompt_pairs + self._cross) / d**2 + self._response_pairs / d
        cut = self._cut_tokens * ((d - 1) / d)
        if self._kind == "move_q":
            kv = self._zero if is_replay else all_prompt
            queries = self._responses * ((d - 1) / d)
            phase.arrived_kv, phase.arrived_q = kv + cut / b, queries / b
            phase.total_kv = (0.75 * (d - 1)) * (self._cut_tokens + prompts)
            phase.total_q = (d - 1) * self._responses
            return self._at_once(phase, kv + cut, queries, hidden, b)
        phase.arrived_kv = all_prompt + cut / b
        phase.total_kv = (d - 1) * (b * self.prompt + 0.75 * self._cut_tokens)
        return self._at_once(phase, b * all_prompt + cut, self._zero, hidden, b)

    def _uncut(self, prompt_pairs: Floats, prompts: Floats, is_replay: bool) -> _Phase:
        """Whole responses, a lane on each rank; the prompt's K/V come to all ranks at once."""
        d, b = self.degree, self._rounds
        pairs = prompt_pairs / d + self._lane_cross + self._lane_pairs
        phase = self._phase(prompts / d + self._lane, self._lane, pairs, self._whole_calls(is_replay))
        phase.arrived_kv = self.prompt * ((d - 1) / d)
        phase.total_kv = (d - 1) * b * self.prompt
        hidden = prompt_pairs / d**2 + self._lane_cross / d + self._lane_pairs
        return self._at_once(phase, b * phase.arrived_kv, self._zero, hidden, b)

    def _whole_calls(self, is_replay: bool) -> Floats:
        """Kernel calls of a rank whose responses are whole, as lowering gives them; measured, not derived."""
        d, b = self.degree, self._rounds
        if d == 1:
            return (b if is_replay else 2) * self._one + self._group
        # By whether there are more than two ranks. Spans, which gather has in a fused pass, take fewer.
        in_replay, fused = ((2, 4), (6, 9)) if self._kind == "move_q" else ((2, 3), (5, 7))
        of_cut = 4
        if self._kind == "gather":
            fused, of_cut = (4, 5), 4 if is_replay else 3
        base = b * in_replay[d > 2] if is_replay else fused[d > 2]
        cut = self._zero if self._kind == "gather_whole" else self._cut
        return base * self._one + (self._group - cut) / d + of_cut * cut

    @property
    def _heads_calls(self) -> int:
        """Of a prompt whose heads are computed in parts."""
        return 3 * self._per_lane + (2 if self._lanes > 1 else 0)

    def _in_lanes(self, prompt_pairs: Floats, prompts: Floats, is_replay: bool) -> _Phase:
        d, s, b, per_lane = self.degree, self._lanes, self._rounds, self._per_lane
        pairs = prompt_pairs / d + (self._lane_cross + self._lane_pairs) / per_lane
        tokens = prompts / d + self._lane / per_lane
        phase = self._phase(tokens, self._lane / per_lane, pairs, self._whole_calls(is_replay))
        if d == 1:
            return phase
        short = self._group - self._long
        all_prompt = self.prompt * ((d - 1) / d)
        in_lane = (per_lane - 1) / per_lane
        if self._kind == "heads":
            base = 4 * b if is_replay else self._heads_calls + 4
            phase.calls = base * self._one + (3 * per_lane * self._long + short) / s
            return self._by_heads(phase, prompts, self._lane, self._responses, b)
        base = d * b if is_replay else 2 * d + 1
        of_long = 1 if per_lane == 1 else per_lane + 2
        phase.calls = base * self._one + of_long / s * self._long + short / d
        lane = self._long_tokens * (in_lane / s)
        phase.arrived_kv = all_prompt + lane / b
        phase.total_kv = (d - 1) * b * self.prompt + 0.75 * (per_lane - 1) * self._long_tokens
        return self._in_ring(phase, all_prompt * b + lane, b)

    def _by_heads(self, phase: _Phase, prompts: Floats, lane: Floats, rest: Floats, passes: int) -> _Phase:
        """Queries and K/V of a part of the heads travel in a lane, the prompt's K/V of that part to all lanes.

        ``prompts``, ``rest``: tokens of the prompt and of the responses that are computed; ``lane``: response tokens
        of the busiest lane.
        """
        d, s, per_lane = self.degree, self._lanes, self._per_lane
        missing = (per_lane - 1) / per_lane
        of_prompt = self.prompt * (passes * (d - 1) / d / per_lane)
        of_lane = lane * (missing / per_lane)
        queries = prompts * (missing / s / per_lane) + of_lane
        operands = [_Exchange(d, of_prompt, self._zero, self._zero)]
        operands.append(_Exchange(per_lane, of_lane, queries, self._zero))
        states = [_Exchange(per_lane, self._zero, self._zero, queries)]
        phase.moves = [
            _Moves(operands, passes, phase.pairs / (d * per_lane), self._zero),
            _Moves(states, passes, self._zero, self._zero),
        ]
        phase.stages = 2 * passes
        phase.arrived_kv = (of_prompt + of_lane) / passes
        phase.arrived_q = queries / passes
        phase.total_kv = of_prompt * d + missing * rest
        phase.total_q = missing * (prompts + rest)
        return phase

    def _in_ring(self, phase: _Phase, arrives: Floats, passes: int) -> _Phase:
        """Moves in d - 1 stages, each under the tiles of the stage before; those that leave the node apart."""
        d = self.degree
        if d == 1:
            return phase
        within = min(d, self._profile.ranks_per_node)
        for stages, link in ((within - 1, self._profile.node_link), (d - within, self._profile.cluster_link)):
            if stages:
                part = stages / (d - 1)
                exchange = _Exchange(d, arrives * part, self._zero, self._zero)
                part = stages / d
                moves = _Moves([exchange], passes * stages, phase.pairs * part, phase.calls * part, link)
                phase.moves.append(moves)
        phase.stages = passes * (d - 1)
        return phase

    def _at_once(
        self, phase: _Phase, kv: Floats, queries: Floats, hidden_under: Floats, passes: int
    ) -> _Phase:
        """Operands in one stage, under what a rank computes of its own, about two thirds of its calls; then states come
        back."""
        d = self.degree
        if d == 1:
            return phase
        phase.stages = passes
        operands, own_calls = _Exchange(d, kv, queries, self._zero), phase.calls * (2 / 3)
        phase.moves.append(_Moves([operands], passes, hidden_under, own_calls))
        if queries.any():
            phase.stages = 2 * passes
            states = _Exchange(d, self._zero, self._zero, queries)
            phase.moves.append(_Moves([states], passes, self._zero, self._zero))
        return phase

    def _phase(self, tokens: Floats, scored: Floats, pairs: Floats, calls: Floats) -> _Phase:
        z = self._zero
        return _Phase(tokens, scored, pairs, calls, [], 0.0, z, z, z, z)
