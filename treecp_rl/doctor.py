"""installation + Hydra overrides -> findings, each with its mend. What `treecp-rl doctor` prints.

verl reports a plugin that fails to load at DEBUG level and goes on without it; a placement group that does
not fit waits without a word. Here such things are asked for directly: the plugin's entry point is imported
in this process and in a Ray worker, and what a config demands is set against what Ray has.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from treecp_rl.errors import TreeCPError

DISTRIBUTION = "treecp-rl"
PLUGIN_GROUP = "verl.plugins"
PLUGIN_NAME = "treecp"
OPTIONAL = ("vllm", "flash-attn", "peft", "prefix-grouper", "reasoning-gym", "matplotlib")
_SUPPORTED_PYTHON = ">=3.10,<3.13"
# A loaded machine may need minutes for what takes 20 s on an idle one; a fault must not be a guess.
_RAY_TASK_SECONDS = 90.0
# Below this, Ray's object store moves from shared memory to disk.
_SHARED_MEMORY_BYTES = 512 * 2**20
_DISK_BYTES = 2 * 2**30

Status = Literal["ok", "note", "fault"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    check: str
    status: Status
    detail: str
    mend: str | None = None
    """The exact next move; every fault has one."""


@dataclass(frozen=True)
class Report:
    """All findings, in the order they were made."""

    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        return not any(finding.status == "fault" for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        return {"healthy": self.healthy, "findings": [asdict(finding) for finding in self.findings]}


def examine(overrides: Sequence[str] = (), *, start_ray: bool = True) -> Report:
    """Look at everything; a check that itself fails is a fault, and the others go on."""
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("python", _python),
        ("packages", _packages),
        ("devices", _devices),
        ("plugin", _plugin),
        ("attention", _attention),
        ("storage", _storage),
        ("ports", _ports),
        ("config", lambda: _config(overrides)),
    ]
    if start_ray:
        checks.append(("ray", _ray))
    findings: list[Finding] = []
    for name, check in checks:
        try:
            findings.extend(check())
        except Exception as error:  # a broken installation breaks anywhere; say where, go on
            findings.append(Finding(name, "fault", last_line(error), _mend_for_exception(error)))
    return Report(tuple(findings))


def render(report: Report) -> str:
    marks = {"ok": "ok   ", "note": "note ", "fault": "FAULT"}
    width = max(len(finding.check) for finding in report.findings)
    lines = []
    for finding in report.findings:
        lines.append(f"{marks[finding.status]} {finding.check:<{width}}  {finding.detail}")
        if finding.mend:
            lines.append(f"      {'':<{width}}  -> {finding.mend}")
    faults = sum(finding.status == "fault" for finding in report.findings)
    lines.append("no faults" if not faults else f"{faults} fault(s)")
    return "\n".join(lines)


def last_line(error: BaseException) -> str:
    return traceback.format_exception_only(error)[-1].strip()


# ------------------------------------------------------------------------------------------ versions


def _python() -> Iterator[Finding]:
    version = platform.python_version()
    if version in SpecifierSet(_SUPPORTED_PYTHON):
        yield Finding("python", "ok", f"{version} ({sys.executable})")
    else:
        yield Finding("python", "fault", f"{version}; verl needs {_SUPPORTED_PYTHON}", "use Python 3.11")


def _packages() -> Iterator[Finding]:
    """Installed versions against this package's own requirements; optional packages are named either way."""
    for line in importlib.metadata.requires(DISTRIBUTION) or []:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield package_finding(requirement)
    for name in OPTIONAL:
        version = _version(name)
        yield (
            Finding(f"package {name}", "ok", version)
            if version
            else Finding(f"package {name}", "note", "not installed; optional")
        )
    yield from _broken_flash_attention()


