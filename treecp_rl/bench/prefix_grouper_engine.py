"""verl's FSDP2 engine with PrefixGrouper inside: the peer that also computes a prompt once.

verl 0.9.1 still ships the grouping helpers but no engine that calls them, so this one does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import AttentionInterface
from verl.trainer.ppo.prefix_grouper_utils import build_pg_from_micro_batch, pg_forward
from verl.utils import tensordict_utils as tu
from verl.utils.torch_functional import entropy_from_logits
from verl.workers.engine.utils import detach_tree

from treecp_rl.bench.prefix_grouper import bottom_right_masks, prefix_grouper_attention
from treecp_rl.workers.engine import FSDP2EngineOnCPU

ATTENTION_NAME = "prefix_grouper"
PAD_ID = 0


class PrefixGrouperEngine(FSDP2EngineOnCPU):
    """One micro-batch holds whole groups, rows of a group side by side, prompts free of the pad id."""

    causal_prompt = False

    def _build_module(self) -> torch.nn.Module:
        module = super()._build_module()
        AttentionInterface.register(ATTENTION_NAME, prefix_grouper_attention)
        module.set_attn_implementation(ATTENTION_NAME)
        return module

    def forward_step(
        self, micro_batch: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool
    ) -> tuple[Tensor, dict[str, Any]]:
        wants_entropy = tu.get_non_tensor_data(micro_batch, "calculate_entropy", default=False)
        grouper, tokens, attention_mask, positions, responses, mask = build_pg_from_micro_batch(
            _padded(micro_batch), pad_token_id=PAD_ID
        )
        grouper.masks = bottom_right_masks(grouper, causal_prompt=self.causal_prompt)
        log_probs, entropy, _ = pg_forward(
            self.module,
            grouper,
            tokens,
            attention_mask,
            positions,
            responses,
            mask,
            calculate_entropy=wants_entropy,
            entropy_fn=entropy_from_logits,
        )
        model_output = {"log_probs": _like_input(log_probs, micro_batch)}
        if entropy is not None:
            model_output["entropy"] = _like_input(entropy, micro_batch)
        if loss_function is None:
            loss, metrics = torch.tensor(1.0), {}
        else:
            loss, metrics = loss_function(
                model_output=model_output, data=micro_batch, dp_group=self.get_data_parallel_group()
            )
        output = {
            "model_output": detach_tree(model_output),
            "loss": loss.detach().item(),
            "metrics": metrics,
        }
        return loss, output


class TunedPrefixGrouperEngine(PrefixGrouperEngine):
    """The same, with the prompt's mask left out where it may be."""

    causal_prompt = True


def _padded(micro_batch: TensorDict) -> dict[str, Any]:
    responses = micro_batch["responses"]
    lengths = responses.offsets().diff()
    present = torch.arange(int(lengths.max()))[None] < lengths[:, None]
    uids = micro_batch["uid"]
    return {
        "prompts": torch.nested.to_padded_tensor(micro_batch["prompts"], PAD_ID),
        "responses": torch.nested.to_padded_tensor(responses, PAD_ID),
        "response_mask": present.long(),
        "uid": list(uids.tolist() if hasattr(uids, "tolist") else uids),
    }


def _like_input(values: Tensor, micro_batch: TensorDict) -> Tensor:
    """[rows, R] response values -> jagged [P+R], left-shifted, as verl's consumers slice it."""
    prompts = micro_batch["prompts"].offsets().diff().tolist()
    responses = micro_batch["responses"].offsets().diff().tolist()
    rows = []
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        own = values[row, :response]
        rows.append(torch.cat([own.new_zeros(prompt - 1), own, own.new_zeros(1)]))
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
