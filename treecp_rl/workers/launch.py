"""Overrides and composed config -> checks -> the trainer they run on, before Ray or any actor starts.

``LaunchCallback`` is named by ``model_engine/treecp.yaml``, so Hydra calls it for every way of launching:
treecp_rl.train, verl's own main_ppo with ``model_engine=treecp``, or a recipe's config. A refusal is one line
and exit code 2. Imports neither verl nor ray.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from treecp_rl.errors import ConfigError
from treecp_rl.planner.profile import load_profile
from treecp_rl.workers.options import OPTIONS_KEY, TreeCPOptions, refuse_unknown_option

BACKENDS = ("treecp", "fsdp2")
TRAINER_NAME = "treecp_sync"
DEFAULT_WORKER = "treecp_rl.workers.TreeCPActorRolloutRefWorker"

_ACTOR = "actor_rollout_ref.actor"
_MODEL = "actor_rollout_ref.model"
_FSDP = f"{_ACTOR}.fsdp_config"


class LaunchCallback(Callback):
    """Hydra calls this with the composed config before it makes the run's directory."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        try:
            prepare(config)
            check_files(config)
        except (
            Exception
        ) as error:  # Hydra turns a callback's exceptions into warnings and would go on unchecked
            refuse(error)


def refuse(error: BaseException) -> None:
    """Print a refusal as one line and exit with code 2."""
    while isinstance(
        getattr(error, "cause", None), BaseException
    ):  # Ray wraps it once for each actor it left
        error = error.cause  # type: ignore[attr-defined]
    message = " ".join(str(error).split())
    print(f"treecp: {type(error).__name__}: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def prepare(config: DictConfig) -> None:
    """Check a composed config, and let the treecp backend run on the trainer that keeps groups whole.

    Raises:
        ConfigError: something cannot run; the message names the key.
    """
    check_config(config)
    check_resources(config)
    if config.actor_rollout_ref.actor.strategy != "treecp":
        return
    if config.trainer.v1.trainer_mode == "sync":
        config.trainer.v1.trainer_mode = TRAINER_NAME
    if config.actor_rollout_ref.rollout.n == 1:
        notice = "actor_rollout_ref.rollout.n=1: groups of one row, no prompt can be shared"
        print(f"treecp: {notice}", file=sys.stderr)


def require_prepared(config: DictConfig) -> None:
    """Refuse to run what ``prepare`` has not seen: its checks would be missing without a word.

    Raises:
        ConfigError: the treecp backend stands on verl's own trainer.
    """
    if config.actor_rollout_ref.actor.strategy == "treecp" and config.trainer.v1.trainer_mode == "sync":
        raise ConfigError(
            "the launch checks of treecp did not run: the config has lost hydra.callbacks.treecp; "
            "keep `override model_engine: treecp` in its defaults"
        )


def check_files(config: DictConfig) -> None:
    """Refuse local files that do not exist, before Ray starts and verl looks for them a minute later.

    Raises:
        ConfigError: names the key and the path.
    """
    for key in ("data.train_files", "data.val_files"):
        value = OmegaConf.select(config, key)
        for path in [value] if isinstance(value, str) else value or ():
            _require_file(key, str(path))
    model_path = str(OmegaConf.select(config, f"{_MODEL}.path") or "")
    if model_path.startswith(("/", ".", "~")):  # anything else may be a name on a hub
        _require_file(f"{_MODEL}.path", model_path)


def _require_file(key: str, path: str) -> None:
    if "://" not in path and not os.path.exists(os.path.expanduser(path)):
        raise ConfigError(f"{key}={path} does not exist; give the path of a file that does")


# ----------------------------------------------------------------------------------------- command line


def check_overrides(arguments: Sequence[str]) -> None:
    """Refuse what Hydra would answer less clearly: an unknown backend, an unknown treecp option.

    Raises:
        ConfigError: with the valid names.
    """
    for key, value in parse_overrides(arguments).items():
        if key == "trainer.backend" and value not in BACKENDS:
            raise ConfigError(unknown_backend("trainer.backend", value))
        if key.startswith(f"{OPTIONS_KEY}."):
            refuse_unknown_option(key.removeprefix(f"{OPTIONS_KEY}."))


def parse_overrides(arguments: Sequence[str]) -> dict[str, object]:
    """key -> value of the overrides among ``arguments``; what Hydra cannot parse is left to Hydra."""
    parser = OverridesParser.create()
    overrides = {}
    for argument in arguments:
        try:
            (override,) = parser.parse_overrides([argument])
        except HydraException:
            continue
        overrides[override.key_or_group] = override.value()
    return overrides


def first_override(arguments: Sequence[str]) -> int:
    """Where overrides begin: Hydra wants them in one run, after or before its flags, never on both sides."""
    for index, argument in enumerate(arguments):
        is_flag_value = index > 0 and arguments[index - 1].startswith("-")
        if "=" in argument and not argument.startswith("-") and not is_flag_value:
            return index
    return len(arguments)


def platform_overrides(arguments: Sequence[str]) -> list[str]:
    """``platform=cpu`` where the user names no platform and there is no CUDA device; sets verl's environment.

    verl reads VERL_PLATFORM as it is imported, and Ray's raylet its niceness as it starts, so both must stand
    in this process's environment before either does.
    """
    import torch  # heavy, and needed here only

    chosen = parse_overrides(arguments).get("platform")
    added = [] if chosen or torch.cuda.is_available() else ["platform=cpu"]
    if added:
        print("treecp: no CUDA device, running with platform=cpu", file=sys.stderr)
    if added or chosen == "cpu":
        os.environ["VERL_PLATFORM"] = "cpu"
        os.environ.setdefault("RAY_worker_niceness", "0")  # workers at nice 15 starve on a busy CPU
    return added


# ---------------------------------------------------------------------------------------------- options


@dataclass(frozen=True)
class Rule:
    """A value of one key that the treecp engine does not run."""

    key: str
    is_refused: Callable[[Any], bool]
    why: str
    """Reason and next move."""


_ULYSSES = "treecp does not run under Ulysses; set it to 1"
_BUCKETS = "packed trees are not padded to buckets; set it to False"
_QAT = "quantisation-aware training is not supported; set it to False"
_ROUTES = "router replay records a route for each row, a shared prompt has one for all"

RULES = (
    Rule(f"{_ACTOR}.ulysses_sequence_parallel_size", lambda v: v > 1, _ULYSSES),
    Rule(f"{_FSDP}.ulysses_sequence_parallel_size", lambda v: v > 1, _ULYSSES),
    Rule(f"{_MODEL}.use_fused_kernels", bool, "treecp scores tokens in a head of its own; set it to False"),
    Rule(
        f"{_MODEL}.mtp.enable_train", bool, "multi-token prediction does not run over trees; set it to False"
    ),
    Rule(
        "actor_rollout_ref.rollout.temperature",
        lambda v: not 0 < float(v) < float("inf"),
        "log-probs are of logits / temperature; set it above 0 (validation has val_kwargs.temperature)",
    ),
    Rule(f"{_ACTOR}.use_prefix_grouper", bool, "treecp already computes each prompt once; set it to False"),
    Rule(f"{_ACTOR}.shuffle", bool, "it would tear groups apart; set it to False and data.shuffle to True"),
    Rule(f"{_ACTOR}.pad_to_length", bool, _BUCKETS),
    Rule(f"{_FSDP}.pad_to_length", bool, _BUCKETS),
    Rule(f"{_ACTOR}.qat.enable", bool, _QAT),
    Rule(f"{_FSDP}.qat.enable", bool, _QAT),
    Rule(
        f"{_FSDP}.mixed_precision.param_dtype",
        lambda v: str(v) in ("fp16", "float16", "half", "16"),
        "fp16 needs a loss scaler, which treecp does not run; use bf16 or fp32",
    ),
    Rule(
        f"{_FSDP}.router_replay.mode",
        lambda v: v != "disabled",
        f"{_ROUTES}; set it to disabled",
    ),
    Rule(
        "actor_rollout_ref.rollout.enable_rollout_routing_replay",
        bool,
        f"{_ROUTES}; set it to False",
    ),
    Rule(
        f"{_ACTOR}.policy_loss.loss_mode",
        lambda v: v in ("clip_cov", "kl_cov", "geo_mean"),
        "it depends on how rows are cut into micro-batches, so it is no sum over rows; use another loss",
    ),
    Rule(
        f"{_ACTOR}.policy_loss.rollout_correction.rollout_is_batch_normalize",
        bool,
        "it normalises within a micro-batch, so the loss is no sum over rows; set it to False",
    ),
    Rule("distillation.enabled", bool, "it needs logits of every position; use trainer.backend=fsdp2"),
    Rule("trainer.use_v1", lambda v: not v, "treecp runs on verl's V1 trainer; set it to True"),
    Rule("critic.strategy", lambda v: v == "treecp", "a critic runs on verl's own engine; set it to fsdp2"),
)
"""What the treecp engine refuses. Options of verl's engine that only choose how the same numbers come about are
accepted and have no effect: use_remove_padding, use_torch_compile, entropy_from_logits_with_chunking,
entropy_checkpointing (treecp always packs, and always scores in chunks that recompute in backward)."""


def check_config(config: DictConfig) -> None:
    """Refuse, by name, what cannot run.

    Raises:
        ConfigError: the first such key.
    """
    _check_backend(config)
    _check_critic(config)
    actor = config.actor_rollout_ref.actor
    options = TreeCPOptions.from_mapping(OmegaConf.select(config, OPTIONS_KEY))
    if actor.strategy != "treecp":
        if OmegaConf.select(config, f"{_ACTOR}.worker_cls"):
            raise ConfigError(f"{_ACTOR}.worker_cls={actor.worker_cls} needs trainer.backend=treecp")
        return
    for refusal in refusals(config):
        raise ConfigError(refusal)
    if options.profile is not None:
        load_profile(options.profile)
    options.require_domain_divides(int(config.trainer.n_gpus_per_node) * int(config.trainer.nnodes))
    check_worker_name(OmegaConf.select(config, f"{_ACTOR}.worker_cls") or DEFAULT_WORKER)


def refusals(config: DictConfig) -> Iterator[str]:
    """One line for each option that the treecp engine does not run."""
    for rule in RULES:
        value = OmegaConf.select(config, rule.key)
        if value is not None and rule.is_refused(value):
            yield f"{rule.key}={value}: {rule.why}"
    actor = config.actor_rollout_ref.actor
    if actor.loss_agg_mode == "seq-mean-token-sum-norm" and actor.loss_scale_factor is None:
        yield (
            f"{_ACTOR}.loss_agg_mode=seq-mean-token-sum-norm without {_ACTOR}.loss_scale_factor divides by the "
            "width of each micro-batch; set loss_scale_factor, e.g. to data.max_response_length"
        )


def engine_refusals(engine_config: Any, model_config: Any) -> Iterator[str]:
    """The same rules for an engine that is built without a launcher: its own part of the config."""
    for rule in RULES:
        for prefix, root in ((_FSDP, engine_config), (_MODEL, model_config)):
            if rule.key.startswith(f"{prefix}."):
                value = _walk(root, rule.key.removeprefix(f"{prefix}.").split("."))
                if value is not None and rule.is_refused(value):
                    yield f"{rule.key}={value}: {rule.why}"


def _walk(node: Any, names: list[str]) -> Any:
    for name in names:
        node = node.get(name, None) if node is not None else None
    return node


def check_worker_name(name: str) -> None:
    """Refuse a worker class that does not exist. That it is a worker is checked where it is loaded.

    Raises:
        ConfigError: no module or no attribute of that name.
    """
    module_name, _, class_name = str(name).rpartition(".")
    try:
        exists = class_name in dir(import_module(module_name))
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{_ACTOR}.worker_cls={name}: cannot import {module_name!r} ({error})") from error
    if not exists:
        raise ConfigError(
            f"{_ACTOR}.worker_cls={name}: {module_name} has no class {class_name}; "
            f"the default is {DEFAULT_WORKER}"
        )


def _check_backend(config: DictConfig) -> None:
    backend = OmegaConf.select(config, "trainer.backend")
    if backend is not None and backend not in BACKENDS:
        raise ConfigError(unknown_backend("trainer.backend", backend))
    strategy = config.actor_rollout_ref.actor.strategy
    if strategy not in BACKENDS:
        raise ConfigError(unknown_backend(f"{_ACTOR}.strategy", strategy))


def _check_critic(config: DictConfig) -> None:
    enabled = config.critic.enable
    wanted = enabled if enabled is not None else config.algorithm.adv_estimator == "gae"
    if wanted and config.trainer.device == "cpu":
        key = "critic.enable=True" if enabled else "algorithm.adv_estimator=gae"
        raise ConfigError(
            f"{key} needs a critic, and verl loads critics with flash-attention only, which the CPU does not run; "
            "use algorithm.adv_estimator=grpo, or platform=cuda"
        )


def unknown_backend(key: str, value: object) -> str:
    """The line that lists the backends."""
    hint = " (FSDP1 is not supported)" if value == "fsdp" else ""
    return f"{key}={value} is not a backend{hint}; valid values: {', '.join(BACKENDS)}"


# -------------------------------------------------------------------------------------------- resources

CPUS_PER_SLOT = 3
"""CPUs of one placement bundle of verl's resource pool (its ``max_colocate_count``)."""


@dataclass(frozen=True)
class Demand:
    """What a run asks of Ray."""

    slots: int
    """Training processes, one accelerator (on CPU: one logical "GPU") each."""
    cpus: int


def demand_of(config: DictConfig) -> Demand:
    """Slots and CPUs that must be free when the run starts."""
    pools = [config.trainer]
    if config.reward.reward_model.enable_resource_pool:
        pools.append(config.reward.reward_model)
    slots = sum(int(pool.n_gpus_per_node) * int(pool.nnodes) for pool in pools)
    storage_units = int(config.transfer_queue.backend.SimpleStorage.num_data_storage_units)
    # Beside the slots: the queue's controller and storage, and one CPU through which other actors are placed.
    return Demand(slots=slots, cpus=CPUS_PER_SLOT * slots + storage_units + 2)


def check_resources(config: DictConfig) -> None:
    """Refuse a config that a Ray started by this run could never place; verl would wait without a word.

    A Ray that is already running is asked once the trainer is connected (``TreeCPTrainer``).

    Raises:
        ConfigError: with both numbers and the key to change.
    """
    ray_init = config.ray_kwargs.ray_init
    if ray_init.get("address") or os.environ.get("RAY_ADDRESS") or config.trainer.nnodes > 1:
        return
    demand = demand_of(config)
    cpus = ray_init.get("num_cpus") or os.cpu_count() or 1
    if cpus < demand.cpus:
        raise ConfigError(too_few("CPUs", cpus, demand.cpus, "ray_kwargs.ray_init.num_cpus", demand))
    slots = ray_init.get("num_gpus")
    if slots is not None and slots < demand.slots:
        raise ConfigError(too_few("slots (GPU)", slots, demand.slots, "ray_kwargs.ray_init.num_gpus", demand))


def too_few(what: str, have: float, need: int, key: str, demand: Demand) -> str:
    """The line that says what Ray lacks."""
    return (
        f"Ray has {have:g} {what}, this run needs {need} ({demand.slots} training processes x {CPUS_PER_SLOT} "
        f"CPUs, and the data queue); raise {key} (the number may exceed the machine's: it is logical) "
        "or lower trainer.n_gpus_per_node"
    )
