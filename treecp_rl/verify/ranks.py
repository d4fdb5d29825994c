"""job file -> one process a rank over gloo -> outcome files. `python -m treecp_rl.verify.ranks DIR RANK
WORLD`.

The parent starts the ranks, waits up to a deadline, and ends only its own children. A rank that fails ends
the others at once: a collective that will never meet must not eat the whole timeout.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from treecp_rl.errors import TreeCPError
from treecp_rl.planner.batch import Mode
from treecp_rl.tree import Share
from treecp_rl.verify.cases import Case, Lengths, cases_from_lengths, standard_cases
from treecp_rl.verify.losses import BatchLoss
from treecp_rl.verify.models import DTYPES, random_model
from treecp_rl.verify.subject import Outcome, join_world, merge_outcomes, prepare_engine_model, run_engine


class RankFailure(TreeCPError):
    """A spawned rank raised, died, or was still running at the deadline."""


@dataclass(frozen=True)
class Job:
    """All a rank needs; cases are rebuilt from their recipe, because they hold functions."""

    config: PretrainedConfig
    dtype: str
    share: Share
    lengths: tuple[Lengths, ...] | None
    case_names: tuple[str, ...]
    losses: tuple[BatchLoss, ...]
    plans: tuple[Mode | None, ...] = (None,)
    """What each case is run by, one after another, see ``subject.run_engine``."""


def build_cases(config: PretrainedConfig, lengths: tuple[Lengths, ...] | None) -> tuple[Case, ...]:
    return cases_from_lengths(config.vocab_size, lengths) if lengths else standard_cases(config.vocab_size)


def run_job(job: Job, rank: int, world_size: int) -> list[Outcome]:
    """Every case of the job on this rank, in order, for the first plan, then for the next."""
    dtype = DTYPES[job.dtype]
    model = prepare_engine_model(random_model(job.config, dtype, drawn_in=dtype), world_size)
    by_name = {case.name: case for case in build_cases(job.config, job.lengths)}
    return [
        run_engine(model, by_name[name], loss, share=job.share, plan=plan, rank=rank, world_size=world_size)
        for plan in job.plans
        for name, loss in zip(job.case_names, job.losses, strict=True)
    ]


def run_world(job: Job, world_size: int, timeout_seconds: float) -> list[Outcome]:
    """The job on `world_size` processes; one merged outcome a plan and case."""
    if world_size == 1:
        return run_job(job, 0, 1)
    with tempfile.TemporaryDirectory(prefix="treecp-verify-") as folder:
        directory = Path(folder)
        (directory / "job.pkl").write_bytes(pickle.dumps(job))
        children = [_start(directory, rank, world_size) for rank in range(world_size)]
        try:
            _wait(children, directory, time.monotonic() + timeout_seconds, timeout_seconds)
        finally:
            for child in children:
                if child.poll() is None:
                    child.kill()
                child.wait()
        ranks = [pickle.loads((directory / f"rank{rank}.pkl").read_bytes()) for rank in range(world_size)]
    return [merge_outcomes(list(parts)) for parts in zip(*ranks, strict=True)]


def _start(directory: Path, rank: int, world_size: int) -> subprocess.Popen[bytes]:
    threads = max(1, torch.get_num_threads() // world_size)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "treecp_rl.verify.ranks", str(directory), str(rank), str(world_size)]
    with (directory / f"rank{rank}.log").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def _wait(
    children: list[subprocess.Popen[bytes]], directory: Path, deadline: float, timeout_seconds: float
) -> None:
    while True:
        codes = [child.poll() for child in children]
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        if failed:
            rank = failed[0]
            tail = (directory / f"rank{rank}.log").read_text(errors="replace").strip().splitlines()[-15:]
            raise RankFailure(f"rank {rank} ended with code {codes[rank]}:\n" + "\n".join(tail))
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            running = [rank for rank, code in enumerate(codes) if code is None]
            raise RankFailure(
                f"ranks {running} still ran after {timeout_seconds:.0f} s and were ended; "
                "a hang, or a machine too slow for these lengths (--timeout)"
            )
        time.sleep(0.05)


def _main(directory: Path, rank: int, world_size: int) -> None:
    job: Job = pickle.loads((directory / "job.pkl").read_bytes())
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    join_world(rank, world_size, str(directory / "rendezvous"))
    outcomes = run_job(job, rank, world_size)
    if rank != 0:
        outcomes = [Outcome(**{**vars(outcome), "gradients": {}}) for outcome in outcomes]
    (directory / f"rank{rank}.pkl").write_bytes(pickle.dumps(outcomes))
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        _main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    except BaseException:
        traceback.print_exc()
        # Without this, the gloo threads of a failed rank may keep the process alive until its peers give up.
        sys.stderr.flush()
        os._exit(1)
