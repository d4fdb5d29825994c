"""What the CPU generator promises: the model's own distribution, exactly, whatever shares the batch."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.workers.tiny_model import save_tiny_model
from treecp_rl.workers.generation import BatchGenerator, GenerationRequest
from treecp_rl.workers.sampling import Sampling, sample

EOS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")


def recompute(model, prompt, token_ids, temperature=1.0):
    """Log-probabilities of the tokens by one dense forward of the whole row."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *token_ids]])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(token_ids)[:, None]).squeeze(-1)


def prompts(count, low=5, high=60, seed=0):
    random = np.random.default_rng(seed)
    return [tuple(random.integers(3, 250, random.integers(low, high)).tolist()) for _ in range(count)]


def finish(generator):
    ended = []
    while generator.has_work:
        ended += generator.step()
    return {generation.request_id: generation for generation in ended}


def request(name, prompt, max_tokens=8, seed=0, **options):
    return GenerationRequest(name, prompt, Sampling(max_tokens, **options), (seed,))


def test_log_probs_are_the_models_for_any_mix_of_rows_and_arrivals(model):
    generator = BatchGenerator(model, [EOS], max_rows=13, prefill_tokens=150, cached_prompt_tokens=200)
    requests = [
        request(
            f"{p}-{g}", prompt, max_tokens=1 + (5 * p + g) % 12, seed=10 * p + g, temperature=0.7 + 0.1 * g
        )
        for p, prompt in enumerate(prompts(6))
        for g in range(4)
    ]
    ended = {}
    for one in requests:  # arrive while earlier rows run; eight of them only after the rest are done
        generator.submit(one)
        if one.request_id.endswith("3"):
            ended |= {g.request_id: g for g in generator.step()}
    ended |= finish(generator)
    assert ended.keys() == {one.request_id for one in requests}
    for one in requests:
        generation = ended[one.request_id]
        expected = recompute(model, one.prompt, generation.token_ids, one.sampling.temperature)
        torch.testing.assert_close(torch.tensor(generation.log_probs), expected, rtol=0, atol=1e-5)
        length = len(generation.token_ids)
        assert EOS not in generation.token_ids[:-1]
        assert (generation.finish == "stop") == (generation.token_ids[-1] == EOS)
        assert generation.finish == "stop" or length == one.sampling.max_tokens


def test_greedy_equals_generate(model):
    generator = BatchGenerator(model, [EOS])
    for i, prompt in enumerate(prompts(5)):
        generator.submit(request(str(i), prompt, max_tokens=12, temperature=0))
    ended = finish(generator)
    for i, prompt in enumerate(prompts(5)):
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
        assert ended[str(i)].token_ids == out[0, len(prompt) :].tolist()


def test_a_prompt_is_computed_once_for_its_group(model):
    computed = []
    handle = model.register_forward_pre_hook(
        lambda _, args, kwargs: computed.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    generator = BatchGenerator(model, [EOS])
    group = prompts(1)[0]
    for i in range(8):
        generator.submit(request(str(i), group, max_tokens=1, seed=i))
    ended = finish(generator)
    generator.submit(request("later", group, max_tokens=1, seed=8))
    ended |= finish(generator)
    generator.forget_prompts()
    generator.submit(request("after new weights", group, max_tokens=1, seed=9))
    ended |= finish(generator)
    handle.remove()
    assert computed == [(1, len(group))] * 2
    assert sorted(g.cached_tokens for g in ended.values()) == [0, 0] + [len(group)] * 8


def test_samples_depend_on_the_rows_seed_and_not_on_its_company(model):
    def run(extra, max_rows):
        generator = BatchGenerator(model, [EOS], max_rows=max_rows)
        for i, prompt in enumerate(prompts(3)):
            generator.submit(request(str(i), prompt, max_tokens=20, seed=i))
        for i, prompt in enumerate(prompts(extra, seed=1)):
            generator.submit(request(f"extra{i}", prompt, max_tokens=20, seed=i))
        ended = finish(generator)
        return [ended[str(i)].token_ids for i in range(3)]

    assert run(0, 64) == run(9, 64) == run(9, 2)


def test_abort_returns_what_there_is_and_leaves_nothing(model):
    generator = BatchGenerator(model, [], max_rows=2)
    for i, prompt in enumerate(prompts(3)):
        generator.submit(request(str(i), prompt, max_tokens=50, seed=i))
    generator.step()
    aborted = {generation.request_id: generation for generation in generator.abort()}
    assert {name: len(g.token_ids) for name, g in aborted.items()} == {"0": 2, "1": 2, "2": 0}
    assert {g.finish for g in aborted.values()} == {"aborted"}
    assert not generator.has_work and generator.step() == []


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.6}, {0, 1}),
        ({"top_p": 0.4}, {0}),
        ({"top_k": 3, "top_p": 0.8}, {0, 1}),
        ({"temperature": 0}, {0}),
    ],
)
def test_sampling_follows_the_filtered_distribution(options, allowed):
    """Frequencies over an even grid of draws equal the renormalised probabilities, and so do the log-probs."""
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    draws = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
    tokens, log_probs = sample(probs.log().expand(2000, 4), [Sampling(1, **options)] * 2000, draws)
    kept = sorted(allowed)
    expected = probs[kept] / (probs.sum() if options.get("temperature") == 0 else probs[kept].sum())
    assert set(tokens.tolist()) == allowed
    if options.get("temperature") != 0:
        counts = torch.bincount(tokens, minlength=4)[kept] / 2000
        torch.testing.assert_close(counts, expected, rtol=0, atol=2e-3)
    lookup = torch.zeros(4).index_copy(0, torch.tensor(kept), expected)
    torch.testing.assert_close(log_probs, lookup[tokens].log())


def test_rows_of_one_batch_keep_their_own_options():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]]).expand(3, 4)
    options = [Sampling(1, temperature=0), Sampling(1, top_k=1), Sampling(1, temperature=2.0)]
    tokens, log_probs = sample(logits, options, torch.tensor([0.99, 0.99, 0.9999], dtype=torch.float64))
    expected = [logits[0].log_softmax(-1)[0], 0.0, (logits[0] / 2).log_softmax(-1)[3]]
    assert tokens.tolist() == [0, 0, 3]
    torch.testing.assert_close(log_probs, torch.tensor(expected))
    _, raw = sample(logits, options, torch.tensor([0.99, 0.99, 0.9999]).double(), raw_log_probs=True)
    torch.testing.assert_close(raw, logits[0].log_softmax(-1)[tokens])
