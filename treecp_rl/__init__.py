"""treecp_rl: a veRL trainer backend that computes each GRPO prompt once.

rollout rows -> replay trees -> plan -> passes on every rank -> verl's own loss and optimizer.
"""

from treecp_rl.errors import (
    BatchError,
    ConfigError,
    PlanError,
    RowTooLong,
    TreeCPError,
    UnsupportedModel,
)

__version__ = "0.1.0"

__all__ = [
    "BatchError",
    "ConfigError",
    "PlanError",
    "RowTooLong",
    "TreeCPError",
    "UnsupportedModel",
    "__version__",
]
