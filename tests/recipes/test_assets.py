"""Assets are made once, whole or not at all, and the same for the same options."""

import hashlib
import json
from dataclasses import replace

import pandas as pd
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.grpo_reasoning_gym import assets, task, warm_start
from recipes.grpo_reasoning_gym.assets import AssetOptions
from recipes.grpo_reasoning_gym.warm_start import WarmStartOptions
from recipes.once import make_once

OPTIONS = AssetOptions(train_questions=64, validation_questions=16, tokenizer_questions=40)
SHORT = WarmStartOptions(max_steps=2, probe_every=2, probe_questions=4, stop_at_accuracy=0.0)


@pytest.fixture
def short_warm_start(monkeypatch):
    """Two supervised steps in place of about ninety; everything else as it is."""
    monkeypatch.setattr(assets, "WarmStartOptions", lambda **options: replace(SHORT, **options))


def test_same_options_same_files(tmp_path, short_warm_start):
    digests = []
    for name in ("a", "b"):
        directory = tmp_path / name
        directory.mkdir()
        assets.make(directory, OPTIONS, report=lambda line: None)
        files = sorted(path for path in directory.rglob("*") if path.is_file())
        digests.append(
            {str(f.relative_to(directory)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}
        )
    assert digests[0] == digests[1]

    directory = tmp_path / "a"
    manifest = json.loads((directory / assets.MANIFEST).read_text())
    assert manifest["validation_overlap"] == {"train": 0, "warm_start": 0}
    assert "2 supervised steps on 64 worked examples" in assets.describe_warm_start(directory)
    prompts = {
        split: {row[0]["content"] for row in pd.read_parquet(directory / f"{split}.parquet")["prompt"]}
        for split in ("train", "validation")
    }
    assert len(prompts["validation"]) == 16 and not prompts["train"] & prompts["validation"]
    model = AutoModelForCausalLM.from_pretrained(directory / "model")
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id


def test_a_warm_start_that_does_not_get_there_says_so(tmp_path):
    assets.Qwen2Config().save_pretrained(tmp_path)
    tokenizer = assets._make_tokenizer(tmp_path, OPTIONS)
    with pytest.raises(RuntimeError, match=r"of 0.99 sampled accuracy in 2 steps; choose another seed"):
        warm_start.train(
            tokenizer, OPTIONS.task, replace(SHORT, stop_at_accuracy=0.99), report=lambda line: None
        )


def test_every_option_changes_the_directory():
    harder = task.TaskOptions(max_island_size=9)
    others = [
        OPTIONS,
        replace(OPTIONS, seed=1),
        replace(OPTIONS, task=harder),
        replace(OPTIONS, train_questions=65),
    ]
    assert len({options.digest for options in others}) == len(others)


def test_an_interrupted_make_leaves_nothing(tmp_path):
    target = tmp_path / "assets"

    def interrupted(directory):
        (directory / "half").write_text("made")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_once(target, interrupted, report=lambda line: None)
    assert list(tmp_path.iterdir()) == []


def test_made_once(tmp_path):
    made = []

    def make(directory):
        made.append(directory)
        (directory / "file").write_text("whole")

    for _ in range(2):
        make_once(tmp_path / "assets", make, report=lambda line: None)
    assert len(made) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["assets"]
