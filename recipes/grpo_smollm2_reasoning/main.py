"""GRPO on SmolLM2-135M-Instruct with reasoning-gym's letter_counting, on CPU.

python -m recipes.grpo_smollm2_reasoning.main                       one run, from the start
python -m recipes.grpo_smollm2_reasoning.main --resume              goes on with the last run
python -m recipes.grpo_smollm2_reasoning.main trainer.total_training_steps=50 ...      any Hydra override
"""

import sys
from pathlib import Path

from recipes import driver
from recipes.grpo_smollm2_reasoning.assets import ensure_data, ensure_model


def make_assets(seed: int) -> Path:
    """Model and questions."""
    ensure_model()
    return ensure_data(seed)


RECIPE = driver.Recipe(
    name="grpo_smollm2_reasoning",
    make_assets=make_assets,
    describe_start=lambda _: "SmolLM2-135M-Instruct as published (weights quantised to 4 bits, unpacked)",
    validation_key="val-core/letter_counting/acc/mean@2",
    title="GRPO on SmolLM2-135M-Instruct, reasoning-gym letter_counting",
)

if __name__ == "__main__":
    sys.exit(driver.main(RECIPE, __doc__))
