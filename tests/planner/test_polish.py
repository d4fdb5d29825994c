"""Proves that small batches are planned by schedule: no slower than closed forms or any one kind, and valid."""

import random
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treecp_rl.errors import PlanError
from treecp_rl.plan import Decision
from treecp_rl.planner.batch import lanes_of
from treecp_rl.planner.check import check
from treecp_rl.planner.estimates import ModelDims, estimate, estimate_profile
from treecp_rl.planner.forms import RunOptions
from treecp_rl.planner.lower import lower
from treecp_rl.planner.lower_plan import lower_plan, nodes_of
from treecp_rl.planner.polish import MOST_POLISHED, POLISHED_KINDS, plan_for_run
from treecp_rl.planner.schedule_batch import plan_batch
from treecp_rl.planner.search import TreeLengths
from treecp_rl.planner.seconds import Pass, memory_budget, predict

CPU = estimate("cpu", "tiny", ModelDims(256, 1024, 4, 8, 2, 32, 4096))
H100 = estimate_profile("h100", "Qwen2.5-7B")
KEPT = RunOptions(checkpointing=False)


def seconds_of(plan, trees, profile, options):
    return sum(predict(passes, profile, options).seconds for _, passes in lower_plan(plan, trees))


def some_trees(rng, count, most):
    def length():
        return round(2 ** rng.uniform(4, most))

    return [
        TreeLengths(length(), tuple(length() for _ in range(rng.choice([2, 4, 8])))) for _ in range(count)
    ]


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize(("profile", "options", "most"), [(CPU, KEPT, 9), (H100, RunOptions(), 13)])
def test_a_polished_plan_is_no_slower_than_closed_forms_or_any_one_kind_on_all_ranks(
    num_ranks, profile, options, most
):
    rng = random.Random(num_ranks)
    for _ in range(4):
        trees = some_trees(rng, rng.choice([1, 2, 4]), most)
        plan = plan_for_run(trees, num_ranks, profile, options)
        predicted = seconds_of(plan, trees, profile, options)
        assert plan.predicted_seconds == pytest.approx(predicted)
        closed = seconds_of(plan_batch(trees, num_ranks, profile, options), trees, profile, options)
        assert predicted <= closed * (1 + 1e-9)
        nodes = nodes_of(trees)
        for kind in POLISHED_KINDS:
            lanes = lanes_of(kind, num_ranks, profile.shape.num_kv_heads)
            decisions = [Decision(kind, degree=num_ranks, lanes=lanes, weights=plan.weights)] * len(trees)
            forced = Pass(lower(nodes, decisions, num_ranks), nodes)
            if len(trees) == 1:
                # Of several trees the best is found one after another, which need not be best of all.
                assert predicted <= predict([forced], profile, options).seconds * (1 + 1e-9), kind


def test_schedules_say_more_than_closed_forms():
    rng, ratios = random.Random(6), []
    for _ in range(8):
        trees = some_trees(rng, 3, 9)
        plans = plan_for_run(trees, 4, CPU, KEPT), plan_batch(trees, 4, CPU, KEPT)
        polished, closed = (seconds_of(plan, trees, CPU, KEPT) for plan in plans)
        ratios.append(closed / polished)
    assert min(ratios) >= 1 and max(ratios) >= 1.02


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.builds(
            TreeLengths,
            st.integers(1, 300),
            st.lists(st.integers(1, 200), min_size=1, max_size=6).map(tuple),
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(2, 8),
    st.sampled_from([None, 200, 700]),
)
def test_polished_plans_lower_and_pass_the_checks(trees, num_ranks, tokens_per_rank):
    options = RunOptions(checkpointing=False, tokens_per_rank=tokens_per_rank)
    try:
        plan = plan_for_run(trees, num_ranks, CPU, options)
    except PlanError:
        assert tokens_per_rank is not None
        return
    assert [one.tree for one in plan.trees] == list(range(len(trees)))
    assert 0 < plan.lower_bound_seconds <= plan.predicted_seconds
    for one, passes in lower_plan(plan, trees):
        if one.is_shared and tokens_per_rank is not None:
            tokens = sum(trees[planned.tree].num_tokens for planned in one.trees)
            assert tokens <= tokens_per_rank * num_ranks
        for lowered in passes:
            check(lowered.schedule, lowered.nodes, memory_budget(CPU, options))


def test_no_two_trees_on_two_ranks_have_a_better_plan_than_the_polished_one_by_much():
    """All pairs of ways and places; a sweep may stop in a place from which no single tree leads on."""
    rng = random.Random(1)
    worst = 1.0
    for _ in range(6):
        trees = some_trees(rng, 2, 9)
        plan = plan_for_run(trees, 2, CPU, KEPT)
        nodes, best = nodes_of(trees), float("inf")
        ways = [Decision("local", rank, weights=plan.weights) for rank in (0, 1)]
        ways += [
            Decision(kind, degree=2, lanes=lanes_of(kind, 2, 2), weights=plan.weights)
            for kind in POLISHED_KINDS
        ]
        for decisions in product(ways, repeat=2):
            best = min(best, predict([Pass(lower(nodes, decisions, 2), nodes)], CPU, KEPT).seconds)
        worst = max(worst, plan.predicted_seconds / best)
    assert worst <= 1.02


def test_large_batches_and_log_probs_are_planned_by_closed_forms():
    trees = some_trees(random.Random(2), MOST_POLISHED // 2 + 1, 8)
    assert plan_for_run(trees, 2, CPU, KEPT) == plan_batch(trees, 2, CPU, KEPT)
    forward = RunOptions(checkpointing=False, needs_gradients=False)
    assert plan_for_run(trees[:2], 2, CPU, forward) == plan_batch(trees[:2], 2, CPU, forward)
    assert plan_for_run(trees[:2], 1, CPU, KEPT) == plan_batch(trees[:2], 1, CPU, KEPT)


def test_a_plan_that_is_faster_but_does_not_fit_is_not_taken():
    trees = [TreeLengths(400, (100,) * 8), TreeLengths(300, (60, 200, 30))]
    free = plan_for_run(trees, 2, CPU, KEPT)
    (peak,) = {predict(passes, CPU, KEPT).peak_bytes for _, passes in lower_plan(free, trees)}
    for part in (0.99, 0.9, 0.8):
        memory = replace(CPU.memory, bytes_per_rank=int(part * peak))
        tight = replace(CPU, memory=memory)
        plan = plan_for_run(trees, 2, tight, KEPT)
        for _, passes in lower_plan(plan, trees):
            assert predict(passes, tight, KEPT).peak_bytes <= memory.bytes_per_rank


def test_factors_scale_a_polished_plan_and_its_bound():
    trees = some_trees(random.Random(3), 2, 9)
    plan = plan_for_run(trees, 4, CPU, KEPT)
    slower = plan_for_run(trees, 4, replace(CPU, factors=replace(CPU.factors, fused=2.0)), KEPT)
    assert slower.predicted_seconds == pytest.approx(2 * plan.predicted_seconds)
    assert slower.gap == pytest.approx(plan.gap)


def test_a_polished_plan_names_its_placements_and_its_digest_holds_them():
    plan = plan_for_run([TreeLengths(400, (90, 60, 120))], 4, CPU, KEPT)
    (planned,) = plan.trees
    assert planned.candidate.kind == "gather" and planned.placement is not None
    assert plan.decision(planned).placement == planned.placement
    unweighed = replace(plan.passes[0], trees=(replace(planned, placement=None),))
    assert replace(plan, passes=(unweighed,)).digest != plan.digest
