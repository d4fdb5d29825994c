"""Rollout ``treecp_cpu``: verl's replica and adapter in front of ``rollout_server.CPUServer``.

trainer process                                    server process
  CPUReplica.launch_servers ──────── starts ─────────> CPUServer
  CPURollout.update_weights ── buckets of tensors ───> receive_weights
agent loop ────────────── generate, in bulk ─────────> generate

A replica is one process, whatever its tensor_model_parallel_size: more ranks a replica mean fewer, larger servers
with more threads each.
"""

import os
from collections.abc import Generator
from typing import Any

import ray
import torch
from omegaconf import DictConfig
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica
from verl.workers.rollout.utils import ensure_async_iterator

from treecp_rl.errors import ConfigError
from treecp_rl.workers.plugin import ROLLOUT_NAME
from treecp_rl.workers.rollout_model import check_config
from treecp_rl.workers.rollout_server import CPUServer


def server_name(replica_rank: int) -> str:
    """The Ray name of a replica's server; the dashboard shows it and the adapter finds it by it."""
    return f"{ROLLOUT_NAME}_server_{replica_rank}"


class CPUReplica(RolloutReplica):
    """One CPU server for ``world_size`` trainer ranks."""

    def __init__(
        self,
        replica_rank: int,
        config: RolloutConfig | DictConfig,
        model_config: DictConfig,
        gpus_per_node: int = 8,
        is_reward_model: bool = False,
        is_teacher_model: bool = False,
        name_suffix: str = "",
    ) -> None:
        super().__init__(
            replica_rank, config, model_config, gpus_per_node, is_reward_model, is_teacher_model, name_suffix
        )
        if is_reward_model or is_teacher_model:
            raise ConfigError(
                f"rollout {ROLLOUT_NAME} serves no reward or teacher model (it has no HTTP interface); "
                "use vllm for that role"
            )
        check_config(self.config)

    async def launch_servers(self) -> None:
        node_id = await self.workers[0].__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
        name = server_name(self.replica_rank)
        server = (
            ray.remote(CPUServer)
            .options(
                name=name,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
                max_concurrency=self.max_concurrency,
            )
            .remote(
                config=self.config,
                model_config=self.model_config,
                replica_rank=self.replica_rank,
                num_threads=self._num_threads(),
            )
        )
        await server.ready.remote()
        self.servers = [server]
        self._server_handle = server
        self._server_address = name

    def _num_threads(self) -> int:
        """Threads a server computes with: an even share of the machine, or what the config says."""
        options = self.config.engine_kwargs.get(ROLLOUT_NAME) or {}
        replicas_on_node = max(1, self.gpus_per_node // self.world_size)
        return int(options.get("num_threads") or max(1, (os.cpu_count() or 1) // replicas_on_node))


class CPURollout(BaseRollout):
    """In each trainer rank: hands the trainer's weights to the replica's server. Rank 0 of a replica sends."""

    def __init__(
        self,
        config: RolloutConfig,
        model_config: HFModelConfig,
        device_mesh: Any,
        replica_rank: int = -1,
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        _refuse_lora_adapters(self.model_config)
        rank = int(os.environ["RANK"])
        ranks_per_replica = (
            self.config.tensor_model_parallel_size
            * self.config.data_parallel_size
            * self.config.pipeline_model_parallel_size
        )
        self.replica_rank = rank // ranks_per_replica if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % ranks_per_replica == 0
        self._server: ray.actor.ActorHandle | None = None

    @property
    def server(self) -> ray.actor.ActorHandle:
        """Looked up at first use: the server starts after this adapter."""
        if self._server is None:
            self._server = ray.get_actor(server_name(self.replica_rank))
        return self._server

    async def resume(self, tags: list[str]) -> None:
        if self.is_leader_rank:
            await self.server.wake_up.remote(tags=tags)

    async def release(self) -> None:
        if self.is_leader_rank:
            await self.server.sleep.remote()

    @torch.no_grad()
    async def update_weights(
        self,
        weights: Generator[tuple[str, torch.Tensor], None, None],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Send every tensor to the server. All ranks iterate: each item gathers one parameter over the ranks."""
        if wire_format != "named_tensors":
            raise ConfigError(
                f"rollout {ROLLOUT_NAME} takes full tensors, not {wire_format!r}; set "
                "actor_rollout_ref.rollout.checkpoint_engine.backend=naive"
            )
        bucket_bytes = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        bucket: list[tuple[str, torch.Tensor]] = []
        size = 0
        async for name, tensor in ensure_async_iterator(weights):
            if not self.is_leader_rank:
                continue
            # Cloned now: with LoRA the trainer takes the merge back when its generator ends.
            bucket.append((name, tensor.detach().to("cpu", copy=True).contiguous()))
            size += tensor.nbytes
            if size >= bucket_bytes:
                await self.server.receive_weights.remote(bucket, last=False)
                bucket, size = [], 0
        if self.is_leader_rank:
            await self.server.receive_weights.remote(bucket, last=True, global_steps=global_steps)


def _refuse_lora_adapters(model_config: HFModelConfig) -> None:
    rank = model_config.lora.get("rank", 0) or model_config.lora_rank
    if rank > 0 and not model_config.lora.get("merge", False):
        raise ConfigError(
            f"rollout {ROLLOUT_NAME} serves merged weights only and lora_rank is {rank}; set "
            "actor_rollout_ref.model.lora.merge=True"
        )
