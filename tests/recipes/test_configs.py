"""Every recipe's config composes, passes treecp's own checks, and builds verl's typed configs; so does every
command that a run script or the driver would start."""

import os
import subprocess
import sys
from argparse import Namespace

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from recipes import driver
from recipes.grpo_reasoning_gym.main import RECIPE as REASONING_GYM
from recipes.grpo_smollm2_reasoning.main import RECIPE as SMOLLM2
from treecp_rl.workers import launch

ROOT = driver.ROOT
PLATFORMS = {
    "grpo_reasoning_gym": "cpu",
    "grpo_smollm2_reasoning": "cpu",
    "grpo_qwen2_5_7b_long_prompt": "cuda",
}
OVERRIDES = {"grpo_qwen2_5_7b_long_prompt": []}


def composed(name: str, *overrides: str):
    directory = ROOT / "recipes" / name / "config"
    paths = OVERRIDES.get(name, ["recipe.assets=/assets"])
    with initialize_config_dir(str(directory), version_base=None):
        return compose(name, overrides=[f"platform={PLATFORMS[name]}", *paths, *overrides])


def test_every_recipe_is_listed():
    assert {path.parents[1].name for path in (ROOT / "recipes").glob("*/config/*.yaml")} >= set(PLATFORMS)


@pytest.mark.parametrize("name", PLATFORMS)
@pytest.mark.parametrize("backend", ["treecp", "fsdp2"])
def test_config_composes_and_may_run(name, backend):
    from verl.utils.config import omega_conf_to_dataclass

    config = composed(name, f"trainer.backend={backend}")
    OmegaConf.to_container(config.recipe, resolve=True, throw_on_missing=True)
    OmegaConf.to_container(config.data, resolve=True, throw_on_missing=True)
    launch.check_config(config)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert actor.strategy == actor.engine.strategy == backend
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert rollout.name == ("vllm" if PLATFORMS[name] == "cuda" else "treecp_cpu")
    assert actor.use_kl_loss and config.algorithm.adv_estimator == "grpo"
    assert (ROOT / config.reward.custom_reward_function.path).is_file()


@pytest.mark.parametrize("name", PLATFORMS)
def test_batch_sizes_fit_each_other(name):
    """Whole optimizer steps in a step, the same number of groups on every rank."""
    config = composed(name)
    train, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    assert train % mini == 0
    assert mini % config.trainer.n_gpus_per_node == 0
    assert config.actor_rollout_ref.rollout.n > 1


@pytest.mark.parametrize("recipe", [REASONING_GYM, SMOLLM2], ids=lambda recipe: recipe.name)
def test_validation_key_follows_the_config(recipe):
    config = composed(recipe.name)
    assert recipe.validation_key.endswith(f"/acc/mean@{config.actor_rollout_ref.rollout.val_kwargs.n}")


def test_verl_loads_the_reward_function():
    from verl.trainer.ppo.reward import get_custom_reward_fn

    os.chdir(ROOT)
    function = get_custom_reward_fn(composed("grpo_reasoning_gym"))
    assert function("largest_island", "5", "5", extra_info={})["acc"] == 1.0


def composed_by_command(arguments: list[str]) -> str:
    """What `python -m treecp_rl.train ... --cfg job` prints for a command's arguments."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "treecp_rl.train", *arguments, "--cfg", "job"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_drivers_command_composes(tmp_path):
    command = driver.train_command(
        REASONING_GYM,
        tmp_path / "assets",
        tmp_path / "run",
        Namespace(backend="fsdp2", resume=True),
        ["trainer.total_training_steps=7"],
    )
    assert command[1:3] == ["-m", "treecp_rl.train"]
    config = OmegaConf.create(composed_by_command(command[3:]))
    assert config.trainer.total_training_steps == 7
    assert config.trainer.backend == "fsdp2" and config.trainer.resume_mode == "auto"
    assert config.trainer.default_local_dir == f"{tmp_path}/run/checkpoints"
    assert config.data.val_files == f"{tmp_path}/assets/validation.parquet"


@pytest.mark.parametrize("name", PLATFORMS)
def test_the_run_scripts_command_composes(name, tmp_path):
    """Runs run.sh with a `python` that writes its arguments down instead of making assets or training."""
    (tmp_path / "python").write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" > "{tmp_path}/last"\necho /model\necho /assets\n'
    )
    (tmp_path / "python").chmod(0o755)
    script = ROOT / "recipes" / name / "run.sh"
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run([script, "trainer.total_training_steps=7"], check=True, env=environment, timeout=30)
    module, *arguments = (tmp_path / "last").read_text().splitlines()[1:]
    assert module == "treecp_rl.train"
    # The stand-in printed two lines where one recipe's assets print one.
    arguments = [argument for argument in arguments if argument != "/assets"]
    config = OmegaConf.create(composed_by_command(arguments))
    assert config.trainer.project_name == name
    assert config.trainer.total_training_steps == 7
