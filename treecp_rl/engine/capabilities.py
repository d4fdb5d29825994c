"""Model config -> ready model, or a refusal that names what cannot run exactly.

A model type is allowed only after its tiny version matched the dense oracle in every gradient
(tests/engine/test_exactness.py); features that break the match are looked for one by one.
"""

from collections.abc import Iterator
from typing import Any

import torch

from treecp_rl.attention.huggingface import use_tree_attention
from treecp_rl.errors import UnsupportedModel

EXACT_MODEL_TYPES = (
    "arcee",
    "gemma",
    "glm4",
    "hunyuan_v1_dense",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "starcoder2",
)

_ADVICE = "train this model with trainer.backend=fsdp2"

# Frequencies that depend on the longest sequence of the call: rows of a tree would change each other's.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")

_DROPOUTS = (
    "attention_dropout",
    "attn_pdrop",
    "resid_pdrop",
    "embd_pdrop",
    "hidden_dropout",
    "residual_dropout",
)
_LOGIT_SCALES = ("logits_scaling", "logit_scale", "final_logit_softcapping")


def require_supported(config: Any) -> None:
    """Refuse a transformers config that tree attention cannot run exactly.

    Raises:
        UnsupportedModel: lists every reason at once, each with its number and what to change.
    """
    reasons = list(_reasons(config))
    if reasons:
        raise UnsupportedModel(
            f"model_type {config.model_type!r} cannot run with treecp: " + "; ".join(reasons)
        )


def prepare_model(model: torch.nn.Module) -> None:
    """Switch a causal LM (bare, LoRA-wrapped or sharded) to tree attention; safe to call twice.

    Raises:
        UnsupportedModel: the config or a module of the model cannot run exactly.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    require_supported(base.config)
    _refuse_dropout_modules(model)
    if base.get_output_embeddings() is None:
        raise UnsupportedModel(f"{type(base).__name__} has no LM head to score tokens with; load a causal LM")
    use_tree_attention(base)


def _reasons(config: Any) -> Iterator[str]:
    # Named features first: they say more than "not in the list".
    if getattr(config, "is_encoder_decoder", False):
        yield f"it is an encoder-decoder; {_ADVICE}"
    if any(hasattr(config, name) for name in ("vision_config", "audio_config", "text_config")):
        yield f"it is multimodal, and prompts are keyed on text tokens alone; {_ADVICE}"
    layer_types = getattr(config, "layer_types", None) or ()
    other = sorted(set(layer_types) - {"full_attention"})
    if other:
        yield f"{sum(t in other for t in layer_types)} of {len(layer_types)} layers are {', '.join(other)}; {_ADVICE}"
    yield from _window_reasons(config, layer_types)
    if getattr(config, "attn_logit_softcapping", None):
        yield f"attn_logit_softcapping={config.attn_logit_softcapping} changes the scores inside attention; {_ADVICE}"
    for name in _LOGIT_SCALES:
        if getattr(config, name, None) not in (None, 1, 1.0):
            yield f"{name}={getattr(config, name)} changes logits after the LM head; {_ADVICE}"
    for name in _DROPOUTS:
        if getattr(config, name, None):
            yield (
                f"{name}={getattr(config, name)}: a shared token would draw one mask for all its rows; "
                f"set +actor_rollout_ref.model.override_config.{name}=0.0"
            )
    yield from _rope_reasons(config)
    yield from _router_reasons(config)
    if config.model_type not in EXACT_MODEL_TYPES:
        yield f"it has not been shown exact (shown: {', '.join(EXACT_MODEL_TYPES)}); {_ADVICE}"


def _window_reasons(config: Any, layer_types: Any) -> Iterator[str]:
    window = getattr(config, "sliding_window", None)
    if window and not layer_types and getattr(config, "use_sliding_window", True):
        yield (
            f"sliding_window={window} limits what a token attends to; {_ADVICE}, or, if every row is shorter, set "
            "+actor_rollout_ref.model.override_config.sliding_window=null"
        )


def _rope_reasons(config: Any) -> Iterator[str]:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type"))
    if kind in _LENGTH_DEPENDENT_ROPE:
        yield f"rope_type={kind!r} depends on the longest row of a call, so rows would change each other; {_ADVICE}"
    if "mrope_section" in rope:
        yield f"mrope_section={rope['mrope_section']} needs multi-axis position ids; {_ADVICE}"


def _router_reasons(config: Any) -> Iterator[str]:
    if getattr(config, "output_router_logits", False):
        yield (
            "output_router_logits=True adds a load-balancing loss over computed tokens, which sharing changes; set "
            "+actor_rollout_ref.model.override_config.output_router_logits=False"
        )
    if getattr(config, "router_jitter_noise", 0.0):
        yield (
            f"router_jitter_noise={config.router_jitter_noise} is random per token; set "
            "+actor_rollout_ref.model.override_config.router_jitter_noise=0.0"
        )


def _refuse_dropout_modules(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and module.p > 0:
            raise UnsupportedModel(
                f"module {name} drops out with p={module.p}: a shared token would draw one mask for all its rows; "
                "set it to 0 (for LoRA: lora_dropout=0)"
            )
