"""GRPO on reasoning-gym's largest_island, on two CPU cores.

python -m recipes.grpo_reasoning_gym.main                       one run, from the start
python -m recipes.grpo_reasoning_gym.main --backend fsdp2       the same run on verl's own engine
python -m recipes.grpo_reasoning_gym.main --resume              goes on with the last run
python -m recipes.grpo_reasoning_gym.main trainer.total_training_steps=60 ...      any Hydra override
"""

import sys

from recipes import driver
from recipes.grpo_reasoning_gym.assets import AssetOptions, describe_warm_start, ensure

RECIPE = driver.Recipe(
    name="grpo_reasoning_gym",
    make_assets=lambda seed: ensure(AssetOptions(seed=seed)),
    describe_start=describe_warm_start,
    validation_key="val-core/largest_island/acc/mean@4",
    title="GRPO on reasoning-gym largest_island",
)

if __name__ == "__main__":
    sys.exit(driver.main(RECIPE, __doc__))
