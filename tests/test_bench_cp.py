"""The context-parallel benchmark: every kind runs and agrees, what it reports is computed right, and a split tree
stays within the memory of rows that run one by one.
"""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from treecp_rl.bench.cp import BenchOptions, BenchReport, Case, file_text
from treecp_rl.bench.cp_plans import KINDS, OUR_KINDS, PlannedStep
from treecp_rl.bench.cp_ranks import (
    Job,
    Measured,
    StepResult,
    _close_kinds,
    _duellists,
    _PointRuns,
    _require_agreement,
    least_cpu_seconds,
    median_interval,
    run_world,
    small_model_estimate,
)
from treecp_rl.bench.memory import peak_bytes
from treecp_rl.bench.overlap import overlap_of
from treecp_rl.bench.shapes import SHAPES, point
from treecp_rl.bench.step import BenchError
from treecp_rl.cli import main
from treecp_rl.engine.capabilities import prepare_model
from treecp_rl.engine.passes import PassOptions, plan_passes, run_passes
from treecp_rl.errors import ConfigError
from treecp_rl.planner.profile import save_profile
from treecp_rl.tree import Row
from treecp_rl.verify.models import random_model, tiny_config
from treecp_rl.verify.ranks import RankFailure

FIELDS = {
    "world_size": int,
    "kind": str,
    "ours": bool,
    "seconds": float,
    "cpu_seconds": float,
    "blocked_seconds": float,
    "bytes_moved": int,
    "bytes_expected": int,
    "peak_bytes": int,
    "tokens_computed": int,
    "work_imbalance": float,
    "token_imbalance": float,
}


@pytest.mark.slow
def test_every_kind_runs_on_a_small_point(tmp_path):
    trace = tmp_path / "trace.json"
    asked = ["--world-sizes", "2", "--budgets", "1024", "--scale", "1", "--shapes", "lmsys", "--repeats", "1"]
    asked += ["--close-repeats", "1", "--duel-repeats", "1", "--profile", str(tmp_path / "profile.json")]
    save_profile(replace(small_model_estimate(), gradient_sync_s=1000.0), tmp_path / "profile.json")
    command = [sys.executable, "-W", "ignore", "-m", "treecp_rl.cli", "bench", "cp", "--json", *asked]
    finished = subprocess.run(
        [*command, "--trace", str(trace)], capture_output=True, text=True, timeout=280, check=False
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    report = json.loads(finished.stdout)
    assert [case["kind"] for case in report["cases"]] == list(KINDS)
    for case in report["cases"]:
        assert {name: type(case[name]) for name in FIELDS} == FIELDS
        assert case["shape"] == {
            "name": "lmsys",
            "prompt": 31,
            "responses": list(point("lmsys", 1024).responses),
            "budget_tokens": 1024,
        }
        assert case["ours"] == (case["kind"] in OUR_KINDS)
        assert case["bytes_moved"] == case["bytes_expected"] > 0
        assert case["peak_bytes"] > 0 and case["cpu_seconds"] > 0
        assert case["predicted_seconds"] > 1000, "by the profile that was named"
    assert sum(len(case["duel_cpu_seconds"]) for case in report["cases"]) in (0, 2)
    tokens = {case["kind"]: case["tokens_computed"] for case in report["cases"]}
    assert tokens["flat_ring"] == tokens["gather"] + 7 * 31
    (held,) = report["points"]
    assert held["bytes_as_expected"] and held["gather_is_even"]
    assert report["summary"]["world_2"]["points"] == 1
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"treecp::tiles", "treecp::wait"} <= names and any(str(name).startswith("gloo:") for name in names)
    ring = next(one for one in report["overlap"] if one["kind"] == "reuse_ring")
    assert ring["num_exchanges"] == 8, "one all-to-all a layer, forward and backward"
    assert 0 <= ring["hidden_seconds"] + ring["waited_seconds"] <= ring["communication_seconds"]


