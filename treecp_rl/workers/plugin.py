"""``import verl`` -> entry point ``verl.plugins`` -> this module -> names that verl can look up.

Registered at once:  platform ``cpu`` (used only where VERL_PLATFORM=cpu).
Registered later:    rollout ``treecp_cpu``, engine ``treecp`` and trainer ``treecp_sync``, each once verl's own
                     registry has been imported.

verl loads the entry point in the middle of its own import, in every process, and does not call what it
loads, so importing this module registers, and this module imports nothing heavy. It may be loaded twice
(entry point and VERL_USE_EXTERNAL_MODULES=treecp_rl.workers.plugin); the second time changes nothing. verl
reports a plugin that fails to load at DEBUG level only: ``is_registered`` is what a start-up check asks.
"""

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType

from verl.plugin.platform import PlatformRegistry

from treecp_rl.workers.platform import PLATFORM_NAME, PlatformCPU

ROLLOUT_NAME = "treecp_cpu"


def register() -> None:
    """Put this package's names into verl's registries. Safe to call again."""
    if PlatformRegistry.get(PLATFORM_NAME) is not PlatformCPU:
        PlatformRegistry.register(platform=PLATFORM_NAME)(PlatformCPU)
    after_import("verl.workers.rollout.base", _register_rollout_adapter)
    after_import("verl.workers.rollout.replica", _register_rollout_replica)
    after_import("verl.workers.engine", lambda _: importlib.import_module("treecp_rl.workers.engine"))
    after_import("verl.trainer.ppo.v1", lambda _: importlib.import_module("treecp_rl.workers.trainer"))


def is_registered() -> bool:
    """Whether verl in this process knows our platform and will know our rollout."""
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY

    return PlatformRegistry.get(PLATFORM_NAME) is PlatformCPU and (ROLLOUT_NAME, "async") in _ROLLOUT_REGISTRY


def after_import(module_name: str, callback: Callable[[ModuleType], None]) -> None:
    """Call ``callback(module)`` once ``module_name`` is imported: now, or right after its first import."""
    module = sys.modules.get(module_name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        callback(module)
    elif module_name not in _AfterImport.pending:
        _AfterImport.pending[module_name] = callback
        if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
            sys.meta_path.insert(0, _AfterImport())


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds a pending module through the other finders and runs its callback once the module is executed."""

    pending: dict[str, Callable[[ModuleType], None]] = {}  # noqa: RUF012  (one table a process, on purpose)

    def find_spec(self, fullname, path, target=None):
        callback = self.pending.pop(fullname, None)  # before the search below, which comes by here again
        if callback is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_then_call(module: ModuleType) -> None:
            execute(module)
            callback(module)

        spec.loader.exec_module = execute_then_call  # type: ignore[method-assign]
        return spec


def _register_rollout_adapter(base: ModuleType) -> None:
    base._ROLLOUT_REGISTRY[(ROLLOUT_NAME, "async")] = "treecp_rl.workers.rollout.CPURollout"


def _register_rollout_replica(replica: ModuleType) -> None:
    replica.RolloutReplicaRegistry.register(ROLLOUT_NAME, _load_replica)


def _load_replica():
    from treecp_rl.workers.rollout import CPUReplica

    return CPUReplica


register()
