"""public length statistics -> shapes -> one group of rows of a token budget.

A shape is a prompt and a mean response length. Public statistics rarely give both for the same rows, so each field
below says where its number comes from: a published mean or median, or a stated assumption where none was found.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from treecp_rl.errors import ConfigError
from treecp_rl.planner.search import TreeLengths
from treecp_rl.tree import Row

GROUP_ROWS = 8
"""Responses of a group, G."""
RESPONSE_CV = 0.5
"""Standard deviation over mean of the responses of a group, lognormal: an assumption, as none is published."""
_LENGTHS_SEED = 11
_TOKENS_SEED = 5


@dataclass(frozen=True)
class LengthShape:
    """Typical lengths of a data set; only their ratio is used."""

    prompt_tokens: float
    response_tokens: float


SHAPES = {
    # LongAlign-10k: median prompt of 240 rows, Qwen3 tokens; no response statistic is published, 230 assumed. 50:1.
    "longalign": LengthShape(11490, 230),
    # LongReward-10k (sft): median prompt of 240 rows, Qwen3 tokens; no response statistic, 409 assumed. 40:1.
    "longreward": LengthShape(16364, 409),
    # LMSYS-Chat-1M: mean tokens per turn of a million conversations, Llama-2 tokens. 1:3.
    "lmsys": LengthShape(69.5, 214.5),
    # OpenThoughts-114k: mean response that AugTree (section 4.3) reports of its subset for 16k tokens; no prompt
    # statistic is published, 272 assumed. 1:7.
    "openthoughts": LengthShape(272, 1907),
}


@dataclass(frozen=True)
class Point:
    """One group: a shape at a token budget."""

    name: str
    prompt: int
    responses: tuple[int, ...]
    budget_tokens: int
    """G (P + R): what the rows compute one by one, up to rounding."""

    @property
    def longest_row(self) -> int:
        return self.prompt + max(self.responses)

    @property
    def tokens_flat(self) -> int:
        return sum(self.prompt + response for response in self.responses)

    def rows(self, vocab_size: int) -> list[Row]:
        """The group with random tokens, the same on every call."""
        return random_rows([TreeLengths(self.prompt, self.responses)], vocab_size)


@dataclass(frozen=True)
class BatchPoint:
    """Several groups that are planned together."""

    name: str
    trees: tuple[TreeLengths, ...]

    @property
    def budget_tokens(self) -> int:
        return self.tokens_flat

    @property
    def longest_row(self) -> int:
        return max(tree.prompt + max(tree.responses) for tree in self.trees)

    @property
    def tokens_flat(self) -> int:
        return sum(len(tree.responses) * tree.prompt + sum(tree.responses) for tree in self.trees)

    def rows(self, vocab_size: int) -> list[Row]:
        """All groups with random tokens, the same on every call."""
        return random_rows(self.trees, vocab_size)


def random_rows(trees: Sequence[TreeLengths], vocab_size: int) -> list[Row]:
    """Rows of these lengths, the same on every call."""
    generator = torch.Generator().manual_seed(_TOKENS_SEED)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(1, vocab_size, (count,), generator=generator)

    prompts = [tokens(tree.prompt) for tree in trees]
    return [
        Row(f"group {number}", prompt, tokens(response))
        for number, (prompt, tree) in enumerate(zip(prompts, trees, strict=True))
        for response in tree.responses
    ]


def point(name: str, budget_tokens: int) -> Point:
    """The group of a shape whose rows together have about ``budget_tokens`` tokens.

    Raises:
        ConfigError: no such shape, or a budget too small for a prompt and its responses.
    """
    if name not in SHAPES:
        raise ConfigError(f"no shape {name!r}; choose from {', '.join(SHAPES)}")
    row_tokens = budget_tokens / GROUP_ROWS
    shape = SHAPES[name]
    prompt = round(row_tokens * shape.prompt_tokens / (shape.prompt_tokens + shape.response_tokens))
    response = row_tokens - prompt
    if prompt < 1 or response < 1:
        raise ConfigError(
            f"a budget of {budget_tokens} tokens gives {name} a prompt of {prompt} and responses of {response:.1f} "
            f"tokens; each needs one or more: raise the budget"
        )
    return Point(name, prompt, _lognormal(response), budget_tokens)


def _lognormal(mean: float) -> tuple[int, ...]:
    """GROUP_ROWS lengths of that mean, their spread ``RESPONSE_CV`` before rounding."""
    sigma = math.sqrt(math.log(1 + RESPONSE_CV**2))
    draw = random.Random(_LENGTHS_SEED)
    drawn = [math.exp(sigma * draw.gauss(0, 1)) for _ in range(GROUP_ROWS)]
    return tuple(max(1, round(mean * GROUP_ROWS * one / sum(drawn))) for one in drawn)
