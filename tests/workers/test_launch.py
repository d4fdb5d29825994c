"""Launching: the three ways compose to the same engine, and what cannot run is refused in one line, at once."""

import os
import subprocess
import sys
import time
from dataclasses import fields

import pytest
import yaml
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from treecp_rl.errors import ConfigError
from treecp_rl.workers import launch
from treecp_rl.workers.options import TreeCPOptions

ENVIRONMENT = {**os.environ, "VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"}


def compose_ours(*overrides: str):
    with initialize_config_module("treecp_rl.configs", version_base=None):
        return compose("treecp_ppo", overrides=["platform=cpu", *overrides])


def compose_stock(*overrides: str):
    """As verl's own main_ppo: its primary config, and ours found through the search path plugin."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=list(overrides))


@pytest.fixture(scope="module")
def base_config():
    return compose_ours()


def prepared(*overrides: str):
    config = compose_ours(*overrides)
    launch.prepare(config)
    return config


def run_command(*arguments: str, timeout: float = 200) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=ENVIRONMENT,
        check=False,
    )


# ------------------------------------------------------------------------------------------------ three ways


def test_backend_treecp_selects_engine_and_trainer():
    config = prepared("trainer.backend=treecp")
    assert config.actor_rollout_ref.actor.strategy == config.actor_rollout_ref.ref.strategy == "treecp"
    assert config.trainer.v1.trainer_mode == "treecp_sync"
    assert config.critic.strategy == "fsdp2"


def test_backend_fsdp2_is_stock_verl_by_one_word():
    treecp, stock = compose_ours(), prepared("trainer.backend=fsdp2")
    assert stock.actor_rollout_ref.actor.strategy == stock.actor_rollout_ref.ref.strategy == "fsdp2"
    assert stock.trainer.v1.trainer_mode == "sync"
    stock.trainer.backend = "treecp"
    assert OmegaConf.to_container(stock, resolve=True) == OmegaConf.to_container(treecp, resolve=True)


def test_stock_main_ppo_finds_the_engine():
    config = compose_stock("model_engine=treecp", "+platform=cpu", "algorithm.adv_estimator=grpo")
    assert config.actor_rollout_ref.actor.strategy == config.actor_rollout_ref.ref.strategy == "treecp"
    launch.prepare(config)
    assert config.trainer.v1.trainer_mode == "treecp_sync"
    assert "backend" not in config.trainer


def test_stock_main_ppo_without_us_is_untouched():
    config = compose_stock()
    assert config.actor_rollout_ref.actor._target_ == "verl.workers.config.FSDPActorConfig"
    assert config.trainer.v1.trainer_mode == "sync"


@pytest.mark.parametrize("module", ["treecp_rl.train", "verl.trainer.main_ppo"])
def test_worker_class_is_swapped_by_name(module):
    name = "actor_rollout_ref.actor.worker_cls=treecp_rl.workers.TreeCPActorRolloutRefWorker"
    config = compose_ours(name) if module == "treecp_rl.train" else compose_stock("model_engine=treecp", name)
    launch.check_config(config)
    from treecp_rl.workers import TreeCPActorRolloutRefWorker
    from treecp_rl.workers.trainer import load_worker_class

    assert load_worker_class(config) is TreeCPActorRolloutRefWorker


def test_everything_is_registered_once_verl_is_imported():
    """In a fresh process: verl alone knows platform, engines and trainer by name."""
    script = (
        "import verl, verl.workers.engine, verl.trainer.ppo.v1 as v1;"
        "from verl.workers.engine import EngineRegistry as R;"
        "engines = [R.get_engine_cls('language_model', name).__name__ for name in ('treecp', 'fsdp2')];"
        "print(*engines, v1.get_trainer_cls('treecp_sync').__name__)"
    )
    done = run_command("-c", script)
    assert done.stdout.split() == ["TreeCPEngine", "FSDP2EngineOnCPU", "TreeCPTrainer"], done.stderr


# ---------------------------------------------------------------------------------------------- refusals


def test_unknown_backend_is_one_line_in_no_time():
    started = time.monotonic()
    done = run_command("-m", "treecp_rl.train", "trainer.backend=treepc")
    assert time.monotonic() - started < 10
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "trainer.backend=treepc" in line
    assert "treecp, fsdp2" in line


def test_unknown_option_lists_the_valid_ones():
    done = run_command("-m", "treecp_rl.train", "actor_rollout_ref.actor.treecp.shares=prompt")
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    for field in fields(TreeCPOptions):
        assert field.name in line


def test_too_few_cpus_is_said_within_ten_seconds_of_composing():
    done = run_command("-m", "treecp_rl.train", "ray_kwargs.ray_init.num_cpus=1")
    assert done.returncode == 2
    line = done.stderr.strip().splitlines()[-1]
    assert "Ray has 1 CPUs, this run needs 9" in line
    assert "ray_kwargs.ray_init.num_cpus" in line


def test_stock_main_ppo_refuses_in_one_line_too():
    done = run_command(
        "-m",
        "verl.trainer.main_ppo",
        "model_engine=treecp",
        "+platform=cpu",
        "actor_rollout_ref.actor.strategy=fsdp",
    )
    assert done.returncode == 2
    assert "FSDP1 is not supported" in done.stderr.strip().splitlines()[-1]


REFUSED = {
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2": "Ulysses",
    "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2": "Ulysses",
    "actor_rollout_ref.model.use_fused_kernels=True": "use_fused_kernels",
    "actor_rollout_ref.actor.use_prefix_grouper=True": "use_prefix_grouper",
    "actor_rollout_ref.actor.shuffle=True": "shuffle",
    "actor_rollout_ref.actor.pad_to_length=True": "pad_to_length",
    "actor_rollout_ref.actor.fsdp_config.qat.enable=True": "qat",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp16": "fp16",
    "actor_rollout_ref.rollout.enable_rollout_routing_replay=True": "routing_replay",
    "actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov": "clip_cov",
    "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm": "loss_scale_factor",
    "actor_rollout_ref.actor.strategy=fsdp": "FSDP1",
    "actor_rollout_ref.actor.worker_cls=treecp_rl.workers.Nobody": "has no class Nobody",
    "actor_rollout_ref.actor.worker_cls=no_such_module.Worker": "cannot import",
    "actor_rollout_ref.actor.treecp.share=everything": "share='everything'",
    "actor_rollout_ref.actor.treecp.tokens_per_rank=0": "tokens_per_rank=0",
    "actor_rollout_ref.actor.treecp=5": "must be a mapping with the keys share",
    "actor_rollout_ref.rollout.temperature=0": "set it above 0",
    "actor_rollout_ref.actor.treecp.mode=ringg": "not one of auto, fused, split, local, gather, gather_whole, heads",
    "actor_rollout_ref.actor.treecp.mode=ring": "reuse_ring",
    "actor_rollout_ref.actor.treecp.streaming=sometimes": "streaming='sometimes' must be true or false",
    "actor_rollout_ref.actor.treecp.resend=1": "resend=1 must be true or false",
    "actor_rollout_ref.actor.treecp.offload_leaves=2": "offload_leaves=2 must be true or false",
    "actor_rollout_ref.actor.treecp.attention_bytes_per_rank=0": "attention_bytes_per_rank=0 must be a positive",
    "actor_rollout_ref.actor.treecp.save_attention_bytes=-1": "save_attention_bytes=-1 must be a whole number",
    "actor_rollout_ref.actor.treecp.domain_size=5": "domain_size=5 does not divide",
    "+actor_rollout_ref.actor.treecp.shares=1": "valid keys",
    "distillation.enabled=True": "distillation",
    "critic.strategy=treecp": "critic",
    "critic.enable=True": "critic.enable=True",
    "algorithm.adv_estimator=gae": "algorithm.adv_estimator=gae",
    "trainer.use_v1=False": "use_v1",
    "trainer.backend=fsdp": "valid values",
    "ray_kwargs.ray_init.num_gpus=1": "slots",
}


@pytest.mark.parametrize("override", REFUSED)
def test_refusals_name_the_key(base_config, override):
    key, _, value = override.lstrip("+").partition("=")
    config = base_config.copy()  # composing takes seconds
    OmegaConf.update(config, key, yaml.safe_load(value), force_add=True)
    with pytest.raises(ConfigError) as refusal:
        launch.prepare(config)
    assert REFUSED[override] in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_an_unforeseen_error_of_a_check_stops_the_launch(base_config, capsys):
    """Hydra turns a callback's exceptions into warnings; the checks behind it would then be skipped."""
    config = base_config.copy()
    OmegaConf.update(config, "ray_kwargs.ray_init.num_cpus", "sixty-four")
    with pytest.raises(SystemExit) as stop:
        launch.LaunchCallback().on_run_start(config)
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_config_without_the_launch_checks_does_not_run(base_config):
    with pytest.raises(ConfigError, match="launch checks of treecp did not run"):
        launch.require_prepared(base_config)


