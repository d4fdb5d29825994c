"""Proves that a plan's words, JSON and picture say what the plan says, and what a file of lengths may hold."""

import json
import xml.etree.ElementTree as ET

import pytest

from treecp_rl.errors import BatchError
from treecp_rl.planner.estimates import estimate_profile
from treecp_rl.planner.explain import (
    COLOURS,
    EXPOSED,
    IDLE,
    all_figures,
    as_json,
    describe,
    pass_figures,
    picture,
)
from treecp_rl.planner.forms import RunOptions, candidates
from treecp_rl.planner.lengths import read_lengths
from treecp_rl.planner.lower_plan import lower_plan
from treecp_rl.planner.polish import POLISHED_KINDS
from treecp_rl.planner.schedule_batch import plan_batch
from treecp_rl.planner.search import TreeLengths
from treecp_rl.planner.seconds import predict

PROFILE = estimate_profile("h100", "Qwen2.5-7B")
OPTIONS = RunOptions(tokens_per_rank=8192)
TREES = [TreeLengths(8000, (512,) * 8), *(TreeLengths(300 + 50 * i, (400,) * 8) for i in range(12))]
TREES.append(TreeLengths(20000, (4000,) * 16))
PLAN = plan_batch(TREES, 8, PROFILE, OPTIONS)
FIGURES = all_figures(PLAN, TREES, PROFILE, OPTIONS)


def test_seconds_of_trees_are_computing_and_exposed_moves():
    for one in PLAN.trees:
        figures = FIGURES[one.tree]
        assert figures.computing_seconds + figures.exposed_seconds == pytest.approx(one.seconds)


def test_every_kind_that_a_plan_may_have_is_painted():
    assert {one.kind for one in candidates("full", (1, 2, 4, 8), 8, 4)} | set(POLISHED_KINDS) == set(COLOURS)


def test_bytes_and_peaks_are_near_those_of_the_schedules():
    for one, passes in lower_plan(PLAN, TREES):
        exact = predict(passes, PROFILE, OPTIONS)
        figures = pass_figures(one, FIGURES, PLAN.num_ranks)
        assert figures.moved_bytes == pytest.approx(exact.moved_bytes, rel=0.25)
        assert figures.peak_bytes == pytest.approx(exact.peak_bytes, rel=0.2)
        assert 0 < figures.busy_part <= 1


def test_the_json_is_the_plan():
    record = json.loads(json.dumps(as_json(PLAN, FIGURES)))
    assert record["digest"] == PLAN.digest
    assert record["gap"] == pytest.approx(record["predicted_seconds"] / record["lower_bound_seconds"] - 1)
    assert sum(one["seconds"] for one in record["passes"]) == pytest.approx(record["predicted_seconds"])
    assert [one["tree"] for one in record["trees"]] == list(range(len(TREES)))
    for tree in record["trees"]:
        assert tree["tree"] in record["passes"][tree["pass"]]["trees"]


def test_the_words_name_every_pass_and_every_way():
    text = describe(PLAN, FIGURES, PROFILE, 0.001)
    assert PLAN.digest in text and "estimate of" in text and "split" in text
    listed = [line for line in text.splitlines() if line.split()[:1] and line.split()[0].isdigit()]
    ways = {one.candidate for one in PLAN.trees}
    assert len(listed) == len(PLAN.passes) + len(ways)


@pytest.mark.parametrize("num_ranks", [8, 256])
def test_the_picture_has_a_row_a_rank_and_widths_that_add_up(num_ranks):
    plan = plan_batch(TREES, num_ranks, PROFILE, OPTIONS)
    figures = all_figures(plan, TREES, PROFILE, OPTIONS)
    root = ET.fromstring(picture(plan, figures))
    space = "{http://www.w3.org/2000/svg}"
    rows = [text for text in root.iter(f"{space}text") if (text.text or "").startswith("rank ")]
    assert len(rows) == min(num_ranks, 128)
    idle = [r for r in root.iter(f"{space}rect") if r.get("fill") == IDLE and float(r.get("y")) > 40]
    assert len(idle) == len(rows) * len(plan.passes)
    width = sum(float(r.get("width")) for r in idle) / len(rows)
    for rect in root.iter(f"{space}rect"):
        if rect.get("fill") not in (IDLE, "white"):
            assert rect.find(f"{space}title") is not None or float(rect.get("y")) < 40
            assert float(rect.get("x", 0)) + float(rect.get("width")) <= 64 + width + 60
    assert EXPOSED in picture(plan, figures)


@pytest.mark.parametrize(
    "text",
    [
        "group,prompt,response\na,10,3\nb,7,2\na,10,5\n",
        '{"prompt": 10, "responses": [3, 5]}\n\n{"prompt": 7, "responses": [2]}\n',
        '{"group": "a", "prompt": 10, "response": 3}\n{"group": "b", "prompt": 7, "response": 2}\n'
        '{"group": "a", "prompt": 10, "response": 5}\n',
    ],
)
def test_lengths_are_read(tmp_path, text):
    (tmp_path / "file").write_text(text)
    assert read_lengths(tmp_path / "file") == [TreeLengths(10, (3, 5)), TreeLengths(7, (2,))]


def test_a_dump_of_verl_is_read_with_characters_per_token(tmp_path):
    lines = [{"input": "x" * 40, "output": "y" * 12}, {"input": "x" * 40, "output": "y" * 20}]
    (tmp_path / "dump.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert read_lengths(tmp_path / "dump.jsonl", 4) == [TreeLengths(10, (3, 5))]
    with pytest.raises(BatchError, match="holds texts, not lengths"):
        read_lengths(tmp_path / "dump.jsonl")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no rows"),
        ("group,prompt\na,1\n", "response"),
        ("group,prompt,response\na,x,1\n", r":2: .*whole numbers"),
        ("group,prompt,response\na,0,1\n", ":2: prompt 0"),
        ("group,prompt,response\na,5,-1\n", r"\[-1\]"),
        ("group,prompt,response\na,5,1\na,6,1\n", "prompts of 5 and 6"),
        ('{"prompt": 5', "no JSON"),
        ('{"prompt": 5, "responses": 3}', "whole numbers"),
        ('{"prompt": 5.5, "responses": [3]}', "no whole number"),
        ('{"prompt": 5, "responses": []}', "no response"),
        ('{"prompt": 5}\n[1]', "group"),
    ],
)
def test_bad_lengths_are_named(tmp_path, text, says):
    (tmp_path / "file").write_text(text)
    with pytest.raises(BatchError, match=says):
        read_lengths(tmp_path / "file")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(BatchError, match=r"no file .*nowhere\.csv"):
        read_lengths(tmp_path / "nowhere.csv")
