"""Proves that a pass cut over ranks equals the same pass on one rank, through FSDP2, for every kind of plan."""

from contextlib import contextmanager
from dataclasses import replace
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard

from treecp_rl.engine.capabilities import prepare_model
from treecp_rl.engine.head import HeadOptions
from treecp_rl.engine.passes import Domain, PassOptions, plan_passes, run_passes
from treecp_rl.engine.planning import planner_of
from treecp_rl.errors import PlanError
from treecp_rl.planner.batch import Mode
from treecp_rl.planner.estimates import dims_of, estimate
from treecp_rl.planner.forms import RunOptions
from treecp_rl.planner.profile import Link
from treecp_rl.tree import Row
from treecp_rl.verify.models import random_model, tiny_config
from treecp_rl.verify.oracle import gradients_of, max_relative_gradient_error
from treecp_rl.verify.ranks import run_on_ranks

VARIANTS = {
    **{mode: {"mode": mode} for mode in get_args(Mode)},
    "sent again": {"mode": "gather", "resend": True},
    "split, sent again": {"mode": "split_move_q", "resend": True},
    "one tree after another": {"mode": "gather", "streaming": False},
    "outputs saved": {"mode": "gather", "save_attention_bytes": 10**9},
    "outputs saved, sent again": {"mode": "move_q", "save_attention_bytes": 10**9, "resend": True},
    "leaves offloaded": {"mode": "split", "offload_leaves": True},
    "planned": {"planned_for": "free links"},
    "planned, whole trees": {"planned_for": "no links"},
    "planned, in rounds": {"planned_for": "little room"},
}
CONFIG = tiny_config(97, hidden_size=64, num_layers=2)
PROFILE = estimate("cpu", "tiny", dims_of(CONFIG))
COSTS = {
    "free links": replace(
        PROFILE,
        node_link=Link(0.0, 0.0),
        stage_s=0.0,
        attention_forward=replace(PROFILE.attention_forward, per_tile_s=0.0),
        attention_backward=replace(PROFILE.attention_backward, per_tile_s=0.0),
    ),
    "no links": replace(PROFILE, node_link=Link(1e3, 1.0)),
    "little room": PROFILE,
}
BOUND = 1e-12
HEAD = HeadOptions(entropy=True, chunk_tokens=16)


def rows_of(name):
    generator = torch.Generator().manual_seed(3)

    def tokens(count):
        return torch.randint(1, 97, (count,), generator=generator)

    if name == "one valid token":
        return [Row("a", tokens(70), tokens(1))]
    if name == "7 and 29":
        return [Row("a", tokens(7), tokens(29)), Row("a", tokens(0 + 7), tokens(7))]
    prompt, stem = tokens(140), tokens(20)
    ends = [tokens(9), tokens(1), torch.cat([stem, tokens(70)]), torch.cat([stem, tokens(2)]), tokens(0)]
    return [Row("a", prompt, end) for end in ends] + [Row("b", tokens(3), tokens(4)) for _ in range(2)]


CASES = ("ragged", "7 and 29", "one valid token")


def by_row(report):
    """Row -> [R] log-probs."""
    return {
        row: values
        for scores in report.scores
        for row, values in zip(scores.row_indices, scores.log_probs, strict=True)
    }


def loss_of(scores):
    """Not a sum over tokens: each row's mean enters through tanh, so rows must be whole on every rank."""
    rows = zip(scores.log_probs, scores.entropy, strict=True)
    attached = sum(lp.sum() for lp in scores.log_probs) * 0.0
    return attached + sum(torch.tanh(lp.mean()) + 0.1 * (h * h).sum() for lp, h in rows if len(lp))


def fresh_model(sharded, reshard=True):
    model = random_model(CONFIG, torch.float64, drawn_in=torch.float64)
    prepare_model(model)
    model.train()
    if sharded:
        for layer in model.model.layers:
            fully_shard(layer, reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=reshard)
    return model


def planner_for(name, num_ranks):
    """Plans by the costs of that name."""
    room = 240 // num_ranks if name == "little room" else None
    return planner_of(COSTS[name], num_ranks, RunOptions(checkpointing=False, tokens_per_rank=room))


def step(model, rows, domain=None, tokens_per_pass=400, share="prefix", planned_for=None, **options):
    @contextmanager
    def sync(is_last):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(is_last)
        yield

    model.zero_grad(set_to_none=True)
    chosen = PassOptions(HEAD, **options)
    planner = planned_for and planner_for(planned_for, domain.size)
    plan = plan_passes(rows, share=share, tokens_per_pass=tokens_per_pass, mode=chosen.mode, planner=planner)
    old = run_passes(model, plan, None, chosen, domain=domain)
    report = run_passes(model, plan, loss_of, chosen, domain=domain, sync_context=sync)
    return old, report, gradients_of(model)


def run_rank(rank, world_size):
    domain = Domain(rank, world_size, dist.group.WORLD)
    found = {}
    for checkpointing, reshard in ((False, True), (True, False)):
        model = fresh_model(sharded=True, reshard=reshard)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for case in CASES:
            for variant, options in VARIANTS.items():
                old, report, gradients = step(model, rows_of(case), domain, **options)
                found[case, variant, checkpointing] = (by_row(old), gradients, report.pad_tokens)
    model = fresh_model(sharded=False)
    for mode in ("gather", "split_heads"):
        old, report, gradients = step(model, rows_of("ragged"), domain, mode=mode)
        for gradient in gradients.values():
            dist.all_reduce(gradient)
        averaged = {name: gradient / world_size for name, gradient in gradients.items()}
        found["ragged", f"{mode}, replicated", False] = (by_row(old), averaged, report.pad_tokens)
    found["digest"] = refusal_of_unequal_plans(fresh_model(sharded=True), domain)
    return found


def refusal_of_unequal_plans(model, domain):
    """Ranks that were given different rows."""
    tokens = torch.arange(1, 60 + domain.rank)
    try:
        step(model, [Row("a", tokens, tokens)], domain, mode="gather")
    except PlanError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_pass_over_ranks_equals_one_rank(world_size):
    expected = {}
    for case in CASES:
        old, _, gradients = step(fresh_model(sharded=False), rows_of(case))
        expected[case] = (by_row(old), gradients)
    ranks = run_on_ranks(run_rank, world_size, timeout_seconds=600)
    for found in ranks:
        digest = found.pop("digest")
        assert "different plans" in digest and "on ranks [0]" in digest
        for (case, *variant), (log_probs, gradients, _) in found.items():
            for row, dense in expected[case][0].items():
                assert torch.allclose(log_probs[row], dense, rtol=0, atol=1e-12), (case, variant, row)
            worst = max_relative_gradient_error(gradients, expected[case][1])
            assert worst.error <= BOUND, (case, variant, worst)
    assert all(found["one valid token", "auto", False][2] <= world_size - 1 for found in ranks)


def test_planned_variants_plan_what_their_names_say():
    forms = {}
    for name in COSTS:
        plan = plan_passes(rows_of("ragged"), share="prefix", tokens_per_pass=1, planner=planner_for(name, 4))
        assert sorted(row.row for tree in plan.trees for row in tree.rows) == list(range(7))
        decisions = [decision for one in plan.passes for decision in one.decisions]
        forms[name] = (max(decision.degree for decision in decisions), plan.num_groups_replayed)
        assert plan.chosen is not None and plan.num_groups_cut == 0
    assert forms["no links"] == (1, 0)
    assert forms["free links"][0] == 4
    assert forms["little room"][1] == 1
