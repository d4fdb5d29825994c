"""A recipe -> its assets -> `python -m treecp_rl.train` as a child process -> a summary of what it did.

Every run has a directory of its own with its log, metrics, checkpoints, reward curve and summary.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from recipes import summary

ROOT = Path(__file__).resolve().parents[1]
ASSETS = "assets.txt"
"""File in a run's directory that says which assets it reads, so that a resumed run reads the same."""


@dataclass(frozen=True)
class Recipe:
    """What the driver must know of a recipe."""

    name: str
    """Its folder under recipes/, its config's name, and its folder under runs/."""
    make_assets: Callable[[int], Path]
    """Seed -> the directory that holds what the run reads; made now if it does not exist."""
    describe_start: Callable[[Path], str]
    """Assets -> one line: what the run starts from."""
    validation_key: str
    """verl's name for the validation accuracy."""
    title: str
    """Title of the reward curve."""
    all_runs: Path = ROOT / "runs"
    """Where the runs of all recipes go."""

    @property
    def config(self) -> Path:
        """Where its Hydra config lies."""
        return ROOT / "recipes" / self.name / "config"

    @property
    def runs(self) -> Path:
        """Where its runs go."""
        return self.all_runs / self.name


def main(recipe: Recipe, description: str, argv: Sequence[str] | None = None) -> int:
    """Runs the recipe; returns the training process's exit code."""
    arguments, overrides = parse(description, argv)
    os.chdir(ROOT)
    sys.stdout.reconfigure(line_buffering=True)
    run_dir, assets = _resume(recipe) if arguments.resume else _begin(recipe, arguments.seed or 0)
    command = train_command(recipe, assets, run_dir, arguments, overrides)
    print(f"run: {'goes on in' if arguments.resume else 'starts in'} {run_dir}")
    code = run(command, log=run_dir / "train.log", metrics=next_metrics_file(run_dir))
    if code:
        print(f"training failed with exit code {code}; its output is in {run_dir / 'train.log'}")
        return code
    report(recipe, run_dir, assets)
    return 0


def parse(description: str, argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Own options, and the rest: Hydra overrides that go through as they are."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="treecp", help="trainer.backend (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="seed of the assets of a new run (default: 0)")
    parser.add_argument(
        "--resume", action="store_true", help="go on with the last run from its last checkpoint"
    )
    arguments, overrides = parser.parse_known_args(argv)
    if arguments.resume and arguments.seed is not None:
        parser.error("--resume goes on with the last run's own assets; leave out --seed")
    unknown = [override for override in overrides if override.startswith("-")]
    if unknown:
        parser.error(f"unknown options {' '.join(unknown)}; Hydra overrides are written key=value")
    return arguments, overrides


def _begin(recipe: Recipe, seed: int) -> tuple[Path, Path]:
    assets = recipe.make_assets(seed).resolve()
    run_dir = new_run(recipe.runs)
    (run_dir / ASSETS).write_text(f"{assets}\n")
    return run_dir, assets


def _resume(recipe: Recipe) -> tuple[Path, Path]:
    run_dir = last_run(recipe.runs)
    return run_dir, Path((run_dir / ASSETS).read_text().strip())


def new_run(runs: Path) -> Path:
    """A new directory, named by the time."""
    directory = runs / time.strftime("run-%Y%m%d-%H%M%S")
    directory.mkdir(parents=True)
    return directory


def last_run(runs_dir: Path) -> Path:
    """The newest run that got as far as a checkpoint."""
    runs = sorted(runs_dir.glob("run-*/checkpoints/latest_checkpointed_iteration.txt"))
    if not runs:
        raise SystemExit(f"--resume: no run with a checkpoint under {runs_dir}; start one without --resume")
    return runs[-1].parents[1]


def next_metrics_file(run_dir: Path) -> Path:
    """verl empties the file it logs to, so each start of a run writes one of its own."""
    return run_dir / f"metrics-{len(metrics_files(run_dir)):02d}.jsonl"


def metrics_files(run_dir: Path) -> list[Path]:
    """All metrics files of a run, in order."""
    return sorted(run_dir.glob("metrics-*.jsonl"))


def train_command(
    recipe: Recipe, assets: Path, run_dir: Path, arguments: argparse.Namespace, overrides: Sequence[str]
) -> list[str]:
    """The command a user could type."""
    return [
        sys.executable,
        "-m",
        "treecp_rl.train",
        f"--config-dir={recipe.config}",
        f"--config-name={recipe.name}",
        *([] if any(override.startswith("platform=") for override in overrides) else ["platform=cpu"]),
        f"trainer.backend={arguments.backend}",
        f"recipe.assets={assets}",
        f"recipe.run_dir={run_dir}",
        f"trainer.resume_mode={'auto' if arguments.resume else 'disable'}",
        f"hydra.run.dir={run_dir}/hydra",
        *overrides,
    ]


def run(command: Sequence[str], log: Path, metrics: Path) -> int:
    """Runs the training; its output goes to the terminal and, after what is there already, to `log`."""
    print("$ " + " ".join(command))
    environment = {**os.environ, "VERL_FILE_LOGGER_PATH": str(metrics), "PYTHONUNBUFFERED": "1"}
    with (
        _exit_when_terminated(),
        log.open("ab") as copy,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as child,
    ):
        try:
            while chunk := child.stdout.read1(65536):
                copy.write(chunk)
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()
            return child.wait()
        except BaseException:
            # Ctrl-C reaches the child by itself, a signal to this process alone does not. It takes Ray down with it.
            child.terminate()
            child.wait()
            raise


@contextmanager
def _exit_when_terminated() -> Iterator[None]:
    """Lets SIGTERM raise, as Ctrl-C does, so that the training process is ended too."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def report(recipe: Recipe, run_dir: Path, assets: Path) -> None:
    """Writes and shows the summary."""
    figures = summary.summarize(summary.read_metrics(metrics_files(run_dir)), recipe.validation_key)
    picture = run_dir / "reward_curve.png"
    summary.draw(figures, recipe.title, picture)
    (run_dir / "summary.json").write_text(json.dumps(summary.to_json(figures), indent=2) + "\n")
    files = [
        ("checkpoint", last_checkpoint(run_dir)),
        ("metrics", metrics_files(run_dir)[-1]),
        ("reward curve", picture),
        ("log", run_dir / "train.log"),
    ]
    for line in summary.lines(figures, files, recipe.describe_start(assets)):
        print(line)


def last_checkpoint(run_dir: Path) -> Path:
    """The newest checkpoint, by verl's own marker."""
    marker = run_dir / "checkpoints" / "latest_checkpointed_iteration.txt"
    return marker.parent / f"global_step_{marker.read_text().strip()}" if marker.exists() else marker.parent
