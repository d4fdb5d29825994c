"""VERL_PLATFORM=cpu -> ``PlatformCPU`` -> every device question verl asks in this process.

verl has platforms for accelerators only and takes "nvidia" where it finds none. This one is chosen by the
environment variable alone, never by detection: on a GPU host a Ray actor without a GPU sees no device
either, and must not turn into a CPU trainer behind the user's back.
"""

import os
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform import PlatformBase

from treecp_rl.workers import cpu_device

PLATFORM_NAME = "cpu"


class PlatformCPU(PlatformBase):
    """The CPU as verl's accelerator: gloo for collectives, Ray's "GPU" resource as logical slots."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return cpu_device

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return os.environ.get("VERL_PLATFORM", "").strip().lower() == PLATFORM_NAME

    def current_device(self) -> torch.device:  # type: ignore[override]
        return cpu_device.current_device()

    def device_count(self) -> int:
        return cpu_device.device_count()

    def set_device(self, device_index: int) -> None:
        cpu_device.set_device(device_index)

    def synchronize(self, device_index: int | None = None) -> None:
        cpu_device.synchronize()

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """No allocator to set."""

    def empty_cache(self) -> None:
        cpu_device.empty_cache()

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        """``gloo``; in a worker of a Ray group the default process group is created here, once.

        verl asks for this name to build "cpu:gloo,<device>:<name>". With the CPU as the device that names one
        device type twice, which torch refuses, but verl builds a group only when none exists yet, and it asks
        for the name first. So the group it would have built is made here.
        """
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ and not torch.distributed.is_initialized():
            torch.distributed.init_process_group(
                backend="gloo",
                rank=int(os.environ["RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]),
                init_method=os.environ.get("DIST_INIT_METHOD"),
            )
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """The variable Ray sets for its "GPU" resource; harmless where there is no CUDA."""
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str):
        yield

    def profiler_start(self) -> None:
        """No device profiler."""

    def profiler_stop(self) -> None:
        """No device profiler."""

    def ray_resource_name(self) -> str:
        """``GPU``: verl counts accelerators only, so ``ray.init(num_gpus=N)`` declares N logical slots."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        """False sends verl's weight transfer through shared memory."""
        return False

    def cudart(self) -> Any:
        return None
