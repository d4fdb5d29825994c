"""(vocabulary size, lengths) -> named mini-batches on which exactness is decided.

A case is rows, the mask of every row, one loss of the family, which rank trains which row, and how the
engine is to run it. Each stands for something that went wrong in some trainer: masked tool tokens,
duplicate samples, a pad id inside a prompt, a rank without work ... Token ids come from a seed, so a case
is the same in every process.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treecp_rl.tree import Row
from treecp_rl.verify.losses import LOSSES, BatchLoss, LossSpec, RowTarget, group_advantages

PAD_ID = 0


@dataclass(frozen=True)
class Case:
    """One mini-batch. `masks[i]` is [R_i]; `rank_of` maps (row, world size) to the rank that trains the
    row.
    """

    name: str
    rows: tuple[Row, ...]
    masks: tuple[Tensor, ...]
    loss: LossSpec
    rank_of: Callable[[int, int], int]
    tokens_per_pass: int | None = None
    """Token budget of one pass; None means that everything may go into one."""
    checkpointing: bool = False

    is_about_dealing: bool = False
    """Whether the case is how rows are dealt to ranks, which a domain's ranks never see."""

    def rows_of(self, rank: int, world_size: int) -> tuple[int, ...]:
        return tuple(i for i in range(len(self.rows)) if self.rank_of(i, world_size) == rank)


@dataclass(frozen=True)
class Lengths:
    """One group: the prompt's tokens and each response's."""

    prompt: int
    responses: tuple[int, ...]


@dataclass
class _Builder:
    vocabulary: int
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(20))

    def tokens(self, count: int) -> Tensor:
        return torch.randint(1, self.vocabulary, (count,), generator=self.generator)

    def group(self, uid: str, prompt: int, responses: Sequence[int], temperature: float = 1.0) -> list[Row]:
        shared = self.tokens(prompt)
        return [Row(uid, shared.clone(), self.tokens(count), temperature) for count in responses]

    def groups(self, *lengths: Lengths) -> list[Row]:
        return [
            row
            for number, group in enumerate(lengths)
            for row in self.group(f"g{number}", group.prompt, group.responses)
        ]


def standard_cases(vocabulary: int) -> tuple[Case, ...]:
    """The cases of `treecp-rl verify`; about 5,000 flattened tokens in all."""
    build = _Builder(vocabulary)
    return (
        _ragged_groups(build),
        _temperatures(build),
        _case("prompt_heavy", build.groups(Lengths(160, (8, 6, 8, 5))), "dapo"),
        _case("response_heavy", build.groups(Lengths(6, (70, 48, 64))), "dr_grpo"),
        _duplicates(build),
        _response_is_prefix(build),
        _case("empty_and_one_token", build.groups(Lengths(9, (0, 1, 5)), Lengths(4, (1, 0))), "rloo"),
        _pad_id_in_prompt(build),
        _masked_tool_tokens(build),
        _one_valid_token(build),
        _group_of_one(build),
        replace(_ragged_groups(build), name="one_rank_without_work", **_dealt(lambda row, world: 0)),
        replace(
            _ragged_groups(build), name="group_split_over_ranks", **_dealt(lambda row, world: row % world)
        ),
        _case("cut_over_ranks", build.groups(Lengths(150, (70, 3, 40)), Lengths(7, (29,))), "grpo"),
        _case("long_tail", build.groups(Lengths(29, (230, 7, 1))), "dapo"),
        replace(_ragged_groups(build), name="activation_checkpointing", checkpointing=True),
        replace(_ragged_groups(build), name="several_passes", tokens_per_pass=40),
        replace(
            _ragged_groups(build), name="several_passes_checkpointed", tokens_per_pass=40, checkpointing=True
        ),
    )


def _dealt(rank_of: Callable[[int, int], int]) -> dict[str, Any]:
    return {"rank_of": rank_of, "is_about_dealing": True}


