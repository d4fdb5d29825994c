"""hidden states -> log-prob, entropy and sum of pi^2 of the scored pairs, chunk by chunk.

The LM head is scored where it stands: during a pass its ``forward`` receives only the scored positions and
returns the pairs' scores instead of logits. So the module call stays an ordinary forward of the root (which
FSDP2 needs), and no more than one chunk of logits exists at a time, in forward and in backward.

Shapes: S scored positions, N pairs, C positions of a chunk, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

from treecp_rl.errors import ConfigError
from treecp_rl.tree import PackedTrees


@dataclass(frozen=True)
class HeadOptions:
    """What to compute of each scored pair, and in which portions."""

    entropy: bool = False
    sum_pi_squared: bool = False
    chunk_tokens: int = 1024
    """Scored positions whose logits exist at one time."""

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise ConfigError(f"chunk_tokens={self.chunk_tokens} must be 1 or more")

    @property
    def quantities(self) -> tuple[str, ...]:
        """Names of the rows of the score tensor."""
        asked = {"log_probs": True, "entropy": self.entropy, "sum_pi_squared": self.sum_pi_squared}
        return tuple(name for name, wanted in asked.items() if wanted)


@contextmanager
def scoring_head(head: torch.nn.Module, packed: PackedTrees, options: HeadOptions) -> Iterator[None]:
    """Within this context ``head(hidden [1,S,E])`` returns scores [1,Q,N], one row a quantity."""
    logits_of = head.forward

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        return score_pairs(logits_of, hidden.squeeze(0), packed, options)

    own_forward = vars(head).get("forward")
    head.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del head.forward
        if own_forward is not None:
            head.forward = own_forward


def score_pairs(logits_of, hidden: torch.Tensor, packed: PackedTrees, options: HeadOptions) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """Scores of all pairs.

    Args:
        logits_of: hidden [C,E] -> logits [C,V].
        hidden: [S,E] states of the scored positions, ascending.
        packed: the pass; its pairs ascend by position, so that a chunk's pairs are one span.

    Returns:
        [1,Q,N] in fp32 or wider; never a view, because FSDP2 hangs its backward hook on a model's output.
    """
    borders = torch.arange(0, len(hidden) + options.chunk_tokens, options.chunk_tokens)
    pair_borders = torch.searchsorted(packed.pair_position, borders.to(packed.pair_position.device)).tolist()
    scores = []
    for chunk, start in enumerate(borders[:-1].tolist()):
        positions = slice(start, start + options.chunk_tokens)
        pairs = slice(pair_borders[chunk], pair_borders[chunk + 1])
        scores.append(
            checkpoint(
                _score_chunk,
                logits_of,
                hidden[positions],
                packed.position_temperature[positions],
                packed.pair_position[pairs] - start,
                packed.pair_label[pairs],
                options.quantities,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        )
    if not scores:
        # Attached to every parameter, the head's too: a sharded model's backward needs a gradient for each,
        # on a rank whose rows are all empty as on its peers.
        attached = logits_of(hidden).sum()
        wide = torch.promote_types(attached.dtype, torch.float32)
        return attached.to(wide) * hidden.new_zeros(1, len(options.quantities), 0, dtype=wide)
    return torch.cat(scores, dim=2)


def _score_chunk(  # type: ignore[no-untyped-def]
    logits_of,
    hidden: torch.Tensor,
    temperature: torch.Tensor,
    pair_position: torch.Tensor,
    pair_label: torch.Tensor,
    quantities: tuple[str, ...],
) -> torch.Tensor:
    """[1,Q,n] scores of one chunk's n pairs."""
    logits = logits_of(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits / temperature.unsqueeze(1).to(logits.dtype)
    log_z = torch.logsumexp(logits, dim=-1)
    values = [logits[pair_position, pair_label] - log_z[pair_position]]
    if len(quantities) > 1:
        pi = torch.exp(logits - log_z.unsqueeze(1))
        if "entropy" in quantities:
            values.append((log_z - (pi * logits).sum(-1))[pair_position])
        if "sum_pi_squared" in quantities:
            values.append((pi * pi).sum(-1)[pair_position])
    return torch.stack(values).unsqueeze(0)
