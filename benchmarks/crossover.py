"""Where MoveQ moves fewer bytes than TreeMoveKV: bytes that the planner predicts, and bytes that ranks sent, exactly.

    python benchmarks/crossover.py --json benchmarks/crossover.json --picture benchmarks/crossover.svg
    python benchmarks/crossover.py --world-sizes 2 --heads 8:2 --group-sizes 2 --ratios 1,16     # a part of it

lengths, heads, ranks -> schedules (``planner.lower``) -> bytes (``planner.cost``), by rank and direction; the same
trees trained by gloo processes, a model of one layer, whose exchanges count what they send. The two are compared to
the byte in every pass, and the script fails where they differ. Exit status: 0, or 1.

P prompt tokens, R tokens of each of G responses; H:K query and key/value heads; ratio is P / R. A split tree's prefill
and replay are counted apart: what AugTree's section 3.3 compares is the replay.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Qwen2Config

from treecp_rl.attention.huggingface import PROGRAM_KEY
from treecp_rl.engine.capabilities import prepare_model
from treecp_rl.engine.passes import Domain, PassOptions, plan_passes, run_passes
from treecp_rl.engine.shares import shape_of
from treecp_rl.planner.batch import Mode
from treecp_rl.planner.cost import ModelShape, bytes_sent
from treecp_rl.planner.forms import Candidate, move_bytes
from treecp_rl.planner.lower_plan import lower_plan
from treecp_rl.planner.place import ZIGZAG_FLOOR
from treecp_rl.planner.schedule_batch import BatchPlan, PlannedPass, PlannedTree
from treecp_rl.planner.search import TreeLengths
from treecp_rl.simulator.charts import Chart, Panel, Series, svg
from treecp_rl.tree import Row
from treecp_rl.verify.models import random_model
from treecp_rl.verify.ranks import run_on_ranks

HIDDEN, VOCABULARY = 64, 256
MOST_PROMPT_TOKENS = 1024
LANES = 2
"""Of TreeMoveKV, as the engine's forced modes have it."""
TIMEOUT_SECONDS = 240.0


@dataclass(frozen=True)
class Grid:
    """What is measured."""

    world_sizes: tuple[int, ...] = (2, 4)
    heads: tuple[tuple[int, int], ...] = ((8, 8), (8, 2), (8, 1))
    group_sizes: tuple[int, ...] = (2, 4, 8)
    response_tokens: tuple[int, ...] = (8, 64)
    """Short ones stay whole on a rank, longer ones are cut over a lane."""
    ratios: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)

    def trees(self) -> list[TreeLengths]:
        """All but those with too long a prompt."""
        return [
            TreeLengths(ratio * response, (response,) * group_size)
            for group_size, response, ratio in product(self.group_sizes, self.response_tokens, self.ratios)
            if ratio * response <= MOST_PROMPT_TOKENS
        ]


@dataclass(frozen=True)
class Way:
    """One kind in one form."""

    form: str
    kind: str

    @property
    def mode(self) -> Mode:
        return f"split_{self.kind}" if self.form == "split" else self.kind  # type: ignore[return-value]

    def candidate(self, ranks: int) -> Candidate:
        lanes = LANES if self.kind == "tree_move_kv" else 1
        return Candidate(self.form, self.kind, ranks, lanes)  # type: ignore[arg-type]


WAYS = tuple(Way(form, kind) for form in ("split", "fused") for kind in ("tree_move_kv", "move_q"))
PassBytes = tuple[tuple[int, int], ...]
"""Of one pass: forward and backward bytes that each rank sends, all layers."""


def predicted(tree: TreeLengths, way: Way, ranks: int, shape: ModelShape) -> tuple[PassBytes, ...]:
    """From lengths alone: a fused pass, or prefill and replay."""
    planned = PlannedTree(0, way.candidate(ranks), 0, 0.0, (0,) * len(tree.responses))
    one = PlannedPass((planned,), 0.0)
    ((_, passes),) = lower_plan(BatchPlan("auto", ranks, "", (one,), 0.0, None), [tree])
    found = [bytes_sent(each.schedule, shape) for each in passes]
    layers = shape.num_layers
    return tuple(
        tuple((layers * there, layers * back) for there, back in zip(one.forward, one.backward, strict=True))
        for one in found
    )


def model_of(heads: int, kv_heads: int) -> torch.nn.Module:
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=False,
        use_sliding_window=False,
    )
    model = random_model(config, torch.float32, drawn_in=torch.float32)
    prepare_model(model)
    return model


