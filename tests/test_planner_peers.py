"""Proves the common measure of benchmarks/planner_peers.py by hand-made cases, and its solver by brute force."""

import importlib.util
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from treecp_rl.planner.forms import Candidate
from treecp_rl.planner.profile import load_profile
from treecp_rl.planner.schedule_batch import plan_batch
from treecp_rl.planner.search import TreeLengths
from treecp_rl.simulator.workloads import draw_batch

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "planner_peers.py"


@pytest.fixture(scope="module")
def peers():
    spec = importlib.util.spec_from_file_location("planner_peers", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["planner_peers"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["planner_peers"]


@pytest.fixture
def solver():
    pytest.importorskip(
        "ortools", reason="OR-tools is missing: pip install --no-deps -r requirements/planner_peers.txt"
    )


def hand_made(peers, seconds, room=0.1, fixed=1.0):
    """Trees of such seconds at degrees 1, 2, 4; ``room`` at degree 1, spread over the ranks."""
    seconds = np.array(seconds, dtype=float)
    rooms = room / np.array([1.0, 2.0, 4.0]) * np.ones_like(seconds)
    chosen = tuple(Candidate("fused", "gather" if d > 1 else "local", d) for d in (1, 2, 4))
    trees = tuple(TreeLengths(8 + i, (4,)) for i in range(len(seconds)))
    return peers.Costs(trees, (1, 2, 4), seconds, rooms, (chosen,) * len(seconds), fixed)


def drawn(peers, seed, count=5, **more):
    """Seconds that fall with the degree, but less than they would ideally."""
    rng = np.random.default_rng(seed)
    alone = rng.uniform(1, 8, (count, 1))
    return hand_made(peers, alone / np.array([1.0, 2.0, 4.0]) * np.array([1.0, 1.15, 1.4]), **more)


def test_a_pass_takes_as_long_as_its_busiest_rank(peers):
    costs = hand_made(peers, [[4.0, 3.0, 2.0], [1.0, 0.8, 0.7], [2.0, 1.5, 1.0]])
    place = peers.Place
    one = (place(0, 1, 0), place(0, 0, 1), place(0, 0, 3))
    assert peers.evaluate(one, costs) == pytest.approx(max(3 + 1, 2) + 1)
    two = (place(0, 2, 0), place(1, 0, 1), place(1, 0, 1))
    assert peers.evaluate(two, costs) == pytest.approx(2 + 3 + 2 * 1)


def test_what_does_not_fit_has_no_value(peers):
    costs = hand_made(peers, [[np.inf, 3.0, 2.0], [1.0, 0.8, 0.7]], room=0.6)
    place = peers.Place
    for wrong, says in (
        ((place(0, 0, 0), place(0, 0, 1)), "tree 0 has no place"),
        ((place(0, 1, 1), place(0, 0, 3)), "tree 0 has no place on 2 ranks from rank 1"),
    ):
        with pytest.raises(ValueError, match=says):
            peers.evaluate(wrong, costs)
    crowded = hand_made(peers, [[1.0, 0.8, 0.7]] * 2, room=0.6)
    with pytest.raises(ValueError, match=r"1\.200 of its memory"):
        peers.evaluate((place(0, 0, 2), place(0, 0, 2)), crowded)


@pytest.mark.parametrize("policy", ["auto", "nsp", "disjoint"])
def test_the_measure_says_of_our_plans_what_the_planner_says(peers, policy):
    profile = load_profile("h100")
    trees = draw_batch("mixed", 12, 8, 3)
    costs = peers.costs_of(trees, 8, profile)
    plan = plan_batch(trees, 8, profile, policy=policy)
    assignment = peers.assignment_of(plan, costs)
    assert peers.evaluate(assignment, costs) == pytest.approx(plan.predicted_seconds, rel=1e-9)
    assert peers.by_schedules(assignment, costs, profile) == pytest.approx(plan.predicted_seconds, rel=0.15)


def test_karmarkar_karp_of_verl_deals_out_whole_trees(peers):
    partition = peers.karmarkar_karp_of_verl()
    costs = peers.costs_of(draw_batch("reasoning", 16, 8, 0), 4, load_profile("h100"))
    found = peers.by_karmarkar_karp(costs, partition)
    assert len({costs.degrees[place.level] for place in found}) == 1, "groups of one size"
    least = costs.fixed_seconds + float((costs.seconds * np.array(costs.degrees)).min(axis=1).sum()) / 4
    assert least <= peers.evaluate(found, costs) < 1.2 * least


def test_karmarkar_karp_takes_another_pass_where_room_is_short(peers):
    costs = hand_made(peers, [[2.0, 1.9, 1.8]] * 8, room=0.9)
    found = peers.by_karmarkar_karp(costs, peers.karmarkar_karp_of_verl())
    assert costs.fewest_passes == 2 == 1 + max(place.pass_number for place in found)
    assert peers.evaluate(found, costs) == pytest.approx(2 * (2.0 + 1.0))


@pytest.mark.parametrize("package", ["ortools", "verl.utils.seqlen_balancing"])
def test_a_missing_package_is_named_before_anything_runs(peers, package, monkeypatch, capsys):
    monkeypatch.setattr(peers, "cp_sat" if package != "ortools" else "karmarkar_karp_of_verl", lambda: None)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(peers, "compare", lambda *_: pytest.fail("it ran"))
    assert peers.main([]) == 2
    assert "pip install" in capsys.readouterr().err


def best_of_disjoint_groups(peers, costs):
    """Every multiset of groups that takes 4 ranks or fewer, and every assignment to it."""
    best = np.inf
    for groups in ((2,), (1, 1), (1, 0, 0), (0, 0, 0, 0)):
        firsts = np.cumsum([0, *(costs.degrees[level] for level in groups[:-1])])
        places = [peers.Place(0, level, int(first)) for level, first in zip(groups, firsts, strict=True)]
        for chosen in product(places, repeat=len(costs.trees)):
            try:
                best = min(best, peers.evaluate(chosen, costs))
            except ValueError:
                continue
    return best


@pytest.mark.parametrize("seed", range(6))
def test_the_solver_finds_what_brute_force_finds(peers, solver, seed):
    costs = drawn(peers, seed, room=0.1 if seed % 2 else 0.5)
    solved = peers.by_flexsp(costs, 20.0, 1, peers.karmarkar_karp_of_verl())
    assert solved.status == "OPTIMAL"
    assert peers.evaluate(solved.assignment, costs) == pytest.approx(
        best_of_disjoint_groups(peers, costs), abs=2e-5
    ), "up to the microseconds that it counts in"
    bound = solved.bound_seconds + costs.fixed_seconds
    assert bound == pytest.approx(peers.evaluate(solved.assignment, costs), abs=2e-5)


def test_the_solver_cuts_a_batch_into_micro_batches_where_room_is_short(peers, solver):
    costs = drawn(peers, 0, count=8, room=0.9)
    solved = peers.by_flexsp(costs, 20.0, 1, peers.karmarkar_karp_of_verl())
    assert solved.status == "OPTIMAL, OPTIMAL"
    small = {tree for tree in range(8) if solved.assignment[tree].pass_number == 0}
    assert small == {0, 1, 2, 3}, "sorted by length"
    assert peers.evaluate(solved.assignment, costs) > 0


def test_another_micro_batch_is_taken_where_one_has_no_solution(peers, solver):
    """Nine trees that each need more than half of one rank: two passes have room for them, but only in parts."""
    costs = hand_made(peers, [[1.0, np.inf, np.inf]] * 9, room=0.6)
    assert costs.fewest_passes == 2
    solved = peers.by_flexsp(costs, 20.0, 1, peers.karmarkar_karp_of_verl())
    assert solved.status == "OPTIMAL, OPTIMAL, OPTIMAL"
    assert peers.evaluate(solved.assignment, costs) == pytest.approx(3 * (1.0 + 1.0))


def test_a_tree_that_fits_nowhere_is_refused(peers):
    with pytest.raises(ValueError, match="tree 1 fits on no 2 ranks"):
        peers.costs_of([TreeLengths(100, (50,)), TreeLengths(3_000_000, (50,))], 2, load_profile("h100"))


def test_a_small_batch_runs_from_end_to_end(peers, solver, tmp_path, capsys):
    asked = ["--sizes", "6x4", "--workloads", "long", "--limits", "5", "--json", str(tmp_path / "p.json")]
    assert peers.main(asked) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(peers.OURS) + 2
    assert (tmp_path / "p.json").stat().st_size > 0
