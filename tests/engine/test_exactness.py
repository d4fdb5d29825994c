"""The engine and the dense oracle are one function: scores, loss and EVERY parameter's gradient, in float64.

Masks, duplicates, empty responses, budgets, checkpointing and ranks are the cases of `treecp-rl verify`;
here they run over more settings, and with probes that a comparison of averages would miss.
"""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from tests.oracle import dense_step, max_relative_gradient_error
from treecp_rl.bench.memory import peak_bytes
from treecp_rl.engine.capabilities import EXACT_MODEL_TYPES, prepare_model, require_supported
from treecp_rl.engine.head import HeadOptions
from treecp_rl.engine.passes import PassOptions, plan_passes, run_passes
from treecp_rl.errors import UnsupportedModel
from treecp_rl.tree import Row
from treecp_rl.verify.cases import bind_loss, standard_cases
from treecp_rl.verify.losses import LOSSES, LossSpec
from treecp_rl.verify.models import random_model, tiny_config
from treecp_rl.verify.subject import prepare_engine_model, run_engine

VOCABULARY = 97
BOUND = 1e-12
CASES = {case.name: case for case in standard_cases(VOCABULARY)}
F64 = torch.float64


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def config():
    return tiny_config(VOCABULARY, hidden_size=32, num_layers=2)


@pytest.fixture(scope="module")
def oracle(config):
    return random_model(config, F64, drawn_in=F64)


@pytest.fixture(scope="module")
def subject(config):
    return prepare_engine_model(random_model(config, F64, drawn_in=F64), 1)


def reference(oracle, case, spec=None):
    """(oracle's step, the loss it took)."""
    losses = []

    def loss(scores):
        losses.append(bind_loss(case, scores.log_probs, spec))
        return losses[0](scores)

    return dense_step(oracle, case.rows, loss), losses[0]


def assert_exact(outcome, expected, bound=BOUND):
    for scores in (outcome.update, outcome.forward_only):
        for name, rows in scores.items():
            assert sorted(rows) == list(range(len(expected.scores.log_probs)))
            for row, values in rows.items():
                torch.testing.assert_close(values, getattr(expected.scores, name)[row], rtol=0, atol=bound)
    assert abs(outcome.loss - expected.loss) <= bound * max(1.0, abs(expected.loss))
    error = max_relative_gradient_error(outcome.gradients, expected.gradients)
    assert error.error <= bound, error


@pytest.mark.parametrize("share", ["none", "prompt", "prefix"])
@pytest.mark.parametrize("name", CASES)
def test_case_is_exact(oracle, subject, name, share):
    case = CASES[name]
    expected, loss = reference(oracle, case)
    assert any(gradient.any() for gradient in expected.gradients.values())
    assert_exact(run_engine(subject, case, loss, share=share), expected)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("tokens_per_pass", [32, 45, 60, 10_000])
def test_result_does_not_depend_on_passes(oracle, subject, tokens_per_pass, checkpointing):
    case = replace(CASES["ragged_groups"], tokens_per_pass=tokens_per_pass, checkpointing=checkpointing)
    expected, loss = reference(oracle, case)
    assert_exact(run_engine(subject, case, loss, share="prompt"), expected)


MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum"]


@pytest.mark.parametrize("aggregation", MODES)
def test_every_aggregation_over_passes_and_masks(oracle, subject, aggregation):
    case = replace(CASES["masked_tool_tokens"], tokens_per_pass=22)
    expected, loss = reference(oracle, case, LossSpec(aggregation=aggregation, scale=32.0, clip_high=0.28))
    assert_exact(run_engine(subject, case, loss, share="prompt"), expected)


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_of_the_family(oracle, subject, name):
    case = replace(CASES["ragged_groups"], tokens_per_pass=45)
    expected, loss = reference(oracle, case, LOSSES[name])
    assert_exact(run_engine(subject, case, loss, share="prefix"), expected)


def test_masked_tokens_are_attended(oracle, subject):
    """[1,1,0,0,1]: another masked token changes the score of the token behind it."""
    case = CASES["masked_tool_tokens"]
    _, loss = reference(oracle, case)
    before = run_engine(subject, case, loss, share="prompt")
    response = case.rows[0].response.clone()
    response[2] = response[2] % (VOCABULARY - 1) + 1
    changed = replace(case, rows=(replace(case.rows[0], response=response), *case.rows[1:]))
    after = run_engine(subject, changed, loss, share="prompt")
    before_row, after_row = before.update["log_probs"][0], after.update["log_probs"][0]
    assert torch.equal(before_row[:2], after_row[:2])
    assert not torch.equal(before_row[4], after_row[4])


def test_nothing_leaks_between_siblings_and_groups(oracle, subject):
    """One token of one response changes that row, from that token on, and not one bit anywhere else."""
    case = CASES["ragged_groups"]
    _, loss = reference(oracle, case)
    before = run_engine(subject, case, loss, share="prompt").update["log_probs"]
    row, position = 2, 1
    response = case.rows[row].response.clone()
    response[position] = response[position] % (VOCABULARY - 1) + 1
    rows = [replace(r, response=response) if index == row else r for index, r in enumerate(case.rows)]
    after = run_engine(subject, replace(case, rows=tuple(rows)), loss, share="prompt").update["log_probs"]
    for index, values in before.items():
        if index != row:
            assert torch.equal(values, after[index])
    assert torch.equal(before[row][:position], after[row][:position])
    assert (before[row][position:] != after[row][position:]).all()


