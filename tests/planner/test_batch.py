"""Proves that pass packing keeps every tree, the budget, and is a function of its input alone."""

from hypothesis import given
from hypothesis import strategies as st

from treecp_rl.planner.batch import pack_into_passes


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(50, 120))
def test_passes_hold_every_tree_once_within_budget(sizes, budget):
    passes = pack_into_passes(sizes, budget)
    assert sorted(tree for trees in passes for tree in trees) == list(range(len(sizes)))
    assert all(sum(sizes[tree] for tree in trees) <= budget for trees in passes)
    # First-fit decreasing needs at most 11/9 of the optimum + 6/9 passes (Dosa 2007).
    lower_bound = -(-sum(sizes) // budget)
    assert len(passes) <= 2 * lower_bound + 1
    assert passes == pack_into_passes(sizes, budget)
