"""A worker whose rank 1 ends without a word in the update of step 2, as an out-of-memory killer would have it."""

import os

import torch.distributed as dist
from tensordict import TensorDict
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register

from treecp_rl.workers.worker import TreeCPActorRolloutRefWorker, TreeCPTrainingWorker

DIES_IN_UPDATE = 2


class DyingTrainingWorker(TreeCPTrainingWorker):
    num_updates = 0

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_mini_batch(self, data: TensorDict) -> TensorDict:
        self.num_updates += 1
        if self.num_updates == DIES_IN_UPDATE and dist.get_rank() == 1:
            self.engine.forward_backward_batch = lambda *args, **options: os._exit(9)
        return super().train_mini_batch(data)


class DyingActorRolloutRefWorker(TreeCPActorRolloutRefWorker):
    actor_worker_cls = DyingTrainingWorker
