"""Proves that batch plans cover the batch, keep budgets and bounds, match their peers, lower and pass the checks."""

import math
import random
from dataclasses import replace
from itertools import product
from math import isclose

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treecp_rl.errors import BatchError, ConfigError, PlanError
from treecp_rl.planner.check import check
from treecp_rl.planner.estimates import estimate_profile
from treecp_rl.planner.forms import RunOptions, candidates, cost_table, token_pairs
from treecp_rl.planner.lower_plan import lower_plan
from treecp_rl.planner.schedule_batch import MOST_LOOKS, _Blocks, batch_features, degree_chain, plan_batch
from treecp_rl.planner.search import TreeLengths, Workload, tree_features
from treecp_rl.planner.seconds import memory_budget, predict

PROFILE = estimate_profile("h100", "Qwen2.5-7B")
CAPPED = RunOptions(tokens_per_rank=24576)


def draw(rng, mean, cv):
    sigma = math.sqrt(math.log(1 + cv * cv))
    return max(1, round(mean * math.exp(sigma * rng.gauss(0, 1) - sigma * sigma / 2)))


def batch(kind, num_trees, group=8, seed=0):
    """Long prompts with short responses, reasoning, or a third of each with chat."""
    rng = random.Random(seed)
    trees = []
    for _ in range(num_trees):
        one = kind if kind != "mixed" else rng.choice(["long", "reasoning", "chat"])
        prompt, response = {
            "long": (min(65000, draw(rng, 18000, 1.1)), 300),
            "reasoning": (draw(rng, 330, 0.4), draw(rng, 4800, 0.65)),
            "chat": (draw(rng, 80, 0.6), 214),
        }[one]
        trees.append(TreeLengths(prompt, tuple(min(20000, draw(rng, response, 0.55)) for _ in range(group))))
    return trees


def require_valid(plan, trees, options, check_memory=False):
    """Every tree once, no token budget exceeded, bound below prediction; every pass lowers and passes ``check``."""
    assert [one.tree for one in plan.trees] == list(range(len(trees)))
    assert plan.lower_bound_seconds <= plan.predicted_seconds * (1 + 1e-9)
    budget = memory_budget(PROFILE, options) if check_memory else None
    exact = 0.0
    for one, passes in lower_plan(plan, trees):
        if options.tokens_per_rank is not None:
            tokens = sum(trees[t.tree].num_tokens for t in one.trees)
            assert not one.is_shared or tokens <= options.tokens_per_rank * plan.num_ranks
        for lowered in passes:
            check(lowered.schedule, lowered.nodes, budget)
        exact += predict(passes, PROFILE, options).seconds
        for planned in one.trees:
            assert planned.first_rank % planned.candidate.degree == 0
            assert planned.ranks.stop <= plan.num_ranks
            rows = trees[planned.tree].responses
            assert one.is_shared or len(planned.round_of) == len(rows)
    return exact


@pytest.mark.parametrize("kind", ["long", "reasoning", "mixed"])
@pytest.mark.parametrize("policy", ["auto", "nsp", "disjoint", "static"])
def test_plans_cover_the_batch_and_their_schedules_cost_what_was_predicted(kind, policy):
    trees = batch(kind, 12)
    plan = plan_batch(trees, 8, PROFILE, CAPPED, policy, 4 if policy == "static" else None)
    exact = require_valid(plan, trees, CAPPED, check_memory=True)
    assert plan.predicted_seconds == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize("options", [RunOptions(), CAPPED], ids=["memory", "24k"])
@pytest.mark.parametrize("kind", ["long", "reasoning", "mixed"])
@pytest.mark.parametrize("num_trees", [64, 256])
def test_ours_is_no_slower_than_any_peer(kind, num_trees, options):
    trees = batch(kind, num_trees)
    ours = plan_batch(trees, 64, PROFILE, options).predicted_seconds
    if num_trees == 64:
        assert plan_batch(trees, 64, PROFILE, options, effort="thorough").predicted_seconds <= ours
    peers = [("nsp", None), ("disjoint", None)] if num_trees == 64 else []
    for policy, degree in [*peers, *(("static", degree) for degree in (1, 2, 4, 8, 16))]:
        try:
            peer = plan_batch(trees, 64, PROFILE, options, policy, degree)
        except PlanError:
            # Some tree does not fit on so few ranks.
            assert policy == "static"
            continue
        assert ours <= peer.predicted_seconds, (policy, degree)


