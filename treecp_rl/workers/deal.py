"""groups -> (mini-batch, rank) -> the order of rows that verl's equal-sized chunks and mini-batches ask for.

verl cuts a batch into equal contiguous chunks, one a rank, and each chunk into equal contiguous mini-batches.
Groups are dealt whole into these bins by workload; the bins are as wide as the fullest and the rest is padding:
one tree a bin. Both ways of dealing are weighed, with equal numbers of rows (no padding where groups are equal)
and by work alone (where responses differ much).
"""

from collections.abc import Sequence
from dataclasses import dataclass

_LINEAR_WORK = 24576
"""Work of a token in the linear layers against one query-key pair, as in verl's ``calculate_workload``."""
_PADDING_PROMPT_TOKENS = 127
"""Of the rows verl pads with; each has one response token."""
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
        """Work of the group's replay tree."""
        return _tree_work(self.prompt_tokens, self.response_tokens)

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
        mini_batches = _deal(pieces, num_mini_batches, mini_batch_rows)
        ranks = _deal_to_ranks(mini_batches, num_ranks)
        width = _width(ranks)
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
            rows = [row for group in ranks[mini_batch][rank] for row in group.rows]
            slots += [*rows, *[None] * (width - len(rows))]
    return Deal(tuple(slots), num_mini_batches, len(groups_split))


def _tree_work(prompt_tokens: int, response_tokens: Sequence[int]) -> int:
    """A replay tree computes its prompt once and every response after it."""
    pairs = prompt_tokens**2 + sum(n * (2 * prompt_tokens + n) for n in response_tokens)
    return _LINEAR_WORK * (prompt_tokens + sum(response_tokens)) + pairs


def _origin(piece: Group, groups: Sequence[Group]) -> int:
    return next(index for index, group in enumerate(groups) if piece.rows[0] in group.rows)


_Bins = list[list[Group]]


def _deal(groups: Sequence[Group], num_bins: int, max_rows: float) -> _Bins:
    """The heaviest group first, each to the bin with the least work among those it does not overfill."""
    bins: _Bins = [[] for _ in range(num_bins)]
    rows, work = [0] * num_bins, [0] * num_bins
    for group in sorted(groups, key=lambda group: (-group.workload, group.rows)):
        size = len(group.rows)
        chosen = min(range(num_bins), key=lambda b: (max(0, rows[b] + size - max_rows), work[b], b))
        bins[chosen].append(group)
        rows[chosen] += size
        work[chosen] += group.workload
    return bins


def _deal_to_ranks(mini_batches: _Bins, num_ranks: int) -> list[_Bins]:
    """Mini-batch -> rank -> groups: by equal rows or by work alone, whichever is done first."""
    by_rows, by_work = [], []
    for groups in mini_batches:
        rows = sum(len(group.rows) for group in groups)
        by_rows.append(_deal(groups, num_ranks, max_rows=-(-rows // num_ranks)))
        by_work.append(_deal(groups, num_ranks, max_rows=float("inf")))
    return min((by_rows, by_work), key=_finishing_work)


def _width(mini_batches: list[_Bins]) -> int:
    return max(_num_rows(content) for ranks in mini_batches for content in ranks)


def _num_rows(groups: Sequence[Group]) -> int:
    return sum(len(group.rows) for group in groups)


def _finishing_work(mini_batches: list[_Bins]) -> int:
    """Work of the slowest rank, mini-batch after mini-batch, padding included."""
    width = _width(mini_batches)

    def work(content: Sequence[Group]) -> int:
        padding = width - _num_rows(content)
        of_padding = _tree_work(_PADDING_PROMPT_TOKENS, [1] * padding) if padding else 0
        return of_padding + sum(group.workload for group in content)

    return sum(max(work(content) for content in ranks) for ranks in mini_batches)
