"""The CPU rollout through verl: manager, load balancer, client, replica and weight adapter are verl's own path."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

from tests.workers.test_generation import recompute
from tests.workers.tiny_model import save_tiny_model
from treecp_rl.errors import ConfigError

PROMPT = [1, 87, 85, 69, 201, 81, 60, 2, 201, 1, 67, 85, 59, 86, 61, 86, 201]


def compose_config(folder, *overrides):
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={folder}",
                "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
                "actor_rollout_ref.rollout.name=treecp_cpu",
                "actor_rollout_ref.rollout.dtype=float32",
                "actor_rollout_ref.rollout.load_format=auto",
                "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
                "actor_rollout_ref.rollout.nnodes=1",
                "actor_rollout_ref.rollout.n_gpus_per_node=1",
                "actor_rollout_ref.rollout.max_num_seqs=64",
                "data.max_prompt_length=96",
                "data.max_response_length=48",
                *overrides,
            ],
        )
    OmegaConf.resolve(config.actor_rollout_ref)
    return config


@pytest.fixture(scope="module")
def served(ray_cluster, tmp_path_factory):
    """A standalone replica behind verl's server manager, its client, and the model it started from."""
    from verl.workers.rollout.llm_server import LLMServerManager

    folder = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    config = compose_config(folder)
    manager = LLMServerManager.create(config=config)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return SimpleNamespace(config=config, manager=manager, client=manager.get_client(), model=model)


def generate(served, prompts, **sampling):
    """Send all prompts at once, as an agent loop does."""
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}

    async def send():
        calls = [
            served.client.generate(f"request-{i}", prompt_ids=list(prompt), sampling_params=params | sampling)
            for i, prompt in enumerate(prompts)
        ]
        return await asyncio.gather(*calls)

    return asyncio.run(send())


def assert_log_probs(model, prompt, output, temperature=1.0):
    expected = recompute(model, prompt, output.token_ids, temperature)
    torch.testing.assert_close(torch.tensor(output.log_probs), expected, rtol=0, atol=1e-5)


