"""The certificate: its losses are verl's, its oracle is right, it passes where it should and fails where it
must.
"""

import json

import pytest
import torch

from tests.oracle import (
    dense_scores,
    dense_step,
    float64_norms,
    max_relative_gradient_error,
    relative_gradient_errors,
)
from treecp_rl.errors import ConfigError, UnsupportedModel
from treecp_rl.tree import Row
from treecp_rl.verify.cases import Lengths, cases_from_lengths, parse_lengths, standard_cases
from treecp_rl.verify.certificate import VerifyOptions, certify, render
from treecp_rl.verify.losses import LOSSES, BatchLoss, LossSpec, RowTarget, group_advantages, kl_estimate
from treecp_rl.verify.models import load_config, random_model, tiny_config
from treecp_rl.verify.oracle import DenseScores
from treecp_rl.verify.ranks import RankFailure

F64 = torch.float64
SMALL = {"num_layers": 1, "vocab_size": 64}


@pytest.fixture(scope="module")
def model():
    return random_model(tiny_config(61, hidden_size=32, num_layers=2), F64, drawn_in=F64)


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(1, 61, (6,), generator=generator)
    return [
        Row("g", prompt, torch.randint(1, 61, (length,), generator=generator), 0.7) for length in (4, 0, 1, 6)
    ]


def targets_of(lengths, generator=None, masks=None):
    generator = generator or torch.Generator().manual_seed(5)

    def draw(length, scale=0.5):
        return -2.0 + scale * torch.randn(length, generator=generator, dtype=F64)

    return [
        RowTarget(
            mask=masks[i].double() if masks else torch.ones(length, dtype=F64),
            advantages=torch.randn(1, generator=generator, dtype=F64).expand(length),
            old_log_probs=draw(length),
            ref_log_probs=draw(length),
        )
        for i, length in enumerate(lengths)
    ]


# ----------------------------------------------------------------------------------------------- oracle


def test_gradient_is_the_slope_of_the_loss(model, rows):
    loss = BatchLoss(LOSSES["grpo"], targets_of([row.response.numel() for row in rows]))
    step = dense_step(model, rows, loss)
    assert all(parameter.grad is None for parameter in model.parameters())
    for name in ("model.layers.0.self_attn.k_proj.weight", "model.norm.weight", "lm_head.weight"):
        weight = dict(model.named_parameters())[name]
        index = step.gradients[name].abs().argmax()
        values = []
        for shift in (1e-6, -1e-6):
            with torch.no_grad():
                weight.view(-1)[index] += shift
                values.append(float(loss(dense_scores(model, rows))))
                weight.view(-1)[index] -= shift
        slope = (values[0] - values[1]) / 2e-6
        assert slope == pytest.approx(step.gradients[name].view(-1)[index].item(), rel=1e-6)


def test_scores_are_of_the_tempered_distribution(model, rows):
    scores = dense_scores(model, rows)
    logits = model(input_ids=torch.cat([rows[0].prompt, rows[0].response])[None]).logits[0, 5:9] / 0.7
    pi = logits.softmax(-1)
    torch.testing.assert_close(scores.log_probs[0], pi.log()[range(4), rows[0].response], rtol=0, atol=1e-12)
    torch.testing.assert_close(scores.entropy[0], -(pi * pi.log()).sum(-1), rtol=0, atol=1e-12)
    torch.testing.assert_close(scores.sum_pi_squared[0], (pi * pi).sum(-1), rtol=0, atol=1e-12)
    assert scores.log_probs[1].shape == (0,)


def test_norms_compute_in_float64_only_inside_the_context():
    model = random_model(tiny_config(61, hidden_size=32, num_layers=1), torch.float32, drawn_in=torch.float32)
    model = model.double()
    tokens = torch.arange(1, 9)[None]
    coarse = model(input_ids=tokens).logits
    with float64_norms(model):
        exact = model(input_ids=tokens).logits
    assert not torch.equal(coarse, exact)
    torch.testing.assert_close(coarse, exact, rtol=0, atol=1e-5)
    assert torch.equal(model(input_ids=tokens).logits, coarse)


def test_error_measure_is_relative_and_absolute_at_zero():
    reference = {"a": torch.tensor([2.0, -4.0]), "b": torch.zeros(2)}
    ours = {"a": torch.tensor([2.0, -3.0]), "b": torch.tensor([0.0, 0.125])}
    assert relative_gradient_errors(ours, reference) == {"a": 0.25, "b": 0.125}
    assert max_relative_gradient_error(ours, reference) == (0.25, "a")
    nan = {"a": torch.tensor([float("nan"), 0.0]), "b": torch.zeros(2)}
    assert max_relative_gradient_error(nan, reference).parameter == "a"
    with pytest.raises(ValueError, match="parameters differ"):
        max_relative_gradient_error({"a": torch.zeros(2)}, reference)


