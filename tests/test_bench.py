"""The step benchmark: memory is counted right, the peer's adapter is right, and the report says what was
asked.
"""

import json
import subprocess
import sys

import pytest
import torch

pytest.importorskip("prefix_grouper")

from treecp_rl.bench.attention import attention_bytes
from treecp_rl.bench.memory import peak_bytes
from treecp_rl.bench.step import BenchError, _require_equal_norms, parse_cases
from treecp_rl.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")


def test_peak_counts_what_is_held_at_one_time():
    size = 1 << 20

    def two_of_three():
        first = torch.empty(size, dtype=torch.uint8)
        second = torch.empty(size, dtype=torch.uint8)
        del first
        third = torch.empty(size, dtype=torch.uint8)
        return second, third

    assert peak_bytes(two_of_three) == 2 * size
    assert peak_bytes(lambda: None) == 0


def test_what_was_there_before_is_not_taken_off():
    """A step that drops the last step's gradients, which the profiler saw come, or did not."""
    size = 1 << 20
    kept = [torch.empty(size, dtype=torch.uint8)]

    def replace():
        kept.clear()
        kept.append(torch.empty(size, dtype=torch.uint8))

    assert [peak_bytes(replace) for _ in range(3)] == [size] * 3
    replace()
    assert peak_bytes(replace) == size


def test_peak_sees_scratch_space_inside_an_operator():
    query = torch.randn(1, 1, 512, 8)

    def attend():
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            torch.nn.functional.scaled_dot_product_attention(query, query, query)

    assert peak_bytes(attend) >= 512 * 512 * 4


def test_attention_memory_at_a_long_prompt():
    memory = attention_bytes(prompt=512, response=16, group_size=8)
    assert memory["treecp"] <= memory["prefix_grouper"] / 2


def test_cases_are_read():
    assert parse_cases("2048:64,512:512") == ((2048, 64), (512, 512))
    for text in ("2048", "a:b", "0:4", "4:0", ""):
        with pytest.raises(ConfigError, match="--cases"):
            parse_cases(text)


def test_engines_that_disagree_are_not_compared():
    _require_equal_norms({"treecp": 1.0, "flat": 1.0 + 1e-6, "prefix_grouper": 1.0})
    with pytest.raises(BenchError, match="prefix_grouper"):
        _require_equal_norms({"treecp": 1.0, "flat": 1.0, "prefix_grouper": 1.1})
    with pytest.raises(BenchError, match="treecp"):
        _require_equal_norms({"treecp": float("nan"), "flat": 1.0, "prefix_grouper": 1.0})


@pytest.mark.slow
def test_bench_step_reports_the_three_engines():
    """A small shape, all engines, one round: their first gradient norms agree, or this fails."""
    shape = ["--cases", "96:8", "--group-size", "4", "--vocab-size", "256", "--repeats", "1"]
    command = [sys.executable, "-W", "ignore", "-m", "treecp_rl.cli", "bench", "step", "--json", *shape]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert finished.returncode == 0, finished.stderr[-2000:]
    (case,) = json.loads(finished.stdout)["cases"]
    assert (case["prompt"], case["response"], case["group_size"]) == (96, 8, 4)
    assert case["ideal_speedup"] == pytest.approx(4 * 104 / (96 + 32))
    for key in ("speedup_vs_flat", "speedup_vs_prefix_grouper", "peak_bytes", "peak_bytes_flat"):
        assert case[key] > 0
    assert case["attention_bytes"] < case["attention_bytes_prefix_grouper"]
    assert set(case["cpu_seconds"]) == {"treecp", "flat", "prefix_grouper"}
