"""Proves that the reality benchmark runs each world size with its own profile, and names what it cannot read."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from treecp_rl.planner.profile import load_profile

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def run(*arguments):
    command = [sys.executable, str(BENCHMARKS / "planner_reality.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize(
    ("profiles", "says"),
    [
        ("measured.json", "'measured.json' is not RANKS=FILE, such as 2=two.json"),
        ("2=none.json", "no profile none.json"),
    ],
)
def test_profiles_that_cannot_be_read_are_named(profiles, says):
    ended = run("--profiles", profiles)
    assert ended.returncode == 2 and says in ended.stderr


@pytest.mark.slow
def test_each_world_size_has_its_profile(tmp_path):
    files = {2: BENCHMARKS / "plan_profile.json", 4: BENCHMARKS / "plan_profile_4_ranks.json"}
    out = tmp_path / "reality.json"
    sizes = ["--batches", "1", "--most-tokens", "64", "--close-repeats", "0", "--duel-repeats", "1"]
    named = ",".join(f"{ranks}={file}" for ranks, file in files.items())
    ended = run("--profiles", named, *sizes, "--output", str(out))
    assert ended.returncode == 0, ended.stderr
    report = json.loads(out.read_text())
    assert report["profiles"] == {str(ranks): load_profile(file).digest for ranks, file in files.items()}
    assert [one["world_size"] for one in report["batches"]] == [2, 4]
    for one in report["batches"]:
        assert one["predicted_seconds"]["auto"] <= min(one["predicted_seconds"].values()) * (1 + 1e-9)
