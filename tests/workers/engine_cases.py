"""Batches as verl's trainer sends them, and the engines under test; runs inside the ranks of a ``RankPool``."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

VOCABULARY = 97


@dataclass(frozen=True)
class Group:
    """Rows of one prompt. Response tokens are drawn per row unless ``responses`` gives them."""

    uid: str
    prompt_length: int
    response_lengths: tuple[int, ...]
    masks: tuple[tuple[int, ...] | None, ...] | None = None
    """Loss mask a row; None: all ones."""
    responses: tuple[tuple[int, ...], ...] | None = None
    prompt: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Case:
    """One step. ``ranks[r]`` are the groups of rank r; ``order`` is applied to each rank's rows."""

    ranks: tuple[tuple[Group, ...], ...]
    actor: dict[str, Any] = field(default_factory=dict)
    """Overrides of the actor config that the loss reads."""
    temperature: Any = 1.0
    micro_rows: int | None = 1
    """Rows of a micro-batch; None: dynamic batches of ``micro_tokens``."""
    micro_tokens: int | None = None
    entropy: bool = False
    shuffled: bool = False
    log_ratio: float = 0.3
    """Spread of old log-probs around the reference value."""
    ref_shift: float = 0.3
    """Spread, or with ``ref_constant`` the value, of ref - old log-prob."""
    ref_constant: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


def rows_of(case: Case, rank: int) -> list[dict[str, Any]]:
    """Rows as dictionaries of tensors, the same for every engine and process."""
    rows = []
    for group in case.ranks[rank] if rank < len(case.ranks) else ():
        seed = sum(ord(c) * 31**i for i, c in enumerate(group.uid)) % (2**31) + group.prompt_length
        draw = torch.Generator().manual_seed(seed)
        prompt = _draw(draw, group.prompt_length) if group.prompt is None else torch.tensor(group.prompt)
        for index, length in enumerate(group.response_lengths):
            given = group.responses and group.responses[index]
            response = torch.tensor(given) if given else _draw(draw, length)
            mask = group.masks and group.masks[index]
            old = -2.5 + case.log_ratio * torch.randn(length, generator=draw)
            shift = torch.full((length,), case.ref_shift) if case.ref_constant else None
            shift = case.ref_shift * torch.randn(length, generator=draw) if shift is None else shift
            rows.append(
                {
                    "uid": group.uid,
                    "prompts": prompt,
                    "responses": response,
                    "response_mask": torch.tensor(mask)
                    if mask is not None
                    else torch.ones(length, dtype=torch.int64),
                    "old_log_probs": old,
                    "ref_log_prob": old + shift,
                    "advantages": torch.randn(1, generator=draw).expand(length).clone(),
                }
            )
    if case.shuffled:
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(7)).tolist()
        rows = [rows[index] for index in order]
    return rows


def batch_of(case: Case, rank: int):
    """The rank's TensorDict, as verl's trainer sends it to an update."""
    from verl.utils import tensordict_utils as tu

    rows = rows_of(case, rank)
    tensors = {}
    if rows:
        for key in ("prompts", "responses", "response_mask", "old_log_probs", "ref_log_prob", "advantages"):
            tensors[key] = _jagged([row[key] for row in rows])
        tensors["input_ids"] = _jagged([torch.cat([row["prompts"], row["responses"]]) for row in rows])
        tensors["position_ids"] = _jagged(
            [torch.arange(len(row["prompts"]) + len(row["responses"])) for row in rows]
        )
        tensors["loss_mask"] = tensors["response_mask"]
        tensors["uid"] = [row["uid"] for row in rows]
    num_rows = sum(len(group.response_lengths) for groups in case.ranks for group in groups)
    settings = {
        "temperature": case.temperature,
        "global_batch_size": num_rows,
        "calculate_entropy": case.entropy,
        "use_dynamic_bsz": case.micro_rows is None,
        "use_remove_padding": False,
        "use_fused_kernels": False,
        "micro_batch_size_per_gpu": len(rows) if case.micro_rows == -1 else case.micro_rows,
        "max_token_len_per_gpu": case.micro_tokens,
    }
    settings = {key: value for key, value in (settings | case.extra).items() if value is not None}
    if not rows:
        from tensordict import TensorDict

        data = TensorDict({}, batch_size=(0,))
        tu.assign_non_tensor(data, **settings)
        return data
    return tu.get_tensordict(tensor_dict=tensors, non_tensor_dict=settings)


def _draw(generator: torch.Generator, length: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (length,), generator=generator)


def _jagged(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)


# ------------------------------------------------------------------------------------------------ engines

