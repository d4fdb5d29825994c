"""Tree sizes -> passes: which trees share one forward under a token budget."""

from collections.abc import Sequence


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
