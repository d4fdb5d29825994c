"""config path or nothing -> transformers config -> random model in a chosen dtype.

Weights come from a seed and are never small or zero by default: biases and norm weights are drawn too, so
that a gradient that forgets one of them shows.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, Qwen2Config

from treecp_rl.errors import ConfigError
from treecp_rl.verify.float64 import keep_float64

_SMALLEST_VOCABULARY = 8
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def tiny_config(vocab_size: int = 384, hidden_size: int = 128, num_layers: int = 4) -> PretrainedConfig:
    """A small Qwen2: grouped-query attention, biases on q, k and v, untied head."""
    return Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        use_sliding_window=False,
    )


def load_config(path: str | None, num_layers: int | None, vocab_size: int | None) -> PretrainedConfig:
    """The config at `path` (a config.json or the directory that holds one), cut in depth and vocabulary."""
    if path is None:
        return tiny_config(vocab_size or 384, num_layers=num_layers or 4)
    if not Path(path).exists():
        raise ConfigError(
            f"--model-config {path}: no such file or directory; give a config.json or its folder"
        )
    config = _read_config(path)
    if num_layers is not None:
        _cut_depth(config, num_layers)
    if vocab_size is not None:
        if vocab_size < _SMALLEST_VOCABULARY:
            raise ConfigError(
                f"--vocab-size {vocab_size}: cases draw from {_SMALLEST_VOCABULARY} tokens or more"
            )
        config.vocab_size = vocab_size
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            setattr(config, name, None)
    return config


def _read_config(path: str) -> PretrainedConfig:
    """A config that a causal LM can be built from; transformers answers a bad one in many ways."""
    try:
        config = copy.deepcopy(AutoConfig.from_pretrained(path))
        parameter_count(config)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"--model-config {path} describes no causal LM: {type(error).__name__}: {reason}; "
            "give the config.json of one"
        ) from error
    return config


def random_model(
    config: PretrainedConfig, dtype: torch.dtype, *, seed: int = 0, drawn_in: torch.dtype
) -> nn.Module:
    """A stock model in `dtype` whose weights are exactly representable in `drawn_in`.

    The oracle of a bfloat16 run is the float64 model with the same bfloat16 weights.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(config),
        attn_implementation="sdpa",
        experts_implementation="eager",  # grouped matrix products have no float64
        dtype=torch.float32,
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                noise = 0.1 * torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise + (1.0 if "norm" in name else 0.0))
    model = model.to(drawn_in).to(dtype)
    if dtype == torch.float64:
        keep_float64(model)
    return model.train()


def parameter_count(config: PretrainedConfig) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    return sum(parameter.numel() for parameter in model.parameters())


def _cut_depth(config: PretrainedConfig, num_layers: int) -> None:
    depth = config.num_hidden_layers
    if not 1 <= num_layers <= depth:
        raise ConfigError(f"--num-layers {num_layers}: the model has {depth} layers; choose 1 to {depth}")
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:num_layers]
