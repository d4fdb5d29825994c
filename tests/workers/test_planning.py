"""Proves that the trainer asks for what its ranks will need, and that factors follow measurements."""

import math
from dataclasses import replace

import pytest
import torch
from hydra import compose, initialize_config_module
from hypothesis import given, settings
from hypothesis import strategies as st

from treecp_rl.engine.planning import lengths_of
from treecp_rl.errors import ConfigError
from treecp_rl.planner.estimates import dims_of, estimate
from treecp_rl.planner.profile import Factors, save_profile
from treecp_rl.tree import Row, fold
from treecp_rl.verify.models import tiny_config
from treecp_rl.workers.options import TreeCPOptions
from treecp_rl.workers.planning import (
    Ahead,
    MicroBatch,
    Refiner,
    RowLengths,
    ahead_of,
    decode_factors,
    encode_factors,
    lengths_of_rows,
    planning_of,
)

CONFIG = tiny_config(97, hidden_size=64, num_layers=2)
OPTIONS = TreeCPOptions(domain_size=2)
PLANNING = planning_of(OPTIONS, CONFIG, "cpu", checkpointing=True)

rows = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=9)


def real_rows(pairs):
    """Rows whose group says how long its prompt is; tokens repeat, so responses are often equal."""
    return [Row(str(group), torch.full((group + 1,), 7), torch.full((length,), 3)) for group, length in pairs]


@given(rows, st.integers(1, 50))
@settings(max_examples=80, deadline=None)
def test_trainer_and_ranks_make_one_request(pairs, budget):
    folded = [lengths_of(tree) for tree in fold(real_rows(pairs), "prompt")]
    known = lengths_of_rows([RowLengths(str(group), group + 1, length) for group, length in pairs])
    mine = PLANNING.request(folded, budget, needs_gradients=True)
    trainers = PLANNING.request(known, budget, needs_gradients=True)
    assert mine.request.key == trainers.request.key


def test_requests_of_a_step_are_those_of_every_rank_and_mini_batch():
    ranks = [[RowLengths(f"{rank}{i // 2}", 10, 3 + i) for i in range(4)] for rank in range(2)]
    log_prob, update = MicroBatch(True, 100, None), MicroBatch(False, None, 2)
    ahead = Ahead(PLANNING, OPTIONS, log_prob=log_prob, ref=log_prob, update=update)
    factors = Factors(fused=1.5)
    found = ahead.requests(ranks, 2, factors)
    assert [len(one.trees) for one in found] == [2, 2, 2, 2, 1, 1, 1, 1]
    assert [one.options.needs_gradients for one in found] == [False] * 4 + [True] * 4
    assert {one.profile.factors for one in found[4:]} == {factors}
    # Two rows of the longest in the mini-batch.
    assert [one.options.tokens_per_rank for one in found] == [100] * 4 + [28, 28, 32, 32]
    # Both ranks have the same lengths, and the reference pass those of log-probs.
    assert len({one.key for one in found}) == 1 + 2


def compose_ours(*overrides):
    with initialize_config_module("treecp_rl.configs", version_base=None):
        overrides = ["platform=cpu", "actor_rollout_ref.actor.treecp.domain_size=2", *overrides]
        return compose("treecp_ppo", overrides=list(overrides))


BUDGETS = (
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=10",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=20",
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=30",
)


@pytest.mark.parametrize(
    ("more", "ref"),
    [((), None), (("use_kl_loss=True",), 30), (("use_kl_loss=True", "lora"), 20)],
)
def test_budgets_are_those_that_verl_hands_to_its_engines(more, ref):
    spelled = {
        "use_kl_loss=True": "actor_rollout_ref.actor.use_kl_loss=True",
        "lora": "actor_rollout_ref.model.lora_rank=4",
    }
    ahead = ahead_of(compose_ours(*BUDGETS, *(spelled[one] for one in more)), lambda: CONFIG)
    assert (ahead.update.max_tokens, ahead.log_prob.max_tokens) == (10, 20)
    assert (ahead.ref and ahead.ref.max_tokens) == ref
    assert ahead.planning.num_ranks == 2


def test_trainer_asks_nothing_ahead_where_trees_depend_on_tokens_or_nothing_is_planned():
    for more in ("share=prefix", "mode=gather", "domain_size=1"):
        config = compose_ours(f"actor_rollout_ref.actor.treecp.{more}")
        assert ahead_of(config, lambda: pytest.fail("no need to load the model's config")) is None


def test_nothing_is_planned_where_there_is_nothing_to_choose():
    for options in (TreeCPOptions(), TreeCPOptions(domain_size=2, mode="gather")):
        assert planning_of(options, CONFIG, "cpu", checkpointing=True) is None


def test_profile_is_read_and_must_be_of_the_model(tmp_path):
    measured = replace(estimate("cpu", "tiny", dims_of(CONFIG)), name="mine")
    save_profile(measured, tmp_path / "mine.json")
    options = TreeCPOptions(domain_size=2, profile=str(tmp_path / "mine.json"))
    assert planning_of(options, CONFIG, "cpu", checkpointing=False).profile == measured
    with pytest.raises(ConfigError, match=r"treecp\.profile=.*mine\.json: profile mine is of tiny"):
        planning_of(options, tiny_config(97, hidden_size=64, num_layers=3), "cpu", checkpointing=False)
    with pytest.raises(ConfigError, match=r"treecp\.profile=3 must be a name or a file"):
        TreeCPOptions(profile=3)


def test_a_config_without_a_dimension_is_refused_by_name():
    class Odd:
        model_type = "odd"
        num_attention_heads = 4

    with pytest.raises(ConfigError, match=r"config of odd has no .*treecp\.profile"):
        planning_of(OPTIONS, Odd(), "cpu", checkpointing=True)


def test_factors_travel_to_the_bit():
    factors = Factors(0.1 + 0.2, math.pi, 1 / 3)
    assert decode_factors(encode_factors(factors)) == factors
    assert decode_factors(None) is None


def metrics_of(predicted, measured, replayed=0):
    return {
        "treecp/predicted_seconds": predicted,
        "treecp/measured_seconds": measured,
        "treecp/groups_replayed": replayed,
        "treecp/groups": 4,
    }


def test_factors_follow_measurements_within_bounds():
    refiner = Refiner(Factors())
    refiner.take(PLANNING.profile, metrics_of(1.0, 1e9), "treecp/")
    # One odd step moves them little, and all of them: nobody has measured the others.
    assert 1.0 < refiner.factors.fused < 1.03
    assert refiner.factors.fused == refiner.factors.split == refiner.factors.flat
    before = refiner.factors
    refiner.take(PLANNING.profile, metrics_of(1.0, 0.5, replayed=4), "treecp/")
    assert refiner.factors.split < before.split
    assert refiner.factors.fused == before.fused


@pytest.mark.parametrize("metrics", [{}, metrics_of(0.0, 1.0), metrics_of(1.0, 2.0, replayed=1)])
def test_steps_that_say_nothing_change_nothing(metrics):
    refiner = Refiner(Factors())
    refiner.take(PLANNING.profile, metrics, "treecp/")
    assert refiner.factors == Factors()


def test_factors_converge_on_a_steady_ratio():
    refiner = Refiner(Factors())
    for _ in range(200):
        refiner.take(PLANNING.profile, metrics_of(refiner.factors.fused, 2.0), "treecp/")
    assert refiner.factors.fused == pytest.approx(2.0, rel=0.01)