def test_missing_files_are_refused_before_ray_starts(base_config, tmp_path):
    config = base_config.copy()
    there = tmp_path / "there.parquet"
    there.touch()
    OmegaConf.update(config, "data.train_files", [str(there)])
    OmegaConf.update(config, "data.val_files", str(tmp_path / "missing.parquet"))
    with pytest.raises(ConfigError, match=r"data\.val_files=.*missing\.parquet does not exist"):
        launch.check_files(config)
    OmegaConf.update(config, "data.val_files", "hdfs://host/there.parquet")
    OmegaConf.update(config, "actor_rollout_ref.model.path", str(tmp_path / "no_model"))
    with pytest.raises(ConfigError, match="no_model does not exist"):
        launch.check_files(config)
    OmegaConf.update(config, "actor_rollout_ref.model.path", "Qwen/Qwen2.5-7B-Instruct")
    launch.check_files(config)


@pytest.mark.parametrize(
    ("arguments", "index"),
    [
        ([], 0),
        (["a=1"], 0),
        (["--config-dir", "d", "--config-name", "n", "a=1", "b=2"], 4),
        (["a=1", "--cfg", "job"], 0),
        (["--config-dir=d"], 1),
        (["--config-name", "n"], 2),
    ],
)
def test_an_added_override_joins_the_others(arguments, index):
    assert launch.first_override(arguments) == index


