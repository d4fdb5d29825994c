"""This machine or cluster, a model -> a measured ClusterProfile; with ``--check`` how well it predicts and ranks plans.

Steps of the real engine on random trees are timed on one rank and split by least squares into what a pass, a token, a
pair, a tile and a scored token cost; exchanges between ranks give latency and seconds a byte. On a CPU, time
is CPU time of one thread, since ranks that share cores say little by wall time.
"""

from __future__ import annotations

import datetime
import math
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from treecp_rl.bench.cp_plans import planned_step
from treecp_rl.bench.cp_ranks import HIDDEN_SIZE, NUM_LAYERS, VOCAB_SIZE, Job, run_world
from treecp_rl.bench.fit import Floats, fit_terms
from treecp_rl.bench.links import Launch, MeasuredLinks, launched, measure_links
from treecp_rl.bench.memory import peak_bytes
from treecp_rl.bench.shapes import Point
from treecp_rl.engine.capabilities import prepare_model
from treecp_rl.engine.passes import PassOptions, RowScores, plan_passes, run_passes
from treecp_rl.engine.shares import shape_of
from treecp_rl.errors import ConfigError
from treecp_rl.planner.batch import Mode
from treecp_rl.planner.cost import MemoryBudget
from treecp_rl.planner.lower import lower_local
from treecp_rl.planner.lower_plan import nodes_of
from treecp_rl.planner.profile import Affine, ClusterProfile, Link, Memory, TileCost
from treecp_rl.planner.search import TreeLengths
from treecp_rl.tree import Row
from treecp_rl.verify.models import load_config, random_model, tiny_config

CHECKED_KINDS: tuple[Mode, ...] = (
    "gather",
    "heads",
    "reuse_ring",
    "tree_move_kv",
    "move_q",
    "flat_ring",
    "split_gather",
    "split_move_q",
)
RANK_KINDS: tuple[Mode, ...] = (
    "local",
    "gather",
    "gather_whole",
    "heads",
    "reuse_ring",
    "tree_move_kv",
    "move_q",
    "dcp_fused",
    "split_gather",
    "split_move_q",
)
"""Kinds whose steps on ranks of this machine say what passes, tiles, stages, moves and bytes cost."""
RANK_POINTS = 10
PLAN_RANKS = (2, 4, 8)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TERMS = ("pass", "token", "pair", "tile", "scored token")
MEMORY_TOKENS = (256, 768)
RANKS_PER_NODE = 8
"""Of a profile, where nothing says how many."""
MEMORY_PART = 0.5
"""Of the memory that is free on this machine, what its ranks' passes may hold."""
CHECK_TIMEOUT_SECONDS = 1800.0
_UNBOUNDED = 1 << 40


@dataclass(frozen=True)
class CalibrateOptions:
    """What `treecp-rl calibrate` was asked for."""

    name: str = "measured"
    model_config: str | None = None
    """config.json or its folder; None is the small model that ``bench cp`` trains."""
    num_layers: int | None = None
    dtype: str = "float32"
    num_trees: int = 36
    """Random trees, of which a third is held out."""
    most_tokens: int = 1024
    """Of a prompt, and of a tree's responses together."""
    repeats: int = 3
    threads: int = 1
    ranks_per_node: int | None = None
    """None: as launched, or 8."""
    plan_ranks: int = 2
    """Ranks on which plans are run: as many as share a machine in a run, where they share its cores."""
    check: bool = False
    check_points: int = 4


@dataclass(frozen=True)
class Calibration:
    """The profile, and how far to trust it."""

    profile: ClusterProfile
    fit_error: float
    """Median relative error of the steps that were fitted."""
    held_out_error: float
    """Median relative error of the steps that were not."""
    links: Mapping[str, Link]
    """What exchanges take by themselves, by transport, inside a node and between nodes."""
    kendall_tau: float | None = None
    """Of predicted and measured order of kinds of plan, mean over points; None: not checked."""
    plan_error: float | None = None
    """Median relative error of those steps."""
    orders: tuple[dict[str, Any], ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "profile": self.profile.name,
            "digest": self.profile.digest,
            "fit_error": self.fit_error,
            "held_out_error": self.held_out_error,
            "links": {name: asdict(link) for name, link in self.links.items()},
            "kendall_tau": self.kendall_tau,
            "plan_error": self.plan_error,
            "points": list(self.orders),
        }


