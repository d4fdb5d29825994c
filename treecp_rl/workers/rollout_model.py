"""verl's rollout and model config -> the model a ``CPUServer`` serves, its limits, and what it refuses."""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from verl.workers.config import HFModelConfig, RolloutConfig

from treecp_rl.errors import BatchError, ConfigError, TreeCPError


@dataclass(frozen=True)
class ServerLimits:
    """How many tokens a row may have, by whose word."""

    prompt_length: int
    response_length: int
    max_model_len: int

    def max_tokens(self, prompt_tokens: int, asked: int | None) -> int:
        """Tokens a row may generate; ``asked`` is the caller's own limit. Raises if that is none."""
        budget = self.prompt_length + self.response_length
        if prompt_tokens >= min(budget, self.max_model_len):
            raise BatchError(
                f"a prompt of {prompt_tokens} tokens leaves no room to answer: actor_rollout_ref.rollout."
                f"prompt_length (data.max_prompt_length) is {self.prompt_length}, response_length "
                f"(data.max_response_length) {self.response_length}, max_model_len {self.max_model_len}; raise "
                "data.max_prompt_length or set data.filter_overlong_prompts=True"
            )
        default = min(self.response_length, budget - prompt_tokens)
        return max(1, min(default if asked is None else asked, self.max_model_len - prompt_tokens))


def load_model(config: RolloutConfig, model_config: HFModelConfig) -> PreTrainedModel:
    """The model in the rollout's dtype: from its files, or random where ``load_format`` is a dummy."""
    options = {
        "dtype": getattr(torch, config.dtype),
        "attn_implementation": "sdpa",
        "trust_remote_code": model_config.trust_remote_code,
    }
    if "dummy" in config.load_format:
        model = AutoModelForCausalLM.from_config(model_config.hf_config, **options)
    else:
        model = AutoModelForCausalLM.from_pretrained(
            model_config.local_path, config=model_config.hf_config, **options
        )
    return model.eval().requires_grad_(False)


def load_weights(model: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    """Copy every tensor into the parameter of its name; nothing is copied unless all names and shapes fit."""
    state = model.state_dict()
    unknown = sorted(weights.keys() - state.keys())
    # A tied parameter has two names and needs one of them.
    given = {state[name].data_ptr() for name in weights.keys() & state.keys()}
    missing = sorted(name for name, tensor in state.items() if tensor.data_ptr() not in given)
    misshapen = [
        f"{name} {tuple(weights[name].shape)} for {tuple(state[name].shape)}"
        for name in weights.keys() & state.keys()
        if weights[name].shape != state[name].shape
    ]
    if unknown or missing or misshapen:
        raise TreeCPError(
            f"the trainer's weights do not fit the rollout's model {type(model).__name__}: {len(unknown)} unknown "
            f"names {unknown[:3]}, {len(missing)} of {len(state)} missing {missing[:3]}, {len(misshapen)} of another "
            f"shape {misshapen[:3]}; both must be built from the same actor_rollout_ref.model.path"
        )
    with torch.no_grad():
        for name, tensor in weights.items():
            state[name].copy_(tensor)


def eos_token_ids(model_config: HFModelConfig) -> set[int]:
    """Tokens that end a response: the generation config's, the model config's and the tokenizer's."""
    sources = [model_config.generation_config, model_config.hf_config]
    values = [getattr(source, "eos_token_id", None) for source in sources]
    values.append(model_config.tokenizer.eos_token_id if model_config.tokenizer is not None else None)
    return {
        token
        for value in values
        if value is not None
        for token in (value if isinstance(value, list) else [value])
    }


def server_limits(config: RolloutConfig, model_config: HFModelConfig) -> ServerLimits:
    longest = getattr(model_config.hf_config.get_text_config(), "max_position_embeddings", None)
    asked = config.max_model_len or longest or config.prompt_length + config.response_length
    if longest is not None and asked > longest:
        raise ConfigError(
            f"actor_rollout_ref.rollout.max_model_len is {asked}, the model has {longest} positions "
            "(max_position_embeddings); lower it or leave it null"
        )
    if config.prompt_length + config.response_length > asked:
        raise ConfigError(
            f"data.max_prompt_length {config.prompt_length} + data.max_response_length {config.response_length} "
            f"exceed the {asked} tokens of actor_rollout_ref.rollout.max_model_len (null means the model's "
            "max_position_embeddings); lower one of them"
        )
    return ServerLimits(config.prompt_length, config.response_length, asked)


def check_config(config: RolloutConfig) -> None:
    """Refuse options that this rollout would have to ignore, before any process is started."""
    names = {option.name for option in fields(config)}
    wanted: dict[str, tuple[Any, ...]] = {
        "logprobs_mode": ("processed_logprobs", "raw_logprobs", None),
        "repetition_penalty": (1.0,),
        "quantization": (None,),
        "dtype": ("float32", "bfloat16", "float16"),
        "enable_rollout_routing_replay": (False,),
    }
    for key, allowed in wanted.items():
        value = getattr(config, key) if key in names else allowed[0]
        if value not in allowed:
            raise ConfigError(
                f"rollout treecp_cpu cannot run with actor_rollout_ref.rollout.{key}={value!r}; "
                f"set it to {' or '.join(repr(choice) for choice in allowed)}, or use rollout.name=vllm"
            )
