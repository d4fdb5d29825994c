#!/usr/bin/env bash
# The recipe without its driver: one verl command. Hydra overrides may follow, e.g. trainer.backend=fsdp2.
set -euo pipefail
cd "$(dirname "$0")/../.."
assets=$(python -m recipes.grpo_reasoning_gym.assets)
run_dir=runs/grpo_reasoning_gym/manual
mkdir -p "$run_dir"
export VERL_FILE_LOGGER_PATH="$run_dir/metrics.jsonl"
set -x
python -m treecp_rl.train \
    --config-dir recipes/grpo_reasoning_gym/config \
    --config-name grpo_reasoning_gym \
    platform=cpu \
    recipe.assets="$assets" \
    recipe.run_dir="$run_dir" \
    "$@"
