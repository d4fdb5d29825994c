"""The dense float64 reference of all tests; a product module, so that `treecp-rl verify` uses the same."""

from treecp_rl.verify.oracle import *  # noqa: F403
