"""Tree sizes -> passes and decisions: which trees share one forward, and which ranks share a tree."""

from collections.abc import Sequence
from math import gcd
from typing import Literal, cast

from treecp_rl.errors import ConfigError
from treecp_rl.plan import Decision, Kind

Mode = Literal[
    "auto",
    "fused",
    "split",
    "local",
    "gather",
    "gather_whole",
    "heads",
    "reuse_ring",
    "tree_move_kv",
    "move_q",
    "dcp_fused",
    "flat_ring",
    "split_gather",
    "split_heads",
    "split_tree_move_kv",
    "split_move_q",
]
"""How trees run. ``auto`` chooses; ``fused`` and ``split`` force the form and choose the kind; any other forces
form and kind on every tree. ``reuse_ring`` is a ring over the tree (AugTree's MegaR), ``flat_ring`` a ring over
every row on its own (MegaN, and the paper's b = 0)."""


def is_split(mode: Mode) -> bool:
    """Whether a mode forces every tree into a prefill pass and replay passes."""
    return mode.startswith("split")


def is_fused(mode: Mode) -> bool:
    """Whether a mode forces prompt and responses into one pass."""
    return not is_split(mode) and mode != "auto"


def _forced_kind(mode: Mode) -> Kind | None:
    if mode in ("auto", "fused", "split"):
        return None
    if mode in ("flat_ring", "reuse_ring"):
        return "ring"
    return cast(Kind, mode.removeprefix("split_"))


def pack_into_passes(tree_tokens: Sequence[int], tokens_per_pass: int) -> tuple[tuple[int, ...], ...]:
    """Bin-pack trees, largest first, into the fewest passes first-fit finds.

    Args:
        tree_tokens: packed tokens of each tree, each at most ``tokens_per_pass``.
        tokens_per_pass: most packed tokens of one pass.

    Returns:
        Tree indices of each pass, ascending inside a pass; equal inputs give equal passes on every rank.
    """
    passes: list[list[int]] = []
    room: list[int] = []
    for tree in sorted(range(len(tree_tokens)), key=lambda tree: (-tree_tokens[tree], tree)):
        tokens = tree_tokens[tree]
        fit = next((index for index, free in enumerate(room) if free >= tokens), None)
        if fit is None:
            passes.append([tree])
            room.append(tokens_per_pass - tokens)
        else:
            passes[fit].append(tree)
            room[fit] -= tokens
    return tuple(tuple(sorted(trees)) for trees in passes)


def decide(
    tree_tokens: Sequence[int], domain_size: int, mode: Mode = "auto", num_kv_heads: int = 1
) -> tuple[Decision, ...]:
    """A decision for each tree of a pass.

    Where the mode leaves the kind open, a tree stays whole on the rank with the fewest tokens, largest tree
    first, unless it alone exceeds an even share of the pass: then it is cut over all ranks by ``gather``. A tree
    of fewer tokens than there are ranks is cut over as many ranks as it has tokens.

    Args:
        tree_tokens: packed tokens of each tree.
        domain_size: ranks that share the pass.
        num_kv_heads: key/value heads of the model, which ``heads`` deals out inside a lane.

    Raises:
        ConfigError: the model cannot run the forced kind.
    """
    kind = _forced_kind(mode)
    if kind is not None:
        if kind == "heads":
            _require_common_heads(domain_size, num_kv_heads)
        degrees = [1 if kind == "local" else min(domain_size, tokens) for tokens in tree_tokens]
        return tuple(
            Decision(kind, degree=degree, lanes=lanes_of(kind, degree, num_kv_heads)) for degree in degrees
        )
    load = [0.0] * domain_size
    share = sum(tree_tokens) / domain_size
    decisions = [Decision("local")] * len(tree_tokens)
    for tree in sorted(range(len(tree_tokens)), key=lambda tree: (-tree_tokens[tree], tree)):
        tokens = tree_tokens[tree]
        if domain_size > 1 and tokens > share:
            decision = decisions[tree] = Decision("gather", degree=min(domain_size, tokens))
            for rank in decision.ranks:
                load[rank] += tokens / decision.degree
        else:
            rank = min(range(domain_size), key=lambda rank: (load[rank], rank))
            decisions[tree] = Decision("local", first_rank=rank)
            load[rank] += tokens
    return tuple(decisions)


def _require_common_heads(domain_size: int, num_kv_heads: int) -> None:
    if domain_size > 1 and gcd(domain_size, num_kv_heads) == 1:
        raise ConfigError(
            f"heads deals out {num_kv_heads} key/value heads over {domain_size} ranks, which have no common divisor; "
            "choose a domain_size that shares one, or another mode"
        )


def lanes_of(kind: Kind, degree: int, num_kv_heads: int) -> int:
    """Lanes of a kind where nothing chooses them: the fewest that ``heads`` can have, two for ``tree_move_kv``."""
    if kind == "heads":
        return degree // gcd(degree, num_kv_heads)
    return 2 if kind == "tree_move_kv" and degree % 2 == 0 else 1
