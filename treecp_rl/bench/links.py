"""Ranks that exchange bytes -> latency and seconds a byte inside a node and between nodes, by transport.

By itself it starts two processes on this machine. Under torchrun the launched ranks are measured: the ranks of a node
among one another, all nodes at once; then those that have the same place on every node, all places at once, so that
the ranks of a node share its way out as they do in training.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from treecp_rl.bench.fit import Floats, fit_terms
from treecp_rl.collectives import Traffic, exchange, max_over_ranks
from treecp_rl.errors import ConfigError
from treecp_rl.planner.profile import Link
from treecp_rl.verify.ranks import run_on_ranks

TRANSPORTS = ("all-to-all", "point-to-point")
LINK_BYTES = (1 << 10, 1 << 16, 1 << 20, 1 << 22)
"""That a rank sends in an exchange, evenly to the others."""
LINK_REPEATS = 10
LINK_TIMEOUT = timedelta(seconds=300)


@dataclass(frozen=True)
class Launch:
    """This process among those that torchrun started."""

    rank: int
    world_size: int
    ranks_per_node: int

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.ranks_per_node

    @property
    def of_nodes(self) -> list[list[int]]:
        """Ranks of each node; none where a node has one."""
        firsts = range(0, self.world_size, self.ranks_per_node)
        nodes = [list(range(first, first + self.ranks_per_node)) for first in firsts]
        return nodes if self.ranks_per_node > 1 else []

    @property
    def of_places(self) -> list[list[int]]:
        """Ranks with the same place on every node; none where there is one node."""
        firsts = range(self.ranks_per_node)
        places = [list(range(first, self.world_size, self.ranks_per_node)) for first in firsts]
        return places if self.num_nodes > 1 else []


@dataclass(frozen=True)
class MeasuredLinks:
    """What exchanges take by themselves, by transport; empty where there was nothing to measure."""

    node: Mapping[str, Link]
    cluster: Mapping[str, Link]
    """Between nodes."""
    backend: str
    world_size: int
    ranks_per_node: int | None
    """Of the launch; None: two processes of this machine stood in."""

    @property
    def by_name(self) -> dict[str, Link]:
        return {**self.node, **{f"{name} between nodes": link for name, link in self.cluster.items()}}

    @property
    def source(self) -> str:
        """For a profile."""
        if self.ranks_per_node is None:
            return f"link: two processes of one node over {self.backend}; nothing was measured between nodes"
        nodes = self.world_size // self.ranks_per_node
        return f"link: {nodes} nodes of {self.ranks_per_node} ranks over {self.backend}"


def launched() -> Launch | None:
    """What torchrun says of this process; None: it was started by itself, or as the only rank.

    Raises:
        ConfigError: nodes of different sizes, or a launcher that does not say how many ranks a node has.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        return None
    missing = [
        name for name in ("RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ
    ]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE is {world_size}, but {', '.join(missing)} is not set; launch the ranks with torchrun, or "
            "unset WORLD_SIZE to measure this machine alone"
        )
    ranks_per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    if world_size % ranks_per_node:
        raise ConfigError(
            f"{world_size} ranks of which this node has {ranks_per_node}; launch equally many on every node"
        )
    return Launch(int(os.environ["RANK"]), world_size, ranks_per_node)


def measure_links(launch: Launch | None, threads: int) -> MeasuredLinks:
    """Latency and seconds a byte of exchanges; every rank of a launch enters, all get the same."""
    if launch is None:
        backend = _backend(2)
        timeout_seconds = LINK_TIMEOUT.total_seconds()
        (seconds, _), _ = run_on_ranks(
            _local_rank, 2, timeout_seconds=timeout_seconds, threads=threads, backend=backend
        )
        return MeasuredLinks(_fitted(seconds), {}, backend, 2, None)
    node, cluster = _launched_seconds(launch, threads)
    return MeasuredLinks(
        {} if node is None else _fitted(node),
        {} if cluster is None else _fitted(cluster),
        _backend(launch.ranks_per_node),
        launch.world_size,
        launch.ranks_per_node,
    )


def _backend(ranks_per_node: int) -> str:
    return "nccl" if torch.cuda.device_count() >= ranks_per_node else "gloo"


def _device(backend: str, launch: Launch) -> torch.device:
    if backend == "gloo":
        return torch.device("cpu")
    device = torch.device("cuda", launch.rank % launch.ranks_per_node)
    torch.cuda.set_device(device)
    return device


def _local_rank(rank: int, world_size: int) -> tuple[Floats | None, Floats | None]:
    """One of the two processes that stand in for a launch."""
    return _seconds(Launch(rank, world_size, ranks_per_node=world_size))


def _launched_seconds(launch: Launch, threads: int) -> tuple[Floats | None, Floats | None]:
    """Joins the ranks of the launch, measures, and leaves them."""
    torch.set_num_threads(threads)
    dist.init_process_group(
        _backend(launch.ranks_per_node),
        init_method="env://",
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=LINK_TIMEOUT,
    )
    try:
        return _seconds(launch)
    finally:
        dist.destroy_process_group()


def _seconds(launch: Launch) -> tuple[Floats | None, Floats | None]:
    """Of exchanges inside nodes and between them, as ``_measured``; all ranks have joined."""
    device = _device(_backend(launch.ranks_per_node), launch)
    return _measured(launch.of_nodes, device), _measured(launch.of_places, device)


def _measured(groups: Sequence[Sequence[int]], device: torch.device) -> Floats | None:
    """[transports, sizes] seconds of exchanges in all groups at once, of the slowest rank; None: no groups."""
    if not groups:
        return None
    group, _ = dist.new_subgroups_by_enumeration(list(map(list, groups)), timeout=LINK_TIMEOUT)
    assert group is not None, "groups hold every rank"
    medians = [
        [_exchange_seconds(size, group, device, is_sparse) for size in LINK_BYTES]
        for is_sparse in (False, True)
    ]
    slowest = max_over_ranks([round(1e9 * seconds) for one in medians for seconds in one], None)
    return 1e-9 * np.array(slowest, dtype=np.float64).reshape(len(TRANSPORTS), len(LINK_BYTES))


def _exchange_seconds(
    num_bytes: int, group: dist.ProcessGroup, device: torch.device, is_sparse: bool
) -> float:
    """Median seconds in which each rank sends so many bytes to the others, after two exchanges for warming up."""
    me, world = dist.get_rank(group), dist.get_world_size(group)
    each = num_bytes // (world - 1)
    sizes = [each if other != me else 0 for other in range(world)]
    runs = []
    for _ in range(2 + LINK_REPEATS):
        outgoing = [torch.zeros(count, dtype=torch.uint8, device=device) for count in sizes]
        dist.barrier()
        _synchronize(device)
        start = time.perf_counter()
        exchange(outgoing, sizes, group, Traffic(), is_sparse=is_sparse).wait()
        _synchronize(device)
        runs.append(time.perf_counter() - start)
    return statistics.median(runs[2:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _fitted(seconds: Floats) -> dict[str, Link]:
    features = np.array([[1.0, size] for size in LINK_BYTES])
    links = {}
    for name, of_transport in zip(TRANSPORTS, seconds, strict=True):
        latency, per_byte = fit_terms(features, of_transport)
        links[name] = Link(float(latency), float(max(per_byte, 1e-15)))
    return links
