"""Hydra config -> verl's actor and engine dataclasses, with the options of treecp in them."""

from dataclasses import dataclass, field
from typing import Any

from verl.workers.config import FSDPActorConfig, FSDPEngineConfig

from treecp_rl.errors import ConfigError
from treecp_rl.workers.launch import BACKENDS, unknown_backend
from treecp_rl.workers.options import TreeCPOptions

__all__ = ["TreeCPActorConfig", "TreeCPEngineConfig", "TreeCPOptions"]


@dataclass
class TreeCPEngineConfig(FSDPEngineConfig):
    """verl's FSDP options, and ours, as the engine receives them."""

    _mutable_fields = FSDPEngineConfig._mutable_fields | {"treecp"}

    treecp: TreeCPOptions = field(default_factory=TreeCPOptions)


@dataclass
class TreeCPActorConfig(FSDPActorConfig):
    """verl's FSDP actor (or reference) with ``strategy: treecp`` or ``fsdp2``."""

    _mutable_fields = FSDPActorConfig._mutable_fields | {"treecp"}

    strategy: str = "treecp"
    worker_cls: str | None = None
    """Class of the training actors; None: the strategy's own."""
    treecp: Any = None
    """Mapping or TreeCPOptions."""
    fsdp_config: TreeCPEngineConfig = field(default_factory=TreeCPEngineConfig)

    def __post_init__(self) -> None:
        if self.strategy not in BACKENDS:
            raise ConfigError(unknown_backend("actor_rollout_ref.actor.strategy", self.strategy))
        super().__post_init__()
        self.treecp = TreeCPOptions.from_mapping(self.treecp)
        self.engine.treecp = self.treecp
