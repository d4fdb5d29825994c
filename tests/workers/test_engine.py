"""TreeCPEngine against verl's own FSDP2 engine on the same rows, fp32, on 1 and 2 gloo ranks.

Proves: loss, every gradient, log-probs and entropy agree to 5e-6 for every loss, mask and group shape; the
result does not depend on micro-batches; ranks with unequal or no work finish; bad batches are refused everywhere.
"""

import math
from dataclasses import replace

import pytest
import torch

from tests.workers import engine_cases
from tests.workers.engine_cases import Case, Group, worst_relative
from tests.workers.rank_pool import RankPool
from tests.workers.tiny_model import save_tiny_model
from treecp_rl.errors import BatchError, ConfigError, PlanError, RowTooLong, TreeCPError, UnsupportedModel
from treecp_rl.workers.options import TreeCPOptions

BOUND = 5e-6


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny_qwen2")))


@pytest.fixture(scope="module")
def pools():
    """world size -> ranks that live as long as this module."""
    pools = {1: RankPool(1), 2: RankPool(2)}
    yield pools
    for pool in pools.values():
        pool.close()


def two_groups(rank: int, **overrides) -> tuple[Group, ...]:
    return (
        Group(f"a{rank}", 17, (5, 9, 3, 7), **overrides),
        Group(f"b{rank}", 6 + rank, (4, 12, 1), **overrides),
    )


def case_of(world_size: int, **overrides) -> Case:
    return Case(ranks=tuple(two_groups(rank) for rank in range(world_size)), **overrides)


def results(pool: RankPool, function, *args):
    outcomes = pool.run(function, *args)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes


def assert_same_step(
    pool: RankPool, model_path: str, case: Case, options=None, treecp_options=None, bound=BOUND
):
    # One micro-batch a rank: with unequal micro-batch counts verl's own engine would wait for ever.
    flat = replace(case, micro_rows=-1)
    expected = results(pool, engine_cases.update, "fsdp2", model_path, flat, options)
    treecp = (options or {}) | (treecp_options or {})
    found = results(pool, engine_cases.update, "treecp", model_path, case, treecp)
    assert found[0].loss == pytest.approx(expected[0].loss, rel=bound, abs=bound)
    assert found[0].grad_norm == pytest.approx(expected[0].grad_norm, rel=bound)
    assert worst_relative(found[0].grads, expected[0].grads) <= bound
    return found, expected


LOSSES = {
    "grpo": {},
    "grpo_kl_entropy": {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coeff": 0.01},
    "dapo_clip_higher": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 10.0},
    "token_sum": {"loss_agg_mode": "token-sum"},
    "seq_mean_token_sum": {"loss_agg_mode": "seq-mean-token-sum"},
    "seq_mean_token_mean": {"loss_agg_mode": "seq-mean-token-mean"},
    "dr_grpo": {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 16},
    "gspo": {"loss_mode": "gspo", "loss_agg_mode": "seq-mean-token-mean", "clip_ratio_high": 4e-1},
    "rloo_reinforce": {"loss_mode": "gpg"},
    "cispo": {"loss_mode": "cispo"},
    "sapo": {"loss_mode": "sapo"},
}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_every_gradient_equal_the_stock_engine(pools, model_path, loss, world_size):
    case = case_of(world_size, actor=LOSSES[loss], entropy="entropy_coeff" in LOSSES[loss])
    assert_same_step(pools[world_size], model_path, case)


@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "low_var_kl", "k3+"])
def test_kl_types(pools, model_path, kind):
    actor = {"use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_type": kind}
    assert_same_step(pools[2], model_path, case_of(2, actor=actor))


@pytest.mark.parametrize("shift", [50.0, -50.0])
def test_k3_stays_finite_far_from_the_reference(pools, model_path, shift):
    actor = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl"}
    found, _ = assert_same_step(
        pools[1], model_path, case_of(1, actor=actor, ref_shift=shift, ref_constant=True)
    )
    assert math.isfinite(found[0].loss)
    assert all(torch.isfinite(grad).all() for grad in found[0].grads.values())