def cases_from_lengths(vocabulary: int, lengths: Sequence[Lengths]) -> tuple[Case, ...]:
    """The user's own shapes: all groups as one mini-batch, in one pass and under half the tokens."""
    build = _Builder(vocabulary)
    rows = build.groups(*lengths)
    whole = _case("your_lengths", rows, "grpo")
    longest = max(group.prompt + max(group.responses) for group in lengths)
    unique = sum(group.prompt + sum(group.responses) for group in lengths)
    halved = max(longest, unique // 2)
    return (whole, replace(whole, name="your_lengths_several_passes", tokens_per_pass=halved))


def parse_lengths(text: str) -> tuple[Lengths, ...]:
    """'P:R1,R2;P:R1' or the path of a CSV file with the columns group,prompt,response."""
    if text.endswith(".csv"):
        return _lengths_from_csv(Path(text))
    groups = []
    for part in filter(None, (piece.strip() for piece in text.split(";"))):
        prompt, separator, responses = part.partition(":")
        try:
            group = Lengths(int(prompt), tuple(int(count) for count in responses.split(",")))
        except ValueError as error:
            raise ValueError(
                f"--lengths: cannot read {part!r}; write PROMPT:RESPONSE,...;... such as 128:16,20;64:8,8"
            ) from error
        if not separator or group.prompt < 1 or min(group.responses) < 0:
            raise ValueError(
                f"--lengths: {part!r} needs a prompt of 1 token or more and responses of 0 or more"
            )
        groups.append(group)
    if not groups:
        raise ValueError("--lengths is empty; write PROMPT:RESPONSE,RESPONSE;... such as 128:16,20;64:8,8")
    return tuple(groups)


def bind_loss(case: Case, log_probs: Sequence[Tensor], spec: LossSpec | None = None) -> BatchLoss:
    """The case's loss with old and reference policies near the given one: [R_i] log-probs of each row.

    The old policy differs by about the clip range, so that both sides of every clip are taken.
    """
    generator = torch.Generator().manual_seed(7)
    advantages = _advantages(case, generator)
    targets = []
    for row, scores in enumerate(log_probs):
        scores = scores.detach().double().cpu()
        noise = torch.randn(2, scores.numel(), generator=generator, dtype=torch.float64)
        targets.append(
            RowTarget(
                mask=case.masks[row].double(),
                advantages=advantages[row].expand(scores.numel()),
                old_log_probs=scores + 0.25 * noise[0],
                ref_log_probs=scores + 0.5 * noise[1],
            )
        )
    return BatchLoss(spec or case.loss, targets)


def _advantages(case: Case, generator: torch.Generator) -> Tensor:
    rewards = torch.rand(len(case.rows), generator=generator, dtype=torch.float64)
    advantages = torch.empty_like(rewards)
    for uid in dict.fromkeys(row.uid for row in case.rows):
        members = [i for i, row in enumerate(case.rows) if row.uid == uid]
        # A lone row would get advantage zero, and a gradient of exactly zero proves nothing.
        advantages[members] = group_advantages(rewards[members], "grpo") if len(members) > 1 else 1.0
    return advantages


def _case(name: str, rows: Sequence[Row], loss: str, masks: Sequence[Tensor] | None = None) -> Case:
    group_of = {uid: number for number, uid in enumerate(dict.fromkeys(row.uid for row in rows))}
    groups = [group_of[row.uid] for row in rows]
    return Case(
        name=name,
        rows=tuple(rows),
        masks=tuple(masks if masks is not None else [torch.ones(row.response.numel()) for row in rows]),
        loss=LOSSES[loss],
        rank_of=lambda row, world: groups[row] % world,
    )


def _ragged_groups(build: _Builder) -> Case:
    """Groups of 4, 3 and 1 rows, dealt out so that no two neighbours belong together."""
    rows = build.groups(Lengths(20, (7, 3, 12, 5)), Lengths(11, (9, 2, 6)), Lengths(15, (8,)))
    return _case("ragged_groups", [rows[i] for i in (0, 4, 1, 7, 5, 2, 6, 3)], "grpo")


def _temperatures(build: _Builder) -> Case:
    rows = build.group("warm", 12, (6, 4, 5), temperature=0.7) + build.group("int", 10, (5, 3), temperature=1)
    return _case("temperatures", rows, "grpo")


def _duplicates(build: _Builder) -> Case:
    rows = build.group("g0", 14, (6, 9))
    return _case("duplicate_rows", [rows[0], rows[1], rows[0], rows[0]], "gspo")


def _response_is_prefix(build: _Builder) -> Case:
    """r1 = [a, b], r2 = [a, b, c, ...], r3 = r1, and r4 leaves r2 half way."""
    long = build.group("g0", 10, (9,))[0]
    short = replace(long, response=long.response[:4])
    fork = replace(long, response=torch.cat([long.response[:6], build.tokens(5)]))
    return _case("response_prefix_of_another", [short, long, short, fork], "grpo")


def _pad_id_in_prompt(build: _Builder) -> Case:
    rows = build.group("g0", 12, (5, 7))
    prompt = rows[0].prompt.clone()
    prompt[:2] = PAD_ID
    prompt[7] = PAD_ID
    responses = [row.response.clone() for row in rows]
    responses[1][-1] = PAD_ID
    return _case("pad_id_in_prompt", [Row("g0", prompt, response) for response in responses], "dapo")


def _masked_tool_tokens(build: _Builder) -> Case:
    """[1,1,0,0,1]: masked tokens are attended to and not trained on; one row counts nothing at all."""
    rows = build.group("g0", 13, (5, 4, 6)) + build.group("g1", 8, (4, 3))
    masks = [torch.ones(row.response.numel()) for row in rows]
    masks[0] = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0])
    masks[1] = torch.zeros(4)
    return _case("masked_tool_tokens", rows, "grpo", masks)


def _one_valid_token(build: _Builder) -> Case:
    rows = build.group("g0", 13, (5, 4)) + build.group("g1", 8, (4, 3))
    masks = [torch.zeros(row.response.numel()) for row in rows]
    masks[1][2] = 1.0
    # rloo, because a clipped ratio would leave this one token without a gradient.
    return _case("exactly_one_valid_token", rows, "rloo", masks)


def _group_of_one(build: _Builder) -> Case:
    return _case("groups_of_one", build.groups(Lengths(9, (6,)), Lengths(7, (5,)), Lengths(12, (4,))), "dapo")


def _lengths_from_csv(path: Path) -> tuple[Lengths, ...]:
    if not path.is_file():
        raise ValueError(
            f"--lengths {path}: no such file; write a CSV with the columns group,prompt,response"
        )
    groups: dict[str, tuple[int, list[int]]] = {}
    with path.open(newline="") as file:
        for line, record in enumerate(csv.DictReader(file), start=2):
            try:
                prompt, response = int(record["prompt"]), int(record["response"])
                group = groups.setdefault(record["group"], (prompt, []))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}:{line}: needs the columns group,prompt,response with whole numbers"
                ) from error
            if group[0] != prompt:
                raise ValueError(
                    f"{path}:{line}: group {record['group']} has prompts of {group[0]} and {prompt} tokens"
                )
            if prompt < 1 or response < 0:
                raise ValueError(
                    f"{path}:{line}: prompt {prompt} and response {response} must be at least 1 and 0 tokens"
                )
            group[1].append(response)
    if not groups:
        raise ValueError(f"{path} holds no rows; it needs the columns group,prompt,response")
    return tuple(Lengths(prompt, tuple(responses)) for prompt, responses in groups.values())
