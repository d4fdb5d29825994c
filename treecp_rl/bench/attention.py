"""lengths -> peak bytes of ONE layer's attention, forward and backward, as each engine computes it.

Beyond the inputs q, k, v: what the layer keeps for backward, scratch space, masks, copies, and the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

from treecp_rl.attention.executor import tile_attention
from treecp_rl.attention.program import compile_program
from treecp_rl.bench.memory import peak_bytes
from treecp_rl.planner.lower import lower_local
from treecp_rl.tree import Row, fold, pack

_HEADS, _KEY_VALUE_HEADS, _HEAD_DIM = 8, 2, 32


def attention_bytes(
    prompt: int, response: int, group_size: int, *, tuned_peer: bool = False
) -> dict[str, int]:
    """Engine name -> peak bytes."""
    return {
        "treecp": _treecp(prompt, response, group_size),
        "flat": _flat(prompt, response, group_size),
        "prefix_grouper": _prefix_grouper(prompt, response, group_size, tuned_peer),
    }


def _treecp(prompt: int, response: int, group_size: int) -> int:
    # Distinct first tokens, so that nothing beyond the prompt is shared.
    rows = [
        Row("group", torch.zeros(prompt, dtype=torch.int64), torch.full((response,), index + 1))
        for index in range(group_size)
    ]
    packed = pack(fold(rows))
    program = compile_program(lower_local(packed.nodes))
    return _peak(packed.num_tokens, lambda q, k, v: tile_attention(q, k, v, program, _HEAD_DIM**-0.5))


def _flat(prompt: int, response: int, group_size: int) -> int:
    """One row at a time, which is the least memory stock attention can use."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return _peak(
        prompt + response,
        lambda q, k, v: sdpa_attention_forward(_layer(), q, k, v, None, is_causal=True)[0],
    )


def _prefix_grouper(prompt: int, response: int, group_size: int, tuned: bool) -> int:
    from prefix_grouper import PrefixGrouper

    from treecp_rl.bench.prefix_grouper import bottom_right_masks, prefix_grouper_attention

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouper = PrefixGrouper([[prompt, *[response] * group_size]])
        grouper.masks = bottom_right_masks(grouper, causal_prompt=tuned)
        return prefix_grouper_attention(_layer(), q, k, v, None, prefix_grouper=grouper)[0]

    return _peak(prompt + response * group_size, attend)


def _layer() -> SimpleNamespace:
    """What transformers' sdpa function reads of an attention layer."""
    return SimpleNamespace(num_key_value_groups=_HEADS // _KEY_VALUE_HEADS, is_causal=True, training=True)


def _peak(tokens: int, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> int:
    query = torch.randn(1, _HEADS, tokens, _HEAD_DIM, requires_grad=True)
    key, value = (torch.randn(1, _KEY_VALUE_HEADS, tokens, _HEAD_DIM, requires_grad=True) for _ in range(2))
    return peak_bytes(lambda: attend(query, key, value).sum().backward())
