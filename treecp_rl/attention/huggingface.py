"""transformers' AttentionInterface -> tile_attention: how a Hugging Face layer reaches the executor."""

from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from treecp_rl.attention.executor import tile_attention
from treecp_rl.attention.program import Program
from treecp_rl.errors import PlanError, UnsupportedModel

ATTENTION_NAME = "treecp"
PROGRAM_KEY = "treecp_program"
"""The model keyword that carries the pass's program down to every layer."""


def register_attention() -> None:
    """Make ``attn_implementation="treecp"`` known to transformers.

    No mask function is registered beside it, so transformers builds no mask tensor at all.
    """
    AttentionInterface.register(ATTENTION_NAME, tree_attention_forward)


def use_tree_attention(model: PreTrainedModel) -> None:
    """Switch every attention layer of ``model`` to the executor."""
    register_attention()
    model.set_attn_implementation(ATTENTION_NAME)


def tree_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature; [1,H,T,D] and [1,K,T,D] in, [1,T,H,D] out."""
    program = kwargs.get(PROGRAM_KEY)
    if not isinstance(program, Program):
        raise PlanError(
            f"{type(module).__name__} was called outside a treecp pass: the keyword {PROGRAM_KEY} did not reach it; "
            "run the model through engine.passes, or load it with another attn_implementation"
        )
    _refuse_call(module, attention_mask, dropout, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = getattr(module, "layer_idx", None) or 0
    return tile_attention(query, key, value, program, scale, layer).transpose(1, 2), None


# Keywords a layer may pass that change the formula, with the value that leaves it alone.
_FORMULA_KEYWORDS = ("sliding_window", "s_aux", "softcap", "position_bias", "attention_chunk_size")


def _refuse_call(
    module: torch.nn.Module, attention_mask: torch.Tensor | None, dropout: float, kwargs: dict[str, Any]
) -> None:
    """The last line of defence behind ``engine.capabilities``: what a layer asks for is exact or refused."""
    asked = {name: kwargs[name] for name in _FORMULA_KEYWORDS if kwargs.get(name) is not None}
    if attention_mask is not None:
        asked["attention_mask"] = tuple(attention_mask.shape)
    if dropout:
        asked["dropout"] = dropout
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        asked["is_causal"] = False
    if asked:
        raise UnsupportedModel(
            f"{type(module).__name__} asks for {asked}, which tile attention does not compute; "
            "train this model with trainer.backend=fsdp2"
        )
