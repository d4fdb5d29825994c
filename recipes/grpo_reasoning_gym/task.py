"""reasoning-gym questions -> held-out split by question text -> rows with verl's columns -> parquet.

Every question belongs to one side for good: a digest of its text decides. So the questions that validate a run
cannot turn up in the warm start or in the GRPO prompts, however often a stream repeats itself; `overlap` counts
what that rule promises to be zero.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

import pandas as pd
from reasoning_gym.factory import create_dataset

# Streams start far apart, and seeds a million apart within a stream, so that none share reasoning-gym seeds.
WARM_START, TRAIN, VALIDATION, TOKENIZER = 10_000_000, 300_000_000, 900_000_000, 1_500_000_000
_SEED_STRIDE = 1_000_000

_HELD_OUT_ONE_IN = 8


@dataclass(frozen=True)
class TaskOptions:
    """Which questions reasoning-gym's `largest_island` asks."""

    name: str = "largest_island"
    min_side: int = 5
    max_side: int = 5
    num_islands: int = 1
    max_island_size: int = 8


@dataclass(frozen=True)
class Question:
    """One question with everything its scorer needs."""

    text: str
    answer: str
    metadata: dict
    source_index: int


def is_held_out(text: str) -> bool:
    """Whether a question is kept for validation; a property of its text alone."""
    return hashlib.sha256(text.encode()).digest()[0] % _HELD_OUT_ONE_IN == 0


def stream(options: TaskOptions, start: int, seed: int = 0) -> Iterator[Question]:
    """Endless questions of one of the streams above."""
    dataset = create_dataset(
        options.name,
        seed=start + _SEED_STRIDE * seed,
        size=1,
        min_rows=options.min_side,
        max_rows=options.max_side,
        min_cols=options.min_side,
        max_cols=options.max_side,
        min_num_islands=options.num_islands,
        max_num_islands=options.num_islands,
        min_island_size=1,
        max_island_size=options.max_island_size,
    )
    for index in count():
        entry = dataset[index]
        yield Question(entry["question"], entry["answer"], entry["metadata"], index)


def training_questions(options: TaskOptions, start: int, seed: int = 0) -> Iterator[Question]:
    """Endless questions, none of them held out."""
    return (question for question in stream(options, start, seed) if not is_held_out(question.text))


def validation_questions(options: TaskOptions, number: int) -> list[Question]:
    """Different held-out questions, the same for every seed of a run."""
    seen: dict[str, Question] = {}
    for question in stream(options, VALIDATION):
        if is_held_out(question.text):
            seen.setdefault(question.text, question)
        if len(seen) == number:
            break
    return list(seen.values())


def take(questions: Iterable[Question], number: int) -> list[Question]:
    """The first `number` questions."""
    return list(islice(questions, number))


def overlap(validation: Iterable[Question], *others: Iterable[Question]) -> int:
    """How many validation questions, letter by letter, occur in any of the other sets."""
    seen = {question.text for other in others for question in other}
    return sum(question.text in seen for question in validation)


def messages(question: Question) -> list[dict[str, str]]:
    """The chat that asks a question."""
    return [{"role": "user", "content": question.text}]


def to_row(question: Question, options: TaskOptions, split: str) -> dict:
    """A question in verl's columns."""
    return {
        "data_source": options.name,
        "prompt": messages(question),
        "ability": "reasoning",
        "reward_model": {"style": "rule", "ground_truth": question.answer},
        "extra_info": {
            "index": question.source_index,
            "split": split,
            # One string: parquet would give nested lists of differing depth a schema of their own.
            "entry": json.dumps(
                {"question": question.text, "answer": question.answer, "metadata": question.metadata}
            ),
        },
    }


def write_parquet(questions: Iterable[Question], options: TaskOptions, split: str, path: Path) -> None:
    """Writes questions where verl's dataset reads them."""
    pd.DataFrame([to_row(question, options, split) for question in questions]).to_parquet(path, index=False)
