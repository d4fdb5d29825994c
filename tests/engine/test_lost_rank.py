"""Proves that a rank which ends in mid-step ends the others with its name, soon, and not when a job's patience does."""

import datetime
import os
import tempfile
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.engine import test_domain
from tests.engine.test_domain import fresh_model, rows_of, step
from treecp_rl.engine.passes import Domain
from treecp_rl.errors import PlanError, RankLost
from treecp_rl.lost_ranks import naming_lost_ranks

COLLECTIVE_TIMEOUT_SECONDS = 12
LOST = 1


def run_rank(rank, world_size, folder, is_domain):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_SECONDS),
    )
    domain = Domain(rank, world_size, dist.group.WORLD) if is_domain else None
    model = fresh_model(sharded=True)
    step(model, rows_of("ragged"), domain, mode="gather")
    if rank == LOST:
        # Out of memory killers do not say goodbye either.
        test_domain.loss_of = lambda scores: os._exit(9)
    start = time.monotonic()
    try:
        step(model, rows_of("ragged"), domain, mode="gather")
    except RankLost as error:
        torch.save((str(error), time.monotonic() - start), f"{folder}/{rank}.pt")
        os._exit(0)
    os._exit(1)


@pytest.mark.parametrize("is_domain", [False, True])
def test_the_others_name_the_lost_rank_within_the_collective_timeout(is_domain):
    world_size = 3
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        ranks = [
            context.Process(target=run_rank, args=(rank, world_size, folder, is_domain))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(120)
        try:
            assert [process.exitcode for process in ranks] == [9 if rank == LOST else 0 for rank in range(3)]
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
        for rank in {0, 1, 2} - {LOST}:
            message, seconds = torch.load(f"{folder}/{rank}.pt")
            assert f"rank {rank} of 3 stopped: the process of rank {LOST} has ended" in message
            assert "resumes from its last checkpoint" in message
            assert seconds <= COLLECTIVE_TIMEOUT_SECONDS + 10


def test_errors_that_are_nobodys_death_pass_through():
    with pytest.raises(PlanError), naming_lost_ranks():
        raise PlanError("mine")
