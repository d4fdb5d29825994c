"""Proves that ranks in processes of their own give back what they return, and end by themselves, with errors named."""

import os
import time

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