def event(name, start, stop):
    return {"ph": "X", "name": name, "ts": start * 1e6, "dur": (stop - start) * 1e6}


def test_overlap_of_a_hand_made_trace():
    """Under way during [0, 6) and [8, 10): tiles hide [1, 3) and [9, 10), [4, 6) is waited for."""
    trace = [
        event("gloo:all_to_all", 0, 4),
        event("gloo:all_to_all", 2, 6),
        event("gloo:all_to_all", 8, 10),
        event("gloo:all_gather", 20, 30),
        event("treecp::tiles", 1, 3),
        event("treecp::tiles", 9, 25),
        event("treecp::wait", 4, 7),
        {"ph": "M", "name": "treecp::tiles"},
    ]
    overlap = overlap_of({"traceEvents": trace})
    assert overlap.num_exchanges == 3
    seconds = (overlap.communication_seconds, overlap.hidden_seconds, overlap.waited_seconds)
    assert seconds == pytest.approx((8, 3, 2))
    assert overlap.hidden_fraction == pytest.approx(3 / 8)
    assert overlap_of({"traceEvents": trace[3:]}).hidden_fraction is None


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_fill_their_budget(name):
    for budget in (1024, 8192):
        group = point(name, budget)
        assert group.tokens_flat == pytest.approx(budget, rel=0.01)
        assert len(set(group.responses)) > 1 and min(group.responses) >= 1
        assert [len(row.response) for row in group.rows(64)] == list(group.responses)
    ratio = SHAPES[name].prompt_tokens / SHAPES[name].response_tokens
    assert 8 * group.prompt / sum(group.responses) == pytest.approx(ratio, rel=0.1)


def measured(kind, cpu_seconds, bytes_moved, work=1.0):
    planned = PlannedStep(
        bytes_expected=bytes_moved,
        work_imbalance=work,
        token_imbalance=1.0,
        predicted_seconds=1.0,
        digest=kind,
    )
    return Measured(kind, cpu_seconds, cpu_seconds, 0.0, bytes_moved, 1, 1, planned, None)


def report_of(*kinds):
    options = BenchOptions(world_sizes=(2,), kinds=tuple(one.kind for one in kinds))
    return BenchReport(options, (Case(2, point("lmsys", 1024), kinds),))


def summary_of(*kinds):
    return report_of(*kinds).summary()["world_2"]


def test_the_file_says_what_the_report_says():
    report = report_of(measured("gather", 1.0, 20), measured("move_q", 1.0, 50))
    assert json.loads(file_text(report)) == report.as_json()


def test_a_duel_decides_where_there_was_one():
    first, second = measured("gather", 1.0, 10), measured("heads", 2.0, 10)
    rival, other = measured("move_q", 1.0, 10), measured("dcp_fused", 0.9, 10)
    assert report_of(first, second, rival, other).cases[0].summary()["cpu_ratio"] == pytest.approx(1 / 0.9)
    met = [
        replace(second, duel_cpu_seconds=(0.6, 1.2, 0.9)),
        replace(rival, duel_cpu_seconds=(0.5, 1.1, 0.6)),
    ]
    found = report_of(first, *met, other).cases[0].summary()
    assert (found["best_ours"], found["best_baseline"]) == ("heads", "move_q")
    assert found["cpu_ratio"] == pytest.approx(1.2), "of turns, not of the least of either side"