MASKS = {
    "tool_tokens": (Group("a", 9, (5, 5), masks=((1, 1, 0, 0, 1), None)),),
    "masked_row": (Group("a", 9, (4, 6), masks=(None, (0,) * 6)), Group("b", 5, (3,))),
    "masked_micro_batch": (Group("a", 9, (4, 4), masks=((0,) * 4, (0,) * 4)), Group("b", 5, (3, 2))),
    "one_valid_token": (
        Group("a", 9, (4, 4), masks=((0, 0, 1, 0), (0,) * 4)),
        Group("b", 5, (3,), masks=((0, 0, 0),)),
    ),
    "first_half": (Group("a", 9, (6, 6), masks=((1, 1, 1, 0, 0, 0),) * 2),),
}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("masks", MASKS)
def test_masked_tokens_are_attended_and_not_scored(pools, model_path, masks, world_size):
    others = (Group("c", 7, (4, 2)), Group("d", 11, (5, 3)))
    groups = MASKS[masks]
    ranks = (
        (groups,)
        if world_size == 1
        else (groups, tuple(_masked(g) if masks == "one_valid_token" else g for g in others))
    )
    for mode in ("token-mean", "seq-mean-token-mean"):
        assert_same_step(pools[world_size], model_path, Case(ranks=ranks, actor={"loss_agg_mode": mode}))


def _masked(group: Group) -> Group:
    masks = tuple((0,) * length for length in group.response_lengths)
    return Group(group.uid, group.prompt_length, group.response_lengths, masks=masks)


def test_batch_without_a_valid_token_has_loss_zero_and_a_graph(pools, model_path):
    groups = tuple(_masked(group) for group in two_groups(0))
    (found, _) = results(pools[2], engine_cases.update, "treecp", model_path, Case(ranks=(groups, groups)))
    assert found.loss == 0.0
    assert len(found.grads) > 20
    assert all(torch.count_nonzero(grad) == 0 for grad in found.grads.values())


SHAPES = {
    "ragged_and_not_adjacent": Case(
        ranks=((Group("a", 12, (5, 3, 8, 2)), Group("b", 9, (4, 4, 6)), Group("c", 7, (3,))),), shuffled=True
    ),
    "all_uids_unique": Case(ranks=(tuple(Group(f"u{i}", 8, (4,)) for i in range(4)),)),
    "one_uid_two_prompts": Case(ranks=((Group("a", 8, (4, 5)), Group("a", 11, (3, 6))),)),
    "one_prompt_two_uids": Case(
        ranks=((Group("a", 4, (4, 5), prompt=(5, 6, 7, 8)), Group("b", 4, (3, 6), prompt=(5, 6, 7, 8))),)
    ),
    "duplicates_and_prefixes": Case(
        ranks=((Group("a", 8, (2, 3, 2), responses=((5, 6), (5, 6, 7), (5, 6))),),)
    ),
    "pad_token_in_the_prompt": Case(ranks=((Group("a", 6, (3, 4), prompt=(0, 5, 0, 0, 6, 0)),),)),
    "one_token_prompt_and_response": Case(ranks=((Group("a", 1, (1, 1, 4)), Group("b", 9, (5, 1))),)),
}


@pytest.mark.parametrize("share", ["prompt", "prefix"])
@pytest.mark.parametrize("shape", SHAPES)
def test_group_shapes(pools, model_path, shape, share):
    options = {"treecp": TreeCPOptions(share=share)}
    assert_same_step(pools[1], model_path, SHAPES[shape], treecp_options=options)


@pytest.mark.parametrize("micro_rows", [1, -1])
def test_rows_without_a_response_change_nothing(pools, model_path, micro_rows):
    """Alone in a pass as well, which verl's losses cannot pad; the reference is the batch without them."""
    rows = (Group("a", 9, (4, 6)),)
    with_empty = Case(
        ranks=((*rows, Group("e", 15, (0, 0))),), micro_rows=micro_rows, extra={"global_batch_size": 2}
    )
    (expected,) = results(pools[1], engine_cases.update, "treecp", model_path, Case(ranks=(rows,)))
    (found,) = results(pools[1], engine_cases.update, "treecp", model_path, with_empty)
    assert found.loss == pytest.approx(expected.loss, rel=BOUND)
    assert worst_relative(found.grads, expected.grads) <= BOUND
    (scores,) = results(pools[1], engine_cases.log_probs, "treecp", model_path, with_empty)
    assert [len(row) for row in scores["log_probs"]] == [13, 15, 15, 15]