def package_finding(requirement: Requirement) -> Finding:
    """One required package: installed, and in the range that was tested."""
    check = f"package {requirement.name}"
    wanted = str(requirement.specifier) or "any version"
    mend = f'pip install "{requirement.name}{requirement.specifier}"'
    version = _version(requirement.name)
    if version is None:
        return Finding(check, "fault", f"not installed; {wanted} is needed", mend)
    if not requirement.specifier.contains(version, prereleases=True):
        return Finding(check, "fault", f"{version}; {wanted} is needed", mend)
    return Finding(check, "ok", version)


def _broken_flash_attention() -> Iterator[Finding]:
    """flash-attn is compiled against one torch; a mismatch shows only on import."""
    if _version("flash-attn") is None:
        return
    try:
        importlib.import_module("flash_attn")
    except Exception as error:
        yield Finding(
            "package flash-attn",
            "fault",
            f"installed but cannot be imported: {last_line(error)}",
            "pip uninstall flash-attn (treecp does not need it), or rebuild it for this torch: "
            "pip install --no-build-isolation --no-cache-dir --force-reinstall --no-deps flash-attn",
        )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


# ------------------------------------------------------------------------------------------- devices


def _devices() -> Iterator[Finding]:
    import torch

    chosen = os.environ.get("VERL_PLATFORM")
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        yield Finding("devices", "ok", f"{len(names)} x {names[0]}, torch for CUDA {torch.version.cuda}")
        if chosen == "cpu":
            yield Finding(
                "VERL_PLATFORM", "note", "cpu, though there is a GPU", "unset VERL_PLATFORM to train on it"
            )
    else:
        setting = f"VERL_PLATFORM={chosen}" if chosen else "VERL_PLATFORM is unset; treecp_rl.train sets it"
        yield Finding("devices", "ok", f"no CUDA: CPU with {os.cpu_count()} cores and gloo ({setting})")
        if chosen not in (None, "", "cpu"):
            yield Finding(
                "VERL_PLATFORM",
                "fault",
                f"{chosen}, but torch {torch.__version__} finds no such device",
                "unset VERL_PLATFORM, or install torch for your accelerator",
            )
    yield from visible_device_findings(os.environ, torch.cuda.device_count())


