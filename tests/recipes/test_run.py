"""The recipe for real, made small: one step, a checkpoint, then a resumed second step; through verl, Ray and gloo."""

import json
from dataclasses import replace

import pytest

from recipes import driver
from recipes.grpo_reasoning_gym import assets
from recipes.grpo_reasoning_gym.assets import AssetOptions
from recipes.grpo_reasoning_gym.main import RECIPE
from recipes.grpo_reasoning_gym.warm_start import WarmStartOptions

SMALL = [
    "data.train_batch_size=8",
    "data.val_max_samples=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
    "trainer.test_freq=1",
    "trainer.save_freq=1",
]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_and_its_resumption(tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    short = WarmStartOptions(max_steps=10, probe_questions=4, stop_at_accuracy=0.0)
    monkeypatch.setattr(assets, "WarmStartOptions", lambda **options: replace(short, **options))
    made = tmp_path / "assets"
    made.mkdir()
    assets.make(made, AssetOptions(train_questions=32, validation_questions=8), report=lambda line: None)
    recipe = replace(RECIPE, make_assets=lambda seed: made, all_runs=tmp_path)

    assert driver.main(recipe, "", [*SMALL, "trainer.total_training_steps=1"]) == 0
    (run_dir,) = recipe.runs.iterdir()
    first = json.loads((run_dir / "summary.json").read_text())
    assert first["steps"] == 1 and sorted(first["validations"]) == ["0", "1"]
    # 8 groups of 4: prompts of 156 tokens once, against four times.
    assert 8 * 156 < first["tokens_computed"] < first["tokens_flat"] / 3

    assert driver.main(recipe, "", ["--resume", *SMALL, "trainer.total_training_steps=2"]) == 0
    assert list(recipe.runs.iterdir()) == [run_dir]
    second = json.loads((run_dir / "summary.json").read_text())
    assert second["steps"] == 2
    assert second["validation_before"] == first["validation_before"]
    assert second["tokens_flat"] > first["tokens_flat"]
    assert driver.last_checkpoint(run_dir).name == "global_step_2"
    assert [path.name for path in driver.metrics_files(run_dir)] == ["metrics-00.jsonl", "metrics-01.jsonl"]
    shown = capfd.readouterr().out
    assert "Training Progress" in shown and "reward_curve.png" in shown
