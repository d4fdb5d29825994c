"""Proves `treecp-rl plan`, `simulate` and `bench plan` from the command line: outputs, exit codes, refusals."""

import json

import pytest

from treecp_rl.bench.plan import BenchOptions, measure, render
from treecp_rl.cli import main
from treecp_rl.planner.profile import load_profile, save_profile


@pytest.fixture
def lengths(tmp_path):
    path = tmp_path / "lengths.csv"
    rows = [f"{group},{500 * (group + 1)},{100 + 7 * row}" for group in range(6) for row in range(4)]
    path.write_text("group,prompt,response\n" + "\n".join(rows))
    return str(path)


def test_plan_prints_the_promised_fields(lengths, capsys):
    assert main(["plan", "--lengths", lengths, "--ranks", "4", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    promised = {
        "predicted_seconds",
        "lower_bound_seconds",
        "gap",
        "solve_seconds",
        "digest",
        "passes",
        "trees",
    }
    assert promised <= set(record)
    assert len(record["trees"]) == 6
    assert record["solve_seconds"] > 0


def test_plan_explains_compares_and_draws(lengths, tmp_path, capsys):
    out = tmp_path / "plan.svg"
    arguments = ["plan", "--lengths", lengths, "--ranks", "4", "--compare", "--picture", str(out)]
    assert main([*arguments, "--profile", "h200", "--model", "Qwen2.5-1.5B"]) == 0
    text = capsys.readouterr().out
    assert "NSP's beam search" in text and "no sharing" in text and "Qwen2.5-1.5B" in text
    assert out.read_text().startswith("<svg")


@pytest.mark.parametrize(
    "policy",
    [
        ["nsp"],
        ["disjoint"],
        ["static", "--degree", "2"],
        ["auto", "--effort", "thorough"],
        ["auto", "--effort", "fast"],
    ],
)
def test_plan_by_every_policy(lengths, policy, capsys):
    assert main(["plan", "--lengths", lengths, "--ranks", "4", "--policy", *policy]) == 0
    assert f"policy {policy[0]}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--ranks", "4", "--profile", "h900"], 2, "no profile h900"),
        (["--ranks", "4", "--policy", "static"], 2, "needs one"),
        (["--ranks", "4", "--degree", "2"], 2, "belongs to policy static"),
        (["--ranks", "4", "--model", "GPT-2"], 2, "models: Qwen2.5-1.5B"),
        (["--ranks", "4", "--policy", "nsp", "--effort", "thorough"], 2, "belongs to policy auto"),
        (["--ranks", "2", "--tokens-per-rank", "100"], 1, "raise tokens_per_rank"),
    ],
)
def test_what_cannot_be_planned_is_named(lengths, arguments, code, says, capsys):
    assert main(["plan", "--lengths", lengths, *arguments]) == code
    assert says in capsys.readouterr().err


def test_bad_files_are_named(tmp_path, capsys):
    assert main(["plan", "--lengths", str(tmp_path / "none.csv"), "--ranks", "2"]) == 1
    assert "no file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plan", "--lengths", "x", "--ranks", "0"])
    broken = tmp_path / "profile.json"
    save_profile(load_profile("h100"), broken)
    broken.write_text(broken.read_text().replace('"overlap": 0.8,', ""))
    (tmp_path / "one.csv").write_text("group,prompt,response\na,5,5\n")
    asked = ["plan", "--lengths", str(tmp_path / "one.csv"), "--ranks", "2", "--profile", str(broken)]
    assert main(asked) == 2
    assert "lacks overlap" in capsys.readouterr().err


def test_simulate_prints_tables_and_json_and_draws(tmp_path, capsys):
    assert main(["simulate", "--figures", "15b,18", "--ranks", "2", "--pictures", str(tmp_path)]) == 0
    assert "pictures: " in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"fig15b.svg", "fig18_2ranks.svg"}
    assert main(["simulate", "--pictures", str(tmp_path / "none")]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert main(["simulate", "--figures", "18", "--ranks", "8"]) == 0
    assert "AugTree's Fig. 18" in capsys.readouterr().out
    assert main(["simulate", "--figures", "14", "--ranks", "8", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["points"]) == 4
    assert main(["simulate", "--ranks", "eight"]) == 2


def test_bench_plan_has_the_promised_fields(monkeypatch):
    monkeypatch.setattr("treecp_rl.bench.plan.BATCHES", ((8, 4, 4),))
    monkeypatch.setattr("treecp_rl.bench.plan.TREE_BLOCKS", (16,))
    report = measure(BenchOptions(repeats=1, seeds=1, peers=True))
    promised = {"trees", "group_size", "ranks", "policy", "solve_ms_median", "gap", "predicted_seconds"}
    assert all(promised <= set(case) for case in report["cases"])
    assert {"auto", "auto+", "nsp", "disjoint"} <= {case["policy"] for case in report["cases"]}
    assert len(render(report).splitlines()) == len(report["cases"]) + 1
    groups = report["fixed_groups"]
    assert [one["kinds"] for one in groups] == ["ours", "AugTree's"] * 3
    assert all(
        1 <= ours["over_auto"] < theirs["over_auto"]
        for ours, theirs in zip(groups[::2], groups[1::2], strict=True)
    )
