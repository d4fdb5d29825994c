"""reasoning-gym's needle_haystack, long -> train.parquet and validation.parquet.

    python -m recipes.grpo_qwen2_5_7b_long_prompt.data DIRECTORY [--statements 1300]

A question is 1,300 statements, give or take a tenth, about 9,500 tokens, and one name to find among them.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from itertools import count, islice
from pathlib import Path

import pandas as pd
from reasoning_gym.factory import create_dataset

from recipes.grpo_reasoning_gym.task import is_held_out
from recipes.once import make_once

TASK = "needle_haystack"
TRAIN, VALIDATION = 300_000_000, 900_000_000


def write(directory: Path, statements: int, num_train: int, num_validation: int) -> None:
    """Writes both files; they share no question."""
    for split, start, number, held_out in (
        ("train", TRAIN, num_train, False),
        ("validation", VALIDATION, num_validation, True),
    ):
        entries = (e for e in questions(start, statements) if is_held_out(e["question"]) == held_out)
        rows = [to_row(entry, split) for entry in islice(entries, number)]
        pd.DataFrame(rows).to_parquet(directory / f"{split}.parquet", index=False)


def questions(start: int, statements: int) -> Iterator[dict]:
    """Endless questions with `statements` statements, give or take a tenth."""
    dataset = create_dataset(
        TASK,
        seed=start,
        size=1,
        min_num_statements=statements - statements // 10,
        max_num_statements=statements + statements // 10,
    )
    return (dataset[index] for index in count())


def to_row(entry: dict, split: str) -> dict:
    """A question in verl's columns."""
    return {
        "data_source": TASK,
        "prompt": [{"role": "user", "content": entry["question"]}],
        "ability": "long_context",
        "reward_model": {"style": "rule", "ground_truth": entry["answer"]},
        "extra_info": {"index": entry["metadata"]["source_index"], "split": split},
    }


def main() -> None:
    """Makes the data, unless that has been done before."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--statements", type=int, default=1300, help="per question (default: %(default)s)")
    parser.add_argument("--train", type=int, default=8192, help="questions (default: %(default)s)")
    parser.add_argument("--validation", type=int, default=256, help="questions (default: %(default)s)")
    arguments = parser.parse_args()
    make_once(
        arguments.directory,
        partial(
            write,
            statements=arguments.statements,
            num_train=arguments.train,
            num_validation=arguments.validation,
        ),
    )


if __name__ == "__main__":
    main()
