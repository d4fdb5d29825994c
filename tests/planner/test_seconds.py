"""Proves that a step's predicted seconds are made of what its schedules count: passes, stages, moves, one reduction."""

from dataclasses import replace

import pytest

from treecp_rl.plan import Decision
from treecp_rl.planner.estimates import ModelDims, estimate
from treecp_rl.planner.forms import RunOptions
from treecp_rl.planner.lower import lower
from treecp_rl.planner.lower_plan import nodes_of
from treecp_rl.planner.search import TreeLengths
from treecp_rl.planner.seconds import Pass, predict

PROFILE = estimate("cpu", "tiny", ModelDims(256, 1024, 4, 8, 2, 32, 4096))
LAYERS = PROFILE.shape.num_layers
KEPT = RunOptions(checkpointing=False)
LEAN = RunOptions()
LOG_PROBS = RunOptions(needs_gradients=False)
FIRST, SECOND = TreeLengths(200, (40, 30, 20)), TreeLengths(90, (80, 70))


def lowered(trees, kind="gather", num_ranks=2):
    nodes = nodes_of(trees)
    decisions = [Decision(kind, degree=num_ranks)] * len(trees)
    return Pass(lower(nodes, decisions, num_ranks), nodes)


def more_seconds(passes, options, **terms):
    """What terms of one second each add to a step."""
    slower = predict(passes, replace(PROFILE, **terms), options).seconds
    return slower - predict(passes, PROFILE, options).seconds


@pytest.mark.parametrize(("options", "times"), [(KEPT, 2), (LEAN, 3), (LOG_PROBS, 1)])
def test_trees_of_a_pass_share_its_stages(options, times):
    stage = {"stage_s": PROFILE.stage_s + 1.0}
    one = more_seconds([lowered([FIRST])], options, **stage)
    assert one == pytest.approx(times * LAYERS)
    assert more_seconds([lowered([FIRST, SECOND])], options, **stage) == pytest.approx(one)
    apart = more_seconds([lowered([FIRST]), lowered([SECOND])], options, **stage)
    assert apart == pytest.approx(2 * one)


@pytest.mark.parametrize(("options", "times"), [(KEPT, 2), (LEAN, 3), (LOG_PROBS, 1)])
def test_a_move_costs_at_both_ends(options, times):
    one = lowered([FIRST])
    num_moves = sum(len(stage.moves) for stage in one.schedule.stages)
    assert num_moves >= 2, "each of two ranks sends to the other, and every move has both as its ends"
    found = more_seconds([one], options, move_s=PROFILE.move_s + 1.0)
    assert found == pytest.approx(times * LAYERS * num_moves)


def test_gradients_are_reduced_once_a_step_whatever_its_passes():
    term = {"gradient_sync_s": 1.0}
    for options, expected in ((KEPT, 1.0), (LEAN, 1.0), (LOG_PROBS, 0.0)):
        for passes in ([lowered([FIRST, SECOND])], [lowered([FIRST]), lowered([SECOND])]):
            assert more_seconds(passes, options, **term) == pytest.approx(expected)


def test_ranks_without_moves_pay_for_stages_but_not_for_moves():
    alone = lowered([FIRST], kind="local", num_ranks=1)
    assert more_seconds([alone], KEPT, stage_s=9.0, move_s=9.0) == 0.0
