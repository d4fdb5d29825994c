"""A collective that failed -> which rank is gone.

A transport says that a connection closed or a wait timed out, not whose fault it is. Every rank leaves its host and
process id in the job's store; when its collective fails it looks which processes of this host have ended, and which
other ranks do not report the failure too.
"""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch.distributed as dist

from treecp_rl.errors import RankLost

ROLL_CALL_SECONDS = 15.0
"""How long a failed rank waits for the others to report; their waits began at other times."""

_TRANSPORT_WORDS = ("gloo", "nccl", "connection closed", "connection reset", "timed out", "timeout")


@contextmanager
def naming_lost_ranks() -> Iterator[None]:
    """Turn a transport's failure inside into an error that names the ranks which are gone.

    Raises:
        RankLost: a collective failed.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    _register(dist.distributed_c10d._get_default_store())
    try:
        yield
    except RuntimeError as error:
        if not any(word in str(error).lower() for word in _TRANSPORT_WORDS):
            raise
        raise RankLost(
            f"rank {dist.get_rank()} of {dist.get_world_size()} stopped: {_call_roll()}. The step is lost; start "
            f"the job again, and it resumes from its last checkpoint. The transport said: {error}"
        ) from error


@cache
def _register(store: dist.Store) -> None:
    """Once a job: the process does not change between its steps."""
    store.set(f"treecp/process/{dist.get_rank()}", f"{socket.gethostname()} {os.getpid()}")


def _call_roll() -> str:
    """What the ranks that are gone have in common with this one's failure, in words."""
    others = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
    deadline = time.monotonic() + ROLL_CALL_SECONDS
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"treecp/stopped/{dist.get_rank()}", "1")
        while True:
            # Who has reported may have ended since, for the same reason.
            silent = [rank for rank in others if not store.check([f"treecp/stopped/{rank}"])]
            ended = [rank for rank in silent if _has_ended(store, rank)]
            if ended:
                return f"the process of rank {', '.join(map(str, ended))} has ended"
            if not silent:
                return "every rank is alive, but their collectives did not meet"
            if time.monotonic() > deadline:
                return f"rank {', '.join(map(str, silent))} did not answer within {ROLL_CALL_SECONDS:.0f} s"
            time.sleep(0.2)
    except RuntimeError:
        return "the job's store is gone, and with it the rank that held it (usually rank 0)"


def _has_ended(store: dist.Store, rank: int) -> bool:
    """Whether the process of a rank on this host no longer runs."""
    key = f"treecp/process/{rank}"
    if not store.check([key]):
        return False
    host, process_id = store.get(key).decode().split()
    if host != socket.gethostname():
        return False
    try:
        # A process that nobody has waited for yet still has an entry, in state Z.
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return Path("/proc/self/stat").exists()