# ----------------------------------------------------------------------------------------------- losses


def padded(tensors, width):
    return torch.stack([torch.nn.functional.pad(tensor, (0, width - len(tensor))) for tensor in tensors])


MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum"]


@pytest.mark.parametrize("kl", [None, "k1", "k2", "k3"])
@pytest.mark.parametrize("objective", ["ppo", "gspo"])
@pytest.mark.parametrize("mode", MODES)
def test_loss_equals_verls(mode, objective, kl, monkeypatch):
    if not torch.cuda.is_available():
        monkeypatch.setenv("VERL_PLATFORM", "cpu")  # verl asks once in a process
    core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
    from verl.workers.config import FSDPActorConfig

    lengths = [5, 3, 7, 4]
    masks = [torch.tensor([1, 1, 0, 0, 1]), torch.ones(3), torch.ones(7), torch.zeros(4)]
    targets = targets_of(lengths, masks=masks)
    generator = torch.Generator().manual_seed(9)
    log_probs = [(-2 + torch.randn(n, generator=generator, dtype=F64)).requires_grad_() for n in lengths]
    entropy = [torch.rand(n, generator=generator, dtype=F64) for n in lengths]
    spec = LossSpec(
        objective=objective,
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=None if objective == "gspo" else 3.0,
        aggregation=mode,
        scale=16,
        kl=kl,
        kl_coef=0.1,
        entropy_coef=0.01,
    )
    ours = BatchLoss(spec, targets)(DenseScores((0, 1, 2, 3), log_probs, entropy, []))
    our_gradients = torch.autograd.grad(ours, log_probs)

    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
    )
    totals = {
        "dp_size": 1,
        "batch_num_tokens": float(sum(mask.sum() for mask in masks)),
        "global_batch_size": len(lengths),
        "loss_scale_factor": 16,
    }
    config.global_batch_info.update(totals)
    matrix = padded(log_probs, 7)
    mask = padded(masks, 7)
    loss, _ = core_algos.get_policy_loss_fn("vanilla" if objective == "ppo" else "gspo")(
        old_log_prob=padded([target.old_log_probs for target in targets], 7),
        log_prob=matrix,
        advantages=padded([target.advantages for target in targets], 7),
        response_mask=mask,
        loss_agg_mode=mode,
        config=config,
    )
    loss = loss - 0.01 * core_algos.agg_loss(padded(entropy, 7), mask, mode, **totals)
    if kl:
        divergence = core_algos.kl_penalty_forward(
            matrix, padded([target.ref_log_probs for target in targets], 7), kl
        )
        loss = loss + 0.1 * core_algos.agg_loss(divergence, mask, mode, **totals)
    torch.testing.assert_close(ours, loss.double(), rtol=1e-7, atol=1e-9)
    for a, b in zip(our_gradients, torch.autograd.grad(loss, log_probs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_parts_of_a_batch_add_up(name):
    lengths = [5, 3, 7, 4]
    loss = BatchLoss(LOSSES[name], targets_of(lengths))
    log_probs = [-torch.rand(n, dtype=F64) for n in lengths]
    entropy = [torch.rand(n, dtype=F64) for n in lengths]
    whole = loss(DenseScores((0, 1, 2, 3), log_probs, entropy, []))
    parts = [
        loss(DenseScores(rows, [log_probs[i] for i in rows], [entropy[i] for i in rows], []))
        for rows in ((2,), (3, 0), (1,))
    ]
    torch.testing.assert_close(sum(parts), whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        loss.for_world(4)(DenseScores((2,), [log_probs[2]], [entropy[2]], [])), 4 * parts[0]
    )


def test_one_masked_row_leaves_a_denominator_of_four():
    targets = targets_of([4, 4], masks=[torch.ones(4), torch.zeros(4)])
    assert BatchLoss(LossSpec(), targets).valid_tokens == 4


def test_k3_is_bounded_fifty_nats_apart():
    log_probs = torch.tensor([0.0, 0.0], requires_grad=True)
    value = kl_estimate(log_probs, torch.tensor([50.0, -50.0]), "k3")
    value.sum().backward()
    assert value.tolist() == [10.0, 10.0]
    assert log_probs.grad.tolist() == [0.0, 0.0]


def test_scale_is_required():
    with pytest.raises(ValueError, match="scale"):
        LossSpec(aggregation="seq-mean-token-sum-norm")


def test_advantages():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0])
    torch.testing.assert_close(
        group_advantages(rewards, "rloo"), torch.tensor([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    )
    assert group_advantages(rewards, "dr_grpo").tolist() == [0.5, -0.5, -0.5, 0.5]
    assert group_advantages(torch.tensor([3.0]), "grpo").tolist() == [0.0]


# ------------------------------------------------------------------------------------------ certificate


@pytest.mark.parametrize("share", ["prompt", "prefix"])
def test_certificate_float64(share):
    certificate = certify(VerifyOptions(share=share, **SMALL))
    assert certificate.passed, render(certificate)
    record = json.loads(json.dumps(certificate.as_json()))
    assert record["passed"] is True
    assert record["dtype"] == "float64"
    assert record["world_size"] == 1
    assert 0 < record["max_relative_gradient_error"] <= 1e-12
    assert record["max_logprob_error"] <= 1e-12
    assert len(record["cases"]) == len(standard_cases(64))
    assert all(case["max_relative_gradient_error"] <= case["bounds"]["gradient"] for case in record["cases"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_certificate_lower_precision(dtype):
    certificate = certify(VerifyOptions(dtype=dtype, **SMALL))
    assert certificate.passed, render(certificate)
    assert all(case.flat is not None and case.errors.gradient > 1e-9 for case in certificate.cases)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_certificate_over_ranks(world_size):
    certificate = certify(VerifyOptions(world_size=world_size, timeout_seconds=240, **SMALL))
    assert certificate.passed, render(certificate)
    assert {case.world_size for case in certificate.cases} == {world_size}


def test_ranks_that_do_not_finish_are_ended_and_named():
    before = torch.get_num_threads()
    with pytest.raises(RankFailure, match=r"ranks \[0, 1\] still ran after 0 s"):
        certify(VerifyOptions(world_size=2, timeout_seconds=0.2, **SMALL))
    assert torch.get_num_threads() == before


def test_wrong_engine_misses_the_bound(monkeypatch):
    """A gradient that is one part in a hundred million off is seen, named, and fails the certificate."""
    import treecp_rl.verify.subject as subject

    exact = subject.gradients_of

    def slightly_off(model):
        gradients = exact(model)
        gradients["model.norm.weight"] *= 1 + 1e-8
        return gradients

    monkeypatch.setattr(subject, "gradients_of", slightly_off)
    certificate = certify(VerifyOptions(lengths=(Lengths(6, (3, 4)),), **SMALL))
    assert not certificate.passed
    assert certificate.cases[0].errors.worst_parameter == "model.norm.weight"
    assert "MISSED" in render(certificate)


def test_users_config_is_cut_in_depth(tmp_path):
    tiny_config(64, hidden_size=32, num_layers=6).save_pretrained(tmp_path)
    options = VerifyOptions(str(tmp_path), num_layers=1, lengths=(Lengths(8, (3, 0, 5)),))
    certificate = certify(options)
    assert certificate.passed
    assert [case.name for case in certificate.cases] == ["your_lengths", "your_lengths_several_passes"]
    with pytest.raises(ConfigError, match="6 layers"):
        load_config(str(tmp_path), 7, None)
    with pytest.raises(ConfigError, match="no such file"):
        load_config(str(tmp_path / "missing"), None, None)


def test_unsupported_model_is_refused(tmp_path):
    config = tiny_config(64, hidden_size=32, num_layers=2)
    config.layer_types = ["full_attention", "sliding_attention"]
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="sliding_attention"):
        certify(VerifyOptions(str(tmp_path)))


def test_batch_without_response_tokens_proves_nothing():
    with pytest.raises(ConfigError, match="prove nothing"):
        certify(VerifyOptions(lengths=(Lengths(6, (0, 0)),), **SMALL))


def test_lengths_are_read(tmp_path):
    assert parse_lengths("128:16,20; 64:8") == (Lengths(128, (16, 20)), Lengths(64, (8,)))
    table = tmp_path / "lengths.csv"
    table.write_text("group,prompt,response\na,12,3\nb,7,1\na,12,0\n")
    assert parse_lengths(str(table)) == (Lengths(12, (3, 0)), Lengths(7, (1,)))
    table.write_text("group,prompt,response\na,12,3\na,13,0\n")
    with pytest.raises(ValueError, match=r"lengths.csv:3: group a has prompts of 12 and 13"):
        parse_lengths(str(table))
    for text in ("", "12", "0:4", "8:-1", "8:x"):
        with pytest.raises(ValueError, match="--lengths"):
            parse_lengths(text)


def test_users_lengths_fit_their_budget():
    for case in cases_from_lengths(64, (Lengths(30, (5, 40)), Lengths(3, (2,)))):
        assert case.tokens_per_pass is None or case.tokens_per_pass >= 70