_ENGINES: dict[Any, Any] = {}


def engine_of(backend: str, model_path: str, **options: Any):
    """An initialised engine, made once a process for each set of options."""
    key = (backend, model_path, repr(sorted(options.items())))
    if key not in _ENGINES:
        _ENGINES[key] = _build(backend, model_path, **options)
    return _ENGINES[key]


def _build(
    backend: str, model_path: str, *, lora_rank: int = 0, treecp: Any = None, model: Any = None, **engine: Any
):
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    from treecp_rl.workers.config import TreeCPEngineConfig, TreeCPOptions

    settings = {
        "strategy": "fsdp2",
        "mixed_precision": {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        "use_torch_compile": False,
    }
    model_settings = {
        "enable_gradient_checkpointing": False,
        "use_remove_padding": False,
        "override_config": {"attn_implementation": "sdpa"},
    }
    torch.manual_seed(11)  # LoRA draws its first weights
    built = EngineRegistry.new(
        model_type="language_model",
        backend=backend,
        model_config=HFModelConfig(path=model_path, lora_rank=lora_rank, **(model_settings | (model or {}))),
        engine_config=TreeCPEngineConfig(**(settings | {"treecp": treecp or TreeCPOptions()} | engine)),
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=10, lr_warmup_steps=0),
        checkpoint_config=CheckpointConfig(),
    )
    built.initialize()
    return built


