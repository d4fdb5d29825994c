"""Proves what a profile refuses, that it survives its file, and that no single step can spoil it."""

import json
import math
from dataclasses import asdict, replace

import pytest

from treecp_rl.errors import ConfigError
from treecp_rl.planner.cost import ModelShape
from treecp_rl.planner.estimates import HARDWARE, MODELS, estimate_profile
from treecp_rl.planner.profile import (
    FACTOR_LIMIT,
    SHIPPED,
    StepReport,
    load_profile,
    parse_profile,
    save_profile,
)

PROFILE = estimate_profile("h100", "Qwen2.5-7B")
SHIPPED_HARDWARE = ("h100", "h200")
"""A core of some CPU is no hardware to plan a cluster for; its estimate stands in for what nobody measured."""


def record_with(path, value):
    """The profile's JSON with one term changed; ``...`` removes it."""
    record = json.loads(json.dumps(asdict(PROFILE)))
    *outer, last = path.split(".")
    part = record
    for name in outer:
        part = part[name]
    if value is ...:
        del part[last]
    else:
        part[last] = value
    return record


def test_a_profile_survives_its_file(tmp_path):
    save_profile(PROFILE, tmp_path / "mine.json")
    assert load_profile(tmp_path / "mine.json") == PROFILE
    assert load_profile(tmp_path / "mine.json").digest == PROFILE.digest


@pytest.mark.parametrize("hardware", SHIPPED_HARDWARE)
def test_shipped_profiles_are_the_estimates(hardware):
    shipped = load_profile(hardware)
    assert shipped == estimate_profile(hardware, "Qwen2.5-7B")
    assert shipped.kind == "estimate" and shipped.sources and shipped.date
    assert {path.stem for path in SHIPPED.glob("*.json")} == set(SHIPPED_HARDWARE)


@pytest.mark.parametrize("hardware", HARDWARE)
@pytest.mark.parametrize("model", MODELS)
def test_every_estimate_is_a_valid_profile(hardware, model):
    profile = estimate_profile(hardware, model)
    assert parse_profile(json.loads(json.dumps(asdict(profile)))) == profile


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("overlap", ..., "lacks overlap"),
        ("attention_forward.per_pair_s", ..., "attention_forward lacks per_pair_s"),
        ("memory.bytes_per_rank", -1, "bytes_per_rank is -1"),
        ("dense_forward.per_token_s", -1e-9, "per_token_s is -1e-09"),
        ("dense_forward.per_token_s", 0, "above 0"),
        ("stage_s", float("nan"), "finite"),
        ("stage_s", True, "finite"),
        ("ranks_per_node", 1.5, "whole number"),
        ("ranks_per_node", 0, "above 0"),
        ("overlap", 1.5, "0 to 1"),
        ("kind", "guess", "measured or estimate"),
        ("factors.fused", 0, "above 0"),
        ("sources", "a text", "list of texts"),
        ("node_link", 3, "must be an object"),
        ("date", 7, "must be a text"),
        ("speed", 1, "unknown term speed"),
    ],
)
def test_a_bad_term_is_named(path, value, says):
    with pytest.raises(ConfigError, match=says):
        parse_profile(record_with(path, value))


def test_files_that_are_no_profile_are_named(tmp_path):
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match=r"broken\.json is no JSON"):
        load_profile(tmp_path / "broken.json")
    with pytest.raises(ConfigError, match="h100, h200"):
        load_profile("h900")
    with pytest.raises(ConfigError, match=r"Qwen2\.5-7B"):
        estimate_profile("h100", "GPT-2")


def test_a_profile_of_another_model_is_refused():
    PROFILE.require_model(PROFILE.shape)
    with pytest.raises(ConfigError, match=r"is of Qwen2.5-7B.*num_layers=2"):
        PROFILE.require_model(ModelShape(2, 8, 4, 16, itemsize=2))


def test_one_odd_step_moves_a_factor_by_a_few_percent_and_many_steps_find_it():
    odd = PROFILE.refine(StepReport("fused", 1.0, 1000.0))
    assert 1.0 < odd.factors.fused < 1.024
    assert odd.factors.split == 1.0
    refined = PROFILE
    for _ in range(200):
        predicted = refined.factors.fused
        refined = refined.refine(StepReport("fused", predicted, 1.5))
    assert refined.factors.fused == pytest.approx(1.5, rel=0.01)
    for _ in range(2000):
        refined = refined.refine(StepReport("fused", 1.0, 1e6))
    assert refined.factors.fused == FACTOR_LIMIT


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_a_report_without_seconds_is_refused(seconds):
    with pytest.raises(ConfigError, match="no positive finite seconds"):
        PROFILE.refine(StepReport("split", 1.0, seconds))
    with pytest.raises(ConfigError, match="no positive finite seconds"):
        PROFILE.refine(replace(StepReport("split", 1.0, 1.0), predicted_seconds=seconds))
