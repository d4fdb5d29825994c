"""Proves that calibration finds known costs, ranks as it says, and writes a profile that the planner takes."""

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from treecp_rl import calibrate as calibration
from treecp_rl.bench.fit import fit_terms
from treecp_rl.bench.links import Launch, launched, measure_links
from treecp_rl.calibrate import CalibrateOptions, calibrate, kendall_tau
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
    with pytest.raises(ConfigError, match=r"--plan-ranks 3: choose from 2, 4, 8"):
        calibrate(CalibrateOptions(plan_ranks=3))
    with pytest.raises(ConfigError, match=r"--check runs the small float32 model .* \(here cpu\)"):
        calibrate(CalibrateOptions(num_layers=2, check=True))
    with pytest.raises(ConfigError, match="no such file"):
        calibrate(CalibrateOptions(model_config=str(tmp_path / "none")))


LAUNCHED = {"WORLD_SIZE": "4", "RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"LOCAL_WORLD_SIZE": None},
            "WORLD_SIZE is 4, but LOCAL_WORLD_SIZE is not set; launch the ranks with torchrun",
        ),
        ({"LOCAL_WORLD_SIZE": "3"}, "4 ranks of which this node has 3; launch equally many"),
        ({}, "--ranks-per-node 8, but 2 ranks a node were launched"),
    ],
)
def test_a_launch_that_cannot_be_measured_is_named(monkeypatch, change, says):
    for name, value in (LAUNCHED | change).items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=says):
        calibrate(CalibrateOptions(ranks_per_node=8))


def test_ranks_are_measured_inside_nodes_and_between_them(monkeypatch):
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    launch = launched()
    assert launch == Launch(rank=1, world_size=4, ranks_per_node=2)
    assert launch.of_nodes == [[0, 1], [2, 3]] and launch.of_places == [[0, 2], [1, 3]]
    assert Launch(0, 3, 3).of_places == [] and Launch(0, 3, 1).of_nodes == []
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert launched() is None


def test_two_processes_stand_in_for_a_node():
    links = measure_links(None, threads=1)
    assert set(links.by_name) == {"all-to-all", "point-to-point"}
    assert all(link.per_byte_s > 0 for link in links.node.values())
    assert "two processes of one node over gloo; nothing was measured between nodes" in links.source


@pytest.mark.slow
def test_a_cluster_is_measured_under_torchrun(tmp_path):
    """Two agents on this machine are two nodes."""
    out = tmp_path / "cluster.json"
    sizes = ["--num-trees", "15", "--most-tokens", "64", "--repeats", "1", "--num-layers", "2"]
    launch = ["--nnodes", "2", "--nproc-per-node", "2"]
    launch += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    command = ["-m", "treecp_rl.cli", "calibrate", "--output", str(out), "--json", *sizes]
    agents = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *launch, "--node-rank", str(node), *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for node in range(2)
    ]
    try:
        (first, errors), (second, more_errors) = (agent.communicate(timeout=240) for agent in agents)
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], errors + more_errors
    # Only the first rank speaks.
    assert set(json.loads(first)["links"]) == {
        "all-to-all",
        "point-to-point",
        "all-to-all between nodes",
        "point-to-point between nodes",
    }
    assert second == ""
    profile = load_profile(out)
    assert profile.ranks_per_node == 2
    assert "link: 2 nodes of 2 ranks over gloo" in profile.sources
    assert profile.node_link != profile.cluster_link


@pytest.mark.slow
def test_plans_are_run_on_as_many_ranks_as_asked(tmp_path, capsys, monkeypatch):
    """Fewer points and kinds than by default: what is shown is that four ranks ran, and what came of it."""
    monkeypatch.setattr(calibration, "RANK_POINTS", 2)
    monkeypatch.setattr(calibration, "RANK_KINDS", ("local", "gather", "move_q", "tree_move_kv"))
    monkeypatch.setattr(calibration, "CHECKED_KINDS", ("gather", "move_q"))
    out = tmp_path / "four.json"
    sizes = ["--num-trees", "15", "--most-tokens", "128", "--repeats", "1", "--check-points", "1"]
    assert main(["calibrate", "--output", str(out), "--plan-ranks", "4", "--check", *sizes, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["plan_error"] < 1.0 and len(record["points"]) == 1
    profile = load_profile(out)
    assert any(source.endswith("plans on 4 ranks") for source in profile.sources)
    assert profile.layer_forward_s > 0 and profile.node_link.per_byte_s > 0


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


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
    assert memory.checkpointed_bytes_per_token == pytest.approx(expected, rel=0.05)
    assert profile.kind == "measured" and profile.shape.num_layers == 2 and profile.digest == record["digest"]
    lengths.write_text("group,prompt,response\na,50,9\na,50,12\nb,20,30\n")
    assert main(["plan", "--lengths", str(lengths), "--ranks", "2", "--profile", str(out)]) == 0
    assert "profile mine: measured" in capsys.readouterr().out