def test_a_burst_is_sampled_with_the_models_log_probs(served):
    prompts = [[*PROMPT, 30 + i // 8] for i in range(64)]
    outputs = generate(served, prompts, temperature=0.8)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.stop_reason == "completed" and 1 <= len(output.token_ids) <= 48
        assert_log_probs(served.model, prompt, output, temperature=0.8)
    assert len({tuple(output.token_ids) for output in outputs}) > 32, "siblings must differ"
    computed = sum(output.extra_fields["num_cached_tokens"] == 0 for output in outputs)
    assert computed == 8, "each of the eight prompts is computed once"


def test_greedy_is_the_models_argmax(served):
    first, second = generate(served, [PROMPT, PROMPT], temperature=0, max_tokens=6)
    assert first.token_ids == second.token_ids
    for i, token in enumerate(first.token_ids):
        with torch.no_grad():
            logits = served.model(torch.tensor([PROMPT + first.token_ids[:i]])).logits[0, -1]
        assert token == logits.argmax()
    assert_log_probs(served.model, PROMPT, first)


def test_new_weights_change_what_is_generated(served, tmp_path, monkeypatch):
    """verl's adapter, as a trainer rank uses it, on both weight formats: plain and with a tied second name."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import HFModelConfig
    from verl.workers.rollout.base import get_rollout_class

    monkeypatch.setenv("RANK", "0")
    adapter = get_rollout_class("treecp_cpu")(
        config=served.config.actor_rollout_ref.rollout,
        model_config=omega_conf_to_dataclass(served.config.actor_rollout_ref.model, HFModelConfig),
        device_mesh=None,
    )
    folder = save_tiny_model(tmp_path, seed=1)
    new = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = generate(served, [PROMPT], temperature=0)[0]
    weights = dict(new.named_parameters())
    asyncio.run(adapter.update_weights(iter(weights.items()), global_steps=7))
    after = generate(served, [PROMPT], temperature=0)[0]
    assert after.token_ids != before.token_ids
    assert_log_probs(new, PROMPT, after)
    assert after.extra_fields["global_steps"] == after.extra_fields["max_global_steps"] == 7

    tied_twice = {name: tensor.bfloat16() for name, tensor in served.model.state_dict().items()}
    assert "lm_head.weight" in tied_twice
    asyncio.run(adapter.update_weights(iter(tied_twice.items()), global_steps=8))
    again = generate(served, [PROMPT], temperature=0)[0]
    rounded = AutoModelForCausalLM.from_config(served.model.config, dtype=torch.float32)
    rounded.load_state_dict(tied_twice)
    assert_log_probs(rounded, PROMPT, again)

    del weights["model.norm.weight"]
    weights["model.norm.scale"] = torch.ones(64)
    with pytest.raises(Exception, match=r"1 unknown names \['model.norm.scale'\], 1 of .* missing"):
        asyncio.run(adapter.update_weights(iter(weights.items()), global_steps=9))
    assert generate(served, [PROMPT], temperature=0)[0].token_ids == again.token_ids, "nothing half-loaded"

    asyncio.run(adapter.update_weights(iter(served.model.state_dict().items()), global_steps=0))


def test_sampling_repeats_for_the_same_weights_version_and_order(served):
    server = served.manager.get_replicas()[0].server_handle
    weights = [(name, tensor) for name, tensor in served.model.state_dict().items()]

    def run(step):
        import ray

        ray.get(server.receive_weights.remote(weights, last=True, global_steps=step))
        return sorted(tuple(output.token_ids) for output in generate(served, [PROMPT] * 8))

    assert run(3) == run(3) != run(4)


def test_abort_returns_partial_rows_and_resume_lets_later_ones_in(served):
    replica = served.manager.get_replicas()[0]
    params = {"temperature": 1.0, "logprobs": True, "ignore_eos": True, "max_tokens": 2000}

    async def scenario():
        def send(name):
            return asyncio.create_task(
                served.client.generate(name, prompt_ids=PROMPT, sampling_params=dict(params))
            )

        running = [send(f"running-{i}") for i in range(4)]
        await asyncio.sleep(1.0)
        await replica.abort_all_requests()
        aborted = await asyncio.gather(*running)
        params["max_tokens"] = 5
        parked = send("parked")
        await asyncio.sleep(0.5)
        assert not parked.done()
        await replica.abort_all_requests(reject_request=True)
        rejected = await send("rejected")
        await replica.sleep()
        await replica.wake_up()
        await replica.resume_generation()
        return aborted, rejected, await parked

    aborted, rejected, parked = asyncio.run(scenario())
    for output in aborted:
        assert output.stop_reason == "aborted" and 0 < len(output.token_ids) < 2000
        assert_log_probs(served.model, PROMPT, output)
    assert rejected.stop_reason == "aborted" and rejected.token_ids == []
    assert parked.stop_reason == "completed" and len(parked.token_ids) == 5


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([5] * 150, {}, r"150 tokens .*data.max_prompt_length\) is 96.*filter_overlong_prompts"),
        ([5, 100_000], {}, r"token ids from 0 to \d+.*tokenizer"),
        (PROMPT, {"stop": ["\n"]}, "cannot do stop="),
        (PROMPT, {"repetition_penalty": 1.2}, r"cannot do repetition_penalty=1.2"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(served, prompt, sampling, message):
    with pytest.raises(Exception, match=message):
        generate(served, [prompt], **sampling)
    assert generate(served, [PROMPT], max_tokens=1)[0].stop_reason == "completed", "the server goes on"


def test_what_the_config_cannot_have_is_refused_before_any_process(tmp_path):
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import HFModelConfig
    from verl.workers.rollout.replica import get_rollout_replica_class

    folder = save_tiny_model(tmp_path)
    replica_class = get_rollout_replica_class("treecp_cpu")

    def replica(*overrides, **options):
        config = compose_config(folder, *overrides).actor_rollout_ref
        return replica_class(0, config.rollout, config.model, **options)

    with pytest.raises(ConfigError, match=r"rollout\.logprobs_mode='raw_logits'"):
        replica("actor_rollout_ref.rollout.logprobs_mode=raw_logits")
    with pytest.raises(ConfigError, match=r"rollout\.quantization='fp8'"):
        replica("actor_rollout_ref.rollout.quantization=fp8")
    with pytest.raises(ConfigError, match="reward or teacher"):
        replica(is_reward_model=True)

    from treecp_rl.workers.rollout import CPURollout

    config = compose_config(folder, "actor_rollout_ref.model.lora_rank=8").actor_rollout_ref
    with pytest.raises(ConfigError, match=r"lora_rank is 8; set actor_rollout_ref\.model\.lora\.merge=True"):
        CPURollout(config.rollout, omega_conf_to_dataclass(config.model, HFModelConfig), None)
