"""data sheets, model dimensions -> estimated ClusterProfiles, for machines that nobody has measured here.

Rates are those of ``docs/planner.md``: peak from NVIDIA's data sheets, and the parts of it that kernels reach as
published; they are assumptions until ``treecp-rl calibrate`` replaces them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from treecp_rl.errors import ConfigError
from treecp_rl.planner.cost import ModelShape
from treecp_rl.planner.profile import Affine, ClusterProfile, Link, Memory, TileCost

DATE = "2026-11-30"
BYTES_PER_PARAMETER = 18
"""bf16 weights, fp32 master weights, two Adam moments and fp32 gradients, sharded over all ranks (FSDP2)."""
STATE_RANKS = 8
"""Ranks over which an estimate shards those: more leave more room."""


@dataclass(frozen=True, slots=True)
class ModelDims:
    """What estimates need beyond attention's shape."""

    hidden: int
    intermediate: int
    """Of the experts that run for a token together, in a mixture of experts."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    stored_intermediate: int = 0
    """Of all experts together; 0: the same as ``intermediate``."""

    def shape(self, itemsize: int) -> ModelShape:
        return ModelShape(self.num_layers, self.num_heads, self.num_kv_heads, self.head_dim, itemsize)

    @property
    def layer_parameters(self) -> int:
        """Weights of a layer that a token meets."""
        return self._projections + 3 * self.hidden * self.intermediate

    @property
    def num_parameters(self) -> int:
        """Weights stored, embedding and head included."""
        stored = self.stored_intermediate or self.intermediate
        return self.num_layers * (self._projections + 3 * self.hidden * stored) + 2 * self.hidden * self.vocab

    @property
    def _projections(self) -> int:
        return self.hidden * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)


MODELS = {
    # config.json of each model; intermediate sizes of the mixture: 8 of 128 experts of 768.
    "Qwen2.5-1.5B": ModelDims(1536, 8960, 28, 12, 2, 128, 151936),
    "Qwen2.5-3B": ModelDims(2048, 11008, 36, 16, 2, 128, 151936),
    "Qwen2.5-7B": ModelDims(3584, 18944, 28, 28, 4, 128, 152064),
    "Qwen2.5-14B": ModelDims(5120, 13824, 48, 40, 8, 128, 152064),
    "Llama-3.1-8B": ModelDims(4096, 14336, 32, 32, 8, 128, 128256),
    "Qwen3-30B-A3B": ModelDims(2048, 8 * 768, 48, 32, 4, 128, 151936, stored_intermediate=128 * 768),
}


@dataclass(frozen=True, slots=True)
class Hardware:
    """A node's accelerators as estimates see them."""

    flops_per_s: float
    """Dense bf16 peak of one."""
    dense_part: float
    """Part of the peak that linear layers reach with many tokens."""
    half_tokens: float
    """Tokens of a rank at which they reach half of that."""
    attention_forward_part: float
    attention_backward_part: float
    node_link: Link
    cluster_link: Link
    memory_bytes: float
    tile_s: tuple[float, float]
    """Launch of a tile, forward and backward."""
    layer_s: tuple[float, float]
    """Host time of a layer, forward and backward."""
    stage_s: float
    overlap: float
    ranks_per_node: int
    sources: tuple[str, ...]
    itemsize: int = 2
    """Bytes of an activation in training."""


_KERNELS = (
    "parts of peak: 0.62 of linear layers with n/(n+384), FlashAttention 0.60 forward and 0.50 backward: assumptions "
    "in the range of FlashAttention-3 (arXiv 2407.08608) and of Megatron-LM's reported MFU",
    "node link 360 GB/s of NVLink 4's 450 GB/s a direction, cluster link 42 GB/s of one 400 Gb/s port: assumptions",
    "host times 90/160 us a layer, 25 us a stage, 12/20 us a tile, overlap 0.8: assumptions",
)
HARDWARE = {
    "h100": Hardware(
        989e12, 0.62, 384, 0.60, 0.50, Link(25e-6, 1 / 360e9), Link(40e-6, 1 / 42e9), 80e9,
        (12e-6, 20e-6), (90e-6, 160e-6), 25e-6, 0.8, 8,
        ("NVIDIA H100 SXM data sheet: 989 TFLOP/s bf16 dense, 80 GB, NVLink 900 GB/s both ways", *_KERNELS),
    ),
    "h200": Hardware(
        989e12, 0.62, 384, 0.60, 0.50, Link(25e-6, 1 / 360e9), Link(40e-6, 1 / 42e9), 141e9,
        (12e-6, 20e-6), (90e-6, 160e-6), 25e-6, 0.8, 8,
        ("NVIDIA H200 SXM data sheet: 989 TFLOP/s bf16 dense, 141 GB, NVLink 900 GB/s both ways", *_KERNELS),
    ),
    "cpu": Hardware(
        100e9, 0.5, 0, 0.7, 0.9, Link(200e-6, 1 / 1e9), Link(200e-6, 1 / 1e9), 16e9,
        (60e-6, 120e-6), (1e-3, 2e-3), 200e-6, 0.0, 8,
        ("one core of an x86 server in float32, gloo within a machine: orders of magnitude of calibrations with the "
         "small model of bench cp",),
        itemsize=4,
    ),
}  # fmt: skip
LEAST_MEMORY_PART = 0.1
"""Part of a rank's memory that passes have at least: a model whose states leave less is sharded over more ranks."""