@pytest.mark.parametrize("world_size", [1, 2])
def test_result_does_not_depend_on_micro_batches(pools, model_path, world_size):
    actor = LOSSES["grpo_kl_entropy"]
    plans = [
        {"micro_rows": 1},
        {"micro_rows": 2},
        {"micro_rows": -1},
        {"micro_rows": None, "micro_tokens": 40},
        {"micro_rows": None, "micro_tokens": 4096},
    ]
    runs = [
        results(
            pools[world_size],
            engine_cases.update,
            "treecp",
            model_path,
            case_of(world_size, actor=actor, entropy=True, **plan),
        )[0]
        for plan in plans
    ]
    assert len({run.metrics["treecp/passes"].aggregate() for run in runs}) > 2
    for run in runs[1:]:
        assert run.loss == pytest.approx(runs[0].loss, rel=BOUND)
        assert worst_relative(run.grads, runs[0].grads) <= BOUND
        for name, metric in run.metrics.items():
            if not name.startswith("treecp/"):
                values = [getattr(m, "values", m) for m in (metric, runs[0].metrics[name])]
                assert values[0] == pytest.approx(values[1], rel=1e-4, abs=1e-6), name


def test_ranks_with_unequal_work_finish(pools, model_path):
    ranks = ((Group("long", 60, (40, 40)),), tuple(Group(f"s{i}", 5, (3,)) for i in range(4)))
    found, _ = assert_same_step(pools[2], model_path, Case(ranks=ranks, micro_rows=1))
    assert found[0].metrics["treecp/passes"].values == found[1].metrics["treecp/passes"].values


def test_a_group_split_over_ranks_gives_the_same_gradients(pools, model_path):
    prompt = tuple(range(5, 14))
    ranks = ((Group("a", 9, (4, 6), prompt=prompt),), (Group("a", 9, (5, 3), prompt=prompt),))
    assert_same_step(pools[2], model_path, Case(ranks=ranks))


DOMAIN_GROUPS = (Group("a", 150, (40, 90, 3)), Group("b", 9, (4, 5)))
ALONE, SHARED = (
    Case(ranks=(DOMAIN_GROUPS,) * ranks, micro_rows=-1, entropy=True, actor=LOSSES["grpo_kl_entropy"])
    for ranks in (1, 2)
)


@pytest.mark.parametrize(
    "mode", ["auto", "gather", "heads", "reuse_ring", "flat_ring", "split", "split_move_q", "split_heads"]
)
def test_a_domain_of_two_ranks_equals_the_stock_engine_on_one(pools, model_path, mode):
    """Both ranks get the same rows and share each pass; the gradients are those of one rank alone."""
    expected = results(pools[1], engine_cases.update, "fsdp2", model_path, ALONE)
    options = {"treecp": TreeCPOptions(domain_size=2, mode=mode)}
    found = results(pools[2], engine_cases.update, "treecp", model_path, SHARED, options)
    assert found[0].loss == pytest.approx(expected[0].loss, rel=BOUND, abs=BOUND)
    assert worst_relative(found[0].grads, expected[0].grads) <= BOUND
    dense = results(pools[1], engine_cases.log_probs, "fsdp2", model_path, ALONE)[0]["log_probs"]
    for rank in results(pools[2], engine_cases.log_probs, "treecp", model_path, SHARED, options):
        for ours, row, prompt in zip(rank["log_probs"], dense, (150, 150, 150, 9, 9), strict=True):
            assert torch.allclose(ours[prompt - 1 : -1], row[prompt - 1 : -1], atol=1e-5)


DOMAIN_VARIANTS = {
    "checkpointing, outputs saved": (
        {"model": {"enable_gradient_checkpointing": True}},
        {"save_attention_bytes": 10**8},
    ),
    "lora": ({"lora_rank": 4, "model": {"lora_alpha": 8}}, {}),
    "lora, split": ({"lora_rank": 4, "model": {"lora_alpha": 8}}, {"mode": "split"}),
    "keep unsharded, split": ({"reshard_after_forward": False}, {"mode": "split"}),
    "sync every pass, split": ({"use_no_sync_for_gradient_accumulation": False}, {"mode": "split"}),
    "sent again": ({}, {"mode": "gather", "resend": True}),
    "one tree after another": ({}, {"mode": "gather", "streaming": False}),
    "leaves offloaded": ({}, {"mode": "split", "offload_leaves": True}),
}


