"""function -> one fresh process a rank, joined -> what the function returned on each.

The caller waits up to a deadline and ends only its own children. A rank that fails ends the others at once: a
collective that will never meet must not eat the whole timeout.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from treecp_rl.errors import TreeCPError

T = TypeVar("T")


class RankFailure(TreeCPError):
    """A spawned rank raised, died, or was still running at the deadline."""


def run_on_ranks(
    function: Callable[..., T],
    world_size: int,
    *arguments: Any,
    timeout_seconds: float,
    threads: int = 1,
    backend: str = "gloo",
    advice: str = "",
) -> list[T]:
    """``function(rank, world_size, *arguments)`` of a module on every rank; what each returned, by rank.

    Args:
        threads: torch's, of each rank.
        advice: the end of the message of a timeout: what to do about it.

    Raises:
        RankFailure: a rank raised, died, or still ran after ``timeout_seconds``.
    """
    with tempfile.TemporaryDirectory(prefix="treecp-ranks-") as folder:
        call = (function, world_size, arguments, threads, backend, Path(folder))
        ranks = mp.start_processes(_rank, call, nprocs=world_size, join=False, start_method="spawn")
        try:
            _wait(ranks, timeout_seconds, advice)
        finally:
            for process in ranks.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return [pickle.loads((Path(folder) / f"{rank}.pkl").read_bytes()) for rank in range(world_size)]


def _wait(ranks: Any, timeout_seconds: float, advice: str) -> None:
    deadline = time.monotonic() + timeout_seconds
    try:
        while not ranks.join(timeout=max(0.0, min(1.0, deadline - time.monotonic()))):
            if time.monotonic() > deadline:
                running = [rank for rank, process in enumerate(ranks.processes) if process.is_alive()]
                raise RankFailure(
                    f"ranks {running} still ran after {timeout_seconds:.0f} s and were ended; a hang, or a machine "
                    f"too slow for this{advice and ': '}{advice}"
                )
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        raise RankFailure(str(error).strip()) from error


def _rank(
    rank: int,
    function: Callable[..., Any],
    world_size: int,
    arguments: tuple[Any, ...],
    threads: int,
    backend: str,
    folder: Path,
) -> None:
    # Torch has SIGINT sent to a rank whose parent has ended; what a shell runs in its background ignores it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(threads)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size
    )
    returned = function(rank, world_size, *arguments)
    (folder / f"{rank}.pkl").write_bytes(pickle.dumps(returned))
    sys.stdout.flush()
    sys.stderr.flush()
    # Not through the interpreter's end: a thread of gloo may still hold tensors of the last collective, and one that
    # asks an ending interpreter for its lock aborts the process.
    os._exit(0)
