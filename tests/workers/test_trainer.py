"""``python -m treecp_rl.train``: a real GRPO run with Ray, two ranks, reference model, KL, validation, checkpoints."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from transfer_queue import KVBatchMeta

from tests.workers.tiny_model import save_tiny_model
from treecp_rl.errors import BatchError, ConfigError
from treecp_rl.workers import trainer
from treecp_rl.workers.launch import Demand

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return float(len(set(solution_str)) % 5) / 4
"""


def write_assets(folder: Path) -> None:
    save_tiny_model(folder / "model")
    rows = [
        {
            "data_source": "add",
            "prompt": [{"role": "user", "content": f"What is {a} + {b}? The answer is"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"index": 4 * a + b},
        }
        for a in range(6)
        for b in range(4)
    ]
    pd.DataFrame(rows).to_parquet(folder / "train.parquet")
    pd.DataFrame(rows[:4]).to_parquet(folder / "val.parquet")
    (folder / "reward.py").write_text(REWARD)


def overrides(folder: Path) -> list[str]:
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/val.parquet",
        "data.train_batch_size=6",
        "data.max_prompt_length=64",
        "data.max_response_length=8",
        f"actor_rollout_ref.model.path={folder}/model",
        # Three groups on two ranks: nothing divides, and groups must stay whole.
        f"{actor}.ppo_mini_batch_size=3",
        f"{actor}.ppo_micro_batch_size_per_gpu=4",
        f"{actor}.use_kl_loss=True",
        f"{actor}.kl_loss_coef=0.1",
        f"{actor}.optim.lr=1e-3",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=4",
        f"{rollout}.n=3",
        f"reward.custom_reward_function.path={folder}/reward.py",
        "trainer.total_training_steps=2",
        "trainer.save_freq=2",
        "trainer.test_freq=2",
        "trainer.val_before_train=False",
        "trainer.logger=[file]",
        f"trainer.default_local_dir={folder}/checkpoints",
        f"hydra.run.dir={folder}/hydra",
    ]


