"""Public length statistics -> batches and groups of random lengths, the same for equal seeds.

No public corpus states prompts and responses of the same GRPO run, so each field says where it comes from; spreads
within a group are an assumption everywhere.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from treecp_rl.errors import ConfigError
from treecp_rl.planner.search import TreeLengths

RESPONSE_CV = 0.55
"""Standard deviation over mean of the responses of one group: assumed."""


@dataclass(frozen=True, slots=True)
class LengthModel:
    """Lognormal lengths in tokens."""

    prompt_median: float
    prompt_sigma: float
    most_prompt: int
    response_mean: float
    response_cv: float
    """Between the means of groups."""
    most_response: int


LENGTHS = {
    # LongAlign-10k, 240 rows, Qwen3 tokens: prompt p50 11490, p90 37719, most 53176. Responses assumed.
    "long": LengthModel(11490, math.log(37719 / 11490) / 1.2816, 53176, 300, 0.3, 4096),
    # DAPO with tools, Qwen2.5, one logged step: prompts 330 (262 to 689), responses 4353, cut at 10240.
    "reasoning": LengthModel(320, 0.25, 689, 4353, 0.6, 10240),
    # LMSYS-Chat-1M, Llama-2 tokens: means 69.5 and 214.5 a turn.
    "chat": LengthModel(45, 0.9, 4096, 214.5, 0.6, 4096),
}
MIXED = ("long", "reasoning", "chat")
WORKLOADS = (*LENGTHS, "mixed")


def draw_batch(workload: str, num_trees: int, group_size: int, seed: int = 0) -> list[TreeLengths]:
    """A batch of groups.

    Args:
        workload: one of ``WORKLOADS``; ``mixed`` draws each tree from one of the others.

    Raises:
        ConfigError: no such workload.
    """
    if workload not in WORKLOADS:
        raise ConfigError(f"no workload {workload!r}; choose from {', '.join(WORKLOADS)}")
    rng = random.Random(f"{workload} {seed}")
    return [
        _group(LENGTHS[rng.choice(MIXED) if workload == "mixed" else workload], group_size, rng)
        for _ in range(num_trees)
    ]


def _group(lengths: LengthModel, group_size: int, rng: random.Random) -> TreeLengths:
    prompt = lengths.prompt_median * math.exp(lengths.prompt_sigma * rng.gauss(0, 1))
    mean = _lognormal(lengths.response_mean, lengths.response_cv, rng)
    responses = (_lognormal(mean, RESPONSE_CV, rng) for _ in range(group_size))
    return TreeLengths(
        _clip(prompt, lengths.most_prompt), tuple(_clip(one, lengths.most_response) for one in responses)
    )


def _lognormal(mean: float, cv: float, rng: random.Random) -> float:
    sigma = math.sqrt(math.log(1 + cv * cv))
    return mean * math.exp(sigma * rng.gauss(0, 1) - sigma * sigma / 2)


def _clip(tokens: float, most: int) -> int:
    return max(1, min(most, round(tokens)))


SHAPES = {
    # Prompt and mean response; sources as above, and AugTree section 4.3 for OpenThoughts' responses (prompt assumed).
    "LongAlign": (11490.0, 230.0),
    "LongReward": (16364.0, 409.0),
    "LMSYS": (69.5, 214.5),
    "OpenThoughts": (272.0, 1907.0),
}
"""The paper's four workloads; only ratios are used."""


def shaped_group(
    shape: str, row_tokens: int, group_size: int, cv: float = 0.5, seed: int = 11
) -> TreeLengths:
    """One group whose rows together have about ``row_tokens`` tokens.

    Raises:
        ConfigError: no such shape.
    """
    if shape not in SHAPES:
        raise ConfigError(f"no shape {shape!r}; choose from {', '.join(SHAPES)}")
    prompt, response = SHAPES[shape]
    scale = row_tokens / group_size / (prompt + response)
    rng = random.Random(seed)
    drawn = [_lognormal(1.0, cv, rng) for _ in range(group_size)]
    mean = response * scale * group_size / sum(drawn)
    return TreeLengths(max(1, round(prompt * scale)), tuple(max(1, round(mean * one)) for one in drawn))
