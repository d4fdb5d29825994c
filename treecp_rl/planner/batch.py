"""Tree sizes -> passes and decisions: which trees share one forward, and which ranks share a tree."""

from collections.abc import Sequence
from typing import Literal

from treecp_rl.plan import Decision, Kind

Mode = Literal["auto", "local", "gather", "ring", "tree_move_kv", "move_q"]


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


def decide(tree_tokens: Sequence[int], domain_size: int, mode: Mode = "auto") -> tuple[Decision, ...]:
    """A decision for each tree of a pass.

    ``auto`` keeps a tree whole on the rank with the fewest tokens, largest tree first, unless it alone exceeds
    an even share of the pass: then it is cut over all ranks by ``gather``. Any other mode forces that kind on
    every tree.

    Args:
        tree_tokens: packed tokens of each tree.
        domain_size: ranks that share the pass.
    """
    if mode != "auto":
        degree = 1 if mode == "local" else domain_size
        return tuple(Decision(mode, degree=degree, lanes=_lanes(mode, degree)) for _ in tree_tokens)
    load = [0.0] * domain_size
    share = sum(tree_tokens) / domain_size
    decisions = [Decision("local")] * len(tree_tokens)
    for tree in sorted(range(len(tree_tokens)), key=lambda tree: (-tree_tokens[tree], tree)):
        tokens = tree_tokens[tree]
        if domain_size > 1 and tokens > share:
            decisions[tree] = Decision("gather", degree=domain_size)
            load = [carried + tokens / domain_size for carried in load]
        else:
            rank = min(range(domain_size), key=lambda rank: (load[rank], rank))
            decisions[tree] = Decision("local", first_rank=rank)
            load[rank] += tokens
    return tuple(decisions)


def _lanes(kind: Kind, degree: int) -> int:
    return 2 if kind == "tree_move_kv" and degree % 2 == 0 else 1
