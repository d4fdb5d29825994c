"""Proves that calibration finds known costs, ranks as it says, and writes a profile that the planner takes."""

import json

import numpy as np
import pytest

from treecp_rl.calibrate import CalibrateOptions, calibrate, fit_terms, kendall_tau
from treecp_rl.cli import main
from treecp_rl.errors import ConfigError
from treecp_rl.planner.profile import load_profile


def test_terms_of_known_steps_are_found_and_none_is_negative():
    rng = np.random.default_rng(0)
    features = np.column_stack(
        [np.ones(40), rng.uniform(10, 2000, 40), rng.uniform(1e3, 1e6, 40), rng.integers(1, 40, 40)]
    )
    terms = np.array([3e-3, 2e-5, 4e-8, 0.0])
    seconds = features @ terms * rng.uniform(0.98, 1.02, 40)
    found = fit_terms(features, seconds)
    assert found[:3] == pytest.approx(terms[:3], rel=0.15)
    assert found.min() >= 0
    assert features @ found == pytest.approx(seconds, rel=0.06)


def test_tau_is_that_of_the_order():
    assert kendall_tau([1, 2, 3], [10, 20, 30]) == 1
    assert kendall_tau([1, 2, 3], [30, 20, 10]) == -1
    assert kendall_tau([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(4 / 6)


def test_what_cannot_be_measured_is_named(tmp_path):
    with pytest.raises(ConfigError, match="3 trees for 5 terms"):
        calibrate(CalibrateOptions(num_trees=3))
    with pytest.raises(ConfigError, match="choose float32 or bfloat16"):
        calibrate(CalibrateOptions(dtype="int8"))
    with pytest.raises(ConfigError, match="no such file"):
        calibrate(CalibrateOptions(model_config=str(tmp_path / "none")))


@pytest.mark.slow
def test_a_measured_profile_plans(tmp_path, capsys):
    out, lengths = tmp_path / "mine.json", tmp_path / "lengths.csv"
    sizes = ["--num-trees", "15", "--most-tokens", "128", "--repeats", "1", "--num-layers", "2"]
    assert main(["calibrate", "--output", str(out), "--name", "mine", *sizes, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["held_out_error"] < 1.0
    assert set(record["links"]) == {"all-to-all", "point-to-point"}
    assert all(link["per_byte_s"] > 0 for link in record["links"].values())
    profile = load_profile(out)
    # Checkpointed: the input of each of two layers, and what the one keeps that is recomputed.
    memory = profile.memory
    expected = 2 * 256 * 4 + memory.kept_bytes_per_token / 2
    assert memory.checkpointed_bytes_per_token == pytest.approx(expected, rel=0.1)
    assert profile.kind == "measured" and profile.shape.num_layers == 2 and profile.digest == record["digest"]
    lengths.write_text("group,prompt,response\na,50,9\na,50,12\nb,20,30\n")
    assert main(["plan", "--lengths", str(lengths), "--ranks", "2", "--profile", str(out)]) == 0
    assert "profile mine: measured" in capsys.readouterr().out