def calibrate(
    options: CalibrateOptions, progress: Callable[[str], None] = lambda line: None
) -> Calibration | None:
    """Measure a profile. Under torchrun every rank enters; the first measures all but links, and has the result.

    Raises:
        ConfigError: a model that cannot run here, too few trees to fit, or a launch that cannot be measured.
    """
    launch = launched()
    _require_measurable(options, launch)
    config = _config(options)
    # First: the other ranks then leave a quiet machine to what computes.
    links = measure_links(launch, options.threads)
    if launch is not None and launch.rank > 0:
        return None
    progress("link: " + ", ".join(f"{name} {_link_text(link)}" for name, link in links.by_name.items()))
    torch.set_num_threads(options.threads)
    model = _model(config, options)
    trees = _random_trees(options)
    forward, both = _timed(model, trees, options, progress)
    features = np.array([_features(tree) for tree in trees])
    fitted = np.arange(len(trees)) % 3 != 2
    terms_forward = fit_terms(features[fitted], forward[fitted])
    terms_backward = fit_terms(features[fitted], (both - forward)[fitted])
    errors = np.abs(features @ (terms_forward + terms_backward) / both - 1)
    activation_bytes = kept, checkpointed = [
        _activation_bytes(model, checkpointing=checkpointing) for checkpointing in (False, True)
    ]
    progress(f"activations outside of attention: {kept} bytes a token kept, {checkpointed} checkpointed")
    profile = _profile(options, model, terms_forward, terms_backward, links, activation_bytes)
    if _runs_plans(options):
        profile = _with_ranks(profile, options, links)
    found = Calibration(
        profile, float(np.median(errors[fitted])), float(np.median(errors[~fitted])), links.by_name
    )
    return check(found, options) if options.check else found


def _require_measurable(options: CalibrateOptions, launch: Launch | None) -> None:
    """
    Raises:
        ConfigError: says what cannot be measured.
    """
    if options.num_trees < 3 * len(TERMS):
        raise ConfigError(
            f"{options.num_trees} trees for {len(TERMS)} terms; measure {3 * len(TERMS)} or more"
        )
    if options.dtype not in DTYPES:
        raise ConfigError(f"--dtype {options.dtype}: choose {' or '.join(DTYPES)}")
    if launch is not None and options.ranks_per_node not in (None, launch.ranks_per_node):
        raise ConfigError(
            f"--ranks-per-node {options.ranks_per_node}, but {launch.ranks_per_node} ranks a node were launched; "
            "leave it out"
        )
    if options.plan_ranks not in PLAN_RANKS:
        raise ConfigError(f"--plan-ranks {options.plan_ranks}: choose from {', '.join(map(str, PLAN_RANKS))}")
    if options.check and not _runs_plans(options):
        raise ConfigError(
            "--check runs the small float32 model of bench cp on CPU ranks; leave out --model-config, --num-layers and "
            f"--dtype, on a machine whose device is cpu (here {_device().type})"
        )


def _runs_plans(options: CalibrateOptions) -> bool:
    """Whether it is the model that ``bench cp`` shards over CPU ranks."""
    is_small = options.model_config is None and options.num_layers is None and options.dtype == "float32"
    return is_small and _device().type == "cpu"


