"""The questions: the same for the same seed, in verl's columns, and never validated on after training on them."""

import json

import pandas as pd
import pytest

from recipes.grpo_reasoning_gym import reward, task
from recipes.grpo_reasoning_gym.task import TaskOptions

OPTIONS = TaskOptions()


def texts(questions):
    return [question.text for question in questions]


@pytest.fixture(scope="module")
def validation():
    return task.validation_questions(OPTIONS, 64)


def test_streams_are_deterministic_and_seeds_differ(validation):
    first = texts(task.take(task.training_questions(OPTIONS, task.TRAIN, seed=3), 50))
    assert first == texts(task.take(task.training_questions(OPTIONS, task.TRAIN, seed=3), 50))
    assert first != texts(task.take(task.training_questions(OPTIONS, task.TRAIN, seed=4), 50))
    assert texts(validation) == texts(task.validation_questions(OPTIONS, 64))


def test_validation_questions_are_distinct_and_unseen(validation):
    assert len(set(texts(validation))) == len(validation) == 64
    for start in (task.TRAIN, task.WARM_START, task.TOKENIZER):
        trained = task.take(task.training_questions(OPTIONS, start), 2000)
        assert task.overlap(validation, trained) == 0


def test_without_the_held_out_rule_questions_do_repeat():
    """The rule is needed: in a small space of questions, two streams soon ask the same thing."""
    small = TaskOptions(min_side=4, max_side=4, max_island_size=4)
    here = task.take(task.stream(small, task.TRAIN), 500)
    there = task.take(task.stream(small, task.VALIDATION), 500)
    assert task.overlap(there, here) > 0


def test_parquet_has_verls_columns_and_the_scorers_entry(tmp_path, validation):
    task.write_parquet(validation, OPTIONS, "validation", tmp_path / "validation.parquet")
    frame = pd.read_parquet(tmp_path / "validation.parquet")
    assert set(frame) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    row, question = frame.iloc[0], validation[0]
    assert [dict(turn) for turn in row["prompt"]] == [{"role": "user", "content": question.text}]
    assert row["reward_model"]["ground_truth"] == question.answer
    assert json.loads(row["extra_info"]["entry"])["metadata"]["grid"] == question.metadata["grid"]


def test_prompts_are_long_against_responses(validation):
    assert all(len(question.text) > 100 * len(question.answer) for question in validation)


@pytest.mark.parametrize(
    ("response", "score", "accuracy"), [("5", 1.0, 1.0), ("15", 0.5, 0.0), ("4", 0.0, 0.0), ("", 0.0, 0.0)]
)
def test_score_is_reasoning_gyms_and_accuracy_is_exact(response, score, accuracy):
    assert reward.compute_score("largest_island", response, "5") == {"score": score, "acc": accuracy}
