"""Proves the closed forms of the search against what lowered schedules cost, byte by byte and second by second."""

from dataclasses import replace
from statistics import median

import numpy as np
import pytest

from tests.planner.shapes import trees
from treecp_rl.planner.check import check
from treecp_rl.planner.estimates import estimate_profile
from treecp_rl.planner.forms import (
    SERIAL_PRODUCTS,
    RunOptions,
    candidates,
    cost_table,
    pass_fixed_seconds,
    product,
    token_pairs,
    weights_of,
)
from treecp_rl.planner.lower import lower
from treecp_rl.planner.profile import Affine, Link, TileCost
from treecp_rl.planner.search import TreeLengths, Workload, tree_features
from treecp_rl.planner.seconds import Pass, memory_budget, predict

PROFILE = estimate_profile("h100", "Qwen2.5-7B")
OPTIONS = RunOptions()
EVEN = [(8192, (1024,) * 8), (1024, (4096,) * 8), (16384, (512,) * 16)]
UNEVEN = [
    (8192, (512, 700, 900, 1100, 1300, 2000, 400, 800)),
    (512, (3000, 200, 1500, 800, 900, 1800, 2500, 600) * 2),
    (20000, (300, 90, 1000, 20, 700)),
]
KINDS = [
    (form, kind)
    for form, kinds in {
        "fused": ("local", "gather", "gather_whole", "ring", "tree_move_kv", "move_q", "heads"),
        "split": ("gather", "tree_move_kv", "move_q", "heads"),
        "flat": ("ring",),
    }.items()
    for kind in kinds
]


def passes_of(candidate, prompt, responses):
    """The schedules that a candidate of one round is lowered to."""
    d, decision = candidate.degree, replace(candidate.decision, weights=weights_of(PROFILE, OPTIONS))
    if candidate.form == "flat":
        nodes = trees(*((prompt, [response]) for response in responses))
        return [Pass(lower(nodes, [decision] * len(responses), d), tuple(nodes))]
    whole = trees((prompt, responses))
    if candidate.form == "fused":
        return [Pass(lower(whole, [decision], d), tuple(whole))]
    root = trees((prompt, ()))
    return [
        Pass(lower(root, [decision], d), tuple(root)),
        Pass(lower(whole, [decision], d, resident_trees=(0,)), tuple(whole)),
    ]


def compared(form, kind, cases, degrees, profile=PROFILE):
    """(candidate, seconds, bytes, peak) ratios of closed form to schedule; fixed costs of passes apart."""
    found = []
    for prompt, responses in cases:
        tree = TreeLengths(prompt, responses)
        for one in candidates("full", degrees, len(responses), PROFILE.shape.num_kv_heads):
            if (one.form, one.kind) != (form, kind) or one.rounds > 1:
                continue
            table = cost_table(profile, OPTIONS, (one,))
            features = tree_features(Workload(tree, token_pairs(PROFILE)), table.index)
            passes = passes_of(one, prompt, responses)
            exact = predict(passes, profile, OPTIONS)
            exact_seconds = exact.seconds - len(passes) * pass_fixed_seconds(profile, OPTIONS)
            moved = table.moved_bytes(features)[0]
            found.append(
                (
                    one,
                    table.marginal_seconds(features)[0] / exact_seconds,
                    moved / exact.moved_bytes if exact.moved_bytes else 1.0 + moved,
                    table.peak_bytes(features)[0] / exact.peak_bytes,
                )
            )
    assert found
    return found


@pytest.mark.parametrize(("form", "kind"), KINDS)
def test_bytes_of_even_trees_are_exact(form, kind):
    """Within a node, where all chunks divide and no response is cut.

    In a prefill by heads, lanes that own the middle of the prompt do not read its end; the form lets them. Spans of a
    prompt are read by fewer ranks, or lie beside a response of which a rank then lacks a part; the form has zigzags.
    """
    about = {("split", "heads"): 0.02, ("fused", "gather"): 0.05}.get((form, kind), 1e-3)
    for one, _, moved, _ in compared(form, kind, EVEN, (1, 2, 4, 8)):
        assert moved == pytest.approx(1.0, abs=about), one


@pytest.mark.parametrize(("form", "kind"), KINDS)
def test_seconds_and_peaks_follow_the_schedule(form, kind):
    found = compared(form, kind, EVEN + UNEVEN, (1, 2, 4, 8, 16))
    for one, seconds, moved, peak in found:
        assert 0.7 < seconds < 1.4, one
        assert 0.7 < peak < 1.3, one
        # What is wrapped around where no response is long is not in the forms, nor what spans save.
        assert 0.3 < moved < 1.8, one
    assert median(seconds for _, seconds, _, _ in found) == pytest.approx(1.0, abs=0.1)
    assert median(peak for _, _, _, peak in found) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(("form", "kind"), KINDS)
def test_kernel_calls_of_even_trees_are_nearly_exact(form, kind):
    """By a profile in which nothing else costs."""
    free, call = Affine(0.0, 0.0), TileCost(1e-5, 1e-20)
    launches = replace(
        PROFILE,
        **dict.fromkeys(("dense_forward", "dense_backward", "head_forward", "head_backward"), free),
        **dict.fromkeys(("attention_forward", "attention_backward"), call),
        **dict.fromkeys(("node_link", "cluster_link"), Link(0.0, 0.0)),
        **dict.fromkeys(("layer_forward_s", "layer_backward_s", "stage_s", "move_s", "gradient_sync_s"), 0.0),
        overlap=0.0,
    )
    for one, seconds, _, _ in compared(form, kind, EVEN, (1, 2, 4, 8), launches):
        assert seconds == pytest.approx(1.0, abs=0.25), one


def test_products_in_blocks_equal_one_product():
    rng = np.random.default_rng(0)
    features, rows = rng.random((2000, 49)), rng.random((107, 49))
    assert rows.size * len(features) > 4 * SERIAL_PRODUCTS
    np.testing.assert_allclose(product(features, rows), features @ rows.T, rtol=1e-12)
    np.testing.assert_allclose(product(features[0], rows), rows @ features[0], rtol=1e-12)


def test_log_probs_alone_cost_one_forward():
    tree = TreeLengths(8192, (1024,) * 8)
    one = candidates("full", (8,), 8, 4)[1]
    seconds = {}
    for options in (RunOptions(), RunOptions(checkpointing=False), RunOptions(needs_gradients=False)):
        table = cost_table(PROFILE, options, (one,))
        features = tree_features(Workload(tree, token_pairs(PROFILE)), table.index)
        seconds[options] = table.seconds(features)[0]
        passes = passes_of(one, 8192, (1024,) * 8)
        assert seconds[options] == pytest.approx(predict(passes, PROFILE, options).seconds, rel=0.1)
    with_forward_again, kept, forward_only = seconds.values()
    assert with_forward_again > kept > forward_only


def test_the_budget_of_a_profile_is_what_check_enforces():
    nodes = trees((512, [128] * 4))
    one = candidates("full", (2,), 4, 4)[1]
    check(lower(nodes, [one.decision], 2), nodes, memory_budget(PROFILE, OPTIONS))
