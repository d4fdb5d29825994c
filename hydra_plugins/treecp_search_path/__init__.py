"""Puts treecp_rl's configs, and verl's behind them, on Hydra's search path in this environment.

So ``python -m verl.trainer.main_ppo model_engine=treecp`` finds the engine's configs after ``pip install``,
and a recipe may start from ``treecp_ppo`` without naming where verl's configs lie.
``hydra_plugins`` is a namespace package: it must not have an ``__init__.py`` of its own.
"""

from importlib.util import find_spec
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class TreeCPSearchPathPlugin(SearchPathPlugin):
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="treecp-rl", path="pkg://treecp_rl.configs")
        verl = find_spec("verl")  # found, not imported: other Hydra applications need not wait for verl
        for folder in verl.submodule_search_locations or () if verl else ():
            search_path.append(provider="verl", path=f"file://{Path(folder) / 'trainer' / 'config'}")
