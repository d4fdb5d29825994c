"""[logits, one row each] + [Sampling] -> next tokens and the log-probability each was drawn with."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a row picks its tokens. ``temperature`` 0 is greedy, ``top_k`` 0 keeps every token."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    ignore_eos: bool = False


def sample(
    logits_BV: Tensor, samplings: Sequence[Sampling], uniform_B: Tensor, *, raw_log_probs: bool = False
) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probabilities, each row by its own options and its own number in [0, 1).

    The log-probability is that of the distribution the token came from (scaled, filtered); a greedy token's is
    that of the model itself. With ``raw_log_probs`` it is the model's own for every row.
    """
    greedy = torch.tensor([options.temperature == 0 for options in samplings])
    temperature = torch.tensor([options.temperature or 1.0 for options in samplings])
    log_probs = torch.log_softmax(_filter(logits_BV / temperature[:, None], samplings), dim=-1)
    cumulative = log_probs.double().exp().cumsum(-1)
    # The first token whose cumulative probability exceeds the draw; a token of probability 0 never is the first.
    drawn = torch.searchsorted(cumulative, uniform_B[:, None] * cumulative[:, -1:], right=True).squeeze(-1)
    tokens = torch.where(greedy, logits_BV.argmax(-1), drawn.clamp(max=logits_BV.shape[-1] - 1))
    if raw_log_probs:
        log_probs = torch.log_softmax(logits_BV, dim=-1)
    return tokens, log_probs.gather(-1, tokens[:, None]).squeeze(-1)


def _filter(logits_BV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Logits with what top-k and then top-p exclude at -inf; untouched where no row excludes anything."""
    size = logits_BV.shape[-1]
    narrow = [o.temperature != 0 and (o.top_p < 1 or 0 < o.top_k < size) for o in samplings]
    if not any(narrow):
        return logits_BV
    top_k = torch.tensor(
        [o.top_k if on and o.top_k > 0 else size for o, on in zip(samplings, narrow, strict=True)]
    )
    top_p = torch.tensor([o.top_p if on else 2.0 for o, on in zip(samplings, narrow, strict=True)])
    values, order = logits_BV.sort(dim=-1, descending=True, stable=True)
    values = values.masked_fill(torch.arange(size) >= top_k[:, None], -torch.inf)
    probs = values.softmax(-1)
    values = values.masked_fill(probs.cumsum(-1) - probs >= top_p[:, None], -torch.inf)
    return torch.empty_like(values).scatter(-1, order, values)
