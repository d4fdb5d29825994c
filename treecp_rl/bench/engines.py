"""(case, model) -> rows as verl sends them, and the three engines that compute them, built alike.

All three are verl's FSDP2 engine underneath: same wrapper, optimizer, clipping and loss. They differ in how
a batch becomes forwards, which is what is measured.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, Qwen2Config


@dataclass(frozen=True)
class StockSettings:
    """How verl's own engine cuts a batch: the options a user would tune."""

    remove_padding: bool
    micro_batch_rows: int

    def __str__(self) -> str:
        return f"use_remove_padding={self.remove_padding}, micro_batch_size_per_gpu={self.micro_batch_rows}"


@dataclass(frozen=True)
class Contestant:
    """An initialised engine and the batch settings it runs with."""

    name: str
    engine: Any
    settings: dict[str, Any]

    def old_log_probs(self, batch: Batch) -> Any:
        return self._infer(batch, calculate_entropy=True)

    def ref_log_probs(self, batch: Batch) -> Any:
        return self._infer(batch, calculate_entropy=False)

    def update(self, batch: Batch) -> Any:
        with self.engine.train_mode():
            return self.engine.train_batch(batch.data(self.settings, calculate_entropy=False), batch.loss)

    def _infer(self, batch: Batch, calculate_entropy: bool) -> Any:
        with self.engine.eval_mode():
            return self.engine.infer_batch(batch.data(self.settings, calculate_entropy=calculate_entropy))


@dataclass(frozen=True)
class Batch:
    """One group of rows, jagged, with what verl's PPO loss reads."""

    tensors: dict[str, Any]
    rows: int
    loss: Callable[..., Any]

    def data(self, settings: dict[str, Any], *, calculate_entropy: bool) -> TensorDict:
        from verl.utils import tensordict_utils as tu

        common = {
            "temperature": 1.0,
            "global_batch_size": self.rows,
            "calculate_entropy": calculate_entropy,
            "use_dynamic_bsz": False,
            "use_fused_kernels": False,
        }
        return tu.get_tensordict(tensor_dict=dict(self.tensors), non_tensor_dict=common | settings)


@contextmanager
def verl_world() -> Iterator[None]:
    """A world of one process, on verl's CPU platform when there is no CUDA; gone again on leaving."""
    if not torch.cuda.is_available():
        os.environ["VERL_PLATFORM"] = "cpu"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, init_method=address, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def save_model(folder: Path, vocab_size: int, longest_row: int) -> Path:
    """4 layers x 256 hidden, 8 query and 2 key-value heads, saved as a user's checkpoint would be."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=max(4096, longest_row),
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def make_batch(prompt: int, response: int, group_size: int, vocab_size: int) -> Batch:
    """One prompt, `group_size` responses of equal length, every response token trained."""
    from verl.workers.utils.losses import ppo_loss

    from treecp_rl.workers.config import TreeCPActorConfig

    generator = torch.Generator().manual_seed(1)

    def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    def floats() -> torch.Tensor:
        noise = torch.randn(group_size, response, generator=generator)
        return jagged(list(noise * 0.1 - 8.0))

    # Token 0 is the pad id, which PrefixGrouper may not meet inside a prompt.
    prompt_tokens = torch.randint(1, vocab_size, (prompt,), generator=generator)
    responses = list(torch.randint(1, vocab_size, (group_size, response), generator=generator))
    advantages = torch.randn(group_size, 1, generator=generator).expand(group_size, response)
    mask = jagged([torch.ones(response, dtype=torch.int64) for _ in range(group_size)])
    tensors = {
        "prompts": jagged([prompt_tokens] * group_size),
        "responses": jagged(responses),
        "input_ids": jagged([torch.cat([prompt_tokens, row]) for row in responses]),
        "position_ids": jagged([torch.arange(prompt + response)] * group_size),
        "response_mask": mask,
        "loss_mask": mask,
        "old_log_probs": floats(),
        "ref_log_prob": floats(),
        "advantages": jagged([row.clone() for row in advantages]),
        "uid": ["group"] * group_size,
    }
    actor = TreeCPActorConfig(
        strategy="treecp",
        rollout_n=group_size,
        ppo_micro_batch_size_per_gpu=1,
        use_kl_loss=True,
        kl_loss_coef=0.01,
        kl_loss_type="low_var_kl",
    )
    return Batch(tensors, group_size, partial(ppo_loss, config=actor))


def build_treecp(model: Path) -> Any:
    from treecp_rl.workers.engine import TreeCPEngine

    return _build(TreeCPEngine, model, remove_padding=False)


def build_stock(model: Path, remove_padding: bool) -> Any:
    from treecp_rl.workers.engine import FSDP2EngineOnCPU

    return _build(FSDP2EngineOnCPU, model, remove_padding=remove_padding)


def build_prefix_grouper(model: Path, *, tuned: bool) -> Any:
    from treecp_rl.bench.prefix_grouper_engine import PrefixGrouperEngine, TunedPrefixGrouperEngine

    engine_class = TunedPrefixGrouperEngine if tuned else PrefixGrouperEngine
    return _build(engine_class, model, remove_padding=False)


def _build(engine_class: type, model: Path, *, remove_padding: bool) -> Any:
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPOptimizerConfig, HFModelConfig

    from treecp_rl.workers.config import TreeCPEngineConfig

    engine = engine_class(
        model_config=HFModelConfig(
            path=str(model),
            load_tokenizer=False,
            enable_gradient_checkpointing=False,
            use_remove_padding=remove_padding,
            override_config={"attn_implementation": "sdpa"},
        ),
        engine_config=TreeCPEngineConfig(
            strategy="fsdp2",
            mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            use_torch_compile=False,
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-4, total_training_steps=1000, lr_warmup_steps=0),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine
