"""Proves that benchmarks/placements.py runs both ways in turns on real ranks, and knows where they are the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "placements.py"


@pytest.mark.slow
@pytest.mark.parametrize(("change", "num_cases"), [("blocks", 12), ("spans", 6)])
def test_each_change_is_measured_on_two_ranks(tmp_path, change, num_cases):
    file = tmp_path / "found.json"
    ended = subprocess.run(
        [sys.executable, SCRIPT, change, "--turns", "1", "--world-sizes", "2", "--output", file],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    report = json.loads(file.read_text())
    assert report["change"] == change and len(report["cases"]) == num_cases
    assert any(not case["same_schedules"] for case in report["cases"])
    assert all(0.3 < case["ratio"] < 3 for case in report["cases"])
