"""Hydra mapping -> TreeCPOptions. Imports neither verl nor torch: a wrong option is refused at once."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args

from treecp_rl.errors import ConfigError
from treecp_rl.planner.batch import Mode

OPTIONS_KEY = "actor_rollout_ref.actor.treecp"
SHARES = ("prompt", "prefix")
MODES = get_args(Mode)


@dataclass(frozen=True)
class TreeCPOptions:
    """Options of the treecp engine, ``actor_rollout_ref.actor.treecp`` in a config."""

    share: str = "prompt"
    """What is computed once: "prompt", or "prefix" for what responses have in common as well."""
    tokens_per_rank: int | None = None
    """Most packed tokens of one forward, a rank (on average over a domain); None: derived from verl's micro-batch
    options."""
    head_chunk_tokens: int = 1024
    """Positions whose logits exist at one time."""
    domain_size: int = 1
    """Ranks that share each pass (context parallelism); divides the number of training processes."""
    mode: Mode = "auto"
    """Form and kind of plan: "auto", or one forced on every tree (``planner.batch.Mode``)."""
    profile: str | None = None
    """What ``auto`` plans with: a shipped profile's name, or a file of ``treecp-rl calibrate``; None: an estimate of
    the model."""
    streaming: bool = True
    """Whether one tree's moves travel under another's tiles."""
    resend: bool = False
    """Whether backward has moved K/V and queries sent again instead of keeping them."""
    save_attention_bytes: int = 0
    """Attention outputs kept through activation checkpointing, most bytes a rank and pass."""
    offload_leaves: bool = False
    """Whether a split tree's prompt K/V wait in host memory between its passes."""
    attention_bytes_per_rank: int | None = None
    """What attention may hold on a rank in a pass; a plan that needs more is refused. None: not looked at."""

    def __post_init__(self) -> None:
        if self.share not in SHARES:
            raise ConfigError(f"{OPTIONS_KEY}.share={self.share!r} is not one of {', '.join(SHARES)}")
        if self.mode not in MODES:
            raise ConfigError(f"{OPTIONS_KEY}.mode={self.mode!r} is not one of {', '.join(MODES)}")
        if self.profile is not None and not isinstance(self.profile, str):
            raise ConfigError(f"{OPTIONS_KEY}.profile={self.profile!r} must be a name or a file")
        for name in ("tokens_per_rank", "head_chunk_tokens", "domain_size", "attention_bytes_per_rank"):
            value = getattr(self, name)
            allowed = value is None and name in ("tokens_per_rank", "attention_bytes_per_rank")
            if not allowed and not _is_whole_number(value, at_least=1):
                raise ConfigError(f"{OPTIONS_KEY}.{name}={value!r} must be a positive whole number")
        if not _is_whole_number(self.save_attention_bytes, at_least=0):
            raise ConfigError(
                f"{OPTIONS_KEY}.save_attention_bytes={self.save_attention_bytes!r} must be a whole number of bytes, "
                "0 to save nothing"
            )
        for name in ("streaming", "resend", "offload_leaves"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{OPTIONS_KEY}.{name}={getattr(self, name)!r} must be true or false")

    def require_domain_divides(self, world_size: int) -> None:
        """Refuse a domain that does not divide the training processes.

        Raises:
            ConfigError: with the sizes that do.
        """
        if world_size % self.domain_size:
            fitting = [str(size) for size in range(1, world_size + 1) if world_size % size == 0]
            raise ConfigError(
                f"{OPTIONS_KEY}.domain_size={self.domain_size} does not divide {world_size} training processes; "
                f"choose one of {', '.join(fitting)}"
            )

    @classmethod
    def from_mapping(cls, options: "Mapping[str, Any] | TreeCPOptions | None") -> "TreeCPOptions":
        """Build from a config node.

        Raises:
            ConfigError: a key that does not exist, or a value that cannot be.
        """
        if isinstance(options, TreeCPOptions):
            return options
        if options is not None and not isinstance(options, Mapping):
            valid = ", ".join(field.name for field in fields(cls))
            raise ConfigError(f"{OPTIONS_KEY}={options!r} must be a mapping with the keys {valid}")
        for key in options or ():
            refuse_unknown_option(str(key))
        return cls(**dict(options or {}))


def _is_whole_number(value: object, *, at_least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def refuse_unknown_option(key: str) -> None:
    """Raise ConfigError, with the valid keys, unless ``key`` is an option."""
    valid = [field.name for field in fields(TreeCPOptions)]
    if key not in valid:
        raise ConfigError(f"{OPTIONS_KEY}.{key} does not exist; valid keys: {', '.join(valid)}")
