"""groups -> (mini-batch, rank) -> the order of rows that verl's equal-sized chunks and mini-batches ask for.

verl cuts a batch into equal contiguous chunks, one a rank, and each chunk into equal contiguous mini-batches.
Groups are dealt whole into these bins by workload; the bins are as wide as the fullest and the rest is padding,
which costs little here: all padding rows of a bin are one tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_LINEAR_WORK = 24576
"""Work of a token in the linear layers against one query-key pair, as in verl's ``calculate_workload``."""
_MAX_SLOTS_PER_ROW = 2
"""Groups are cut only where keeping them whole would need more slots a row than this."""


@dataclass(frozen=True)
class Group:
    """The rows of one uid."""

    rows: tuple[int, ...]
    prompt_tokens: int
    response_tokens: tuple[int, ...]
    """Of each row."""

    @property
    def workload(self) -> int:
        """Work of the group's replay tree: its prompt once, every response after it."""
        responses = sum(self.response_tokens)
        pairs = self.prompt_tokens**2 + sum(n * (2 * self.prompt_tokens + n) for n in self.response_tokens)
        return _LINEAR_WORK * (self.prompt_tokens + responses) + pairs

    def halves(self) -> tuple["Group", "Group"]:
        middle = (len(self.rows) + 1) // 2
        return (
            Group(self.rows[:middle], self.prompt_tokens, self.response_tokens[:middle]),
            Group(self.rows[middle:], self.prompt_tokens, self.response_tokens[middle:]),
        )


@dataclass(frozen=True)
class Deal:
    """Where every row goes."""

    slots: tuple[int | None, ...]
    """Row of each slot, rank by rank and, within a rank, mini-batch by mini-batch; None is a padding row."""
    num_mini_batches: int
    groups_split: int
    """Groups that could not stay on one rank and in one mini-batch."""


def deal_groups(
    groups: Sequence[Group], *, num_ranks: int, mini_batch_rows: int, chunk_multiple: int = 1
) -> Deal:
    """Deal groups to mini-batches and ranks.

    Args:
        groups: at least one.
        num_ranks: data-parallel ranks.
        mini_batch_rows: rows that one optimizer step should see, over all ranks.
        chunk_multiple: a rank's rows must be a multiple of it (a critic's mini-batches, say).
    """
    num_rows = sum(len(group.rows) for group in groups)
    num_mini_batches = -(-num_rows // mini_batch_rows)
    pieces, groups_split = list(groups), set()
    while True:
        bins = _fill_bins(pieces, num_ranks, num_mini_batches, mini_batch_rows)
        width = max(sum(len(group.rows) for group in content) for content in bins.values())
        largest = max(pieces, key=lambda group: len(group.rows))
        fits = num_ranks * num_mini_batches * width <= _MAX_SLOTS_PER_ROW * max(num_rows, num_ranks)
        if fits or len(largest.rows) == 1:
            break
        pieces.remove(largest)
        pieces.extend(largest.halves())
        groups_split.add(_origin(largest, groups))
    while num_mini_batches * width % chunk_multiple:
        width += 1
    slots: list[int | None] = []
    for rank in range(num_ranks):
        for mini_batch in range(num_mini_batches):
            rows = [row for group in bins[mini_batch, rank] for row in group.rows]
            slots += [*rows, *[None] * (width - len(rows))]
    return Deal(tuple(slots), num_mini_batches, len(groups_split))


def _origin(piece: Group, groups: Sequence[Group]) -> int:
    return next(index for index, group in enumerate(groups) if piece.rows[0] in group.rows)


def _fill_bins(
    groups: Sequence[Group], num_ranks: int, num_mini_batches: int, mini_batch_rows: int
) -> dict[tuple[int, int], list[Group]]:
    """(mini-batch, rank) -> groups. The heaviest group first, each to where there is least work yet."""
    bins: dict[tuple[int, int], list[Group]] = {
        (mini_batch, rank): [] for mini_batch in range(num_mini_batches) for rank in range(num_ranks)
    }
    rows = [0] * num_mini_batches
    work = [[0] * num_ranks for _ in range(num_mini_batches)]

    def overflow(mini_batch: int, group: Group) -> int:
        return max(0, rows[mini_batch] + len(group.rows) - mini_batch_rows)

    for group in sorted(groups, key=lambda group: (-group.workload, group.rows)):
        mini_batch = min(range(num_mini_batches), key=lambda m: (overflow(m, group), sum(work[m]), m))
        rank = min(range(num_ranks), key=lambda r: (work[mini_batch][r], r))
        bins[mini_batch, rank].append(group)
        rows[mini_batch] += len(group.rows)
        work[mini_batch][rank] += group.workload
    return bins
