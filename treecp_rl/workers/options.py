"""Hydra mapping -> TreeCPOptions. Imports neither verl nor torch: a wrong option is refused at once."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from treecp_rl.errors import ConfigError

OPTIONS_KEY = "actor_rollout_ref.actor.treecp"
SHARES = ("prompt", "prefix")


@dataclass(frozen=True)
class TreeCPOptions:
    """Options of the treecp engine, ``actor_rollout_ref.actor.treecp`` in a config."""

    share: str = "prompt"
    """What is computed once: "prompt", or "prefix" for what responses have in common as well."""
    tokens_per_rank: int | None = None
    """Most packed tokens of one forward on one rank; None: derived from verl's micro-batch options."""
    head_chunk_tokens: int = 1024
    """Positions whose logits exist at one time."""

    def __post_init__(self) -> None:
        if self.share not in SHARES:
            raise ConfigError(f"{OPTIONS_KEY}.share={self.share!r} is not one of {', '.join(SHARES)}")
        for name in ("tokens_per_rank", "head_chunk_tokens"):
            value = getattr(self, name)
            allowed = value is None and name == "tokens_per_rank"
            if not allowed and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"{OPTIONS_KEY}.{name}={value!r} must be a positive whole number")

    @classmethod
    def from_mapping(cls, options: "Mapping[str, Any] | TreeCPOptions | None") -> "TreeCPOptions":
        """Build from a config node.

        Raises:
            ConfigError: a key that does not exist, or a value that cannot be.
        """
        if isinstance(options, TreeCPOptions):
            return options
        for key in options or ():
            refuse_unknown_option(str(key))
        return cls(**dict(options or {}))


def refuse_unknown_option(key: str) -> None:
    """Raise ConfigError, with the valid keys, unless ``key`` is an option."""
    valid = [field.name for field in fields(TreeCPOptions)]
    if key not in valid:
        raise ConfigError(f"{OPTIONS_KEY}.{key} does not exist; valid keys: {', '.join(valid)}")
