"""Every error treecp_rl raises on purpose. Each message names the thing, the number and the next move.

TreeCPError
├── ConfigError          an option or a combination of options that cannot run
├── BatchError           a batch that lacks a key, or whose rows contradict each other
│   └── RowTooLong       one row does not fit the token budget
├── PlanError            a plan that is wrong, or that ranks do not agree on
├── RankLost             a rank that ended in mid-step
└── UnsupportedModel     a model (or an option of it) that cannot be replayed exactly
"""


class TreeCPError(Exception):
    """Base of all errors below; catching it catches every refusal of this package."""


class ConfigError(TreeCPError, ValueError):
    """An option, or a combination of options, that cannot run."""


class BatchError(TreeCPError, ValueError):
    """A batch that lacks a key, or whose rows contradict each other."""


class RowTooLong(BatchError):
    """One row alone exceeds the token budget of a pass."""


class PlanError(TreeCPError):
    """A plan that is wrong, or that the ranks do not agree on."""


class UnsupportedModel(TreeCPError):
    """A model, or an option of it, that this engine cannot run exactly."""


class RankLost(TreeCPError):
    """A rank ended in mid-step, so that the others' collectives cannot finish."""
