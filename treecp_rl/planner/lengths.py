"""A file of lengths -> TreeLengths: CSV, JSON lines, or a rollout dump of verl."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from treecp_rl.errors import BatchError
from treecp_rl.planner.search import TreeLengths

FORMATS = (
    "CSV with the columns group,prompt,response, or JSON lines with prompt and responses, with group, prompt and "
    "response, or with verl's input and output"
)


def read_lengths(path: Path | str, characters_per_token: float | None = None) -> list[TreeLengths]:
    """Groups in the order in which they appear.

    Args:
        characters_per_token: turns the texts of verl's rollout dump into tokens.

    Raises:
        BatchError: no such file, no rows, or a line that is none; names it.
    """
    path = Path(path)
    if not path.is_file():
        raise BatchError(f"no file {path}; write {FORMATS}")
    text = path.read_text()
    is_json = text.lstrip()[:1] == "{"
    rows = _json_rows(text, path, characters_per_token) if is_json else _csv_rows(text, path)
    groups: dict[str, tuple[int, list[int]]] = {}
    for where, group, prompt, responses in rows:
        known = groups.setdefault(group, (prompt, []))
        if known[0] != prompt:
            raise BatchError(f"{where}: group {group} has prompts of {known[0]} and {prompt} tokens")
        if prompt < 1 or min(responses, default=1) < 1:
            raise BatchError(f"{where}: prompt {prompt} and responses {responses} must be 1 token or more")
        known[1].extend(responses)
    if not groups:
        raise BatchError(f"{path} holds no rows; write {FORMATS}")
    return [TreeLengths(prompt, tuple(responses)) for prompt, responses in groups.values()]


Row = tuple[str, str, int, list[int]]
"""(where it stands, group, prompt tokens, response tokens)"""


def _csv_rows(text: str, path: Path) -> Iterator[Row]:
    for line, record in enumerate(csv.DictReader(text.splitlines()), start=2):
        yield _row(f"{path}:{line}", record, line)


def _json_rows(text: str, path: Path, characters_per_token: float | None) -> Iterator[Row]:
    for line, content in enumerate(text.splitlines(), start=1):
        if not content.strip():
            continue
        try:
            record = json.loads(content)
        except ValueError as error:
            raise BatchError(f"{path}:{line} is no JSON: {error}") from error
        if not isinstance(record, dict):
            raise BatchError(f"{path}:{line} is {type(record).__name__}; write {FORMATS}")
        if "input" in record and "output" in record:
            yield _dump_row(f"{path}:{line}", record, characters_per_token)
        else:
            yield _row(f"{path}:{line}", record, line)


def _row(where: str, record: dict[str, Any], line: int) -> Row:
    try:
        prompt = _whole(record["prompt"])
        if "responses" in record:
            return where, str(record.get("group", line)), prompt, _all_whole(record["responses"])
        return where, str(record["group"]), prompt, [_whole(record["response"])]
    except (KeyError, TypeError, ValueError) as error:
        raise BatchError(f"{where}: {error!r}; write {FORMATS}, all whole numbers") from error


def _dump_row(where: str, record: dict[str, Any], characters_per_token: float | None) -> Row:
    """The prompt's text is the group; dumps hold texts, not token counts."""
    if not characters_per_token or characters_per_token <= 0:
        raise BatchError(f"{where} holds texts, not lengths; say how many characters a token has, such as 4")
    prompt, response = (
        max(1, round(len(str(record[name])) / characters_per_token)) for name in ("input", "output")
    )
    return where, str(record["input"]), prompt, [response]


def _whole(value: Any) -> int:
    number = int(value)
    if (isinstance(value, (bool, float)) and value != number) or isinstance(value, bool):
        raise ValueError(f"{value!r} is no whole number")
    return number


def _all_whole(values: Iterable[Any]) -> list[int]:
    return [_whole(value) for value in values]
