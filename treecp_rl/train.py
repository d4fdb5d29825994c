"""``python -m treecp_rl.train trainer.backend=treecp|fsdp2 ...``: Hydra overrides -> verl's GRPO run.

The config is verl's own (``configs/treecp_ppo.yaml`` on top of ``ppo_trainer``), the run is verl's own
``run_ppo``; ``trainer.backend`` says which engine trains. Where there is no CUDA device ``platform=cpu`` is
added to the overrides, where Hydra records it with the others.
"""

import os
import sys
from collections.abc import Sequence

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from treecp_rl.errors import ConfigError, TreeCPError
from treecp_rl.workers.launch import (
    check_overrides,
    first_override,
    platform_overrides,
    prepare,
    refuse,
    require_prepared,
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run a training job; ``argv`` are Hydra overrides and flags (default: the command line)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        check_overrides(arguments)
    except TreeCPError as error:
        refuse(error)
    at = first_override(arguments)
    sys.argv = [sys.argv[0], *arguments[:at], *platform_overrides(arguments), *arguments[at:]]
    hydra.main(config_path="pkg://treecp_rl.configs", config_name="treecp_ppo", version_base=None)(run)()


def run(config: DictConfig) -> None:
    """Hand a checked config to verl."""
    try:
        _run(config)
    except TreeCPError as error:  # also one that a Ray actor raised
        refuse(error)


def _run(config: DictConfig) -> None:
    if HydraConfig.initialized() and HydraConfig.get().mode is RunMode.MULTIRUN:
        prepare(config)  # Hydra calls LaunchCallback for single runs only
    require_prepared(config)
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    from treecp_rl.workers import plugin
    from treecp_rl.workers.trainer import load_worker_class

    if not plugin.is_registered():
        raise ConfigError(
            "verl did not load the plugin of treecp_rl: VERL_USE_EXTERNAL_PLUGINS="
            f"{os.environ.get('VERL_USE_EXTERNAL_PLUGINS', 'auto')}; set it to auto, or see `treecp-rl doctor`"
        )
    auto_set_device(config)
    validate_config(
        config=_divisible(config),
        use_reference_policy=need_reference_policy(config),
        use_critic=need_critic(config),
    )
    if config.actor_rollout_ref.actor.strategy == "treecp":
        load_worker_class(config)
    name = f"{config.actor_rollout_ref.actor.strategy}-trainer"
    run_ppo(config, task_runner_class=TaskRunnerV1.options(name=name))


def _divisible(config: DictConfig) -> DictConfig:
    """The config as verl may check it: treecp deals groups to ranks without counts having to divide."""
    if config.actor_rollout_ref.actor.strategy != "treecp":
        return config
    checked = config.copy()
    checked.trainer.n_gpus_per_node = checked.trainer.nnodes = 1
    return checked


if __name__ == "__main__":
    main()
