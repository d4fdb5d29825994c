"""Options -> one directory with everything a run reads: questions, tokenizer, warm-started model, manifest.

    python -m recipes.grpo_reasoning_gym.assets [--seed N]      makes them once, prints where they lie

The directory's name holds a digest of all options and of the code: other questions or another model, another directory.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from transformers import Qwen2Config

from recipes.grpo_reasoning_gym import task, tokenizer, warm_start
from recipes.grpo_reasoning_gym.task import TaskOptions
from recipes.grpo_reasoning_gym.warm_start import WarmStartOptions
from recipes.once import make_once

ASSETS = Path("runs/grpo_reasoning_gym/assets")
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class AssetOptions:
    """Everything the assets depend on."""

    seed: int = 0
    train_questions: int = 4096
    validation_questions: int = 128
    tokenizer_questions: int = 300
    attention_heads: int = 4
    task: TaskOptions = field(default_factory=TaskOptions)

    @property
    def digest(self) -> str:
        """Eight hex digits that change with any option, and with the code that makes the assets."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode())
        for module in (task, tokenizer, warm_start):
            digest.update(Path(module.__file__).read_bytes())
        return digest.hexdigest()[:8]


def ensure(options: AssetOptions, report: Callable[[str], None] = print) -> Path:
    """The assets' directory, made now if it does not exist."""
    directory = ASSETS / f"seed{options.seed}-{options.digest}"
    return make_once(directory, lambda unfinished: make(unfinished, options, report), report)


def make(directory: Path, options: AssetOptions, report: Callable[[str], None] = print) -> None:
    """Writes all assets into an empty directory."""
    validation = task.validation_questions(options.task, options.validation_questions)
    train = task.take(
        task.training_questions(options.task, task.TRAIN, options.seed), options.train_questions
    )
    task.write_parquet(train, options.task, "train", directory / "train.parquet")
    task.write_parquet(validation, options.task, "validation", directory / "validation.parquet")

    model_directory = directory / "model"
    warm_tokenizer = _make_tokenizer(model_directory, options)
    warm_options = WarmStartOptions(seed=options.seed, attention_heads=options.attention_heads)
    model, warm_report = warm_start.train(warm_tokenizer, options.task, warm_options, report)
    model.save_pretrained(model_directory)

    shown = task.take(
        task.training_questions(options.task, task.WARM_START, options.seed), warm_report.questions
    )
    overlaps = {"train": task.overlap(validation, train), "warm_start": task.overlap(validation, shown)}
    report(
        f"assets: {len(train)} training and {len(validation)} validation questions; validation questions seen in "
        f"training: {overlaps['train']}, in the warm start: {overlaps['warm_start']}"
    )
    if any(overlaps.values()):
        raise RuntimeError(
            f"validation questions were trained on: {overlaps}; task.is_held_out must decide both"
        )
    manifest = {"options": asdict(options), "warm_start": asdict(warm_report), "validation_overlap": overlaps}
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _make_tokenizer(model_directory: Path, options: AssetOptions):
    # AutoTokenizer chooses its class by the model's config, so a config must be there first.
    Qwen2Config().save_pretrained(model_directory)
    questions = task.take(task.training_questions(options.task, task.TOKENIZER), options.tokenizer_questions)
    return tokenizer.build([question.text for question in questions], model_directory)


def describe_warm_start(directory: Path) -> str:
    """One line: what a run on these assets starts from."""
    warm = json.loads((directory / MANIFEST).read_text())["warm_start"]
    return f"a model after {warm['steps']} supervised steps on {warm['questions']} worked examples"


def main() -> None:
    """Makes the assets if needed; the last line on standard output is their directory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    directory = ensure(AssetOptions(seed=arguments.seed), report=lambda line: print(line, file=sys.stderr))
    print(directory.resolve())


if __name__ == "__main__":
    main()