def _with_ranks(profile: ClusterProfile, options: CalibrateOptions, links: MeasuredLinks) -> ClusterProfile:
    """What FSDP2 adds to a pass and a step, and moves to a layer: plans of several kinds on some ranks, against what
    the profile says of them without. What ranks that share a machine take more of everything is in the first term."""
    points = tuple(_random_group(number, options.most_tokens) for number in range(RANK_POINTS))
    repeats = max(3, options.repeats)
    num_ranks = options.plan_ranks
    job = Job(num_ranks, points, RANK_KINDS, repeats, options.threads, profile, counts_memory=False)
    nothing = Link(0.0, 0.0)
    bare = replace(profile, stage_s=0.0, node_link=nothing, cluster_link=nothing)
    one_each = (
        replace(bare, layer_forward_s=bare.layer_forward_s + 1.0),
        replace(bare, attention_forward=_with_tile(bare.attention_forward, 1.0)),
        replace(bare, stage_s=1.0),
        replace(bare, move_s=1.0),
        replace(bare, gradient_sync_s=1.0),
        replace(bare, node_link=Link(0.0, 1.0)),
    )
    features, seconds = [], []
    for point, kinds in zip(points, run_world(job, CHECK_TIMEOUT_SECONDS), strict=True):
        rows = point.rows(VOCAB_SIZE)
        for kind, measured in zip(RANK_KINDS, kinds, strict=True):
            known = planned_step(rows, kind, bare, num_ranks).predicted_seconds
            more = [planned_step(rows, kind, one, num_ranks).predicted_seconds - known for one in one_each]
            features.append([known, *more])
            seconds.append(measured.cpu_seconds)
    terms = fit_terms(np.array(features), np.array(seconds))
    scale, of_layer, of_tile, of_stage, of_move, of_sync, of_byte = terms.tolist()
    # Where bytes are lost in noise they cost what a link alone takes: nothing is free.
    link = Link(0.0, of_byte or profile.node_link.per_byte_s)
    scaled = _scaled(bare, scale)
    return replace(
        scaled,
        layer_forward_s=scaled.layer_forward_s + of_layer,
        attention_forward=_with_tile(scaled.attention_forward, of_tile),
        stage_s=of_stage,
        move_s=of_move,
        gradient_sync_s=of_sync,
        node_link=link,
        cluster_link=profile.cluster_link if links.cluster else link,
    )


def _with_tile(cost: TileCost, more_s: float) -> TileCost:
    return replace(cost, per_tile_s=cost.per_tile_s + more_s)


def _scaled(profile: ClusterProfile, scale: float) -> ClusterProfile:
    """All that a rank computes, by so much slower."""

    def affine(cost: Affine) -> Affine:
        return Affine(scale * cost.fixed_s, scale * cost.per_token_s)

    def tile(cost: TileCost) -> TileCost:
        return TileCost(scale * cost.per_tile_s, scale * cost.per_pair_s)

    return replace(
        profile,
        dense_forward=affine(profile.dense_forward),
        dense_backward=affine(profile.dense_backward),
        head_forward=affine(profile.head_forward),
        head_backward=affine(profile.head_backward),
        attention_forward=tile(profile.attention_forward),
        attention_backward=tile(profile.attention_backward),
        layer_forward_s=scale * profile.layer_forward_s,
        layer_backward_s=scale * profile.layer_backward_s,
    )


def _random_group(number: int, most_tokens: int) -> Point:
    """A group to run on ranks, the same for each number."""
    rng = random.Random(number)
    prompt, total = (round(2 ** rng.uniform(6, math.log2(most_tokens))) for _ in range(2))
    group = rng.choice([4, 8])
    responses = tuple(max(1, round(total / group * rng.uniform(0.4, 1.6))) for _ in range(group))
    return Point(f"group {number}", prompt, responses, group * prompt + sum(responses))


def _config(options: CalibrateOptions) -> PretrainedConfig:
    if options.model_config is None:
        return tiny_config(VOCAB_SIZE, hidden_size=HIDDEN_SIZE, num_layers=options.num_layers or NUM_LAYERS)
    return load_config(options.model_config, options.num_layers, None)


