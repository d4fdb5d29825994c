"""PrefixGrouper's attention on torch: its padding masks as 4-D bottom-right causal masks.

The package hands its attention function a padding mask for the prompt and one for the responses, as
flash-attn takes them; torch's attention needs each in four dimensions. `causal_prompt` is kinder than the
package can be: where no prompt token is padding, the prompt runs with is_causal and no mask.
"""

from __future__ import annotations

from typing import Any

import torch
from prefix_grouper import PrefixGrouper
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward


def prefix_grouper_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    prefix_grouper: PrefixGrouper,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature around PrefixGrouper.forward."""

    def attend(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
        mask = prefix_grouper.masks[padding.shape[1] != q.shape[2]]
        return sdpa_attention_forward(module, q, k, v, mask, is_causal=mask is None, **kwargs)[0]

    kwargs.pop("is_causal", None)
    return prefix_grouper.forward(attend, query, key, value), None


def bottom_right_masks(grouper: PrefixGrouper, *, causal_prompt: bool) -> tuple[Tensor | None, Tensor]:
    """(prompt mask, response mask): [b,1,queries,keys], True where a query may look.

    With `causal_prompt` the first is None where nothing is padded: torch then runs its causal kernel.
    """
    prefix, suffix = grouper.prefix_attn_mask, grouper.suffix_attn_mask
    without = causal_prompt and bool(prefix.all())
    prompt_mask = None if without else _causal(prefix, prefix.shape[1])
    return prompt_mask, _causal(suffix, suffix.shape[1] - prefix.shape[1])


def _causal(padding: Tensor, queries: int) -> Tensor:
    keys = padding.shape[1]
    triangle = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    allowed = triangle[None] & padding.bool()[:, None, :]
    # A padded query still attends to itself: a row without keys would be nan.
    itself = torch.arange(keys - queries, keys)[:, None] == torch.arange(keys)[None]
    return (allowed | itself[None])[:, None]
