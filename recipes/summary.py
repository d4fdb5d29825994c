"""verl's metrics files (one JSON object a step) -> what a run did: a few numbers, a few lines, one picture."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

REWARD = "critic/score/mean"
TOKENS_COMPUTED, TOKENS_FLAT = "treecp/tokens_computed", "treecp/tokens_flat"
STEP_SECONDS = "timing_s/step"


@dataclass(frozen=True)
class Summary:
    """A run in numbers. `rewards` and `validations` map a step to a mean."""

    rewards: dict[int, float]
    validations: dict[int, float]
    tokens_computed: int | None
    """None where the backend does not count them (trainer.backend=fsdp2)."""
    tokens_flat: int | None
    train_seconds: float


def read_metrics(paths: Iterable[Path]) -> dict[int, dict[str, float]]:
    """Step -> its metrics; a step that occurs again, as after a resume, counts as written last."""
    steps: dict[int, dict[str, float]] = {}
    for path in paths:
        for line in path.read_text().splitlines():
            record = json.loads(line)
            steps[record["step"]] = steps.get(record["step"], {}) | record["data"]
    return dict(sorted(steps.items()))


def summarize(steps: dict[int, dict[str, float]], validation_key: str) -> Summary:
    """The numbers of a run.

    Raises:
        ValueError: if there is no training step in it. A run may go without validation.
    """
    rewards = {step: data[REWARD] for step, data in steps.items() if REWARD in data}
    validations = {step: data[validation_key] for step, data in steps.items() if validation_key in data}
    if not rewards:
        raise ValueError(f"no step with {REWARD} in the metrics; see the log for why the run ended")
    return Summary(
        rewards=rewards,
        validations=validations,
        tokens_computed=_total(steps, TOKENS_COMPUTED),
        tokens_flat=_total(steps, TOKENS_FLAT),
        train_seconds=sum(data.get(STEP_SECONDS, 0.0) for data in steps.values()),
    )


def _total(steps: dict[int, dict[str, float]], key: str) -> int | None:
    values = [data[key] for data in steps.values() if key in data]
    return round(sum(values)) if values else None


def first_and_last(curve: dict[int, float]) -> tuple[float, float]:
    """Values at the first and the last step of a curve."""
    return curve[min(curve)], curve[max(curve)]


def to_json(summary: Summary) -> dict:
    """The figures the lines below show, for machines."""
    before, after = first_and_last(summary.validations) if summary.validations else (None, None)
    reward_before, reward_after = first_and_last(summary.rewards)
    return {
        "steps": max(summary.rewards),
        "validation_before": before,
        "validation_after": after,
        "validation_gain": None if before is None else after - before,
        "reward_first_step": reward_before,
        "reward_last_step": reward_after,
        "tokens_computed": summary.tokens_computed,
        "tokens_flat": summary.tokens_flat,
        "train_seconds": summary.train_seconds,
        "validations": summary.validations,
    }


def lines(summary: Summary, files: Sequence[tuple[str, Path]], start: str) -> list[str]:
    """The summary as a user reads it."""
    figures = to_json(summary)
    rows = [
        ("start", start),
        ("steps", f"{figures['steps']} in {summary.train_seconds:.0f} s"),
        ("training reward", f"{figures['reward_first_step']:.3f} -> {figures['reward_last_step']:.3f}"),
        ("validation accuracy", _validation(figures)),
        ("tokens computed", _tokens(summary)),
        *((name, str(path)) for name, path in files),
    ]
    return [f"{name:<20}{value}" for name, value in rows]


def _validation(figures: dict) -> str:
    if figures["validation_before"] is None:
        return "not validated (trainer.test_freq, trainer.val_before_train)"
    return (
        f"{figures['validation_before']:.3f} -> {figures['validation_after']:.3f} "
        f"({figures['validation_gain']:+.3f}) on questions that training never saw"
    )


def _tokens(summary: Summary) -> str:
    if summary.tokens_computed is None or summary.tokens_flat is None:
        return "not counted by this backend"
    ratio = summary.tokens_flat / summary.tokens_computed
    counts = f"{summary.tokens_computed:,}, flattened {summary.tokens_flat:,}"
    return f"{counts} ({ratio:.2f} times as many), in the policy update"


def draw(summary: Summary, title: str, path: Path) -> None:
    """The reward curve as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(
        *zip(*summary.rewards.items(), strict=True), label="training reward (mean of a step)", alpha=0.6
    )
    if summary.validations:
        steps, accuracy = zip(*summary.validations.items(), strict=True)
        axes.plot(steps, accuracy, "o-", label="validation accuracy (unseen questions)")
    axes.set(xlabel="step", ylim=(0, 1), title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