def _model(config: PretrainedConfig, options: CalibrateOptions) -> torch.nn.Module:
    dtype = DTYPES[options.dtype]
    model = random_model(config, dtype, drawn_in=dtype)
    prepare_model(model)
    return model.to(_device())


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _random_trees(options: CalibrateOptions) -> list[TreeLengths]:
    """From all prompt to all responses, from few long ones to many short ones."""
    rng = random.Random(3)
    trees = []
    for _ in range(options.num_trees):
        prompt, responses = (round(2 ** rng.uniform(5, math.log2(options.most_tokens))) for _ in range(2))
        group = rng.choice([1, 2, 4, 8, 16, 32])
        trees.append(TreeLengths(prompt, (max(1, responses // group),) * group))
    return trees


def _features(tree: TreeLengths) -> list[float]:
    """One of each of ``TERMS`` of a tree that runs whole on one rank."""
    tiles = [tile for stage in lower_local(nodes_of([tree])).stages for tile in stage.tiles]
    pairs = sum(tile.num_pairs for tile in tiles)
    return [1.0, tree.num_tokens, pairs, len(tiles), sum(tree.responses)]


def _timed(
    model: torch.nn.Module,
    trees: Sequence[TreeLengths],
    options: CalibrateOptions,
    progress: Callable[[str], None],
) -> tuple[Floats, Floats]:
    """[T] seconds of forward, and of forward and backward: the least, as others on a machine only add to it.

    Round after round over all trees: what slows the machine down for a while then meets each of them at most once.
    """
    seconds = np.full((2, len(trees)), np.inf)
    rows_of = [_rows(tree, model.config.vocab_size) for tree in trees]
    _step(model, rows_of[0], needs_gradients=True)
    for number in range(options.repeats):
        for tree, rows in enumerate(rows_of):
            for needs_gradients in (False, True):
                run = _step(model, rows, needs_gradients)
                seconds[int(needs_gradients), tree] = min(run, seconds[int(needs_gradients), tree])
        progress(f"round {number + 1} of {options.repeats}: {seconds[1].sum():.2f} s")
    return seconds[0], seconds[1]


def _rows(tree: TreeLengths, vocabulary: int) -> list[Row]:
    generator = torch.Generator().manual_seed(5)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(1, vocabulary, (count,), generator=generator)

    prompt = tokens(tree.prompt)
    return [Row("group", prompt, tokens(response)) for response in tree.responses]


def _step(model: torch.nn.Module, rows: Sequence[Row], needs_gradients: bool) -> float:
    """Seconds of one pass; on a CPU of one thread's work."""

    def loss(scores: RowScores) -> torch.Tensor:
        return torch.stack([one.mean() for one in scores.log_probs]).sum()

    device = _device()
    model.zero_grad(set_to_none=True)
    plan = plan_passes(rows, tokens_per_pass=_UNBOUNDED)
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    _synchronize(device)
    start = clock()
    run_passes(model, plan, loss if needs_gradients else None, PassOptions(), device=device)
    _synchronize(device)
    return clock() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _profile(
    options: CalibrateOptions,
    model: torch.nn.Module,
    forward: Floats,
    backward: Floats,
    links: MeasuredLinks,
    activation_bytes: Sequence[int],
) -> ClusterProfile:
    # Where there is nothing between nodes, or inside one, the other stands in.
    node_link, cluster_link = (
        one["all-to-all"] for one in (links.node or links.cluster, links.cluster or links.node)
    )
    config, shape = model.config, shape_of(model)
    layers = shape.num_layers
    # Regression may find no trace of a term that is small beside noise; a profile needs these two above 0.
    tiny = 1e-15
    return ClusterProfile(
        name=options.name,
        date=datetime.date.today().isoformat(),
        kind="measured",
        sources=(
            f"treecp-rl calibrate: {options.num_trees} trees, {options.dtype}, {options.threads} threads, torch "
            f"{torch.__version__}, {platform.machine()} {_device().type}",
            links.source,
            "passes and gradients (FSDP2), tiles, stages, moves and bytes inside a node: "
            + (
                f"plans on {options.plan_ranks} ranks"
                if _runs_plans(options)
                else "not measured, none of them is charged but bytes"
            ),
            "overlap 0: not measured",
            f"activation bytes: peaks of steps of {MEMORY_TOKENS[0]} and {MEMORY_TOKENS[1]} tokens, less attention's",
        ),
        model=f"{config.model_type}, {layers} layers, hidden {config.hidden_size}",
        shape=shape,
        ranks_per_node=options.ranks_per_node or links.ranks_per_node or RANKS_PER_NODE,
        dense_forward=Affine(0.0, max(tiny, forward[1] / layers)),
        dense_backward=Affine(0.0, backward[1] / layers),
        head_forward=Affine(0.0, forward[4]),
        head_backward=Affine(0.0, backward[4]),
        attention_forward=TileCost(forward[3] / layers, max(tiny, forward[2] / layers)),
        attention_backward=TileCost(backward[3] / layers, backward[2] / layers),
        node_link=node_link,
        cluster_link=cluster_link,
        layer_forward_s=forward[0] / layers,
        layer_backward_s=backward[0] / layers,
        stage_s=0.0,
        move_s=0.0,
        gradient_sync_s=0.0,
        overlap=0.0,
        memory=Memory(
            bytes_per_rank=int(MEMORY_PART * _free_bytes()),
            checkpointed_bytes_per_token=activation_bytes[1],
            kept_bytes_per_token=activation_bytes[0],
        ),
    )


def _free_bytes() -> int:
    """Of one rank: its device's, or its share of the machine's if a rank has a core."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return free // max(1, os.cpu_count() or 1)


def _activation_bytes(model: torch.nn.Module, *, checkpointing: bool) -> int:
    """Of a token outside of attention, all layers: what a longer step holds more, less what plans count of it."""
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    budget = MemoryBudget(0, shape_of(model), 1 if checkpointing else None)
    held, attention = [], []
    for num_tokens in MEMORY_TOKENS:
        tree = TreeLengths(num_tokens - 1, (1,))
        step = partial(_step, model, _rows(tree, model.config.vocab_size), needs_gradients=True)
        # Gradients of parameters are there before, so that the peak is activations.
        step()
        held.append(peak_bytes(step))
        attention.append(max(budget.peak_bytes(lower_local(nodes_of([tree])))))
    if checkpointing:
        model.gradient_checkpointing_disable()  # type: ignore[operator]
    more = (held[1] - held[0]) - (attention[1] - attention[0])
    return max(0, round(more / (MEMORY_TOKENS[1] - MEMORY_TOKENS[0])))


def _link_text(link: Link) -> str:
    return f"{link.latency_s * 1e6:.0f} us and {1e-9 / link.per_byte_s:.2f} GB/s"


def check(found: Calibration, options: CalibrateOptions) -> Calibration:
    """Run kinds of plan and compare seconds and order with the profile's."""
    # Others than those that the profile was measured with.
    points = [_random_group(RANK_POINTS + n, options.most_tokens) for n in range(options.check_points)]
    job = Job(
        options.plan_ranks,
        tuple(points),
        CHECKED_KINDS,
        options.repeats,
        options.threads,
        found.profile,
        counts_memory=False,
    )
    orders, errors = [], []
    for point, measured in zip(points, run_world(job, CHECK_TIMEOUT_SECONDS), strict=True):
        predicted = [one.planned.predicted_seconds for one in measured]
        seconds = [one.cpu_seconds for one in measured]
        errors += [abs(guess / real - 1) for guess, real in zip(predicted, seconds, strict=True)]
        orders.append(
            {
                "prompt": point.prompt,
                "responses": list(point.responses),
                "kinds": list(CHECKED_KINDS),
                "predicted_seconds": predicted,
                "measured_cpu_seconds": seconds,
                "kendall_tau": kendall_tau(predicted, seconds),
                "regret": seconds[predicted.index(min(predicted))] / min(seconds) - 1,
            }
        )
    return Calibration(
        found.profile,
        found.fit_error,
        found.held_out_error,
        found.links,
        statistics.mean(one["kendall_tau"] for one in orders),
        statistics.median(errors),
        tuple(orders),
    )


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Agreeing less disagreeing pairs over all pairs: 1 is the same order, -1 the reverse."""
    pairs = [(i, j) for i in range(len(first)) for j in range(i)]
    signs = [np.sign(first[i] - first[j]) * np.sign(second[i] - second[j]) for i, j in pairs]
    return float(sum(signs) / len(pairs))


def render(found: Calibration) -> str:
    """The calibration in words."""
    p = found.profile
    lines = [
        f"profile {p.name} ({p.digest}) of {p.model}, measured {p.date}",
        f"a layer: {p.dense_forward.per_token_s * 1e6:.3f} + {p.dense_backward.per_token_s * 1e6:.3f} us a token, "
        f"{p.attention_forward.per_pair_s * 1e9:.3f} + {p.attention_backward.per_pair_s * 1e9:.3f} ns a pair, "
        f"{p.attention_forward.per_tile_s * 1e6:.0f} + {p.attention_backward.per_tile_s * 1e6:.0f} us a tile",
        f"link in plans {_link_text(p.node_link)}; "
        + ", ".join(f"{name} alone {_link_text(link)}" for name, link in found.links.items()),
        f"median relative error: {found.fit_error:.1%} of fitted, {found.held_out_error:.1%} of held-out steps",
    ]
    if found.kendall_tau is not None:
        lines.append(
            f"plans over ranks: order tau {found.kendall_tau:.2f}, median error {found.plan_error:.1%}, chosen plan "
            f"at most {max(one['regret'] for one in found.orders):.1%} above the fastest"
        )
    return "\n".join(lines)
