"""The tokenizer that is saved is the one that AutoTokenizer, and so verl, loads."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config

from recipes.grpo_reasoning_gym import task, tokenizer, warm_start
from recipes.grpo_reasoning_gym.task import TaskOptions

QUESTIONS = task.take(task.training_questions(TaskOptions(), task.TOKENIZER), 40)
TEXTS = [question.text for question in QUESTIONS]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    Qwen2Config().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def built(directory):
    return tokenizer.build(TEXTS, directory)


def test_round_trip(built, directory):
    loaded = AutoTokenizer.from_pretrained(directory)
    assert loaded.eos_token == "<|im_end|>" and loaded.pad_token == "<|endoftext|>"
    for question in QUESTIONS:
        ids = warm_start.encode_prompt(loaded, question)
        assert ids == warm_start.encode_prompt(built, question)
        # What verl's rollout does with the same question.
        assert ids == loaded.apply_chat_template(
            task.messages(question), add_generation_prompt=True, tokenize=True, return_dict=False
        )
        assert loaded.decode(ids).count("<|im_start|>") == 2


def test_vocabulary_is_the_models(built):
    assert warm_start.model_config(built).vocab_size == len(built)
    assert max(map(max, (built.encode(text) for text in TEXTS))) < len(built)


def test_one_token_for_each_digit(built):
    assert [len(built.encode(digit)) for digit in "0123456789"] == [1] * 10


def test_a_tokenizer_that_does_not_survive_the_round_trip_is_refused(directory):
    """The trap: another pre-tokenizer, saved into a Qwen2 directory, comes back as Qwen2's."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=400, show_progress=False))
    other = PreTrainedTokenizerFast(tokenizer_object=raw)
    other.chat_template = tokenizer.CHAT_TEMPLATE
    loaded = AutoTokenizer.from_pretrained(directory)
    with pytest.raises(RuntimeError, match="train it as the class that AutoTokenizer returns"):
        tokenizer._check_round_trip(other, loaded, TEXTS)
