"""Dealing groups to ranks and mini-batches: every row once, groups whole, bins of equal width."""

from hypothesis import given, settings
from hypothesis import strategies as st

from treecp_rl.workers.deal import Group, deal_groups


def groups_of(sizes, prompt=100, response=10):
    groups, start = [], 0
    for size in sizes:
        groups.append(Group(tuple(range(start, start + size)), prompt, (response,) * size))
        start += size
    return groups


def bins_of(deal, num_ranks):
    width = len(deal.slots) // (num_ranks * deal.num_mini_batches)
    return [deal.slots[i : i + width] for i in range(0, len(deal.slots), width)]


def test_equal_groups_fill_the_bins_without_padding():
    deal = deal_groups(groups_of([4] * 8), num_ranks=2, mini_batch_rows=16)
    assert deal.num_mini_batches == 2
    assert sorted(deal.slots) == list(range(32))
    assert deal.groups_split == 0


def test_counts_need_not_divide():
    """Three groups on two ranks: one rank gets two, the other one and padding."""
    groups = groups_of([4, 4, 4])
    deal = deal_groups(groups, num_ranks=2, mini_batch_rows=12)
    assert deal.groups_split == 0
    assert [sum(row is not None for row in content) for content in bins_of(deal, 2)] == [8, 4]
    assert len(deal.slots) == 16


def test_work_is_balanced_by_tokens_and_not_by_rows():
    long_prompt = Group((0, 1), 5000, (10, 10))
    short = [Group((2 * i, 2 * i + 1), 1000, (10, 10)) for i in range(1, 4)]
    deal = deal_groups([long_prompt, *short], num_ranks=2, mini_batch_rows=8)
    alone = next(content for content in bins_of(deal, 2) if 0 in content)
    assert {row for row in alone if row is not None} == {0, 1}


def test_small_differences_are_not_worth_padding():
    """Responses differ by a few tokens: ranks get equal rows. They differ by thousands: ranks get equal work."""
    alike = [Group((2 * i, 2 * i + 1), 150, (10 + i, 20 - i)) for i in range(8)]
    assert None not in deal_groups(alike, num_ranks=2, mini_batch_rows=16).slots
    skewed = [Group((2 * i, 2 * i + 1), 150, (8000, 8000) if i == 0 else (1000, 1000)) for i in range(8)]
    assert None in deal_groups(skewed, num_ranks=2, mini_batch_rows=16).slots


def test_one_large_group_on_many_ranks_is_cut_and_counted():
    deal = deal_groups(groups_of([64]), num_ranks=8, mini_batch_rows=64)
    assert deal.groups_split == 1
    assert len(deal.slots) <= 2 * 64


def test_chunks_keep_to_a_critics_mini_batches():
    deal = deal_groups(groups_of([3, 3, 3]), num_ranks=1, mini_batch_rows=9, chunk_multiple=4)
    assert len(deal.slots) == 12


@settings(deadline=None, max_examples=200)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=20),
    num_ranks=st.integers(1, 5),
    mini_batch_rows=st.integers(1, 40),
)
def test_every_row_has_one_slot_and_uncut_groups_stay_together(sizes, num_ranks, mini_batch_rows):
    groups = groups_of(sizes)
    deal = deal_groups(groups, num_ranks=num_ranks, mini_batch_rows=mini_batch_rows)
    assert sorted(row for row in deal.slots if row is not None) == list(range(sum(sizes)))
    assert len(deal.slots) % (num_ranks * deal.num_mini_batches) == 0
    torn = 0
    for group in groups:
        homes = {i for i, content in enumerate(bins_of(deal, num_ranks)) if set(content) & set(group.rows)}
        torn += len(homes) > 1
    assert torn <= deal.groups_split
    if len(deal.slots) <= 2 * sum(sizes) and deal.groups_split == 0:
        assert torn == 0
