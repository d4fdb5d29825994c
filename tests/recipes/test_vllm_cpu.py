"""The vLLM recipe: its settings compose here; the extension itself is tested where vLLM is installed."""

import pytest
from hydra import compose, initialize_config_dir
from transformers import PreTrainedTokenizerFast

from recipes.grpo_reasoning_gym.warm_start import model_config
from recipes.vllm_cpu.main import OVERRIDES, RECIPE
from treecp_rl.workers import launch

EXTENSION = "treecp_rl.workers.vllm_cpu.CPUWorkerExtension"


def test_overrides_compose_on_the_recipes_config_and_may_run():
    from verl.utils.config import omega_conf_to_dataclass

    with initialize_config_dir(str(RECIPE.config), version_base=None):
        config = compose(RECIPE.name, overrides=["platform=cpu", "recipe.assets=/assets", *OVERRIDES])
    launch.check_config(config)
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert (rollout.name, rollout.dtype, rollout.enable_sleep_mode) == ("vllm", "float32", False)
    assert rollout.engine_kwargs["vllm"] == {"block_size": 32, "worker_extension_cls": EXTENSION}
    assert rollout.load_format == "dummy" and config.trainer.n_gpus_per_node == 1


def test_its_model_has_heads_that_vllm_has_kernels_for():
    from tokenizers import Tokenizer, models

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0}, [])))
    config = model_config(tokenizer, attention_heads=2)
    assert config.hidden_size // config.num_attention_heads == 32


@pytest.mark.vllm
def test_the_extension_turns_onednn_off_before_a_model_is_loaded():
    ops = pytest.importorskip("vllm._custom_ops")
    from treecp_rl.workers.vllm_cpu import CPUWorkerExtension

    assert ops._supports_onednn is False
    assert hasattr(CPUWorkerExtension, "update_weights_from_ipc")
