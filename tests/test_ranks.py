"""Proves that ranks in processes of their own give back what they return, and end by themselves, with errors named."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from treecp_rl.verify.ranks import RankFailure, run_on_ranks

KEPT = []


def summed(rank, world_size, values):
    total = torch.tensor(values[rank])
    dist.all_reduce(total)
    return rank, world_size, total.item(), torch.get_num_threads()


def test_each_rank_returns_its_own():
    found = run_on_ranks(summed, 2, (1.5, 2.0), timeout_seconds=60, threads=2)
    assert found == [(0, 2, 3.5, 2), (1, 2, 3.5, 2)]


def leave_work_behind(rank, world_size):
    """As FSDP2 does, keeps the group, so that its threads live on; they still hold tensors when this returns."""
    KEPT.append(dist.group.WORLD)
    for _ in range(200):
        dist.all_reduce(torch.ones(300_000), async_op=True)
    return rank


def test_ranks_end_well_whatever_the_threads_of_gloo_still_hold():
    assert run_on_ranks(leave_work_behind, 2, timeout_seconds=60) == [0, 1]


def fail_on_one(rank, world_size, how):
    if rank == 1:
        if how == "raises":
            raise ValueError("two is not a prime")
        os._exit(7)
    dist.barrier()


@pytest.mark.parametrize(("how", "named"), [("raises", "two is not a prime"), ("dies", "exit code 7")])
def test_a_rank_that_fails_ends_the_others_at_once(how, named):
    start = time.monotonic()
    with pytest.raises(RankFailure, match=named) as failure:
        run_on_ranks(fail_on_one, 2, how, timeout_seconds=120)
    assert "rocess 1 terminated" in str(failure.value)
    assert time.monotonic() - start < 60


def sleep(rank, world_size):
    time.sleep(300)


def test_ranks_that_do_not_finish_are_ended_and_named():
    with pytest.raises(
        RankFailure, match=r"ranks \[0, 1\] still ran after 3 s and were ended.*: wait longer$"
    ):
        run_on_ranks(sleep, 2, timeout_seconds=3, advice="wait longer")


def name_yourself(rank, world_size, folder):
    (folder / str(rank)).write_text(str(os.getpid()))
    time.sleep(300)


IN_BACKGROUND = """
import signal, sys
from pathlib import Path
from tests.test_ranks import name_yourself
from treecp_rl.verify.ranks import run_on_ranks

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    run_on_ranks(name_yourself, 2, Path(sys.argv[1]), timeout_seconds=300)
"""


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in Linux's /proc")
def test_ranks_end_with_a_parent_that_was_killed_in_the_background(tmp_path):
    script = tmp_path / "in_background.py"
    script.write_text(IN_BACKGROUND)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    parent = subprocess.Popen([sys.executable, script, tmp_path], env=environment)
    deadline = time.monotonic() + 60
    named = [tmp_path / "0", tmp_path / "1"]
    while not all(file.exists() and file.read_text() for file in named) and time.monotonic() < deadline:
        time.sleep(0.1)
    ranks = [int(file.read_text()) for file in named]
    parent.kill()
    parent.wait()
    while any(map(is_running, ranks)) and time.monotonic() < deadline + 10:
        time.sleep(0.1)
    left = [pid for pid in ranks if is_running(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left
