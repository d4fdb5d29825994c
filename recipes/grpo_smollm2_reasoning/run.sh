#!/usr/bin/env bash
# The recipe without its driver: one verl command. Hydra overrides may follow.
set -euo pipefail
cd "$(dirname "$0")/../.."
made=$(python -m recipes.grpo_smollm2_reasoning.assets)
{ read -r model; read -r assets; } <<<"$made"
run_dir=runs/grpo_smollm2_reasoning/manual
mkdir -p "$run_dir"
export VERL_FILE_LOGGER_PATH="$run_dir/metrics.jsonl"
set -x
python -m treecp_rl.train \
    --config-dir recipes/grpo_smollm2_reasoning/config \
    --config-name grpo_smollm2_reasoning \
    platform=cpu \
    recipe.model="$model" \
    recipe.assets="$assets" \
    recipe.run_dir="$run_dir" \
    "$@"
