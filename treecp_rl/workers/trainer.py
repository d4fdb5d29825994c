"""``treecp_sync``: verl's synchronous trainer, dealing groups whole to ranks and to mini-batches.

verl's own trainer balances rows and so tears groups apart; the engine's results are the same either way, but a
torn group computes its prompt once a piece. Beside that: our worker class, a look at Ray's resources before any
worker is placed, the counts of a step under ``treecp/``, and a batch that came back empty skips its step.
"""

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.import_utils import load_class_from_fqn
from verl.utils.seqlen_balancing import log_seqlen_unbalance

from treecp_rl.errors import BatchError, ConfigError, RankLost, TreeCPError
from treecp_rl.planner.service import FETCH_TIMEOUT_SECONDS, lead_seconds, start_service
from treecp_rl.workers.convert import FACTORS_KEY
from treecp_rl.workers.deal import Group, deal_groups
from treecp_rl.workers.launch import (
    CPUS_PER_SLOT,
    DEFAULT_WORKER,
    TRAINER_NAME,
    Demand,
    check_worker_name,
    demand_of,
    too_few,
)
from treecp_rl.workers.metrics import PREFIX, publish
from treecp_rl.workers.planning import Ahead, Refiner, RowLengths, ahead_of, encode_factors

_POLL_SECONDS = 0.1
"""How often to look for finished rollouts; verl's two seconds would show in every step of a small model."""
_RESOURCE_SECONDS = 6.0
"""Ray reports what other actors give back with a delay of this order."""
_TRAINING_ROLES = (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef, Role.RefPolicy)


class EmptyBatch(TreeCPError):
    """No row to train on came back from the rollout."""