def rows_of(tree: TreeLengths) -> list[Row]:
    """Random tokens; the first of each response differs, so that responses part where the prompt ends."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, VOCABULARY, (tree.prompt,), generator=generator)
    responses = [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in tree.responses]
    for number, response in enumerate(responses):
        response[0] = number
    return [Row("group", prompt, response) for response in responses]


def counted(model: torch.nn.Module, tree: TreeLengths, way: Way, domain: Domain) -> tuple[PassBytes, ...]:
    """One step: what each rank's exchanges sent in each pass, the same on every rank."""
    programs: list[Any] = []
    hook = model.register_forward_pre_hook(
        lambda _, __, named: programs.append(named[PROGRAM_KEY]), with_kwargs=True
    )
    plan = plan_passes(rows_of(tree), tokens_per_pass=1 << 30, mode=way.mode)
    model.zero_grad(set_to_none=True)
    run_passes(
        model,
        plan,
        lambda scores: torch.stack([one.mean() for one in scores.log_probs]).sum(),
        PassOptions(mode=way.mode),
        domain=domain,
    )
    hook.remove()
    own = [(one.forward_traffic.sent_bytes, one.backward_traffic.sent_bytes) for one in programs]
    ranks: list[Any] = [None] * domain.size
    dist.all_gather_object(ranks, own, group=domain.group)
    return tuple(zip(*ranks, strict=True))


def run_rank(rank: int, world_size: int, grid: Grid) -> list[dict[str, Any]]:
    domain = Domain(rank, world_size, dist.group.WORLD)  # type: ignore[arg-type]
    cases = []
    for heads in grid.heads:
        model = model_of(*heads)
        shape = shape_of(model)
        for tree, way in product(grid.trees(), WAYS):
            found = counted(model, tree, way, domain)
            cases.append(case_of(tree, way, world_size, shape, found))
    return cases


def case_of(
    tree: TreeLengths, way: Way, world_size: int, shape: ModelShape, found: tuple[PassBytes, ...]
) -> dict[str, Any]:
    expected = predicted(tree, way, world_size, shape)
    totals = [[sum(map(sum, one)) for one in passes] for passes in (found, expected)]
    return {
        "world_size": world_size,
        "heads": shape.num_heads,
        "kv_heads": shape.num_kv_heads,
        "group_size": len(tree.responses),
        "prompt": tree.prompt,
        "response": tree.responses[0],
        "ratio": tree.prompt // tree.responses[0],
        "form": way.form,
        "kind": way.kind,
        "counted_bytes": totals[0],
        "predicted_bytes": totals[1],
        "equal_by_rank_and_direction": found == expected,
    }


def run_world(world_size: int, grid: Grid, timeout_seconds: float) -> list[dict[str, Any]]:
    """Cases of one number of ranks, on processes of their own, which end with this call."""
    return run_on_ranks(
        run_rank, world_size, grid, timeout_seconds=timeout_seconds, advice="raise --timeout"
    )[0]


def expected_ratio(shape: ModelShape, ranks: int, group_size: int, response: int) -> float:
    """P / R above which MoveQ's replay moves less, by bytes a token, forward and backward.

    v: bytes of a token's K/V and their gradients; u: of its query, state and theirs. MoveQ: each query visits d - 1
    ranks, G R u (d - 1). TreeMoveKV: t ranks hold responses, and each gets the (d - 1) / d of the prompt that it lacks,
    t P v (d - 1) / d; where responses are cut over a lane, G R v (d / s - 1) more. AugTree's Eq. 5, with states,
    gradients, lanes and the group.
    """
    there, back = move_bytes(shape, False), move_bytes(shape, True)
    relative_bytes = (there[1] + there[2] + back[1] + back[2]) / (there[0] + back[0])
    per_lane = ranks // LANES
    is_cut = per_lane > 1 and response >= 2 * per_lane * ZIGZAG_FLOOR
    holding = ranks if is_cut else min(ranks, group_size)
    cut = (per_lane - 1) / (ranks - 1) if is_cut else 0.0
    return group_size * (relative_bytes - cut) * ranks / holding


