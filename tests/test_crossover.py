"""Proves that benchmarks/crossover.py runs real ranks, that bytes sent are as predicted, and that it notices if not."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from treecp_rl.planner.cost import ModelShape

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "crossover.py"


@pytest.fixture(scope="module")
def crossover():
    spec = importlib.util.spec_from_file_location("crossover", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["crossover"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["crossover"]


def test_two_ranks_send_what_is_predicted(tmp_path):
    asked = ["--world-sizes", "2", "--heads", "8:2", "--group-sizes", "2", "--response-tokens", "8"]
    files = ["--json", tmp_path / "c.json", "--picture", tmp_path / "c.svg"]
    run = subprocess.run(
        [sys.executable, SCRIPT, *asked, "--ratios", "4,16", *files],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    record = json.loads((tmp_path / "c.json").read_text())
    assert len(record["cases"]) == 8
    for case in record["cases"]:
        assert case["counted_bytes"] == case["predicted_bytes"]
        assert len(case["counted_bytes"]) == (2 if case["form"] == "split" else 1)
        assert case["counted_bytes"][-1] > 0
    split = next(one for one in record["crossovers"] if one["form"] == "split")
    assert split["move_q_moves_less_from_ratio"] == 16
    assert 4 < split["ratio_by_formula"] < 16
    assert ElementTree.parse(tmp_path / "c.svg").getroot().tag.endswith("svg")


def case(kind, ratio, counted, form="split"):
    return {
        "world_size": 2,
        "heads": 8,
        "kv_heads": 2,
        "group_size": 2,
        "prompt": 8 * ratio,
        "response": 8,
        "ratio": ratio,
        "form": form,
        "kind": kind,
        "counted_bytes": [100, counted],
    }


def test_the_crossover_is_where_move_q_stays_below(crossover):
    moved = {1: 4, 2: 9, 4: 20, 8: 40}
    cases = [case("tree_move_kv", ratio, value) for ratio, value in moved.items()]
    cases += [case("move_q", ratio, value) for ratio, value in {1: 3, 2: 10, 4: 10, 8: 10}.items()]
    (found,) = crossover.crossovers(cases)
    assert found["move_q_moves_less_from_ratio"] == 4, "at 1 it is less, too, but not at 2"
    (none,) = crossover.crossovers([case("tree_move_kv", 1, 4), case("move_q", 1, 4)])
    assert none["move_q_moves_less_from_ratio"] is None


def test_a_byte_more_than_predicted_is_a_difference(crossover):
    shape = ModelShape(1, 8, 2, 8, itemsize=4)
    (tree,) = crossover.Grid((2,), ((8, 2),), (2,), (8,), (16,)).trees()
    for way in crossover.WAYS:
        expected = crossover.predicted(tree, way, 2, shape)
        assert crossover.case_of(tree, way, 2, shape, expected)["equal_by_rank_and_direction"]
        first = expected[0]
        wrong = (((first[0][0] + 1, first[0][1]), *first[1:]), *expected[1:])
        assert not crossover.case_of(tree, way, 2, shape, wrong)["equal_by_rank_and_direction"]


def test_a_difference_fails_the_run(crossover, monkeypatch, capsys):
    wrong = case("move_q", 1, 4) | {"equal_by_rank_and_direction": False, "predicted_bytes": [100, 5]}
    right = case("tree_move_kv", 1, 4) | {"equal_by_rank_and_direction": True, "predicted_bytes": [100, 4]}
    monkeypatch.setattr(crossover, "run_world", lambda *_: [right, wrong])
    assert crossover.main(["--world-sizes", "2"]) == 1
    assert "not as predicted" in capsys.readouterr().err


@pytest.mark.parametrize("asked", [["--heads", "6:2"], ["--heads", "8:3"], ["--world-sizes", "3"]])
def test_what_cannot_be_measured_is_refused(crossover, asked, capsys):
    with pytest.raises(SystemExit):
        crossover.parse(asked)
    assert "error: " in capsys.readouterr().err