def test_the_summary_says_what_does_not_hold():
    rivals = [measured("move_q", 1.0, 50), measured("dcp_fused", 3.0, 10, work=1.5)]
    held = summary_of(measured("gather", 1.04, 20), measured("heads", 2.0, 60), *rivals)
    assert (held["as_fast_as_best_baseline"], held["gather_is_even"]) == (1, 1)
    assert (held["fewest_bytes"], held["fewest_bytes_of_even"]) == (0, 1)
    assert held["fewest_bytes_by_kind"] == {"gather": 0, "heads": 0}
    assert held["does_not_hold"] == ["fewest_bytes: lmsys at 1024 tokens"]
    held = summary_of(measured("gather", 1.06, 10, work=1.02), *rivals)
    assert (held["as_fast_as_best_baseline"], held["gather_is_even"], held["fewest_bytes"]) == (0, 0, 1)
    held = summary_of(measured("gather", 1.0, 10))
    assert not held["does_not_hold"] and held["as_fast_as_best_baseline"] == 0


def result(loss=1.0, norm=2.0, moved=10):
    return StepResult(1.0, (1.0,), 0.0, moved, 1, loss, norm, 1)


def timed(*rank_cpu_seconds):
    return StepResult(9.0, rank_cpu_seconds, 0.0, 10, 1, 1.0, 2.0, 1)


def point_of(**rounds):
    """A point, from each kind's digest and results."""
    planned = {kind: PlannedStep(10, 1.0, 1.0, 1.0, digest) for kind, (digest, _) in rounds.items()}
    results = {kind: found for kind, (_, found) in rounds.items()}
    return _PointRuns(point("lmsys", 1024), planned, {}, results, {kind: [] for kind in rounds})


def test_each_rank_has_its_own_least_and_one_plan_has_the_repeats_of_all_its_kinds():
    assert least_cpu_seconds([timed(1.0, 5.0), timed(4.0, 2.0)]) == 2.0
    runs = point_of(
        auto=("a", [timed(3.0, 1.0)]), gather=("a", [timed(1.0, 2.0)]), move_q=("b", [timed(4.0, 4.0)])
    )
    assert [runs.least_cpu_seconds(kind) for kind in ("auto", "gather", "move_q")] == [1.0, 1.0, 4.0]
    assert _close_kinds(runs) == ["auto", "gather"]


def test_who_duels_whom():
    def duellists(duel_repeats=3, **rounds):
        runs = point_of(**rounds)
        job = Job(2, (), tuple(rounds), 1, 1, challengers=("auto", "gather"), duel_repeats=duel_repeats)
        return _duellists(job, runs)

    auto, gather = ("a", [timed(3.0)]), ("b", [timed(2.0)])
    assert duellists(auto=auto, gather=gather, ring=("c", [timed(1.0)]), move_q=("d", [timed(4.0)])) == [
        "gather",
        "ring",
    ]
    assert not duellists(auto=auto, gather=gather, ring=("a", [timed(1.0)])), "auto runs the ring's schedules"
    assert not duellists(auto=auto, gather=gather), "nobody to meet"
    assert not duellists(duel_repeats=0, auto=auto, ring=gather)


def test_the_interval_of_a_median():
    """By the binomial distribution the 5th to the 12th of 16 hold it in 92 %, the 8th to the 17th of 24 in 94 %."""
    assert median_interval(range(16, 0, -1)) == (5, 12)
    assert median_interval([*range(1, 25)]) == (8, 17)
    assert median_interval([3.0]) == (3.0, 3.0)


def test_a_duel_goes_on_while_it_does_not_tell():
    runs = point_of(auto=("a", []), ring=("b", []))
    runs.duel["ring"] = [timed(1.0, 0.5)] * 16

    def is_undecided(*ratios, limit=1.05):
        runs.duel["auto"] = [timed(0.5, ratio) for ratio in ratios]
        return runs.is_undecided(["auto", "ring"], limit)

    assert is_undecided(*[1.0] * 8, *[1.1] * 8)
    assert not is_undecided(*[1.0] * 12, *[1.1] * 4), "below"
    assert not is_undecided(*[1.0] * 4, *[1.1] * 12), "above"
    assert not is_undecided(*[1.0] * 8, *[1.1] * 8, limit=None)


