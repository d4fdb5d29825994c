"""Proves that fold -> pack -> unfold loses nothing: every token of every row, in the caller's order."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treecp_rl.errors import BatchError, ConfigError, RowTooLong
from treecp_rl.tree import Row, dummy_pack, fold, pack, split_tree

SHARES = ("none", "prompt", "prefix")


def row(uid, prompt, response, temperature=1.0):
    return Row(uid, torch.tensor(prompt), torch.tensor(response, dtype=torch.int64), temperature)


# Two token ids make shared prefixes, duplicates and rows that end inside another row common.
tokens = st.lists(st.integers(0, 1), min_size=1, max_size=4)
batches = st.lists(
    st.builds(
        row,
        uid=st.sampled_from(["a", "b", "-1"]),
        prompt=tokens,
        response=st.lists(st.integers(0, 1), max_size=6),
        temperature=st.sampled_from([1.0, 0.7]),
    ),
    min_size=1,
    max_size=8,
)


@given(batches, st.sampled_from(SHARES))
@settings(max_examples=100, deadline=None)
def test_unfold_returns_every_response_token_to_its_row(rows, share):
    packed = pack(fold(rows, share))
    assert packed.row_indices == tuple(range(len(rows)))
    for expected, labels in zip(rows, packed.unfold(packed.pair_label), strict=True):
        assert labels.tolist() == expected.response.tolist()


@given(batches, st.sampled_from(SHARES))
@settings(max_examples=100, deadline=None)
def test_every_label_is_predicted_by_the_token_before_it_in_its_row(rows, share):
    packed = pack(fold(rows, share))
    predictors = packed.scored_positions[packed.pair_position]
    for index, expected in enumerate(rows):
        full = torch.cat([expected.prompt, expected.response])
        at = packed.unfold(predictors)[index]
        before = slice(len(expected.prompt) - 1, len(full) - 1)
        assert packed.input_ids[at].tolist() == full[before].tolist()
        assert packed.position_ids[at].tolist() == list(range(before.start, before.stop))
        temperatures = packed.unfold(packed.position_temperature[packed.pair_position])[index]
        assert temperatures.tolist() == [expected.temperature] * len(expected.response)


@given(batches, st.sampled_from(SHARES))
@settings(max_examples=100, deadline=None)
def test_a_token_attends_to_exactly_its_own_prefix(rows, share):
    """Ancestors' spans plus the node up to the token spell the row's tokens so far."""
    packed = pack(fold(rows, share))
    spelled = set()
    for node in packed.nodes:
        ancestors, parent = [], node.parent
        while parent >= 0:
            ancestors.insert(0, packed.nodes[parent])
            parent = packed.nodes[parent].parent
        spans = [*ancestors, node]
        spelled.add(
            tuple(token for span in spans for token in packed.input_ids[span.start : span.stop].tolist())
        )
        assert all(a.stop <= node.start < a.subtree_stop for a in ancestors)
    for expected in rows:
        assert (*expected.prompt.tolist(), *expected.response.tolist()) in spelled


@given(batches)
@settings(max_examples=100, deadline=None)
def test_sharing_more_never_computes_more(rows):
    computed = [sum(tree.num_tokens for tree in fold(rows, share)) for share in SHARES]
    flat = sum(r.num_tokens for r in rows)
    assert computed[0] == flat and computed[0] >= computed[1] >= computed[2]
    assert all(sum(tree.num_flat_tokens for tree in fold(rows, share)) == flat for share in SHARES)


@given(batches, st.sampled_from(SHARES), st.integers(1, 24))
@settings(max_examples=100, deadline=None)
def test_a_cut_tree_keeps_its_rows_and_the_budget(rows, share, budget):
    for tree in fold(rows, share):
        if max(rows[path.row].num_tokens for path in tree.rows) > budget:
            with pytest.raises(RowTooLong, match=r"row \d+ .* a pass may hold"):
                split_tree(tree, rows, share, budget)
            continue
        pieces = split_tree(tree, rows, share, budget)
        assert sorted(path.row for piece in pieces for path in piece.rows) == sorted(p.row for p in tree.rows)
        assert all(piece.num_tokens <= budget for piece in pieces)


@pytest.mark.parametrize(
    ("share", "computed"),
    [("none", 6 + 5 + 6 + 5 + 3), ("prompt", 3 + 3 + 2 + 3 + 2), ("prefix", 3 + 2 + 1)],
)
def test_duplicates_and_rows_that_end_inside_another(share, computed):
    rows = [row("a", [1, 2, 3], r) for r in ([5, 6, 7], [5, 6], [5, 6, 7], [5, 6], [])]
    assert sum(tree.num_tokens for tree in fold(rows, share)) == computed


def test_rows_of_one_uid_with_other_prompts_are_not_shared():
    rows = [row("a", [1, 2], [3]), row("a", [1, 2, 2], [3]), row("a", [1, 2], [4])]
    assert [[path.row for path in tree.rows] for tree in fold(rows)] == [[0, 2], [1]]


def test_equal_prompts_of_other_uids_are_not_shared():
    assert len(fold([row("a", [1, 2], [3]), row("b", [1, 2], [3])])) == 2


def test_pad_ids_inside_a_prompt_are_tokens_like_any_other():
    packed = pack(fold([row("a", [0, 0, 5], [0, 0]), row("a", [0, 0, 5], [0])]))
    assert packed.input_ids.tolist() == [0, 0, 5, 0, 0, 0]


def test_an_empty_prompt_is_refused_by_row():
    with pytest.raises(BatchError, match=r"row 1 \(uid b\) has an empty prompt"):
        fold([row("a", [1], [2]), Row("b", torch.empty(0, dtype=torch.int64), torch.tensor([1]))])


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_that_is_no_divisor_is_refused(temperature):
    with pytest.raises(BatchError, match=r"row 0 .* has temperature"):
        fold([row("a", [1], [2], temperature)])


def test_an_unknown_share_is_refused():
    with pytest.raises(ConfigError, match="share='all' is not one of none, prompt, prefix"):
        fold([row("a", [1], [2])], "all")


def test_a_batch_of_empty_responses_scores_nothing():
    packed = pack(fold([row("a", [1, 2], []), row("b", [3], [])]))
    assert len(packed.scored_positions) == 0
    assert [len(values) for values in packed.unfold(packed.pair_label)] == [0, 0]


def test_the_dummy_serves_no_row():
    packed = dummy_pack()
    assert packed.row_indices == () and len(packed.pair_label) == 1
    assert packed.unfold(packed.pair_label) == []