@pytest.mark.parametrize("variant", DOMAIN_VARIANTS)
def test_engine_options_through_a_domain(pools, model_path, variant):
    """And the clipped optimizer step that follows."""
    engine, treecp = DOMAIN_VARIANTS[variant]
    options = engine | {"treecp": TreeCPOptions(domain_size=2, **treecp)}
    expected = results(pools[1], engine_cases.update, "fsdp2", model_path, ALONE, engine)
    found = results(pools[2], engine_cases.update, "treecp", model_path, SHARED, options)
    assert worst_relative(found[0].grads, expected[0].grads) <= BOUND
    norms = [
        results(pool, engine_cases.clipped_norm, backend, model_path, case, chosen)[0]
        for pool, backend, case, chosen in (
            (pools[1], "fsdp2", ALONE, engine),
            (pools[2], "treecp", SHARED, options),
        )
    ]
    assert norms[1] == pytest.approx(norms[0], rel=BOUND)
    assert norms[1][1] <= 0.01 < norms[1][0]


@pytest.mark.parametrize("mode", ["gather", "split_move_q"])
def test_bf16_with_fp32_reduction_through_a_domain(pools, model_path, mode):
    """With a loss that does not clip: a ratio that rounds to the other side of a clip changes more than rounding."""
    bf16 = {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}}
    options = bf16 | {"treecp": TreeCPOptions(domain_size=2, mode=mode)}
    alone, shared = (replace(case, actor=LOSSES["rloo_reinforce"]) for case in (ALONE, SHARED))
    (exact,) = results(pools[1], engine_cases.update, "fsdp2", model_path, alone)
    (flat,) = results(pools[1], engine_cases.update, "fsdp2", model_path, alone, bf16)
    (tree, _) = results(pools[2], engine_cases.update, "treecp", model_path, shared, options)
    assert _distance(tree.grads, exact.grads) <= 1.25 * _distance(flat.grads, exact.grads)


def test_moved_bytes_are_counted(pools, model_path):
    options = {"treecp": TreeCPOptions(domain_size=2, mode="gather")}
    found = results(pools[2], engine_cases.update, "treecp", model_path, SHARED, options)
    assert found[0].metrics["treecp/moved_bytes"].aggregate() > 0
    options = {"treecp": TreeCPOptions(domain_size=2, mode="local")}
    found = results(pools[2], engine_cases.update, "treecp", model_path, SHARED, options)
    assert found[0].metrics["treecp/moved_bytes"].aggregate() == 0


def test_a_plan_over_the_memory_of_a_rank_stops_every_rank(pools, model_path):
    """Rank 0 has the longer rows; rank 1's would fit, but must not wait in a collective."""
    ranks = ((Group("long", 60, (40, 40)),), (Group("short", 5, (3,)),))
    options = {"treecp": TreeCPOptions(attention_bytes_per_rank=60_000)}
    case = Case(ranks=ranks, micro_rows=-1)
    long, short = pools[2].run(engine_cases.update, "treecp", model_path, case, options)
    assert isinstance(long, PlanError) and "raise the budget to" in str(long)
    assert isinstance(short, PlanError) and "another rank refused a pass of its plan" in str(short)


def test_a_kind_that_the_model_cannot_run_is_refused(pools, tmp_path):
    path = str(save_tiny_model(tmp_path, num_key_value_heads=1))
    options = {"treecp": TreeCPOptions(domain_size=2, mode="heads")}
    for outcome in pools[2].run(engine_cases.update, "treecp", path, SHARED, options):
        assert isinstance(outcome, ConfigError)
        assert "deals out 1 key/value heads over 2 ranks" in str(outcome)


def test_tokens_per_rank_bounds_a_pass(pools, model_path):
    """17 + 24 and 6 + 17 packed tokens: two passes under 45, one under 64."""
    for tokens, num_passes in ((45, 2), (64, 1)):
        options = {"treecp": TreeCPOptions(tokens_per_rank=tokens)}
        (outcome,) = results(pools[1], engine_cases.update, "treecp", model_path, case_of(1), options)
        assert outcome.metrics["treecp/passes"].aggregate() == num_passes


