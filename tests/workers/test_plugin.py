"""The plugin as verl meets it: in fresh processes, by the entry point, by the environment variable."""

import os
import subprocess
import sys

import pytest


def _run(code: str, **environment: str) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith("VERL_")} | environment
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


PLATFORM = """
import verl
from verl.utils import device
from verl.plugin.platform import PlatformRegistry
import sys
print(device.get_device_name(), device.get_resource_name(), device.get_device_id(), device.get_nccl_backend())
assert "verl.workers.rollout.replica" not in sys.modules, "the plugin must stay light"
assert "treecp_rl.workers.rollout" not in sys.modules
"""

ROLLOUT = """
import {first}
from verl.workers.rollout import replica, base
from treecp_rl.workers import plugin
plugin.register(); plugin.register()
assert plugin.is_registered()
print(base.get_rollout_class("treecp_cpu").__name__, replica.get_rollout_replica_class("treecp_cpu").__name__)
"""


def test_entry_point_gives_the_cpu_platform_where_it_is_asked_for():
    assert _run(PLATFORM, VERL_PLATFORM="cpu").split() == ["cpu", "GPU", "cpu", "gloo"]


def test_the_cpu_platform_is_never_detected():
    """Without VERL_PLATFORM=cpu verl keeps its own choice (it falls back to cuda where it finds nothing)."""
    code = "from verl.utils import device; print(device.get_device_name())"
    assert _run(code).split() != ["cpu"]


@pytest.mark.parametrize(
    ("first", "environment"),
    [
        ("verl.workers.rollout.replica", {}),
        ("treecp_rl.workers.plugin", {}),
        (
            "verl",
            {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": "treecp_rl.workers.plugin"},
        ),
    ],
)
def test_rollout_name_resolves_whatever_is_imported_first(first, environment):
    out = _run(ROLLOUT.format(first=first), VERL_PLATFORM="cpu", **environment)
    assert out.split()[-2:] == ["CPURollout", "CPUReplica"]


def test_device_module_answers_what_verl_asks():
    code = """
import torch
from verl.utils.device import get_torch_device
from verl.utils.memory_utils import aggressive_empty_cache
from verl.utils.profiler.performance import _get_current_mem_info
from verl.utils.flops_counter import get_device_flops
device = get_torch_device()
assert 0 < device.memory_allocated() <= device.max_memory_allocated() < device.mem_get_info()[1]
aggressive_empty_cache(force_sync=True)
print(_get_current_mem_info(), get_device_flops())
"""
    assert _run(code, VERL_PLATFORM="cpu")


def test_gloo_group_is_made_before_verl_can_name_one_device_twice():
    code = """
from verl.utils.distributed import initialize_global_process_group_ray
import torch
initialize_global_process_group_ray()
print(torch.distributed.get_backend(), torch.distributed.get_world_size())
"""
    rendezvous = {"RANK": "0", "WORLD_SIZE": "1", "DIST_INIT_METHOD": "tcp://127.0.0.1:0"}
    assert _run(code, VERL_PLATFORM="cpu", **rendezvous).split() == ["gloo", "1"]