def loss_of(case: Case):
    """verl's PPO loss for the case."""
    from verl.workers.config import PolicyLossConfig
    from verl.workers.utils.losses import ppo_loss

    from treecp_rl.workers.config import TreeCPActorConfig

    settings = {"strategy": "treecp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1} | case.actor
    policy_loss = PolicyLossConfig(loss_mode=settings.pop("loss_mode", "vanilla"))
    return partial(ppo_loss, config=TreeCPActorConfig(policy_loss=policy_loss, **settings))


@dataclass
class Outcome:
    """What a step left behind, on one rank."""

    loss: float
    """Summed over passes, averaged over ranks, as verl reports it."""
    grad_norm: float
    grads: dict[str, torch.Tensor]
    metrics: dict[str, Any]


def update(backend: str, model_path: str, case: Case, options: dict[str, Any] | None = None) -> Outcome:
    """Gradients of one update step."""
    engine = engine_of(backend, model_path, **(options or {}))
    data = batch_of(case, dist.get_rank())
    with engine.train_mode():
        engine.optimizer_zero_grad()
        output = engine.forward_backward_batch(data, loss_of(case), forward_only=False)
        grads = {
            name: full(parameter.grad)
            for name, parameter in engine.module.named_parameters()
            if parameter.requires_grad and parameter.grad is not None
        }
        engine.optimizer_zero_grad()
    norm = torch.stack([grad.double().norm() for grad in grads.values()]).norm()
    loss = torch.tensor(float(sum(output["loss"])))
    dist.all_reduce(loss)
    return Outcome(float(loss) / dist.get_world_size(), float(norm), grads, output["metrics"])


def log_probs(backend: str, model_path: str, case: Case, options: dict[str, Any] | None = None):
    """Per-row outputs of a forward-only pass, as padded rows."""
    engine = engine_of(backend, model_path, **(options or {}))
    with engine.eval_mode(), torch.no_grad():
        output = engine.forward_backward_batch(batch_of(case, dist.get_rank()), None, forward_only=True)
    return {key: [row.clone() for row in value.unbind()] for key, value in output["model_output"].items()}


def head_chunks(model_path: str, case: Case, options: dict[str, Any]) -> int:
    """How many chunks of logits a forward-only pass computes."""
    from treecp_rl.engine import head

    calls, score_chunk = [], head._score_chunk

    def counted(*args: Any) -> torch.Tensor:
        calls.append(args)
        return score_chunk(*args)

    head._score_chunk = counted
    try:
        log_probs("treecp", model_path, case, options)
    finally:
        head._score_chunk = score_chunk
    return len(calls)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def worst_relative(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest gradient error, relative to that gradient's largest entry (or the largest of all, if it is tiny)."""
    assert found.keys() == expected.keys()
    largest = max(float(grad.abs().max()) for grad in expected.values())
    return max(
        float((found[name] - grad).abs().max()) / max(float(grad.abs().max()), 1e-3 * largest, 1e-30)
        for name, grad in expected.items()
    )


def off_policy_ratio(model_path: str, old: Case, new: Case) -> float:
    """Largest |ratio - 1| of an update whose old log-probs come from the same weights."""
    from verl.workers.utils.padding import response_from_nested

    engine = engine_of("treecp", model_path)
    data = batch_of(old, dist.get_rank())
    with engine.eval_mode(), torch.no_grad():
        scored = engine.forward_backward_batch(data, None, forward_only=True)["model_output"]["log_probs"]
    update_data = batch_of(new, dist.get_rank())
    update_data["old_log_probs"] = response_from_nested(scored, update_data["response_mask"])
    worst = [0.0]

    def loss(model_output, data, dp_group):
        responses = response_from_nested(model_output["log_probs"], data["response_mask"])
        ratio = torch.exp(responses.values() - data["old_log_probs"].values())
        worst[0] = max(worst[0], float((ratio - 1).abs().max()))
        return responses.values().sum() * 0.0, {}

    with engine.train_mode():
        engine.forward_backward_batch(update_data, loss, forward_only=False)
        engine.optimizer_zero_grad()
    return worst[0]


def clipped_norm(
    backend: str, model_path: str, case: Case, options: dict[str, Any] | None = None
) -> tuple[float, float]:
    """Gradient norm of a step before and after verl's clipping; weights stay as they are."""
    from verl.utils.fsdp_utils import fsdp2_clip_grad_norm_

    engine = engine_of(backend, model_path, **(options or {}))
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(batch_of(case, dist.get_rank()), loss_of(case), forward_only=False)
        parameters = [p for p in engine.module.parameters() if p.grad is not None]
        before = float(fsdp2_clip_grad_norm_(parameters, max_norm=0.01))
        after = torch.stack([full(p.grad).double().norm() for p in parameters]).norm()
        engine.optimizer_zero_grad()
    return before, float(after)


def step_with_nan(model_path: str, case: Case) -> dict[str, Any]:
    """One train_batch whose loss is NaN on rank 0."""
    engine = engine_of("treecp", model_path)
    loss = loss_of(case)

    def poisoned(**kwargs):
        value, metrics = loss(**kwargs)
        return value * (float("nan") if dist.get_rank() == 0 else 1.0), metrics

    before = [full(parameter) for parameter in engine.module.parameters()]
    with engine.train_mode():
        output = engine.train_batch(batch_of(case, dist.get_rank()), poisoned)
        engine.optimizer_zero_grad()
    after = [full(parameter) for parameter in engine.module.parameters()]
    changed = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return {"changed": changed, "grad_norm": output["metrics"]["grad_norm"]}


def faulty_update(model_path: str, case: Case, fault: str) -> None:
    """An update whose batch is wrong on rank 0 only."""
    from verl.utils import tensordict_utils as tu

    engine = engine_of("treecp", model_path)
    data = batch_of(case, dist.get_rank())
    if dist.get_rank() == 0:
        lengths = [len(row) for row in data["input_ids"].unbind()]
        match fault:
            case "missing_uid":
                data.pop("uid")
            case "missing_prompts":
                data.pop("prompts")
            case "no_temperature":
                data.pop("temperature")
            case "shifted_positions":
                data["position_ids"] = _jagged([torch.arange(n) + (i == 1) for i, n in enumerate(lengths)])
            case "other_tokens":
                data["input_ids"] = _jagged([row + 1 for row in data["input_ids"].unbind()])
            case "multimodal":
                tu.assign_non_tensor(data, multi_modal_inputs=[{"pixel_values": 1}] * len(lengths))
    with engine.train_mode():
        engine.forward_backward_batch(data, loss_of(case), forward_only=False)


def save_between_steps(model_path: str, case: Case, folder: str) -> dict[str, Any]:
    """Step, checkpoint, step."""
    engine = _build("treecp", model_path)
    _train(engine, case)
    engine.save_checkpoint(folder, global_step=1)
    after_step_1 = _weights(engine)
    lr = _train(engine, case)
    return {"after_step_1": after_step_1, "after_step_2": _weights(engine), "lr": lr}


def resume_and_step(backend: str, model_path: str, case: Case, folder: str) -> dict[str, Any]:
    """A new engine that loads the checkpoint and takes one step."""
    engine = _build(backend, model_path)
    engine.load_checkpoint(folder, del_local_after_load=False)
    lr = _train(engine, case)
    return {"weights": _weights(engine), "lr": lr}


def _train(engine, case: Case) -> float:
    with engine.train_mode():
        engine.train_batch(batch_of(case, dist.get_rank()), loss_of(case))
        return engine.lr_scheduler_step()


def _weights(engine) -> dict[str, torch.Tensor]:
    return {name: full(parameter) for name, parameter in engine.module.named_parameters()}