def test_head_chunk_tokens_bounds_the_logits(pools, model_path):
    case = case_of(1, micro_rows=-1)
    for chunk_tokens, num_chunks in ((8, 5), (1024, 1)):
        options = {"treecp": TreeCPOptions(head_chunk_tokens=chunk_tokens)}
        # 41 response tokens; the first tokens of a group's rows share their predictor: 41 - 3 - 2 = 36 positions.
        assert results(pools[1], engine_cases.head_chunks, model_path, case, options) == [num_chunks]


def test_a_domain_that_does_not_divide_the_world_is_refused(pools, model_path):
    options = {"treecp": TreeCPOptions(domain_size=3)}
    for outcome in pools[2].run(engine_cases.log_probs, "treecp", model_path, case_of(2), options):
        assert isinstance(outcome, ConfigError)
        assert "domain_size=3 does not divide 2 training processes; choose one of 1, 2" in str(outcome)


def test_a_rank_without_rows_joins_in(pools, model_path):
    groups = two_groups(0)
    (alone,) = results(pools[1], engine_cases.update, "treecp", model_path, Case(ranks=(groups,)))
    found, idle = results(pools[2], engine_cases.update, "treecp", model_path, Case(ranks=(groups, ())))
    assert found.loss == pytest.approx(alone.loss, rel=BOUND)
    assert worst_relative(found.grads, alone.grads) <= BOUND
    assert idle.metrics["actor/pg_loss"].values == [0.0]
    assert idle.metrics["treecp/pad_tokens"].aggregate() > 0
    log_probs = results(pools[2], engine_cases.log_probs, "treecp", model_path, Case(ranks=(groups, ())))
    assert log_probs[1] == {}


@pytest.mark.parametrize("temperature", [1.0, 1, 0.7])
@pytest.mark.parametrize("world_size", [1, 2])
def test_log_probs_and_entropy_in_the_callers_order(pools, model_path, temperature, world_size):
    case = case_of(
        world_size,
        temperature=temperature,
        entropy=True,
        shuffled=True,
        extra={"calculate_sum_pi_squared": True},
    )
    expected = results(pools[world_size], engine_cases.log_probs, "fsdp2", model_path, case)
    found = results(pools[world_size], engine_cases.log_probs, "treecp", model_path, case)
    for rank in range(world_size):
        rows = engine_cases.rows_of(case, rank)
        assert found[rank].keys() == expected[rank].keys() == {"log_probs", "entropy", "sum_pi_squared"}
        for name, values in found[rank].items():
            for row, mine, theirs in zip(rows, values, expected[rank][name], strict=True):
                assert len(mine) == len(row["prompts"]) + len(row["responses"])
                responses = slice(len(row["prompts"]) - 1, -1)
                torch.testing.assert_close(mine[responses], theirs[responses], rtol=1e-5, atol=2e-6)
                assert mine.dtype == torch.float32


def test_first_update_is_on_policy(pools, model_path):
    """Old log-probs and the update see the same ratio of 1, however each of them is cut into passes."""
    worst = results(
        pools[2],
        engine_cases.off_policy_ratio,
        model_path,
        case_of(2, temperature=0.7),
        case_of(2, temperature=0.7, micro_rows=-1),
    )
    assert max(worst) <= 1e-6


def test_sharing_is_counted(pools, model_path):
    found, _ = results(pools[2], engine_cases.update, "treecp", model_path, case_of(2))
    counts = {
        name: metric.aggregate() / 2 for name, metric in found.metrics.items() if name.startswith("treecp/")
    }
    assert counts["treecp/tokens_flat"] == 17 * 4 + 24 + 6 * 3 + 17
    assert counts["treecp/tokens_computed"] < counts["treecp/tokens_flat"]
    one_pass = results(pools[2], engine_cases.update, "treecp", model_path, case_of(2, micro_rows=-1))[
        0
    ].metrics
    assert one_pass["treecp/tokens_computed"].aggregate() / 2 == 17 + 24 + 6 + 17
    assert one_pass["treecp/groups"].aggregate() / 2 == 2
    assert one_pass["treecp/groups_without_reuse"].aggregate() == 0


