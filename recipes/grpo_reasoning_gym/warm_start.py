"""Random Qwen2 -> answers learned from worked examples until sampling is right about one time in three.

GRPO learns from the difference between good and bad answers of one question. A random model's answers are all bad,
so a short supervised phase comes first, as it does in practice. It stops early on purpose: what is left to learn is
left to GRPO. No held-out question takes part, neither in training nor in deciding when to stop.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from recipes.grpo_reasoning_gym import task
from recipes.grpo_reasoning_gym.reward import score
from recipes.grpo_reasoning_gym.task import Question, TaskOptions

# The questions that decide when to stop come from the same side as the training questions, further up the stream.
_PROBE = task.WARM_START + 500_000


@dataclass(frozen=True)
class WarmStartOptions:
    """How the supervised phase runs."""

    seed: int = 0
    attention_heads: int = 4
    """Over 64 numbers; vLLM on the CPU runs with two of 32, not with four of 16."""
    batch_size: int = 32
    learning_rate: float = 2e-3
    warm_up_steps: int = 30
    max_steps: int = 400
    probe_every: int = 10
    probe_questions: int = 64
    probe_samples: int = 4
    stop_at_accuracy: float = 0.3


@dataclass(frozen=True)
class WarmStartReport:
    """What the supervised phase did."""

    steps: int
    questions: int
    probe_accuracy: float


def model_config(tokenizer: PreTrainedTokenizerFast, attention_heads: int = 4) -> Qwen2Config:
    """About 100,000 parameters; the vocabulary is the tokenizer's, to the token."""
    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=attention_heads,
        num_key_value_heads=attention_heads // 2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        # The usual 0.02 is for wide layers; at 64 it slows the first steps several times over.
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def train(
    tokenizer: PreTrainedTokenizerFast, task_options: TaskOptions, options: WarmStartOptions, report=print
) -> tuple[PreTrainedModel, WarmStartReport]:
    """Trains a new model on answers alone; `report` gets one line per probe."""
    with _one_thread():
        return _train(tokenizer, task_options, options, report)


@contextmanager
def _one_thread() -> Iterator[None]:
    # At this size a second thread gains nothing, and sums come out the same whatever number of cores there is.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _train(
    tokenizer: PreTrainedTokenizerFast, task_options: TaskOptions, options: WarmStartOptions, report
) -> tuple[PreTrainedModel, WarmStartReport]:
    torch.manual_seed(options.seed)
    model = Qwen2ForCausalLM(model_config(tokenizer, options.attention_heads))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.01)
    questions = task.training_questions(task_options, task.WARM_START, options.seed)
    probe = task.take(task.training_questions(task_options, _PROBE, options.seed), options.probe_questions)
    for step in range(1, options.max_steps + 1):
        _set_learning_rate(optimizer, options, step)
        loss = _step(model, optimizer, tokenizer, questions, options.batch_size)
        if step % options.probe_every:
            continue
        accuracy = sampled_accuracy(model, tokenizer, probe, options.probe_samples)
        report(f"warm start: step {step}  loss {loss:.3f}  sampled accuracy {accuracy:.3f}")
        if accuracy >= options.stop_at_accuracy:
            return model, WarmStartReport(step, step * options.batch_size, accuracy)
    raise RuntimeError(
        f"the warm start reached {accuracy:.3f} of {options.stop_at_accuracy} sampled accuracy in "
        f"{options.max_steps} steps; choose another seed or an easier task"
    )


def _set_learning_rate(optimizer: torch.optim.Optimizer, options: WarmStartOptions, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = options.learning_rate * min(1.0, step / options.warm_up_steps)


def _step(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    tokenizer: PreTrainedTokenizerFast,
    questions: Iterator[Question],
    batch_size: int,
) -> float:
    input_ids, labels = _supervised_batch(tokenizer, task.take(questions, batch_size))
    logits = model(input_ids=input_ids, use_cache=False).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def encode_prompt(tokenizer: PreTrainedTokenizerFast, question: Question) -> list[int]:
    """The token ids verl's rollout will see for this question."""
    rendered = tokenizer.apply_chat_template(
        task.messages(question), tokenize=False, add_generation_prompt=True
    )
    return tokenizer.encode(rendered)


def _supervised_batch(
    tokenizer: PreTrainedTokenizerFast, questions: list[Question]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids, and labels that ignore everything but the answer and its end token."""
    rows = [
        (encode_prompt(tokenizer, q), [*tokenizer.encode(q.answer), tokenizer.eos_token_id])
        for q in questions
    ]
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    input_ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full((len(rows), width), -100)
    for index, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        input_ids[index, :end] = torch.tensor(prompt + answer)
        labels[index, len(prompt) : end] = torch.tensor(answer)
    return input_ids, labels


@torch.no_grad()
def sampled_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    questions: list[Question],
    samples: int,
    max_new_tokens: int = 4,
) -> float:
    """Share of exact answers at temperature 1. Questions of one length share a batch, prompts computed once."""
    by_length: dict[int, list[Question]] = {}
    for question in questions:
        by_length.setdefault(len(encode_prompt(tokenizer, question)), []).append(question)
    correct = 0
    for batch in by_length.values():
        answers = _sample(model, tokenizer, batch, samples, max_new_tokens)
        correct += sum(
            score(text, question.answer) == 1.0
            for question, texts in zip(batch, answers, strict=True)
            for text in texts
        )
    return correct / (len(questions) * samples)


def _sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    questions: list[Question],
    samples: int,
    max_new_tokens: int,
) -> list[list[str]]:
    prompts = torch.tensor([encode_prompt(tokenizer, question) for question in questions])
    output = model(input_ids=prompts, use_cache=True, logits_to_keep=1)
    output.past_key_values.batch_repeat_interleave(samples)
    logits = output.logits[:, -1].repeat_interleave(samples, 0)
    tokens, ended = [], torch.zeros(len(logits), dtype=torch.bool)
    while True:
        token = torch.multinomial(logits.softmax(-1), 1)[:, 0].masked_fill(ended, tokenizer.pad_token_id)
        tokens.append(token)
        ended |= token == tokenizer.eos_token_id
        if ended.all() or len(tokens) == max_new_tokens:
            break
        logits = model(input_ids=token[:, None], past_key_values=output.past_key_values).logits[:, -1]
    texts = tokenizer.batch_decode(torch.stack(tokens, 1), skip_special_tokens=True)
    return [texts[i : i + samples] for i in range(0, len(texts), samples)]