@register_trainer(TRAINER_NAME)
class TreeCPTrainer(PPOTrainerSync):
    """verl's synchronous GRPO/PPO loop on the treecp workers."""

    def __init__(self, config: Any) -> None:
        config.trainer.v1.trainer_mode = "sync"  # what the base class knows itself by
        super().__init__(config)
        self.replay_buffer.poll_interval = _POLL_SECONDS
        self._num_mini_batches = 1
        self._ahead: Ahead | None = None

    def _setup(self) -> None:
        with _worker_groups_named("treecp_actor_rollout_ref_"):
            super()._setup()
        model = self.config.actor_rollout_ref.model
        self._ahead = ahead_of(self.config, lambda: omega_conf_to_dataclass(model).hf_config)
        if self._ahead is not None:
            self._refiner = Refiner(self._ahead.planning.profile.factors)
            self._planner_service = start_service()

    def _init_resource_pool_mgr(self) -> None:
        wait_for_resources(demand_of(self.config))
        super()._init_resource_pool_mgr()
        worker = ray.remote(load_worker_class(self.config))
        for role in _TRAINING_ROLES:
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = worker

    def _step_once(
        self, metrics: dict[str, Any], timing_raw: dict[str, float], sample_batch_size: int
    ) -> KVBatchMeta:
        try:
            return super()._step_once(metrics, timing_raw, sample_batch_size)
        except RuntimeError as error:
            # The replay buffer's own answer when every group of the step failed.
            if "no materializable trajectories" not in str(error):
                raise
            failed = set(self.replay_buffer.failure_keys["train"])
            self.replay_buffer._clear_groups("train", failed)
            self.on_sample_end()
        except EmptyBatch:
            pass
        except ActorDiedError as error:
            raise RankLost(lost_rank_message(error, self.actor_rollout_wg.workers)) from error
        metrics[f"{PREFIX}skipped_steps"] = 1
        return KVBatchMeta(partition_id="train", keys=[], tags=[])

    def _balance_batch(
        self,
        batch: KVBatchMeta,
        metrics: dict[str, Any],
        logging_prefix: str = "global_seqlen",
        keep_minibatch: bool = False,
    ) -> KVBatchMeta:
        """Reorder rows, and add padding rows, so that groups stay whole on ranks of equal work."""
        if not batch.keys:
            raise EmptyBatch("the rollout returned no rows; the step is skipped")
        num_ranks = self._num_actor_ranks()
        deal = deal_groups(
            groups_of(batch, self.config.data.max_prompt_length),
            num_ranks=num_ranks,
            mini_batch_rows=self.config.actor_rollout_ref.actor.ppo_mini_batch_size
            * self.config.actor_rollout_ref.rollout.n,
            chunk_multiple=self._critic_rows(num_ranks),
        )
        num_rows = len(batch)
        batch = upsample_batch_to_divisible_size(batch, len(deal.slots), self.tokenizer.eos_token_id)
        padding = iter(range(num_rows, len(batch)))
        order = [next(padding) if row is None else row for row in deal.slots]
        rows_per_rank = len(order) // num_ranks
        metrics.update(
            log_seqlen_unbalance(
                seqlen_list=[tag["seq_len"] for tag in batch.tags],
                partitions=[order[r * rows_per_rank : (r + 1) * rows_per_rank] for r in range(num_ranks)],
                prefix=logging_prefix,
            )
        )
        batch.reorder(order)
        metrics[f"{PREFIX}groups_split"] = deal.groups_split
        self._num_mini_batches = deal.num_mini_batches
        if self._ahead is not None:
            self._ask_for_plans(self._ahead, batch, rows_per_rank)
        return batch

    def _ask_for_plans(self, ahead: Ahead, batch: KVBatchMeta, rows_per_rank: int) -> None:
        """Have the step's plans solved while its rows are still on their way to the ranks."""
        rows = [
            RowLengths(key.split("_")[0], tag["prompt_len"], tag["response_len"])
            for key, tag in zip(batch.keys, batch.tags, strict=True)
        ]
        ranks = [rows[first : first + rows_per_rank] for first in range(0, len(rows), rows_per_rank)]
        requests = ahead.requests(ranks, self._num_mini_batches, self._refiner.factors)
        self._plan_keys = {request.key for request in requests}
        # Nobody waits for it: a rank that finds no plan solves its own.
        self._planner_service.submit.remote(requests, time.time())

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        from treecp_rl.workers.worker import NUM_MINI_BATCHES

        # Set here: what is put in extra_info earlier is lost when verl writes back to the queue.
        batch.extra_info[NUM_MINI_BATCHES] = self._num_mini_batches
        if self._ahead is not None:
            batch.extra_info[FACTORS_KEY] = encode_factors(self._refiner.factors)
        batch = super()._update_actor(batch, metrics)
        if self._ahead is not None:
            self._add_plan_lead(metrics)
        publish(metrics)
        if self._ahead is not None:
            self._refiner.take(self._ahead.planning.profile, metrics, PREFIX)
        return batch

    def _add_plan_lead(self, metrics: dict[str, Any]) -> None:
        """How far ahead of the ranks this step's plans were; nothing where the service cannot say."""
        try:
            events = ray.get(self._planner_service.events.remote(), timeout=FETCH_TIMEOUT_SECONDS)
        except (RayActorError, GetTimeoutError):
            return
        lead = lead_seconds(events, self._plan_keys)
        if lead is not None:
            metrics[f"{PREFIX}plan_lead_seconds"] = lead

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict[str, Any], timing_raw: Any, global_steps: int, epoch: int
    ) -> None:
        if batch.keys:
            super()._compute_metrics(batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch)
        else:
            metrics.update({"training/global_step": global_steps, "training/epoch": epoch})

    def _log_rollout_data(self, batch: KVBatchMeta, timing_raw: Any, rollout_data_dir: str) -> None:
        if batch.keys:
            super()._log_rollout_data(batch, timing_raw, rollout_data_dir)

    def _num_actor_ranks(self) -> int:
        dispatch = self.actor_rollout_wg._dispatch_info
        if "actor" not in dispatch:
            dispatch["actor"] = self.actor_rollout_wg._query_dispatch_info("actor")
        return max(dispatch["actor"]) + 1

    def _critic_rows(self, num_ranks: int) -> int:
        """Rows of a critic's mini-batch on one rank, which a rank's rows must be a multiple of."""
        if not self.use_critic:
            return 1
        rows = self.config.critic.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n
        return math.lcm(rows, num_ranks) // num_ranks