VARIANTS = {
    "gradient_checkpointing": {"model": {"enable_gradient_checkpointing": True}},
    "remove_padding_is_accepted": {"model": {"use_remove_padding": True}},
    "lora": {"lora_rank": 4, "model": {"lora_alpha": 8}},
    "lora_checkpointing": {"lora_rank": 4, "model": {"lora_alpha": 8, "enable_gradient_checkpointing": True}},
    "keep_unsharded": {"reshard_after_forward": False},
    "sync_every_pass": {"use_no_sync_for_gradient_accumulation": False},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_engine_options(pools, model_path, variant):
    case = case_of(2, actor=LOSSES["grpo_kl_entropy"], entropy=True)
    assert_same_step(pools[2], model_path, case, VARIANTS[variant])


def test_reference_model_is_forward_only(pools, model_path):
    case = case_of(2)
    expected = results(pools[2], engine_cases.log_probs, "fsdp2", model_path, case, {"forward_only": True})
    found = results(pools[2], engine_cases.log_probs, "treecp", model_path, case, {"forward_only": True})
    for mine, theirs in zip(found[0]["log_probs"], expected[0]["log_probs"], strict=True):
        responses = theirs != 0
        assert mine[-2] == pytest.approx(float(theirs[-2]), rel=1e-5)
        assert responses.any()


def test_bf16_is_no_worse_than_flattened_bf16(pools, model_path):
    case = case_of(1, micro_rows=-1)
    bf16 = {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}}
    (exact,) = results(pools[1], engine_cases.update, "fsdp2", model_path, case)
    (flat,) = results(pools[1], engine_cases.update, "fsdp2", model_path, case, bf16)
    (tree,) = results(pools[1], engine_cases.update, "treecp", model_path, case, bf16)
    assert _distance(tree.grads, exact.grads) <= 1.1 * _distance(flat.grads, exact.grads)


def _distance(found, expected) -> float:
    differences = [(found[name] - grad).double().norm() for name, grad in expected.items()]
    return float(torch.stack(differences).norm())


def test_nan_on_one_rank_skips_the_step_everywhere(pools, model_path):
    outcomes = results(pools[2], engine_cases.step_with_nan, model_path, case_of(2))
    assert [outcome["changed"] for outcome in outcomes] == [False, False]
    assert all(math.isnan(outcome["grad_norm"]) for outcome in outcomes)


# ------------------------------------------------------------------------------------------------ refusals


BAD_BATCHES = {
    "missing_uid": ("no 'uid'", BatchError),
    "missing_prompts": ("no 'prompts'", BatchError),
    "shifted_positions": ("row 1 (uid a0): position_ids must run from 0", BatchError),
    "other_tokens": ("row 0 (uid a0): input_ids", BatchError),
    "multimodal": ("multi_modal_inputs", UnsupportedModel),
    "no_temperature": ("no 'temperature'", BatchError),
}


@pytest.mark.parametrize("fault", BAD_BATCHES)
def test_bad_batch_is_refused_on_every_rank(pools, model_path, fault):
    message, kind = BAD_BATCHES[fault]
    guilty, other = pools[2].run(engine_cases.faulty_update, model_path, case_of(2), fault)
    assert isinstance(guilty, kind)
    assert message in str(guilty)
    assert isinstance(other, TreeCPError)


def test_row_over_the_budget_is_refused(pools, model_path):
    case = case_of(1, micro_rows=None, micro_tokens=20)
    (error,) = pools[1].run(engine_cases.update, "treecp", model_path, case)
    assert isinstance(error, RowTooLong)
    assert "has 22 tokens" in str(error)


REFUSED_OPTIONS = {
    "ulysses_sequence_parallel_size": (
        {"ulysses_sequence_parallel_size": 2},
        "ulysses_sequence_parallel_size=2",
    ),
    "pad_to_length": ({"pad_to_length": True}, "pad_to_length=True"),
    "fp16": ({"mixed_precision": {"param_dtype": "fp16"}}, "param_dtype=fp16"),
    "fused_kernels": ({"model": {"use_fused_kernels": True}}, "use_fused_kernels=True"),
}


@pytest.mark.parametrize("option", REFUSED_OPTIONS)
def test_engine_refuses_options_by_name(pools, model_path, option):
    settings, message = REFUSED_OPTIONS[option]
    (error,) = pools[1].run(engine_cases.update, "treecp", model_path, case_of(1), settings)
    assert isinstance(error, ConfigError)
    assert message in str(error)


def test_sliding_window_model_is_refused(pools, tmp_path):
    path = str(save_tiny_model(tmp_path, use_sliding_window=True, sliding_window=8, max_window_layers=0))
    (error,) = pools[1].run(engine_cases.update, "treecp", path, case_of(1))
    assert isinstance(error, UnsupportedModel)
