#!/usr/bin/env bash
# 8 GPUs of 80 GB. Hydra overrides may follow, e.g. actor_rollout_ref.model.path=/models/Qwen2.5-7B-Instruct
set -euo pipefail
cd "$(dirname "$0")/../.."
run_dir=runs/grpo_qwen2_5_7b_long_prompt
python -m recipes.grpo_qwen2_5_7b_long_prompt.data "$run_dir/data"
export VERL_FILE_LOGGER_PATH="$run_dir/metrics.jsonl"
set -x
python -m treecp_rl.train \
    --config-dir recipes/grpo_qwen2_5_7b_long_prompt/config \
    --config-name grpo_qwen2_5_7b_long_prompt \
    platform=cuda \
    recipe.data="$run_dir/data" \
    recipe.run_dir="$run_dir/run" \
    "$@"