def dims_of(config: Any) -> ModelDims:
    """Dimensions of a Hugging Face decoder's config; of a mixture of experts, the experts that run for a token.

    Raises:
        ConfigError: the config lacks one; names it.
    """

    def of(name: str) -> int:
        value = getattr(config, name, None)
        if value is None:
            raise ConfigError(
                f"the config of {getattr(config, 'model_type', config)} has no {name}, which an estimate needs; set "
                "actor_rollout_ref.actor.treecp.profile to a profile that treecp-rl calibrate measured"
            )
        return int(value)

    heads = of("num_attention_heads")
    width, stored = _expert_width(config)
    return ModelDims(
        hidden=of("hidden_size"),
        intermediate=width or of("intermediate_size"),
        num_layers=of("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or of("hidden_size") // heads,
        vocab=of("vocab_size"),
        stored_intermediate=stored,
    )


def _expert_width(config: Any) -> tuple[int, int]:
    """Intermediate size of the experts that run for a token, and of all; zeros of a dense model."""
    width = getattr(config, "moe_intermediate_size", None) or 0
    count = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 0
    active = getattr(config, "num_experts_per_tok", None) or 0
    return width * active, width * count


def estimate_profile(hardware: str, model: str) -> ClusterProfile:
    """A profile of a published model from data sheets.

    Raises:
        ConfigError: no such hardware or model here.
    """
    if model not in MODELS:
        raise ConfigError(f"no estimate of {model} on {hardware}; models: {', '.join(MODELS)}")
    return estimate(hardware, model, MODELS[model])


def estimate(hardware: str, model: str, dims: ModelDims) -> ClusterProfile:
    """A profile of any model from data sheets.

    Args:
        model: its name, for people.

    Raises:
        ConfigError: no such hardware here.
    """
    if hardware not in HARDWARE:
        raise ConfigError(f"no estimate of {model} on {hardware}; hardware: {', '.join(HARDWARE)}")
    machine = HARDWARE[hardware]
    dense = machine.flops_per_s * machine.dense_part
    token_s = 2 * dims.layer_parameters / dense
    head_s = 2 * dims.hidden * dims.vocab / dense
    pair_flops = 4 * dims.num_heads * dims.head_dim
    forward = pair_flops / (machine.flops_per_s * machine.attention_forward_part)
    backward = 2.5 * pair_flops / (machine.flops_per_s * machine.attention_backward_part)
    states = BYTES_PER_PARAMETER * dims.num_parameters / STATE_RANKS
    layers = dims.num_layers
    layer_bytes = machine.itemsize * (6 * dims.hidden + 4 * dims.intermediate)
    return ClusterProfile(
        name=f"{hardware}-{model.lower()}",
        date=DATE,
        kind="estimate",
        sources=machine.sources,
        model=model,
        shape=dims.shape(machine.itemsize),
        ranks_per_node=machine.ranks_per_node,
        dense_forward=Affine(machine.half_tokens * token_s, token_s),
        dense_backward=Affine(2 * machine.half_tokens * token_s, 2 * token_s),
        head_forward=Affine(0.0, head_s),
        # The head's chunks are computed again in backward.
        head_backward=Affine(0.0, 3 * head_s),
        attention_forward=TileCost(machine.tile_s[0], forward),
        attention_backward=TileCost(machine.tile_s[1], backward),
        node_link=machine.node_link,
        cluster_link=machine.cluster_link,
        layer_forward_s=machine.layer_s[0],
        layer_backward_s=machine.layer_s[1],
        stage_s=machine.stage_s,
        # In what a stage takes.
        move_s=0.0,
        # Reduced layer by layer under the backward of the layers below.
        gradient_sync_s=0.0,
        overlap=machine.overlap,
        memory=Memory(
            bytes_per_rank=round(
                max(LEAST_MEMORY_PART * machine.memory_bytes, 0.9 * machine.memory_bytes - states)
            ),
            # A layer keeps norms, projections and the gated product; checkpointed, its input until it is recomputed.
            checkpointed_bytes_per_token=machine.itemsize * layers * dims.hidden + layer_bytes,
            kept_bytes_per_token=layers * layer_bytes,
        ),
    )
