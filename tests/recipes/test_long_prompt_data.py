"""The other recipes' questions: disjoint, in verl's columns, scored by reasoning-gym."""

import json

import pandas as pd
import pytest

from recipes.grpo_qwen2_5_7b_long_prompt import data
from recipes.grpo_reasoning_gym.reward import compute_score
from recipes.grpo_smollm2_reasoning import assets as smollm2
from recipes.grpo_smollm2_reasoning.reward import compute_score as first_line_score
from recipes.grpo_smollm2_reasoning.reward import final_answer


def read(directory):
    return {split: pd.read_parquet(directory / f"{split}.parquet") for split in ("train", "validation")}


def questions(frame):
    return {row[-1]["content"] for row in frame["prompt"]}


def test_needle_haystack(tmp_path):
    data.write(tmp_path, statements=200, num_train=12, num_validation=4)
    frames = read(tmp_path)
    assert [len(frame) for frame in frames.values()] == [12, 4]
    assert not questions(frames["train"]) & questions(frames["validation"])
    row = frames["train"].iloc[0]
    answer = row["reward_model"]["ground_truth"]
    assert row["prompt"][0]["content"].count(". ") > 150
    assert compute_score(row["data_source"], answer, answer, dict(row["extra_info"])) == {
        "score": 1.0,
        "acc": 1.0,
    }


def test_letter_counting_after_three_turns(tmp_path):
    smollm2.write_data(tmp_path, seed=0)
    frames = read(tmp_path)
    assert not questions(frames["train"]) & questions(frames["validation"])
    row = frames["train"].iloc[0]
    assert [turn["role"] for turn in row["prompt"]] == ["user", "assistant"] * 3 + ["user"]
    shown = {turn["content"] for turn in row["prompt"][:-1]}
    assert not shown & (questions(frames["train"]) | questions(frames["validation"])), "an example is asked"
    entry = row["extra_info"]["entry"]
    answer = json.loads(entry)["answer"]
    scored = first_line_score("letter_counting", f"{answer}.\nBecause", answer, {"entry": entry})
    assert scored == {"score": 1.0, "acc": 1.0}


@pytest.mark.parametrize(("response", "answer"), [(" 2.\n\nSo", "2"), ("2", "2"), ("", ""), ("\n3", "3")])
def test_final_answer(response, answer):
    assert final_answer(response) == answer