def test_worker_class_must_be_a_training_worker():
    config = compose_ours("actor_rollout_ref.actor.worker_cls=treecp_rl.workers.options.TreeCPOptions")
    from treecp_rl.workers.trainer import load_worker_class

    with pytest.raises(ConfigError, match="not a subclass"):
        load_worker_class(config)


def test_worker_class_without_the_backend_is_refused():
    with pytest.raises(ConfigError, match=r"needs trainer\.backend=treecp"):
        prepared(
            "trainer.backend=fsdp2",
            "actor_rollout_ref.actor.worker_cls=treecp_rl.workers.TreeCPActorRolloutRefWorker",
        )


def test_one_row_a_group_runs_with_one_notice(capsys):
    prepared("actor_rollout_ref.rollout.n=1")
    assert capsys.readouterr().err.count("no prompt can be shared") == 1


# ------------------------------------------------------------------------------------------------- configs


def test_every_option_is_in_the_yaml_with_its_default(base_config):
    options = base_config.actor_rollout_ref.actor.treecp
    assert dict(options) == {field.name: field.default for field in fields(TreeCPOptions)}


@pytest.mark.parametrize("part", ["actor", "ref"])
def test_yaml_builds_the_dataclass(part):
    from verl.utils.config import omega_conf_to_dataclass

    from treecp_rl.workers.config import TreeCPActorConfig

    config = compose_ours(
        "actor_rollout_ref.actor.treecp.share=prefix",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    )
    node = config.actor_rollout_ref[part]
    if part == "ref":  # what verl's worker does before it builds the reference's config
        node = OmegaConf.create(OmegaConf.to_container(config, resolve=True)).actor_rollout_ref.ref
        for key in [key for key in node if key.startswith("log_prob_")]:
            node.pop(key)
        node.ppo_micro_batch_size_per_gpu = 1
    built = omega_conf_to_dataclass(node)
    assert isinstance(built, TreeCPActorConfig)
    assert built.engine.treecp == built.treecp == TreeCPOptions(share="prefix")
    assert built.engine.strategy == "treecp"


def test_cpu_platform_may_be_overridden():
    config = compose_ours("ray_kwargs.ray_init.num_cpus=64", "actor_rollout_ref.rollout.name=vllm")
    assert config.ray_kwargs.ray_init.num_cpus == 64
    assert config.ray_kwargs.ray_init.num_gpus == config.trainer.n_gpus_per_node
    assert config.ray_kwargs.ray_init.runtime_env.env_vars.VERL_PLATFORM == "cpu"
    assert config.actor_rollout_ref.rollout.name == "vllm"


def test_configs_change_nothing_on_cuda_but_backend_and_estimator():
    with initialize_config_module("treecp_rl.configs", version_base=None):
        ours = compose("treecp_ppo")
    stock = compose_stock()
    flat = _flat(ours)
    differing = {key for key, value in _flat(stock).items() if flat.get(key, "absent") != value}
    assert {key for key in differing if not key.endswith(("strategy", "_target_"))} == {
        "model_engine",
        "algorithm.adv_estimator",
    }


def _flat(node, prefix: str = "") -> dict[str, object]:
    if not OmegaConf.is_dict(node):
        return {prefix: node}
    flat: dict[str, object] = {}
    for key in node:
        child = node._get_node(key)
        path = f"{prefix}.{key}" if prefix else str(key)
        flat |= _flat(child, path) if OmegaConf.is_dict(child) else {path: str(child._value())}
    return flat