def visible_device_findings(environment: dict[str, str] | os._Environ[str], count: int) -> Iterator[Finding]:
    """CUDA_, HIP_ and ROCR_VISIBLE_DEVICES must agree; verl refuses workers in which they do not."""
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    given = {name: environment[name] for name in names if name in environment}
    if len(set(given.values())) > 1:
        listed = ", ".join(f"{name}={value}" for name, value in given.items())
        yield Finding(
            "visible devices",
            "fault",
            f"{listed} contradict each other",
            f"unset {' '.join(list(given)[1:])}, and keep {next(iter(given))}",
        )
    cuda = [part for part in given.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    if len(cuda) > count > 0:
        yield Finding(
            "visible devices",
            "fault",
            f"CUDA_VISIBLE_DEVICES={','.join(cuda)} names {len(cuda)} devices, torch finds {count}",
            f"unset CUDA_VISIBLE_DEVICES, or set it to {','.join(map(str, range(count)))}",
        )


# -------------------------------------------------------------------------------------------- plugin


def _plugin() -> Iterator[Finding]:
    points = [p for p in importlib.metadata.entry_points(group=PLUGIN_GROUP) if p.name == PLUGIN_NAME]
    if not points:
        yield Finding(
            "plugin entry point",
            "fault",
            f"{PLUGIN_GROUP} has no entry {PLUGIN_NAME!r}: {DISTRIBUTION} is not installed in this environment",
            f"{sys.executable} -m pip install --no-deps --no-build-isolation -e PATH_TO_TREECP_RL",
        )
        return
    finding = load_finding(points[0])
    yield finding
    if finding.status == "ok":
        yield _registration_finding("plugin, this process", plugin_state(), sys.executable)


def load_finding(point: importlib.metadata.EntryPoint) -> Finding:
    """Import the entry point as verl does, without swallowing what it raises."""
    try:
        point.load()
    except Exception as error:
        return Finding(
            "plugin entry point",
            "fault",
            f"{point.value} cannot be loaded (verl hides this): {last_line(error)}",
            _mend_for_exception(error),
        )
    return Finding("plugin entry point", "ok", f"{PLUGIN_GROUP}: {point.name} = {point.value}")


def plugin_state() -> dict[str, Any]:
    """What verl knows of us in the process that calls this; also run inside a Ray worker."""
    importlib.import_module("verl")
    from treecp_rl.workers import plugin

    return {
        "registered": plugin.is_registered(),
        "policy": os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto"),
        "platform": os.environ.get("VERL_PLATFORM", ""),
        "python": platform.python_version(),
        "executable": sys.executable,
    }


def _registration_finding(check: str, state: dict[str, Any], executable: str) -> Finding:
    if not state["registered"]:
        return Finding(
            check,
            "fault",
            f"verl did not register treecp (VERL_USE_EXTERNAL_PLUGINS={state['policy']})",
            "unset VERL_USE_EXTERNAL_PLUGINS, or set it to auto",
        )
    if state["executable"] != executable:
        return Finding(
            check,
            "fault",
            f"runs {state['executable']}, the driver runs {executable}",
            "start Ray from the same environment as the driver",
        )
    return Finding(check, "ok", "treecp is registered with verl")


def _mend_for_exception(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"{sys.executable} -m pip install {error.name.split('.')[0].replace('_', '-')}"
    return f"{sys.executable} -m pip install --force-reinstall {DISTRIBUTION}, then run this again"


def _attention() -> Iterator[Finding]:
    import torch

    from treecp_rl.attention.kernels import choose_kernel

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for dtype in (torch.float32, torch.bfloat16):
        kernel = choose_kernel(device, dtype, "auto")
        name = str(dtype).removeprefix("torch.")
        yield Finding(f"attention {device.type} {name}", "ok", f"kernel {kernel.name!r}")


# ------------------------------------------------------------------------------------ machine and Ray


def _storage() -> Iterator[Finding]:
    for check, folder in (("temporary directory", tempfile.gettempdir()), ("working directory", os.getcwd())):
        yield directory_finding(check, Path(folder))
    shared = Path("/dev/shm")
    if shared.exists():
        free = shutil.disk_usage(shared).free
        if free < _SHARED_MEMORY_BYTES:
            yield Finding(
                "shared memory",
                "note",
                f"/dev/shm has {free / 2**20:.0f} MiB free; Ray's object store falls back to disk",
                "in a container: --shm-size=2g",
            )


def directory_finding(check: str, folder: Path) -> Finding:
    """Can a file be written there, or where its nearest existing parent is, and is there room."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.NamedTemporaryFile(dir=existing):
            pass
    except OSError as error:
        return Finding(
            check, "fault", f"{folder} cannot be written: {last_line(error)}", f"chmod u+w {existing}"
        )
    free = shutil.disk_usage(existing).free
    if free < _DISK_BYTES:
        detail = f"{folder} has {free / 2**30:.1f} GiB free; a checkpoint may not fit"
        return Finding(check, "note", detail, "free some disk space")
    return Finding(check, "ok", f"{folder} is writable, {free / 2**30:.0f} GiB free")


def _ports() -> Iterator[Finding]:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        yield Finding(
            "ports", "fault", f"no port can be opened on 127.0.0.1: {last_line(error)}", "ulimit -n 65536"
        )
        return
    dashboard = _is_open("127.0.0.1", 8265)
    taken = "; 8265 is taken, so another Ray's dashboard may be what you see there" if dashboard else ""
    yield Finding("ports", "note" if dashboard else "ok", f"loopback ports can be opened{taken}")


def _is_open(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex((host, port)) == 0


def _ray() -> Iterator[Finding]:
    """Start a Ray of our own (or join the one RAY_ADDRESS names) and look at verl from inside a worker."""
    # Read by the raylet as it starts; at Ray's own 15 a worker starves on a busy CPU.
    os.environ.setdefault("RAY_worker_niceness", "0")
    import ray

    address = os.environ.get("RAY_ADDRESS")
    own_folder = None if address else tempfile.mkdtemp(prefix="treecp-doctor-")
    environment = {"VERL_PLATFORM": "cpu"} if not _has_cuda() else {}
    settings: dict[str, Any] = (
        {"address": address}
        if address
        else {
            "address": "local",
            "num_cpus": 1,
            "num_gpus": 0,
            "include_dashboard": False,
            "_temp_dir": own_folder,
            "object_store_memory": 100 * 2**20,
        }
    )
    try:
        try:
            ray.init(
                log_to_driver=False,
                logging_level="ERROR",
                runtime_env={"env_vars": environment},
                **settings,
            )
        except Exception as error:
            yield Finding("ray", "fault", f"Ray does not start: {last_line(error)}", _ray_mend(address))
            return
        resources = ray.cluster_resources()
        where = f"cluster at {address}" if address else "a local Ray"
        yield Finding(
            "ray",
            "ok",
            f"{where}: {resources.get('CPU', 0):g} CPUs, {resources.get('GPU', 0):g} slots (GPU), "
            f"{resources.get('memory', 0) / 2**30:.0f} GiB",
        )
        state = ray.get(ray.remote(num_cpus=1)(plugin_state).remote(), timeout=_RAY_TASK_SECONDS)
        yield _registration_finding("plugin, Ray worker", state, sys.executable)
    except ray.exceptions.GetTimeoutError:
        yield Finding(
            "plugin, Ray worker",
            "fault",
            f"a task asking for 1 CPU did not answer within {_RAY_TASK_SECONDS:.0f} s",
            "look at `ray status`: are CPUs free, and are workers able to start?",
        )
    finally:
        ray.shutdown()
        if own_folder:
            shutil.rmtree(own_folder, ignore_errors=True)


def _ray_mend(address: str | None) -> str:
    if address:
        return f"check with `ray status --address {address}`, or unset RAY_ADDRESS to start a local Ray"
    return (
        f"run again when the machine is idle (load average now {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores); "
        f"if it stays: look into {tempfile.gettempdir()}/ray/session_latest/logs/gcs_server.out"
    )


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


# -------------------------------------------------------------------------------------------- config


def _config(overrides: Sequence[str]) -> Iterator[Finding]:
    """What a run with these overrides asks for, against this machine's (or RAY_ADDRESS's) Ray."""
    if not overrides:
        yield Finding("config", "note", "no overrides given: `treecp-rl doctor trainer.backend=treecp ...`")
        return
    from omegaconf import OmegaConf

    from treecp_rl.train import check_overrides, platform_overrides
    from treecp_rl.workers import launch

    try:
        check_overrides(overrides)
        config = _compose([*platform_overrides(overrides), *overrides])
        launch.check_config(config)
    except TreeCPError as error:
        yield Finding("config", "fault", str(error), "change the override that is named here")
        return
    demand = launch.demand_of(config)
    backend = OmegaConf.select(config, "trainer.backend")
    yield Finding(
        "config",
        "ok",
        f"trainer.backend={backend}: asks Ray for {demand.cpus} CPUs, {demand.slots} slots (GPU)",
    )
    try:
        launch.check_resources(config)
        yield Finding("resources", "ok", "Ray, as this config starts it, has them")
    except TreeCPError as error:
        yield Finding("resources", "fault", str(error), "see the key named here")
    checkpoints = OmegaConf.select(config, "trainer.default_local_dir")
    if checkpoints:
        yield directory_finding("checkpoint directory", Path(str(checkpoints)).absolute())


def _compose(overrides: Sequence[str]) -> Any:
    from hydra import compose, initialize_config_module
    from hydra.errors import HydraException

    from treecp_rl.errors import ConfigError

    try:
        with initialize_config_module("treecp_rl.configs", version_base=None):
            return compose("treecp_ppo", overrides=list(overrides))
    except HydraException as error:
        raise ConfigError(" ".join(str(error).split())) from error
