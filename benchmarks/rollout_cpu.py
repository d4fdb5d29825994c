"""Rows to generate -> seconds of three generators, interleaved -> JSON. ``python benchmarks/rollout_cpu.py``

Why the CPU rollout has its own continuous batching: ours, transformers' continuous batching and one padded
``generate`` take turns on the same 256 rows of 32 prompts; median of the rounds.
"""

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, Qwen2Config

from treecp_rl.workers.generation import BatchGenerator, GenerationRequest
from treecp_rl.workers.sampling import Sampling

Rows = list[tuple[tuple[int, ...], int]]
"""(prompt, new tokens)"""

GROUP_SIZE, NUM_PROMPTS, EOS = 8, 32, 2
CONFIG = Qwen2Config(
    vocab_size=409,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    use_sliding_window=False,
    tie_word_embeddings=True,
    eos_token_id=EOS,
    pad_token_id=0,
)


def draw_rows(seed: int, most_new_tokens: int) -> Rows:
    draw = random.Random(seed)
    prompts = [
        tuple(draw.randrange(3, CONFIG.vocab_size) for _ in range(draw.randint(130, 160)))
        for _ in range(NUM_PROMPTS)
    ]
    return [(prompt, draw.randint(2, most_new_tokens)) for prompt in prompts for _ in range(GROUP_SIZE)]


def ours(model: torch.nn.Module) -> Callable[[Rows], None]:
    generator = BatchGenerator(model, [EOS])

    def run(rows: Rows) -> None:
        generator.forget_prompts()
        for index, (prompt, new_tokens) in enumerate(rows):
            generator.submit(GenerationRequest(str(index), prompt, Sampling(new_tokens), seed=(index,)))
        while generator.has_work:
            generator.step()

    return run


def continuous_batching(model: torch.nn.Module, generation: GenerationConfig) -> Callable[[Rows], None]:
    manager = model.init_continuous_batching(
        generation_config=generation,
        continuous_batching_config=ContinuousBatchingConfig(return_logprobs=True),
    )
    manager.start()

    def run(rows: Rows) -> None:
        for prompt, new_tokens in rows:
            manager.add_request(list(prompt), max_new_tokens=new_tokens, eos_token_id=EOS)
        finished = 0
        while finished < len(rows):
            result = manager.get_result(timeout=60)
            if result is None or result.error is not None:
                raise RuntimeError(f"continuous batching gave {result} after {finished} of {len(rows)} rows")
            finished += result.is_finished()

    return run


def padded_generate(model: torch.nn.Module, generation: GenerationConfig) -> Callable[[Rows], None]:
    def run(rows: Rows) -> None:
        width = max(len(prompt) for prompt, _ in rows)
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt, _ in rows])
        with torch.inference_mode():
            model.generate(
                input_ids=ids,
                attention_mask=(ids != 0).long(),
                generation_config=generation,
                max_new_tokens=max(new_tokens for _, new_tokens in rows),
                output_logits=True,
                return_dict_in_generate=True,
            )

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--most-new-tokens", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG, attn_implementation="sdpa", dtype=torch.float32).eval()
    generation = GenerationConfig(
        do_sample=True, max_new_tokens=options.most_new_tokens, eos_token_id=EOS, pad_token_id=0
    )
    generators = {
        "treecp_cpu": ours(model),
        "padded_generate": padded_generate(model, generation),
        "continuous_batching": continuous_batching(model, generation),
    }
    seconds: dict[str, list[float]] = {name: [] for name in generators}
    for round_number in range(-1, options.rounds):  # the first round warms up
        rows = draw_rows(round_number, options.most_new_tokens)
        for name, run in generators.items():
            start = time.perf_counter()
            run(rows)
            if round_number >= 0:
                seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = {name: value / medians["treecp_cpu"] for name, value in medians.items()}
    print(json.dumps({**vars(options), "median_seconds": medians, "ratio": ratios}, indent=2), flush=True)
    # The manager's thread of transformers has no end of its own before the process's.
    os._exit(0)


if __name__ == "__main__":
    main()
