"""Proves that the search finds what trying everything finds, that placements keep their bounds, and refusals."""

import itertools
import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treecp_rl.errors import BatchError, PlanError
from treecp_rl.planner.assign import (
    EXACT_UNITS,
    FewUnits,
    _branch,
    assign,
    assign_grid,
    largest_first,
    loads_of,
    lower_bound,
)
from treecp_rl.planner.estimates import estimate_profile
from treecp_rl.planner.forms import RunOptions, candidates, cost_table, powers_of_two, token_pairs
from treecp_rl.planner.profile import Link
from treecp_rl.planner.search import TreeLengths, TreeSearch, Workload, search, tree_features

PROFILE = estimate_profile("h100", "Qwen2.5-7B")
DEGREES = (1, 2, 4, 8)


def with_memory(bytes_per_rank):
    return replace(PROFILE, memory=replace(PROFILE.memory, bytes_per_rank=int(bytes_per_rank)))


def random_tree(rng, most_responses=4):
    group = rng.randint(most_responses // 2, most_responses)
    prompt = round(2 ** rng.uniform(3, 15))
    return TreeLengths(prompt, tuple(round(2 ** rng.uniform(0, 13)) for _ in range(group)))


def every_grid(tree, works, lanes, rounds, capacity):
    """Least work of the busiest lane over all assignments to lanes and rounds, and that lane; None: none fits."""
    best = None
    for lane_of in itertools.product(range(lanes), repeat=len(works)):
        loads = loads_of(works, lane_of, lanes)
        if best is not None and max(loads) >= best[0]:
            continue
        per_lane = [
            [r for r, at in zip(tree.responses, lane_of, strict=True) if at == lane] for lane in range(lanes)
        ]
        if all(packs(units, rounds, capacity) for units in per_lane):
            best = max(loads), per_lane[loads.index(max(loads))]
    return best


def packs(tokens, rounds, capacity):
    """Whether tokens go into so many rounds, by trying all ways."""
    return any(
        all(sum(t for t, at in zip(tokens, way, strict=True) if at == r) <= capacity for r in range(rounds))
        for way in itertools.product(range(rounds), repeat=len(tokens))
    )


@cache
def table_of(profile, options, one):
    return cost_table(profile, options, (one,))


def by_exhaustion(tree, profile, space, options):
    """Algorithm 1 by trying every candidate, every lane and every round of every response."""
    best = None
    for one in candidates(space, DEGREES, len(tree.responses), profile.shape.num_kv_heads):
        if one.degree > (tree.prompt if one.form == "split" else tree.num_tokens):
            continue
        table = table_of(profile, options, one)
        workload = Workload(tree, token_pairs(profile))
        features = tree_features(workload, table.index)
        if one.form == "flat" or one.kind == "gather_whole":
            # Responses lie as they must, so there is nothing to try.
            if table.limits[0] @ features > profile.memory.bytes_per_rank:
                continue
        else:
            columns = [table.index.position[name] for name in ("responses", f"lane/{one.lanes}")]
            row = table.limits[0]
            rest = row @ features - row[columns] @ features[columns]
            # The row holds a round's part of the tokens.
            capacity = (profile.memory.bytes_per_rank - rest) / row[columns].sum() / one.rounds
            found = every_grid(tree, workload.works, one.lanes, one.rounds, capacity * (1 + 1e-12))
            if found is None:
                continue
            if one.lanes > 1:
                lane = found[1]
                features[table.index.position[f"lane/{one.lanes}"]] = sum(lane)
                features[table.index.position[f"lane_cross/{one.lanes}"]] = tree.prompt * sum(lane)
                features[table.index.position[f"lane_pairs/{one.lanes}"]] = sum(r * (r + 1) / 2 for r in lane)
        seconds = table.seconds(features)[0]
        if best is None or seconds < best[1]:
            best = one, seconds
    return best


def clusters():
    """Ample memory to almost none; links as they are, and so slow that lanes pay."""
    slow = replace(PROFILE, node_link=Link(1e-5, 1e-8), overlap=0.5, stage_s=0.0)
    return [
        replace(one, memory=replace(PROFILE.memory, bytes_per_rank=gib * 2**28))
        for one in (PROFILE, slow)
        for gib in (2, 5, 12, 30, 300)
    ]


@pytest.mark.parametrize("space", ["augtree", "full"])
def test_the_choice_is_that_of_exhaustive_search(space):
    """1 000 random trees; lanes, rounds and refusals are all met."""
    rng, options = random.Random(5), RunOptions(checkpointing=False)
    searches = [(one, TreeSearch(one, DEGREES, options, space)) for one in clusters()]
    met, refused = set(), 0
    for _ in range(1000):
        tree = random_tree(rng)
        profile, find = rng.choice(searches)
        expected = by_exhaustion(tree, profile, space, options)
        if expected is None:
            refused += 1
            with pytest.raises(PlanError, match=r"leanest plan|no rounds that fit"):
                find(tree)
            continue
        chosen = find(tree)
        assert chosen.seconds == pytest.approx(expected[1], rel=1e-9), (tree, chosen, expected)
        met.add((chosen.candidate.form, chosen.candidate.rounds > 1, chosen.candidate.lanes > 1))
    assert refused > 10
    assert any(rounds for _, rounds, _ in met) and any(lanes for _, _, lanes in met), met


def test_subsets_equal_brute_force_on_10_000_assignments():
    rng = random.Random(1)
    for _ in range(10000):
        units, lanes = rng.randint(1, 6), rng.randint(1, 4)
        works = [rng.uniform(1, 100) for _ in range(units)]
        ways = np.array(list(itertools.product(range(lanes), repeat=units)))
        loads = np.stack([(np.array(works) * (ways == lane)).sum(axis=1) for lane in range(lanes)])
        found = assign(works, lanes)
        assert found.makespan == pytest.approx(loads.max(axis=0).min())
        assert found.is_proven
        assert max(loads_of(works, found.lane_of, lanes)) == pytest.approx(found.makespan)


def test_largest_first_and_branch_and_bound_keep_their_bounds_on_10_000_assignments():
    rng = random.Random(2)
    proven = 0
    for _ in range(10000):
        units, lanes = rng.randint(EXACT_UNITS + 1, 40), rng.choice([2, 3, 4, 8, 16])
        works = [rng.lognormvariate(0, 0.6) for _ in range(units)]
        greedy = assign(works, lanes)
        assert sorted(set(greedy.lane_of)) == list(range(min(lanes, units)))
        assert greedy.lower_bound == lower_bound(works, lanes) <= greedy.makespan
        assert greedy.makespan <= (4 / 3 - 1 / (3 * lanes)) * polished(works, lanes, greedy, 40).makespan * (
            1 + 1e-9
        )
        proven += greedy.is_proven
    assert proven > 100


def polished(works, lanes, greedy, nodes):
    better = assign(works, lanes, nodes)
    assert greedy.lower_bound <= better.lower_bound <= better.makespan <= greedy.makespan * (1 + 1e-12)
    return better


def test_branch_and_bound_proves_what_subsets_find():
    rng = random.Random(3)
    for _ in range(30):
        works = [rng.uniform(1, 10) for _ in range(EXACT_UNITS + 1)]
        best = FewUnits(works).assign(3).makespan
        found = assign(works, 3, num_nodes=100_000)
        assert found.is_proven
        assert found.makespan == pytest.approx(best)


@pytest.mark.parametrize("units", [5, 12])
def test_no_lane_holds_more_than_its_memory_in_a_round(units):
    rng = random.Random(units)
    found = 0
    for _ in range(300):
        tokens = [rng.randint(1, 100) for _ in range(units)]
        works = [t * (50 + t) for t in tokens]
        rounds, lanes, capacity = rng.randint(1, 4), rng.randint(1, 3), rng.uniform(50, 300)
        grid = assign_grid(works, tokens, rounds, lanes, capacity)
        if grid is None:
            continue
        found += 1
        held = {}
        for t, cell in zip(tokens, zip(grid.lanes.lane_of, grid.round_of, strict=True), strict=True):
            held[cell] = held.get(cell, 0) + t
        assert max(held.values()) <= capacity
        assert max(grid.round_of) < rounds
    assert found > 50


def test_less_memory_needs_more_rounds_and_never_less_time():
    """Equation 6 alone would never take two rounds: memory does."""
    tree = TreeLengths(4096, (4096,) * 8)
    options = RunOptions(checkpointing=False)
    seconds, rounds = [], []
    for gib in (80, 40, 30, 24, 20):
        choice = TreeSearch(with_memory(gib * 2**30), (8,), options, "augtree")(tree)
        seconds.append(choice.seconds)
        rounds.append(choice.candidate.rounds)
    assert seconds == sorted(seconds)
    assert rounds[0] == 1 and rounds[-1] > 1
    with pytest.raises(
        PlanError, match=r"36864 tokens \(prompt 4096\) needs .* GiB .* a rank .* raise the ranks, now 8"
    ):
        search(tree, with_memory(2**30), (8,), options)


def test_few_units_have_lanes_as_good_as_branch_and_bound_proves():
    """Equal works and works that differ by orders; brute force takes too long for these."""
    rng = random.Random(4)
    for _ in range(300):
        units = rng.randint(7, EXACT_UNITS)
        lanes = rng.randint(2, units - 1)
        works = rng.choice([[1.0, 2.0, 4.0], [rng.lognormvariate(0, 2) for _ in range(units)]])
        works = [rng.choice(works) for _ in range(units)]
        found = FewUnits(works).assign(lanes)
        assert sorted(set(found.lane_of)) == list(range(lanes))
        start = largest_first(works, lanes)
        span, least = max(loads_of(works, start, lanes)), lower_bound(works, lanes)
        _, makespan, is_optimal = _branch(works, lanes, start, span, least, 1_000_000)
        assert is_optimal
        assert found.makespan == pytest.approx(makespan)
        assert max(loads_of(works, found.lane_of, lanes)) == pytest.approx(found.makespan)


@settings(max_examples=100, deadline=None)
@given(
    prompt=st.integers(1, 200_000),
    responses=st.lists(st.integers(1, 50_000), min_size=2, max_size=20),
    profile=st.sampled_from(clusters()),
    options=st.sampled_from(
        [RunOptions(), RunOptions(checkpointing=False), RunOptions(needs_gradients=False)]
    ),
)
def test_more_rounds_never_take_less_time(prompt, responses, profile, options):
    """Why the search looks at them only where one round does not fit."""
    tree = TreeLengths(prompt, tuple(responses))
    table = TreeSearch(profile, powers_of_two(64), options).table(len(responses))
    seconds = table.seconds(tree_features(Workload(tree, token_pairs(profile)), table.index))
    of = {one: float(value) for one, value in zip(table.candidates, seconds, strict=True)}
    for one, value in of.items():
        assert value >= of[replace(one, rounds=1)] * (1 - 1e-12), one


def test_a_short_prompt_is_not_split_over_more_ranks_than_it_has_tokens():
    """One token of prompt cannot be prefilled by four ranks; here nothing else has room."""
    tree = TreeLengths(1, (1, 1199))
    with pytest.raises(PlanError, match=r"1201 tokens needs 301 tokens a rank .* budget is 300"):
        search(tree, PROFILE, (1, 2, 4), RunOptions(tokens_per_rank=300))
    assert search(tree, PROFILE, (1, 2, 4), RunOptions(tokens_per_rank=301)).candidate.form == "fused"


def test_ours_is_never_slower_than_the_papers_space():
    rng = random.Random(8)
    for _ in range(200):
        tree = random_tree(rng, most_responses=16)
        full = search(tree, PROFILE, powers_of_two(64))
        paper = search(tree, PROFILE, powers_of_two(64), space="augtree")
        assert full.seconds <= paper.seconds * (1 + 1e-9)


def test_equal_inputs_give_equal_choices():
    tree = TreeLengths(3000, tuple(range(100, 2000, 97)))
    assert search(tree, PROFILE, DEGREES) == search(tree, replace(PROFILE), DEGREES)


def test_a_token_budget_is_kept():
    tree = TreeLengths(4096, (1024,) * 8)
    for budget in (1000, 2000, 4000, 20000):
        options = RunOptions(tokens_per_rank=budget)
        try:
            choice = search(tree, PROFILE, (1, 2, 4, 8), options)
        except PlanError as error:
            assert "tokens a rank" in str(error)
            assert budget < 4096 / 8 + 8192 / 8 / 8
            continue
        table = cost_table(PROFILE, options, (choice.candidate,))
        features = tree_features(Workload(tree, token_pairs(PROFILE)), table.index)
        assert table.tokens_per_rank(features)[0] <= budget


@pytest.mark.parametrize(
    ("prompt", "responses", "says"),
    [(10, (), "no response"), (0, (5,), "prompt 0"), (5, (3, -1), "-1 to 3"), (5, (0,), "1 or more")],
)
def test_lengths_that_are_none_are_named(prompt, responses, says):
    with pytest.raises(BatchError, match=says):
        TreeLengths(prompt, responses)


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.integers(1, 200_000),
    responses=st.lists(st.integers(1, 50_000), min_size=1, max_size=70),
    most=st.sampled_from([1, 2, 8, 128]),
    space=st.sampled_from(["full", "augtree"]),
    gib=st.floats(0.5, 200),
)
def test_any_lengths_are_planned_or_refused_by_name(prompt, responses, most, space, gib):
    profile = with_memory(gib * 2**30)
    tree = TreeLengths(prompt, tuple(responses))
    try:
        choice = search(tree, profile, powers_of_two(most), space=space)
    except PlanError as error:
        assert "GiB" in str(error)
        return
    assert 0 < choice.seconds < float("inf")
    assert choice.candidate.degree <= tree.num_tokens
    assert len(choice.lane_of) == len(choice.round_of) == len(responses)
    assert max(choice.lane_of) < max(1, choice.candidate.lanes)
    assert choice.lanes_gap >= -1e-9
