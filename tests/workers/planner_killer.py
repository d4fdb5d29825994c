"""A worker that ends the planner's actor between a step's log-probs and its update, once."""

from tensordict import TensorDict
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register

from tests.planner.killing import kill_service
from treecp_rl.workers.worker import TreeCPActorRolloutRefWorker, TreeCPTrainingWorker


class PlannerKillingTrainingWorker(TreeCPTrainingWorker):
    has_killed = False

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_mini_batch(self, data: TensorDict) -> TensorDict:
        if not self.has_killed:
            self.has_killed = True
            kill_service()
        return super().train_mini_batch(data)


class PlannerKillingActorRolloutRefWorker(TreeCPActorRolloutRefWorker):
    actor_worker_cls = PlannerKillingTrainingWorker
