"""The driver: what goes through to verl, what a failed run says, and the summary of a recorded run."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from recipes import driver, summary
from recipes.grpo_reasoning_gym.main import RECIPE

RECORDED = Path(__file__).parent / "recorded_metrics.jsonl"


def test_options_and_overrides_are_told_apart():
    arguments, overrides = driver.parse("", ["--backend", "fsdp2", "trainer.total_epochs=2", "+data.x=1"])
    assert (arguments.backend, arguments.resume, arguments.seed) == ("fsdp2", False, None)
    assert overrides == ["trainer.total_epochs=2", "+data.x=1"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [(["--reusme"], "unknown options --reusme"), (["--resume", "--seed", "1"], "leave out --seed")],
)
def test_wrong_options_are_refused(argv, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        driver.parse("", argv)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_nothing_to_resume(tmp_path):
    with pytest.raises(SystemExit, match="no run with a checkpoint"):
        driver.last_run(tmp_path)


def test_resume_takes_the_newest_run_with_a_checkpoint(tmp_path):
    for name, step in (
        ("run-20260101-000000", "3"),
        ("run-20260102-000000", "7"),
        ("run-20260103-000000", None),
    ):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        if step:
            (tmp_path / name / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(step)
    newest = driver.last_run(tmp_path)
    assert newest.name == "run-20260102-000000"
    assert driver.last_checkpoint(newest).name == "global_step_7"


def test_a_platform_given_by_the_user_is_the_only_one():
    arguments, overrides = driver.parse("", ["platform=cuda"])
    command = driver.train_command(RECIPE, Path("a"), Path("r"), arguments, overrides)
    assert [part for part in command if part.startswith("platform=")] == ["platform=cuda"]


def test_a_failed_training_is_a_failed_run(tmp_path, monkeypatch, capfd):
    recipe = replace(RECIPE, make_assets=lambda seed: tmp_path / "assets", all_runs=tmp_path)
    failing = [sys.executable, "-c", "import sys; print('out of luck'); sys.exit(3)"]
    monkeypatch.setattr(driver, "train_command", lambda *_: failing)
    assert driver.main(recipe, "", []) == 3
    shown = capfd.readouterr().out
    assert "out of luck" in shown and "training failed with exit code 3" in shown
    (run_dir,) = recipe.runs.iterdir()
    assert (run_dir / "train.log").read_text() == "out of luck\n"


def test_summary_of_a_recorded_run(tmp_path, capsys):
    shutil.copy(RECORDED, tmp_path / "metrics-00.jsonl")
    (tmp_path / "manifest.json").write_text(json.dumps({"warm_start": {"steps": 90, "questions": 2880}}))
    driver.report(RECIPE, tmp_path, assets=tmp_path)
    written = json.loads((tmp_path / "summary.json").read_text())
    records = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    validations = [r["data"][RECIPE.validation_key] for r in records if RECIPE.validation_key in r["data"]]
    computed = sum(r["data"].get("treecp/tokens_computed", 0) for r in records)
    assert written["validation_before"] == validations[0]
    assert written["validation_gain"] == pytest.approx(validations[-1] - validations[0])
    assert written["tokens_computed"] == round(computed)
    assert written["tokens_flat"] > 2 * written["tokens_computed"]
    assert (tmp_path / "reward_curve.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    for part in (
        "90 supervised steps",
        "tokens computed",
        "flattened",
        "checkpoint",
        "metrics",
        "reward curve",
    ):
        assert part in shown


def test_resumed_runs_are_one_curve(tmp_path):
    files = [tmp_path / "metrics-00.jsonl", tmp_path / "metrics-01.jsonl"]
    key = RECIPE.validation_key
    first = [{"step": 0, "data": {key: 0.2}}, {"step": 1, "data": {summary.REWARD: 0.3}}]
    second = [
        {"step": 1, "data": {summary.REWARD: 0.4}},
        {"step": 2, "data": {summary.REWARD: 0.5, key: 0.6}},
    ]
    for path, records in zip(files, (first, second), strict=True):
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    figures = summary.summarize(summary.read_metrics(files), key)
    assert figures.rewards == {1: 0.4, 2: 0.5}
    assert figures.validations == {0: 0.2, 2: 0.6}
    assert figures.tokens_computed is None
    assert "not counted by this backend" in "\n".join(summary.lines(figures, [], "nothing"))


def test_a_run_without_a_step_has_no_summary():
    with pytest.raises(ValueError, match="see the log for why"):
        summary.summarize({0: {RECIPE.validation_key: 0.3}}, RECIPE.validation_key)


def test_a_run_without_validation_is_summarised(tmp_path):
    figures = summary.summarize({1: {summary.REWARD: 0.25}}, RECIPE.validation_key)
    assert "not validated" in "\n".join(summary.lines(figures, [], "nothing"))
    assert summary.to_json(figures)["validation_gain"] is None
    summary.draw(figures, "title", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 0


def test_a_terminated_driver_takes_its_training_along(tmp_path):
    """`kill` of the driver must not leave a training behind that nobody watches."""
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    script = (
        "import sys; from dataclasses import replace; from pathlib import Path; from recipes import driver\n"
        "from recipes.grpo_reasoning_gym.main import RECIPE\n"
        f"driver.train_command = lambda *_: [sys.executable, '-c', {child!r}]\n"
        f"here = Path({str(tmp_path)!r})\n"
        "driver.main(replace(RECIPE, make_assets=lambda seed: here, all_runs=here), '', [])\n"
    )
    running = subprocess.Popen(
        [sys.executable, "-c", script], cwd=driver.ROOT, stdout=subprocess.PIPE, text=True
    )
    training = next(int(line) for line in running.stdout if line.strip().isdigit())
    running.terminate()
    running.stdout.read()
    assert running.wait(timeout=60) == 128 + 15
    with pytest.raises(ProcessLookupError):
        os.kill(training, 0)
