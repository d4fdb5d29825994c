"""The CPU rollout `treecp_cpu`."""


class CPUReplica:
    pass


class CPURollout:
    pass
