"""Proves that benchmarks/gpu_check.py runs from end to end, that its figures follow from its times, and that
what it leaves out is named. On the CPU, at tiny sizes: the GPU's figures are not looked at here.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu_check.py"


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    path = tmp_path_factory.mktemp("gpu_check") / "findings.json"
    command = [sys.executable, SCRIPT, "--device", "cpu", "--tiny", "--repeats", "2", "--json", path]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(path.read_text())
    assert found["elapsed_seconds"] < 60
    return found


@pytest.fixture(scope="module")
def gpu_check():
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["gpu_check"]


def run_here(gpu_check, tmp_path, *arguments):
    path = tmp_path / "findings.json"
    status = gpu_check.main(["--device", "cpu", "--tiny", "--repeats", "1", "--json", str(path), *arguments])
    return status, json.loads(path.read_text())


def test_everything_is_exact_and_nothing_is_left_out(findings):
    assert findings["passed"] and not findings["failures"] and not findings["left_out"]
    paths = {(check["kernel"], check["dtype"], check["check"]) for check in findings["exactness"]}
    dtypes = ("float32", "float16", "bfloat16")
    assert paths == {
        *(("math", dtype, check) for dtype in dtypes for check in ("tree", "segments")),
        *(("cpu_flash", dtype, "tree") for dtype in dtypes),
    }
    for check in findings["exactness"]:
        errors = (check["out_relative_error"], check["grad_relative_error"])
        assert 0 < max(errors) <= check["bound_relative_error"]


def test_machine_and_settings_are_named(findings):
    assert findings["machine"]["torch"] == torch.__version__
    assert findings["settings"]["kernel"] == "cpu_flash" and findings["settings"]["dtype"] == "float32"


def test_tree_against_flat_ratios_follow_from_times_and_tokens(findings):
    assert len(findings["tree_vs_flat"]) == 8
    for point in findings["tree_vs_flat"]:
        prompt, response, size = (point[name] for name in ("prompt_tokens", "response_tokens", "group_size"))
        assert point["tree_tokens"] == prompt + size * response
        assert point["flat_tokens"] == size * (prompt + response)
        assert point["speedup"] == pytest.approx(point["flat_seconds"] / point["tree_seconds"])
        assert point["ideal_token_ratio"] == pytest.approx(point["flat_tokens"] / point["tree_tokens"])
        assert 1 < point["ideal_flop_ratio"] < size
        assert point["flat_passes"] == 1 and point["num_layers"] == 2 and point["repeats"] == 2
        assert point["loss_relative_difference"] <= 1e-4
        assert point["gradient_norm_relative_difference"] <= 1e-4


def test_attention_rates_follow_from_times_and_flops(findings):
    assert len(findings["attention"]) == 8
    for point in findings["attention"]:
        for side in ("tiles", "varlen"):
            rate = point[f"{side}_flop"] / point[f"{side}_seconds"] / 1e12
            assert point[f"{side}_tflop_per_second"] == pytest.approx(rate)
        ratio = point["tiles_tflop_per_second"] / point["varlen_tflop_per_second"]
        assert point["tiles_over_varlen_rate"] == pytest.approx(ratio)
        # As near as whole rows come.
        assert 0.6 < point["tiles_flop"] / point["varlen_flop"] < 1.7


def test_pairs_equal_a_count_of_the_masks(gpu_check):
    point = gpu_check.Point(prompt_tokens=5, response_tokens=3, group_size=2)
    assert point.tree_pairs == 15 + 2 * (6 + 3 * 5)
    assert point.flat_pairs == 2 * 36


def test_a_budget_that_is_used_up_leaves_points_out_by_name(gpu_check, tmp_path):
    status, found = run_here(gpu_check, tmp_path, "--budget-seconds", "0")
    assert status == 0 and found["exactness"] and not found["attention"] and not found["tree_vs_flat"]
    names = [entry["what"] for entry in found["left_out"]]
    assert len(names) == 16 and "tree against flat P=64 R=4 G=2" in names
    assert all("s left" in entry["reason"] or "s are left" in entry["reason"] for entry in found["left_out"])


def test_points_that_do_not_fit_in_memory_are_left_out_or_cut(gpu_check, tmp_path, monkeypatch):
    def count(contestant, device):
        gpu_check.timed(contestant, device)
        return 72 << 20  # A MiB a token of the probe, however many layers.

    monkeypatch.setattr(gpu_check, "peak_bytes", count)
    monkeypatch.setattr(gpu_check, "free_bytes", lambda device: 320 << 20)
    status, found = run_here(gpu_check, tmp_path)
    assert status == 0
    (left_out,) = [entry for entry in found["left_out"] if "P=256 R=32 G=4" in entry["what"]]
    assert left_out["reason"] == "a tree pass of 384 tokens needs 0.4 GiB, 0.3 GiB are free"
    passes = {
        (point["prompt_tokens"], point["response_tokens"], point["group_size"]): point["flat_passes"]
        for point in found["tree_vs_flat"]
    }
    # 288 MiB of room: four rows of 68 tokens, three of 96, one of 260.
    assert passes[64, 4, 4] == 1 and passes[64, 32, 4] == 2 and passes[256, 4, 4] == 4


def test_a_tree_that_differs_from_its_rows_fails(gpu_check, tmp_path, monkeypatch):
    run_passes = gpu_check.run_passes

    def drop_a_row(model, plan, loss_fn, options, *, device):
        def without_first(scores):
            lost = [scores.log_probs[0] * 0, *scores.log_probs[1:]]
            return loss_fn(gpu_check.RowScores(scores.row_indices, lost))

        return run_passes(model, plan, without_first, options, device=device)

    monkeypatch.setattr(gpu_check, "run_passes", drop_a_row)
    status, found = run_here(gpu_check, tmp_path)
    assert status == 1 and not found["passed"] and len(found["failures"]) == 8
    assert "tree and flat differ by more than" in found["failures"][0]["reason"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so_in_one_line(gpu_check, capsys):
    assert gpu_check.main([]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "torch sees no CUDA device" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cpu"], "add --tiny"),
        (["--device", "cpu", "--tiny", "--repeats", "0"], "--repeats 0: give 1 or more"),
    ],
)
def test_arguments_that_make_no_sense(gpu_check, capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_:
        gpu_check.main(arguments)
    assert exit_.value.code == 2 and message in capsys.readouterr().err


def test_a_kernel_that_cannot_run_is_refused(gpu_check, capsys):
    assert gpu_check.main(["--device", "cpu", "--tiny", "--kernel", "cuda_flash"]) == 2
    assert "'cuda_flash' runs on cuda" in capsys.readouterr().err
