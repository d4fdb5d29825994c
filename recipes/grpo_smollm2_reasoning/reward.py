"""A response's first line -> reasoning-gym's own score, for verl's `custom_reward_function`.

SmolLM2 often goes on after its answer or ends it with a full stop; neither says whether the answer is right.
"""

import json
from functools import cache
from typing import Any

from reasoning_gym.factory import get_score_answer_fn

_scorer = cache(get_score_answer_fn)


def final_answer(response: str) -> str:
    """The part of a response that is scored."""
    return response.strip().partition("\n")[0].strip().removesuffix(".")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any], **_: Any
) -> dict[str, float]:
    """verl calls this for every response."""
    value = float(_scorer(data_source)(final_answer(solution_str), json.loads(extra_info["entry"])))
    return {"score": value, "acc": float(value == 1.0)}
