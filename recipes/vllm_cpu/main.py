"""The recipe grpo_reasoning_gym with rollout.name=vllm: the same GRPO, its answers sampled by vLLM on the CPU.

recipes/vllm_cpu/make_env.sh .venv-vllm                 makes the environment, once
.venv-vllm/bin/python -m recipes.vllm_cpu.main          one run; any Hydra override may follow
"""

import os
import sys

from recipes import driver
from recipes.grpo_reasoning_gym.assets import AssetOptions, describe_warm_start, ensure

ROLLOUT = "actor_rollout_ref.rollout"
OVERRIDES = [
    # One training process and one vLLM server (three processes of its own) fill two cores.
    "trainer.n_gpus_per_node=1",
    f"{ROLLOUT}.name=vllm",
    # No CUDA graphs, and no sleep mode: vLLM refuses it on the CPU.
    f"{ROLLOUT}.enforce_eager=true",
    f"+{ROLLOUT}.enable_sleep_mode=false",
    # vLLM's prefix cache works in whole blocks, 128 tokens on the CPU by default: as long as our prompts.
    f"+{ROLLOUT}.engine_kwargs.vllm.block_size=32",
    # Without it the first weight update fails; the module says why.
    f"+{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls=treecp_rl.workers.vllm_cpu.CPUWorkerExtension",
]
RECIPE = driver.Recipe(
    name="grpo_reasoning_gym",
    # vLLM's attention on the CPU has kernels for heads of 32 numbers and more: two heads instead of four.
    make_assets=lambda seed: ensure(AssetOptions(seed=seed, attention_heads=2)),
    describe_start=describe_warm_start,
    validation_key="val-core/largest_island/acc/mean@4",
    title="GRPO on reasoning-gym largest_island, rollout by vLLM",
)

if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is a local folder
    sys.exit(driver.main(RECIPE, __doc__, [*OVERRIDES, *sys.argv[1:]]))