@pytest.mark.parametrize(
    ("num_trees", "num_ranks", "most"), [(64, 64, 0.05), (512, 64, 0.01), (1024, 256, 0.02)]
)
@pytest.mark.parametrize("kind", ["long", "reasoning", "mixed"])
def test_gaps_stay_small(kind, num_trees, num_ranks, most):
    assert plan_batch(batch(kind, num_trees), num_ranks, PROFILE).gap <= most


def test_the_bound_holds_against_every_plan_of_small_batches():
    """All degrees and places of 3 trees on 4 ranks in 1 or 2 passes."""
    rng = random.Random(4)
    for _ in range(20):
        trees = [TreeLengths(draw(rng, 4000, 1), (draw(rng, 1000, 1),) * 4) for _ in range(3)]
        plan = plan_batch(trees, 4, PROFILE)
        seconds = {
            (tree, degree): plan_batch([trees[tree]], 4, PROFILE, RunOptions(), "static", degree).passes[0]
            for tree, degree in product(range(3), (1, 2, 4))
        }
        fixed = plan.passes[0].seconds - max(_loads(plan.passes[0].trees, 4))
        best = math.inf
        nodes = [(degree, first) for degree in (1, 2, 4) for first in range(0, 4, degree)]
        for places in product(nodes, repeat=3):
            loads = [0.0] * 4
            for tree, (degree, first) in enumerate(places):
                for rank in range(first, first + degree):
                    loads[rank] += seconds[tree, degree].trees[0].seconds
            best = min(best, max(loads) + fixed)
        assert plan.lower_bound_seconds <= best * (1 + 1e-9)
        assert plan.predicted_seconds <= best * 1.05


def _loads(trees, num_ranks):
    loads = [0.0] * num_ranks
    for one in trees:
        for rank in one.ranks:
            loads[rank] += one.seconds
    return loads


def test_a_pass_takes_as_long_as_its_busiest_rank():
    plan = plan_batch(batch("mixed", 40), 16, PROFILE, CAPPED)
    fixed = {round(one.seconds - max(_loads(one.trees, 16)), 9) for one in plan.passes if one.is_shared}
    assert len(fixed) == 1 and fixed.pop() > 0


def test_a_tree_over_the_budget_gets_passes_of_its_own():
    options = RunOptions(tokens_per_rank=4096)
    trees = [TreeLengths(6000, (2000,) * 16), TreeLengths(100, (50,) * 8)]
    plan = plan_batch(trees, 4, PROFILE, options)
    assert [one.is_shared for one in plan.passes] == [False, True]
    assert max(plan.passes[0].trees[0].round_of) > 0
    require_valid(plan, trees, options)


def test_a_tree_may_take_as_many_rounds_as_it_has_responses():
    tree = TreeLengths(1000, (500,) * 23)
    (planned,) = plan_batch([tree], 2, PROFILE, RunOptions(tokens_per_rank=760)).trees
    assert planned.candidate.rounds == 23 and sorted(planned.round_of) == list(range(23))
    with pytest.raises(
        PlanError, match=r"tree 0 .* a row of 1500 tokens .* raise tokens_per_rank to 750 or more"
    ):
        plan_batch([TreeLengths(1000, (1, 500))], 2, PROFILE, RunOptions(tokens_per_rank=749))


def test_equal_inputs_give_equal_plans_and_digests():
    trees = batch("mixed", 50)
    first, second = (plan_batch(list(trees), 32, replace(PROFILE), CAPPED) for _ in range(2))
    assert first == second and first.digest == second.digest
    assert first.digest != plan_batch(trees[:-1], 32, PROFILE, CAPPED).digest


@pytest.mark.parametrize(
    ("num_ranks", "chain"), [(1, (1,)), (8, (1, 2, 4, 8)), (12, (1, 2, 4, 12)), (7, (1, 7))]
)
def test_degrees_divide_one_another(num_ranks, chain):
    assert degree_chain(num_ranks) == chain


