"""Proves that a request does not depend on the order of rows, and that its plan finds back to that order."""

from hypothesis import given, settings
from hypothesis import strategies as st

from treecp_rl.planner.estimates import estimate_profile
from treecp_rl.planner.forms import RunOptions
from treecp_rl.planner.request import arrange
from treecp_rl.planner.schedule_batch import plan_batch
from treecp_rl.planner.search import TreeLengths

PROFILE = estimate_profile("h100", "Qwen2.5-7B")
ROOMY, TIGHT = RunOptions(), RunOptions(tokens_per_rank=4000)

groups = st.lists(
    st.tuples(st.integers(1, 9000), st.lists(st.integers(1, 3000), min_size=1, max_size=5)),
    min_size=1,
    max_size=6,
)


@given(groups, st.randoms(use_true_random=False), st.sampled_from([ROOMY, TIGHT]))
@settings(max_examples=50, deadline=None)
def test_order_changes_neither_key_nor_what_is_planned(groups, random, options):
    trees = [TreeLengths(prompt, tuple(responses)) for prompt, responses in groups]
    first = arrange(trees, 8, PROFILE, options)
    order = random.sample(range(len(trees)), len(trees))
    shuffled = []
    for index in order:
        responses = list(trees[index].responses)
        random.shuffle(responses)
        shuffled.append(TreeLengths(trees[index].prompt, tuple(responses)))
    second = arrange(shuffled, 8, PROFILE, options)
    assert first.request == second.request
    assert first.request.key == second.request.key
    plan = first.request.solve()
    for arranged, batch in ((first, trees), (second, shuffled)):
        restored = arranged.restore(plan)
        assert [one.tree for one in restored.trees] == list(range(len(batch)))
        assert restored.predicted_seconds == plan.predicted_seconds
        for one in restored.trees:
            place = arranged.tree_of.index(one.tree)
            (original,) = (planned for planned in plan.trees if planned.tree == place)
            assert original.candidate == one.candidate and original.first_rank == one.first_rank
            # Every response stays in its round, by its length.
            tree, sent = batch[one.tree], first.request.trees[place]
            assert sorted(zip(tree.responses, one.round_of, strict=False)) == sorted(
                zip(sent.responses, original.round_of, strict=False)
            )


def test_a_split_tree_has_rounds_for_its_own_responses():
    trees = [TreeLengths(9000, (10, 3000, 20, 2900)), TreeLengths(5, (7,))]
    arranged = arrange(trees, 4, PROFILE, RunOptions(tokens_per_rank=3200))
    restored = arranged.restore(arranged.request.solve())
    split = restored.trees[0]
    assert split.candidate.form == "split" and split.candidate.rounds > 1
    assert split.round_of[1] != split.round_of[3]


def test_key_depends_on_all_that_a_plan_depends_on():
    trees = [TreeLengths(9, (1, 2))]
    requests = [
        arrange(trees, 4, PROFILE, ROOMY),
        arrange(trees, 8, PROFILE, ROOMY),
        arrange(trees, 4, PROFILE, TIGHT),
        arrange(trees, 4, PROFILE, RunOptions(needs_gradients=False)),
        arrange(trees, 4, estimate_profile("h200", "Qwen2.5-7B"), ROOMY),
        arrange([TreeLengths(9, (1, 3))], 4, PROFILE, ROOMY),
    ]
    assert len({one.request.key for one in requests}) == len(requests)


def test_equal_requests_have_equal_plans():
    trees = [TreeLengths(100 * n, (10 * n, 5)) for n in range(1, 9)]
    request = arrange(trees, 4, PROFILE, ROOMY).request
    assert request.solve().digest == plan_batch(request.trees, 4, PROFILE, ROOMY).digest