def lost_rank_message(error: ActorDiedError, workers: Sequence[Any]) -> str:
    """Which training rank an actor's death means, and what comes next."""
    ids = [worker._actor_id.hex() for worker in workers]
    if error.actor_id in ids:
        who = f"the process of training rank {ids.index(error.actor_id)} of {len(ids)} has ended"
    else:
        who = f"the actor {error.actor_id} has ended"
    return (
        f"{who} in mid-step (Ray's message says more; out of memory is the usual cause). The step is lost; start "
        "the run again with trainer.resume_mode=auto, and it goes on from its last checkpoint"
    )


def groups_of(batch: KVBatchMeta, max_prompt_length: int) -> list[Group]:
    """The batch's groups; a row's key is "{uid}_{session}_{index}".

    Raises:
        BatchError: a prompt is longer than the config allows.
    """
    rows_of: dict[str, list[int]] = defaultdict(list)
    for row, (key, tag) in enumerate(zip(batch.keys, batch.tags, strict=True)):
        if tag["prompt_len"] > max_prompt_length:
            raise BatchError(
                f"row {key} has a prompt of {tag['prompt_len']} tokens, data.max_prompt_length is "
                f"{max_prompt_length}; raise it, or set data.filter_overlong_prompts=True"
            )
        rows_of[key.split("_")[0]].append(row)
    return [
        Group(
            rows=tuple(rows),
            prompt_tokens=batch.tags[rows[0]]["prompt_len"],
            response_tokens=tuple(batch.tags[row]["response_len"] for row in rows),
        )
        for rows in rows_of.values()
    ]


def load_worker_class(config: Any) -> type:
    """The class of the training actors.

    Raises:
        ConfigError: it does not exist, or is no training worker of verl's.
    """
    from verl.workers.engine_workers import ActorRolloutRefWorker

    name = config.actor_rollout_ref.actor.get("worker_cls") or DEFAULT_WORKER
    check_worker_name(name)
    worker = load_class_from_fqn(name, "actor_rollout_ref.actor.worker_cls")
    if not (isinstance(worker, type) and issubclass(worker, ActorRolloutRefWorker)):
        raise ConfigError(
            f"actor_rollout_ref.actor.worker_cls={name} is not a subclass of verl's ActorRolloutRefWorker; "
            f"the default is {DEFAULT_WORKER}"
        )
    return worker


def wait_for_resources(demand: Demand) -> None:
    """Give Ray a few seconds to have what the placement groups will ask for; verl would wait without a word.

    Raises:
        ConfigError: with both numbers and the key to change.
    """
    deadline = time.monotonic() + _RESOURCE_SECONDS
    need = {"CPU": CPUS_PER_SLOT * demand.slots, "GPU": demand.slots}
    while True:
        have = ray.available_resources()
        missing = [name for name, number in need.items() if have.get(name, 0) < number]
        if not missing:
            return
        if time.monotonic() > deadline:
            name = missing[0]
            key = "ray_kwargs.ray_init.num_cpus" if name == "CPU" else "ray_kwargs.ray_init.num_gpus"
            what = "free CPUs" if name == "CPU" else "free slots (GPU)"
            raise ConfigError(too_few(what, have.get(name, 0), need[name], key, demand))
        time.sleep(0.5)


@contextmanager
def _worker_groups_named(prefix: str) -> Iterator[None]:
    """Name the actors that verl makes within; it offers no argument for it, and its own prefix is six letters."""
    original = trainer_base.RayWorkerGroup
    trainer_base.RayWorkerGroup = partial(original, name_prefix=prefix)
    try:
        yield
    finally:
        trainer_base.RayWorkerGroup = original
