"""A response's text -> reasoning-gym's own score, in the shape verl's `custom_reward_function` wants.

`score` may be partial credit and is what GRPO learns from; `acc` is 1 for an exact answer only and is what
validation reports.
"""

import json
from functools import cache
from typing import Any

from reasoning_gym.factory import get_score_answer_fn

_scorer = cache(get_score_answer_fn)


def score(
    answer: str, ground_truth: str, data_source: str = "largest_island", entry: dict | None = None
) -> float:
    """reasoning-gym's score of one answer, in [0, 1]."""
    return float(_scorer(data_source)(answer, entry or {"answer": ground_truth}))


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **_: Any
) -> dict[str, float]:
    """verl calls this for every response."""
    entry = json.loads((extra_info or {}).get("entry") or "null")
    value = score(solution_str, ground_truth, data_source, entry)
    return {"score": value, "acc": float(value == 1.0)}
