"""Proves that pass packing keeps every tree and the budget, and that every forced kind fits every tree."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treecp_rl.plan import Node
from treecp_rl.planner.batch import Mode, decide, pack_into_passes
from treecp_rl.planner.check import check
from treecp_rl.planner.lower import lower


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(50, 120))
def test_passes_hold_every_tree_once_within_budget(sizes, budget):
    passes = pack_into_passes(sizes, budget)
    assert sorted(tree for trees in passes for tree in trees) == list(range(len(sizes)))
    assert all(sum(sizes[tree] for tree in trees) <= budget for trees in passes)
    # First-fit decreasing needs at most 11/9 of the optimum + 6/9 passes (Dosa 2007).
    lower_bound = -(-sum(sizes) // budget)
    assert len(passes) <= 2 * lower_bound + 1
    assert passes == pack_into_passes(sizes, budget)


@pytest.mark.parametrize("mode", get_args(Mode))
@pytest.mark.parametrize("tree_tokens", [(3,), (1, 300, 3), (5, 2, 7)])
def test_a_tree_of_fewer_tokens_than_ranks_gets_a_smaller_degree(mode, tree_tokens):
    nodes, cursor = [], 0
    for tokens in tree_tokens:
        nodes.append(Node(-1, cursor, cursor + tokens, cursor + tokens))
        cursor += tokens
    decisions = decide(tree_tokens, 8, mode, num_kv_heads=4)
    assert all(decision.degree <= tokens for decision, tokens in zip(decisions, tree_tokens, strict=True))
    check(lower(nodes, decisions, 8), nodes)
