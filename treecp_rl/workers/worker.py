"""verl's training actors with the treecp engine inside, whatever strategy the config names."""

from typing import Any

from tensordict import TensorDict
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

import treecp_rl.workers.engine  # noqa: F401  (registers the engine)
from treecp_rl.workers.metrics import add_up_mini_batches

NUM_MINI_BATCHES = "treecp_num_mini_batches"
"""How many mini-batches the trainer dealt the groups into; each rank holds them one after another."""


class TreeCPTrainingWorker(TrainingWorker):
    """One rank of the actor or the reference model."""

    def __init__(self, config: Any) -> None:
        object.__setattr__(config.engine_config, "strategy", "treecp")
        super().__init__(config)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_mini_batch(self, data: TensorDict) -> TensorDict:
        """As verl's; mini-batches hold whole groups, so their number is given and not their size."""
        num_mini_batches = tu.pop(data, key=NUM_MINI_BATCHES, default=None)
        if num_mini_batches is not None:
            tu.pop(data, key="mini_batch_size", default=None)
            tu.assign_non_tensor(data, num_mini_batch=num_mini_batches)
        output = super().train_mini_batch(data)
        if output is not None:
            add_up_mini_batches(tu.get(output, "metrics"))
        return output


class TreeCPActorRolloutRefWorker(ActorRolloutRefWorker):
    """The class to name in ``actor_rollout_ref.actor.worker_cls``, or to derive from."""

    actor_worker_cls = TreeCPTrainingWorker
    ref_worker_cls = TreeCPTrainingWorker