def train(folder: Path, metrics_file: Path, *more: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    environment |= {
        "VERL_FILE_LOGGER_PATH": str(metrics_file),
        "OMP_NUM_THREADS": "1",
        "TQ_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [sys.executable, "-W", "ignore", "-m", "treecp_rl.train", "trainer.backend=treecp"]
    return subprocess.run(
        [*command, *overrides(folder), *more],
        env=environment,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_whose_rank_dies_says_so_and_resumes_and_outlives_its_planner(tmp_path):
    """Both ranks share every pass. Rank 1 ends in the update of step 2; then the planner before that update."""
    write_assets(tmp_path)
    both = ("actor_rollout_ref.actor.treecp.domain_size=2", "trainer.save_freq=1", "trainer.test_freq=-1")
    dying = "actor_rollout_ref.actor.worker_cls=tests.workers.dying_worker.DyingActorRolloutRefWorker"
    died = train(tmp_path, tmp_path / "first.jsonl", *both, dying)
    assert died.returncode != 0
    assert "RankLost: the process of training rank 1 of 2 has ended in mid-step" in died.stderr
    assert (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").read_text() == "1"

    killing = (
        "actor_rollout_ref.actor.worker_cls=tests.workers.planner_killer.PlannerKillingActorRolloutRefWorker"
    )
    steps = ("trainer.total_training_steps=3", killing)
    resumed = train(tmp_path, tmp_path / "second.jsonl", *both, *steps)
    assert resumed.returncode == 0, resumed.stdout[-4000:] + resumed.stderr[-4000:]
    found = [json.loads(line)["data"] for line in (tmp_path / "second.jsonl").read_text().splitlines()]
    assert [step["training/global_step"] for step in found] == [2, 3]
    for step in found:
        assert step["treecp/groups"] == 6
        assert step["treecp/measured_seconds"] > 0
        assert step["treecp/measured_over_predicted"] > 0
    # Log-probs, reference and two mini-batches; the service died after the first two, and came back.
    assert found[0]["treecp/plans_fetched"] == 2 and found[0]["treecp/planner_fallbacks"] >= 1
    assert found[1]["treecp/plan_lead_seconds"] > 0
    assert found[1]["treecp/plans_fetched"] == 4 and found[1]["treecp/planner_fallbacks"] == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_steps_of_grpo(tmp_path):
    write_assets(tmp_path)
    metrics_file = tmp_path / "metrics.jsonl"
    done = train(tmp_path, metrics_file)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    steps = [json.loads(line)["data"] for line in metrics_file.read_text().splitlines()]
    assert [step["training/global_step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["treecp/rows"] == 18
        assert step["treecp/groups"] == 6
        assert step["treecp/group_size/mean"] == 3
        assert step["treecp/groups_split"] == step["treecp/groups_without_reuse"] == 0
        assert step["treecp/tokens_computed"] < 0.6 * step["treecp/tokens_flat"]
        assert step["treecp/pad_tokens"] > 0
        assert step["training/rollout_probs_diff_max"] < 1e-6
        assert step["actor/grad_norm"] > 0
        assert not any(name.startswith("actor/treecp") for name in step)
        for name in (
            "actor/pg_loss",
            "actor/kl_loss",
            "actor/entropy",
            "actor/lr",
            "timing_s/ref",
            "perf/mfu/actor",
        ):
            assert name in step
    assert steps[1]["actor/kl_loss"] > 0
    assert any(name.startswith("val-core/") for name in steps[1])
    assert (tmp_path / "checkpoints/global_step_2/actor/fsdp_config.json").exists()


# ----------------------------------------------------------------------------------------------- pieces


def batch_of(*rows: tuple[str, int, int]) -> KVBatchMeta:
    tags = [
        {"prompt_len": prompt, "response_len": response, "seq_len": prompt + response}
        for _, prompt, response in rows
    ]
    keys = [f"{uid}_{index}_0" for index, (uid, _, _) in enumerate(rows)]
    return KVBatchMeta(partition_id="train", keys=keys, tags=tags)


def test_groups_are_found_in_any_order():
    groups = trainer.groups_of(batch_of(("a", 5, 1), ("b", 6, 2), ("a", 5, 3)), max_prompt_length=8)
    assert [(group.rows, group.response_tokens) for group in groups] == [((0, 2), (1, 3)), ((1,), (2,))]


def test_prompt_longer_than_allowed_names_key_and_length():
    with pytest.raises(BatchError, match=r"row a_0_0 has a prompt of 9 tokens, data\.max_prompt_length is 8"):
        trainer.groups_of(batch_of(("a", 9, 1)), max_prompt_length=8)


def test_resources_that_never_come_are_named(monkeypatch):
    monkeypatch.setattr(trainer, "_RESOURCE_SECONDS", 0.1)
    monkeypatch.setattr(trainer.ray, "available_resources", lambda: {"CPU": 4.0, "GPU": 2.0})
    trainer.wait_for_resources(Demand(slots=1, cpus=6))
    with pytest.raises(
        ConfigError, match=r"Ray has 4 free CPUs, this run needs 6 .* raise ray_kwargs\.ray_init\.num_cpus"
    ):
        trainer.wait_for_resources(Demand(slots=2, cpus=9))


def test_empty_batch_skips_the_step(monkeypatch):
    """Every rollout failed: no exception, no optimizer step, and the step says so."""
    empty = trainer.TreeCPTrainer.__new__(trainer.TreeCPTrainer)
    monkeypatch.setattr(
        trainer.PPOTrainerSync,
        "_step_once",
        lambda self, *args: self._balance_batch(KVBatchMeta(partition_id="train", keys=[], tags=[]), {}),
    )
    metrics: dict = {}
    batch = empty._step_once(metrics, {}, 4)
    assert (len(batch.keys), metrics) == (0, {"treecp/skipped_steps": 1})
    empty._compute_metrics(batch, metrics, {}, global_steps=3, epoch=0)
    assert metrics["training/global_step"] == 3