def test_features_of_a_batch_are_those_of_its_trees():
    """Where both fill lanes largest first: above the responses that the search assigns exactly."""
    degrees = (1, 2, 4, 8, 16)
    trees = batch("mixed", 40, group=10)
    trees += [TreeLengths(512, (2000,) * 16), TreeLengths(900, (700, 9000, 33) * 4)]
    for group in (10, 12, 16):
        some = [tree for tree in trees if len(tree.responses) == group]
        table = cost_table(PROFILE, RunOptions(), candidates("full", degrees, group, 4))
        together = batch_features(some, table.index, token_pairs(PROFILE))
        for tree, row in zip(some, together, strict=True):
            alone = tree_features(Workload(tree, token_pairs(PROFILE)), table.index)
            names = [
                name
                for name, at in table.index.position.items()
                if not isclose(alone[at], row[at], rel_tol=1e-9)
            ]
            assert not names, (tree, names)


def test_bad_input_is_named():
    tree = TreeLengths(100, (10,))
    with pytest.raises(BatchError, match="no trees"):
        plan_batch([], 4, PROFILE)
    with pytest.raises(ConfigError, match="domain of 0 ranks"):
        plan_batch([tree], 0, PROFILE)
    with pytest.raises(ConfigError, match="choose from auto, nsp"):
        plan_batch([tree], 4, PROFILE, policy="best")
    with pytest.raises(ConfigError, match="a degree belongs to policy static"):
        plan_batch([tree], 4, PROFILE, degree=2)
    with pytest.raises(ConfigError, match="choose from 1, 2, 4"):
        plan_batch([tree], 4, PROFILE, policy="static", degree=3)
    huge = TreeLengths(40_000_000, (10,))
    with pytest.raises(
        PlanError, match=r"tree 1 of the batch: .*40000010 tokens.* GiB .* a rank .* raise the ranks"
    ):
        plan_batch([tree, huge], 4, PROFILE)


def test_blocks_keep_the_load_and_room_of_their_ranks():
    """Random trees on random blocks of 8, 12 and 24 ranks, against loads kept rank by rank."""
    rng = random.Random(3)
    for num_ranks in (8, 12, 24):
        degrees = degree_chain(num_ranks)
        blocks, loads, rooms = _Blocks(degrees, 2 * num_ranks), [0.0] * 2 * num_ranks, [0.0] * 2 * num_ranks
        for _ in range(150):
            level, seconds, need = (
                rng.randrange(len(degrees)),
                rng.choice([0.5, rng.random()]),
                rng.random() / 40,
            )
            width, most = degrees[level], rng.random() * max(loads)
            spans = [range(first, first + width) for first in range(0, len(loads), width)]
            peaks = [max(loads[rank] for rank in span) for span in spans]
            fits = [max(rooms[rank] for rank in span) + need <= 1.0 for span in spans]
            found = blocks.fullest(level, most, need, 0.0)
            if found is None:
                allowed = [i for i, peak in enumerate(peaks) if peak <= most]
                assert sum(not fits[i] for i in allowed) >= min(len(allowed), MOST_LOOKS)
                found = blocks.lightest(level, need)
                assert found is None or peaks[found] == min(
                    p for p, fit in zip(peaks, fits, strict=True) if fit
                )
                if found is None:
                    assert not any(fits)
                    continue
            else:
                assert fits[found] and peaks[found] <= most
                better = sum(peaks[found] < peak <= most for peak in peaks)
                assert better < MOST_LOOKS
            blocks.put(level, found, seconds, need)
            for rank in spans[found]:
                loads[rank] += seconds
                rooms[rank] += need
            assert blocks.loads[0] == loads and blocks.rooms[0] == pytest.approx(rooms)


def test_more_ranks_than_tokens_is_a_valid_plan():
    trees = [TreeLengths(2, (1,)), TreeLengths(1, (1, 1))]
    require_valid(plan_batch(trees, 64, PROFILE), trees, RunOptions())


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 3000), st.lists(st.integers(1, 1500), min_size=1, max_size=6)),
        min_size=1,
        max_size=8,
    ),
    num_ranks=st.sampled_from([1, 2, 3, 4, 6, 8]),
    policy=st.sampled_from(["auto", "nsp", "disjoint"]),
    tokens_per_rank=st.sampled_from([None, 20000, 1500, 300]),
)
def test_every_plan_lowers_and_passes_the_checks(lengths, num_ranks, policy, tokens_per_rank):
    trees = [TreeLengths(prompt, tuple(responses)) for prompt, responses in lengths]
    options = RunOptions(tokens_per_rank=tokens_per_rank)
    try:
        plan = plan_batch(trees, num_ranks, PROFILE, options, policy)
    except PlanError as error:
        assert tokens_per_rank is not None and "tokens" in str(error)
        return
    require_valid(plan, trees, options)