def test_batch_without_a_valid_token_has_loss_zero_and_gradients_zero(oracle, subject):
    case = CASES["ragged_groups"]
    case = replace(case, masks=tuple(torch.zeros_like(mask) for mask in case.masks))
    expected, loss = reference(oracle, case)
    outcome = run_engine(subject, case, loss, share="prompt")
    assert outcome.loss == expected.loss == 0.0
    assert not any(gradient.any() for gradient in outcome.gradients.values())


def test_reference_fifty_nats_away_is_finite(oracle, subject):
    case = CASES["ragged_groups"]
    for shift in (50.0, -50.0):
        _, loss = reference(oracle, case, LossSpec(kl="k3", kl_coef=1.0))
        targets = [replace(t, ref_log_probs=t.old_log_probs + shift) for t in loss.targets]
        far = type(loss)(loss.spec, targets)
        expected = dense_step(oracle, case.rows, far)
        assert all(gradient.isfinite().all() for gradient in expected.gradients.values())
        assert_exact(run_engine(subject, case, far, share="prompt"), expected)


def test_rows_of_a_batch_compute_fewer_tokens(oracle, subject):
    case = CASES["prompt_heavy"]
    _, loss = reference(oracle, case)
    outcome = run_engine(subject, case, loss, share="prompt")
    assert (outcome.tokens_computed, outcome.tokens_flat) == (160 + 27, 4 * 160 + 27)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 10_000])
def test_chunked_head_equals_whole_head(oracle, subject, chunk_tokens):
    case = CASES["ragged_groups"]
    expected, loss = reference(oracle, case)
    plan = plan_passes(case.rows, tokens_per_pass=10_000)
    head = HeadOptions(entropy=True, sum_pi_squared=True, chunk_tokens=chunk_tokens)
    subject.zero_grad()
    run_passes(subject, plan, loss, PassOptions(head=head))
    gradients = {name: parameter.grad.clone() for name, parameter in subject.named_parameters()}
    subject.zero_grad()
    assert max_relative_gradient_error(gradients, expected.gradients).error <= BOUND


def test_memory_does_not_grow_with_vocabulary_times_prompt():
    """448 more prompt tokens cost their activations, not 448 rows of logits."""
    vocabulary, response = 20_000, 8
    config = tiny_config(vocabulary, hidden_size=16, num_layers=1)
    model = prepare_engine_model(random_model(config, torch.float32, drawn_in=torch.float32), 1)

    def peak(prompt):
        tokens = torch.ones(prompt, dtype=torch.int64)
        rows = [Row("g", tokens, torch.arange(1, response + 1) + index) for index in range(4)]
        plan = plan_passes(rows, tokens_per_pass=10_000)
        options = PassOptions(head=HeadOptions(entropy=True, chunk_tokens=16))
        model.zero_grad(set_to_none=True)
        return peak_bytes(
            lambda: run_passes(model, plan, lambda s: sum(x.sum() for x in s.log_probs), options)
        )

    short, long = peak(64), peak(512)
    prompt_logits = 448 * vocabulary * 4
    assert long - short < prompt_logits / 10
    assert long < prompt_logits


# ---------------------------------------------------------------------------------------------- models

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES = {
    "arcee": {},
    "gemma": {},
    "glm4": _TOKEN_IDS,
    "hunyuan_v1_dense": {},
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "olmo2": {},
    "phi3": _TOKEN_IDS | {"sliding_window": None},
    "qwen2": {},
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 32},
    "qwen3": {},
    "qwen3_moe": _EXPERTS,
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "smollm3": _TOKEN_IDS | {"use_sliding_window": False},
    "starcoder2": {"residual_dropout": 0.0, "embedding_dropout": 0.0, "sliding_window": None},
}


def test_a_family_is_allowed_only_with_a_test():
    assert set(FAMILIES) == set(EXACT_MODEL_TYPES)


@pytest.mark.parametrize("name", FAMILIES)
def test_family_is_exact(name):
    config = AutoConfig.for_model(name, **SIZES, **FAMILIES[name])
    oracle = random_model(config, F64, drawn_in=F64)
    subject = prepare_engine_model(random_model(config, F64, drawn_in=F64), 1)
    case = CASES["ragged_groups"]
    expected, loss = reference(oracle, case)
    assert_exact(run_engine(subject, case, loss, share="prompt"), expected)


REFUSED = {
    "mistral with a window": ("mistral", {"sliding_window": 128}, "window"),
    "gpt_oss": ("gpt_oss", {}, "gpt_oss"),
    "qwen3_next": ("qwen3_next", {}, "linear"),
    "gemma2": ("gemma2", {}, "softcap"),
    "qwen2_vl": ("qwen2_vl", None, "multimodal"),
    "bert": ("bert", {}, "bert"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_model_that_cannot_run_exactly_is_refused_by_name(name):
    model_type, options, word = REFUSED[name]
    config = AutoConfig.for_model(model_type, **(SIZES | options if options is not None else {}))
    with pytest.raises(UnsupportedModel, match=word):
        require_supported(config)


def test_refusal_comes_before_any_change_of_the_model():
    config = AutoConfig.for_model("mistral", **SIZES, sliding_window=16)
    model = random_model(config, torch.float32, drawn_in=torch.float32)
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModel):
        prepare_model(model)
    assert model.config._attn_implementation == before