def crossovers(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Least measured ratio from which on MoveQ moves fewer bytes; of a split tree in its replay."""
    found = []
    keys = ("world_size", "heads", "kv_heads", "group_size", "response", "form")
    for key in dict.fromkeys(tuple(case[name] for name in keys) for case in cases):
        named = dict(zip(keys, key, strict=True))
        parts = relative(
            [case for case in cases if all(case[name] == value for name, value in named.items())]
        )
        below = [ratio for ratio in parts if all(part < 1 for r, part in parts.items() if r >= ratio)]
        shape = ModelShape(1, named["heads"], named["kv_heads"], HIDDEN // named["heads"], itemsize=4)
        by_formula = expected_ratio(shape, named["world_size"], named["group_size"], named["response"])
        found.append(
            named
            | {
                "largest_ratio": max(parts),
                "move_q_moves_less_from_ratio": min(below, default=None),
                "ratio_by_formula": round(by_formula, 2) if named["form"] == "split" else None,
            }
        )
    return found


def relative(cases: Sequence[dict[str, Any]]) -> dict[int, float]:
    """Ratio -> MoveQ's counted bytes over TreeMoveKV's, in the last pass: the replay, or the fused pass."""
    last = {(case["kind"], case["ratio"]): case["counted_bytes"][-1] for case in cases}
    return {
        ratio: last["move_q", ratio] / last["tree_move_kv", ratio]
        for ratio in sorted({case["ratio"] for case in cases})
    }


def picture(cases: Sequence[dict[str, Any]]) -> str:
    """MoveQ's bytes of the replay over TreeMoveKV's, a panel for ranks and heads, a line for G and R."""
    split = [case for case in cases if case["form"] == "split"]
    panels = []
    for world, heads, kv in dict.fromkeys((c["world_size"], c["heads"], c["kv_heads"]) for c in split):
        here = [c for c in split if (c["world_size"], c["heads"], c["kv_heads"]) == (world, heads, kv)]
        lines = {
            f"G = {group}, R = {response}": relative(
                [c for c in here if (c["group_size"], c["response"]) == (group, response)]
            )
            for response, group in dict.fromkeys((c["response"], c["group_size"]) for c in here)
        }
        ratios = sorted({c["ratio"] for c in here})
        series = tuple(Series(name, tuple(map(line.get, ratios))) for name, line in lines.items())
        panels.append(Panel(f"{world} ranks, {heads} : {kv} heads", tuple(map(str, ratios)), series))
    title = "Replay: bytes that MoveQ moves over bytes that TreeMoveKV moves (below 1: MoveQ moves less)"
    return svg(Chart(title, "P / R", "ratio of bytes counted", tuple(panels), "lines", panel_width=220))


def render(record: dict[str, Any]) -> str:
    cases = record["cases"]
    equal = sum(case["equal_by_rank_and_direction"] for case in cases)
    lines = [
        f"bytes as predicted, of every rank, pass and direction: {equal} of {len(cases)} cases",
        f"{'ranks':>5}{'heads':>8}{'G':>4}{'R':>4}  {'form':<7}{'MoveQ moves less from P/R':>27}{'by formula':>12}",
    ]
    for one in record["crossovers"]:
        start, formula = one["move_q_moves_less_from_ratio"], one["ratio_by_formula"]
        measured = f"above {one['largest_ratio']}" if start is None else str(start)
        lines.append(
            f"{one['world_size']:>5}{one['heads']:>6}:{one['kv_heads']}{one['group_size']:>4}{one['response']:>4}  "
            f"{one['form']:<7}{measured:>27}{'' if formula is None else format(formula, '.1f'):>12}"
        )
    return "\n".join(lines)


def file_text(record: dict[str, Any]) -> str:
    """One case a line."""
    parts = []
    for name, value in record.items():
        rows = ",\n".join(json.dumps(one) for one in value) if isinstance(value, list) else ""
        parts.append(f"{json.dumps(name)}: " + (f"[\n{rows}\n]" if rows else json.dumps(value)))
    return "{\n" + ",\n".join(parts) + "\n}\n"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Grid()

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split(","))

    def heads(text: str) -> tuple[tuple[int, int], ...]:
        return tuple((int(q), int(kv)) for q, kv in (part.split(":") for part in text.split(",")))

    parser.add_argument("--world-sizes", type=numbers, default=default.world_sizes, metavar="N,...")
    parser.add_argument("--heads", type=heads, default=default.heads, metavar="H:K,...")
    parser.add_argument("--group-sizes", type=numbers, default=default.group_sizes, metavar="G,...")
    parser.add_argument("--response-tokens", type=numbers, default=default.response_tokens, metavar="R,...")
    parser.add_argument("--ratios", type=numbers, default=default.ratios, metavar="P/R,...")
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT_SECONDS, help="seconds for one number of ranks"
    )
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--picture", metavar="FILE")
    options = parser.parse_args(arguments)
    for count, kv in options.heads:
        if HIDDEN % count or count % kv:
            parser.error(f"--heads {count}:{kv}: query heads must divide {HIDDEN}, and key/value heads them")
    if min(options.world_sizes) < 2 or any(world % LANES for world in options.world_sizes):
        parser.error(
            f"--world-sizes {options.world_sizes}: TreeMoveKV runs in {LANES} lanes here; give even numbers"
        )
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    grid = Grid(
        options.world_sizes, options.heads, options.group_sizes, options.response_tokens, options.ratios
    )
    started = time.monotonic()
    cases = [case for world in grid.world_sizes for case in run_world(world, grid, options.timeout)]
    record = {
        "hidden": HIDDEN,
        "layers": 1,
        "dtype": "float32",
        "lanes_of_tree_move_kv": LANES,
        "seconds": round(time.monotonic() - started, 1),
        "crossovers": crossovers(cases),
        "cases": cases,
    }
    print(render(record))
    if options.json:
        Path(options.json).write_text(file_text(record))
    if options.picture:
        Path(options.picture).write_text(picture(cases))
    wrong = [case for case in cases if not case["equal_by_rank_and_direction"]]
    for case in wrong:
        print(f"not as predicted: {case}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