def test_kinds_that_disagree_are_not_compared():
    planned = dict.fromkeys(("gather", "move_q"), PlannedStep(10, 1.0, 1.0, 1.0, ""))
    _require_agreement({"gather": result(), "move_q": result(loss=1.00001)}, planned, "here")
    for wrong, message in (
        (result(loss=1.001), "the loss of move_q"),
        (result(norm=float("nan")), "the gradient norm of move_q"),
        (result(moved=11), "moved 11 bytes, its schedules say 10"),
    ):
        with pytest.raises(BenchError, match=message):
            _require_agreement({"gather": result(), "move_q": wrong}, planned, "here")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["--kinds", "gather,rings"], "no kind 'rings'"),
        (["--shapes", "alpaca"], "no shape 'alpaca'"),
        (["--world-sizes", "1,2"], "must be 2 or more"),
        (["--budgets", "many"], "cannot read 'many'"),
        (["--budgets", "8", "--scale", "1"], "raise the budget"),
        (["--scale", "0"], "--scale"),
        (["--output", "nowhere/cp.json"], "--output nowhere/cp.json: no such folder"),
    ],
)
def test_requests_that_cannot_be_met_are_refused_before_anything_starts(asked, message, capsys):
    assert main(["bench", "cp", *asked]) == 2
    assert message in capsys.readouterr().err


def test_ranks_that_take_too_long_are_ended():
    job = Job(2, (point("lmsys", 1024),), ("gather",), repeats=1, threads=1)
    with pytest.raises(RankFailure, match=r"ranks \[0, 1\] still ran after 0 s.*raise --timeout"):
        run_world(job, timeout_seconds=0.1)


def test_points_are_read_as_asked():
    options = BenchOptions(budgets=(4096, 2048), scale=0.5, shapes=("lmsys",))
    assert [one.budget_tokens for one in options.points] == [1024, 2048]
    with pytest.raises(ConfigError, match="no shape"):
        BenchOptions(shapes=("alpaca",)).points  # noqa: B018


PROMPT, RESPONSE, GROUP = 2048, 64, 8


def group_of_rows():
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(1, 200, (PROMPT,), generator=generator)
    return [Row("a", prompt, torch.randint(1, 200, (RESPONSE,), generator=generator)) for _ in range(GROUP)]


def plan_of(share, mode):
    """No pass may hold more than one row."""
    return plan_passes(group_of_rows(), share=share, mode=mode, tokens_per_pass=PROMPT + RESPONSE)


def test_a_split_tree_runs_where_its_fused_form_exceeds_the_budget():
    split, fused = plan_of("prompt", "auto"), plan_of("prompt", "fused")
    assert [len(one.rounds) for one in split.passes] == [GROUP]
    assert (split.num_groups_cut, fused.num_groups_cut) == (0, 1), "fused must compute the prompt again"


@pytest.mark.parametrize("checkpointing", [False, True])
def test_split_holds_no_more_than_rows_one_by_one(checkpointing):
    """Gradients of parameters are there before, so that the peak is activations, K/V leaves and their gradients."""
    model = random_model(tiny_config(256), torch.float32, drawn_in=torch.float32)
    prepare_model(model)
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable()

    def step(share, mode):
        def loss(scores):
            return torch.stack([log_probs.mean() for log_probs in scores.log_probs]).sum() / GROUP

        return run_passes(model, plan_of(share, mode), loss, PassOptions(mode=mode))

    step("prompt", "split")
    reports = []
    split = peak_bytes(lambda: reports.append(step("prompt", "split")))
    flat = peak_bytes(lambda: reports.append(step("none", "auto")))
    assert [report.tokens_computed for report in reports] == [
        PROMPT + GROUP * RESPONSE,
        GROUP * (PROMPT + RESPONSE),
    ]
    assert [report.num_passes for report in reports] == [1 + GROUP, GROUP]
    assert split < 1.1 * flat, f"{split / 2**20:.1f} MiB against {flat / 2**20:.1f}"
