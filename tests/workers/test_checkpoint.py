"""Checkpoints are verl's own: the stock merger reads them, and a resumed run takes the same next step."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.workers import engine_cases
from tests.workers.engine_cases import Case, Group
from tests.workers.rank_pool import RankPool
from tests.workers.tiny_model import save_tiny_model


@pytest.fixture(scope="module")
def pool():
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """A checkpoint after one step, and what the second step made of the weights, on both ranks."""
    model_path = str(save_tiny_model(tmp_path_factory.mktemp("tiny_qwen2")))
    folder = tmp_path_factory.mktemp("checkpoint")
    outcomes = pool.run(engine_cases.save_between_steps, model_path, CASE, str(folder))
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return model_path, folder, outcomes[0]


GROUPS = tuple((Group(f"a{rank}", 17, (5, 9, 3, 7)), Group(f"b{rank}", 6, (4, 12, 1))) for rank in range(2))
LEARNING_RATE = 1e-3
CASE = Case(ranks=GROUPS, micro_rows=-1)


def test_layout_is_verls(saved):
    _, folder, _ = saved
    for kind in ("model", "optim", "extra_state"):
        for rank in range(2):
            assert (folder / f"{kind}_world_size_2_rank_{rank}.pt").exists()
    assert json.loads((folder / "fsdp_config.json").read_text()) == {"FSDP_version": 2, "world_size": 2}
    assert (folder / "huggingface" / "config.json").exists()


@pytest.mark.parametrize("backend", ["treecp", "fsdp2"])
def test_resumed_engine_takes_the_same_next_step(pool, saved, backend):
    """The stock engine resumes it as well: a run may change its backend between steps."""
    model_path, folder, expected = saved
    for outcome in pool.run(engine_cases.resume_and_step, backend, model_path, CASE, str(folder)):
        if isinstance(outcome, Exception):
            raise outcome
        assert outcome["lr"] == expected["lr"]
        for name, parameter in expected["after_step_2"].items():
            if backend == "treecp":
                assert torch.equal(outcome["weights"][name], parameter), name
            elif (
                "k_proj.bias" not in name
            ):  # its gradient is zero but for rounding, which Adam then scales up
                torch.testing.assert_close(
                    outcome["weights"][name], parameter, rtol=0, atol=1e-2 * LEARNING_RATE
                )


@pytest.mark.slow
def test_stock_merger_reads_it(saved, tmp_path):
    _, folder, expected = saved
    command = ["-m", "verl.model_merger", "merge", "--backend", "fsdp"]
    subprocess.run(
        [sys.executable, *command, "--local_dir", str(folder), "--target_dir", str(tmp_path)],
        check=True,
        capture_output=True,
        timeout=240,
    )
    merged = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    for name, parameter in expected["after_step_1"].items():
        torch.testing.assert_close(merged[name], parameter.to(torch.bfloat16).float(), rtol=0, atol=0)
