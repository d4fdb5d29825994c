"""One GPU, under eight minutes: is every attention kernel exact, and what does a fused tree pass save?

    python benchmarks/gpu_check.py --json gpu_check.json
    python benchmarks/gpu_check.py --device cpu --tiny          # the script itself, where there is no GPU

Needs torch, transformers and this repository; no verl, no ray, nothing is built. In order:

1. what it runs on;
2. every kernel that is available, in every dtype it takes, against dense float64 attention;
3. attention alone: the tiles of a tree against plain causal varlen flash attention, in TFLOP/s;
4. a stack of Qwen2.5-7B-shaped layers (random weights), forward and backward: G responses to one prompt as
   one fused tree pass, against the same rows flattened and run with varlen flash attention; runs take turns
   and medians are reported, beside the ratio of tokens and of FLOPs.

What does not fit in memory or in the time left is listed by name. Exit status: 0, 1 if something was not
exact or broke, 2 if there is no GPU.

Shapes: P prompt tokens, R response tokens, G rows of a group, T packed tokens, H / K query / key heads.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, Qwen2Config

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from treecp_rl.attention.executor import tile_attention
from treecp_rl.attention.huggingface import ATTENTION_NAME
from treecp_rl.attention.kernels import available_kernels, choose_kernel
from treecp_rl.attention.program import compile_program
from treecp_rl.engine.capabilities import prepare_model
from treecp_rl.engine.head import HeadOptions, scoring_head
from treecp_rl.engine.passes import PassOptions, RowScores, plan_passes, run_passes
from treecp_rl.errors import ConfigError
from treecp_rl.planner.lower import lower_local
from treecp_rl.tree import Row, fold, pack

FLAT_ATTENTION = "gpu_check_flat"
ROWS_KEY = "gpu_check_rows"

BOUNDS = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Largest error of a tensor, relative to its largest number."""

AGREEMENT = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Between tree and flat, of loss and gradient norm: both round, and the loss is a sum of either sign."""

MEMORY_SHARE = 0.9
"""Of what is free, so that fragments do not decide."""


@dataclass(frozen=True)
class Point:
    """One group of rows."""

    prompt_tokens: int
    response_tokens: int
    group_size: int

    def __str__(self) -> str:
        return f"P={self.prompt_tokens} R={self.response_tokens} G={self.group_size}"

    @property
    def row_tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens

    @property
    def tree_tokens(self) -> int:
        return self.prompt_tokens + self.group_size * self.response_tokens

    @property
    def flat_tokens(self) -> int:
        return self.group_size * self.row_tokens

    @property
    def tree_pairs(self) -> int:
        """(query, key) pairs that attention computes."""
        own = self.group_size * _causal_pairs(self.response_tokens)
        return (
            _causal_pairs(self.prompt_tokens)
            + own
            + (self.group_size * self.response_tokens * self.prompt_tokens)
        )

    @property
    def flat_pairs(self) -> int:
        return self.group_size * _causal_pairs(self.row_tokens)


def _causal_pairs(tokens: int) -> int:
    return tokens * (tokens + 1) // 2


@dataclass(frozen=True)
class Sizes:
    """The model's shape and the points."""

    hidden: int
    intermediate: int
    heads: int
    key_heads: int
    head_dim: int
    max_layers: int
    vocab: int
    """Small: the layers are measured, and a head over few layers would weigh more than it does in a model."""
    dtype: torch.dtype
    points: tuple[Point, ...]

    @property
    def layer_parameters(self) -> int:
        attention = 2 * self.hidden * (self.heads + self.key_heads) * self.head_dim
        return attention + 3 * self.hidden * self.intermediate

    def attention_flop(self, pairs: int) -> int:
        """Forward 4 H D a pair; backward recomputes the scores and takes 2.5 times that."""
        return 14 * self.heads * self.head_dim * pairs

    def layer_flop(self, tokens: int, pairs: int) -> int:
        """One layer's forward and backward."""
        return 6 * self.layer_parameters * tokens + self.attention_flop(pairs)


def _points(prompts: Sequence[int], responses: Sequence[int], groups: Sequence[int]) -> tuple[Point, ...]:
    """The cheapest first, so that a short budget still gives most of them."""
    points = [Point(p, r, g) for p in prompts for r in responses for g in groups]
    return tuple(sorted(points, key=lambda point: (point.flat_pairs, point.flat_tokens)))


QWEN_7B = Sizes(
    hidden=3584,
    intermediate=18944,
    heads=28,
    key_heads=4,
    head_dim=128,
    max_layers=28,
    vocab=2048,
    dtype=torch.bfloat16,
    points=_points((8192, 32768, 131072), (256, 2048), (8, 32)),
)
TINY = Sizes(
    hidden=64,
    intermediate=128,
    heads=4,
    key_heads=2,
    head_dim=16,
    max_layers=2,
    vocab=64,
    dtype=torch.float32,
    points=_points((64, 256), (4, 32), (2, 4)),
)


@dataclass
class Clock:
    """The script's own time."""

    budget_seconds: float
    started: float = field(default_factory=time.perf_counter)

    @property
    def elapsed_seconds(self) -> float:
        return time.perf_counter() - self.started

    @property
    def left_seconds(self) -> float:
        return self.budget_seconds - self.elapsed_seconds


@dataclass
class Report:
    """What has been found so far; the JSON file."""

    machine: dict[str, Any]
    settings: dict[str, Any]
    exactness: list[dict[str, Any]] = field(default_factory=list)
    attention: list[dict[str, Any]] = field(default_factory=list)
    tree_vs_flat: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[dict[str, str]] = field(default_factory=list)
    failures: list[dict[str, str]] = field(default_factory=list)
    elapsed_seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.failures and all(check["passed"] for check in self.exactness)

    def leave_out(self, what: str, reason: str) -> None:
        self.left_out.append({"what": what, "reason": reason})
        print(f"  left out: {what}: {reason}", flush=True)

    def save(self, path: Path | None, clock: Clock) -> None:
        """Called after every point: what was found survives whoever ends the script early."""
        self.elapsed_seconds = clock.elapsed_seconds
        if path is not None:
            path.write_text(json.dumps({**asdict(self), "passed": self.passed}, indent=1) + "\n")

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """One check that breaks is reported, and the others still run."""
        try:
            yield
        except torch.cuda.OutOfMemoryError as error:
            self.leave_out(what, f"out of memory ({str(error).splitlines()[0]})")
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            self.failures.append({"what": what, "reason": reason})
            print(f"  FAILED: {what}: {reason}", flush=True)


# ------------------------------------------------------------------------------------------------ exactness


def check_exactness(device: torch.device, report: Report) -> None:
    """Every kernel, dtype and head shape: a tree through the executor, and packed segments directly."""
    shapes = [(8, 2, 64), (8, 2, 128), (4, 4, 64)] if device.type == "cuda" else [(8, 2, 16), (4, 4, 12)]
    for name in available_kernels(device):
        for dtype in BOUNDS:
            if dtype not in choose_kernel(device, torch.bfloat16, name).capabilities.dtypes:
                continue
            for shape in shapes:
                kernel = choose_kernel(device, dtype, name, shape[2])
                checks = [("tree", _check_tree)]
                if kernel.capabilities.packs_segments:
                    checks.append(("segments", _check_segments))
                for check, run in checks:
                    what = f"{name} {_name(dtype)} {check} heads {shape[0]}/{shape[1]} head dim {shape[2]}"
                    with report.guard(what):
                        out_error, grad_error = run(kernel, dtype, shape, device)
                        _record_exactness(report, name, dtype, check, shape, out_error, grad_error)


def _record_exactness(report, name, dtype, check, shape, out_error, grad_error):  # type: ignore[no-untyped-def]
    passed = max(out_error, grad_error) <= BOUNDS[dtype]
    report.exactness.append(
        {
            "kernel": name,
            "dtype": _name(dtype),
            "check": check,
            "query_heads": shape[0],
            "key_heads": shape[1],
            "head_dim": shape[2],
            "out_relative_error": out_error,
            "grad_relative_error": grad_error,
            "bound_relative_error": BOUNDS[dtype],
            "passed": passed,
        }
    )
    print(
        f"  {name:12} {_name(dtype):9} {check:9} {shape[0]}/{shape[1]} heads of {shape[2]:3}: "
        f"out {out_error:.1e} grad {grad_error:.1e} {'ok' if passed else 'NOT EXACT'}",
        flush=True,
    )


def _check_tree(kernel, dtype, shape, device):  # type: ignore[no-untyped-def]
    """A deep tree with one-token branches: tiles, merged by the executor."""
    generator = torch.Generator().manual_seed(0)
    prompt, stem, other = (torch.randint(0, 50, (n,), generator=generator) for n in (301, 40, 7))
    tails = [torch.randint(0, 50, (n,), generator=generator) for n in (1, 129, 64)]
    rows = [Row("a", prompt, torch.cat([stem, tail])) for tail in tails]
    packed = pack(fold([*rows, Row("a", prompt, other), Row("b", other, stem)], "prefix"))
    program = compile_program(lower_local(packed.nodes), kernel=kernel.name)
    allowed = torch.zeros(packed.num_tokens, packed.num_tokens, dtype=torch.bool)
    for node in packed.nodes:
        allowed[node.start : node.stop, node.start : node.stop] = True
        allowed[node.stop : node.subtree_stop, node.start : node.stop] = True
    allowed = allowed.tril().to(device)
    grad_out, q, k, v = _random(packed.num_tokens, shape, dtype, device)
    scale = shape[2] ** -0.5
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = tile_attention(*leaves, program, scale)
    grads = torch.autograd.grad(out, leaves, grad_out)
    return _errors((out, *grads), _dense(grad_out, q, k, v, allowed, scale))


def _check_segments(kernel, dtype, shape, device):  # type: ignore[no-untyped-def]
    borders = (0, 1, 200, 201, 513, 640)
    grad_out, q, k, v = _random(borders[-1], shape, dtype, device)
    allowed = torch.zeros(borders[-1], borders[-1], dtype=torch.bool, device=device)
    for start, stop in pairwise(borders):
        allowed[start:stop, start:stop] = True
    scale = shape[2] ** -0.5
    out, lse = kernel.forward_segments(q, k, v, borders, scale)
    grads = kernel.backward_segments(grad_out, q, k, v, out, lse, borders, scale)
    return _errors((out, *grads), _dense(grad_out, q, k, v, allowed.tril(), scale))


def _random(
    tokens: int, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """grad_out, q, k, v: [1,H,T,D] stored token by token, as a layer's projections are."""
    heads, key_heads, dim = shape
    generator = torch.Generator().manual_seed(0)
    draws = (
        torch.randn(1, tokens, h, dim, generator=generator) for h in (heads, heads, key_heads, key_heads)
    )
    return [x.to(device, dtype).transpose(1, 2) for x in draws]


def _dense(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float) -> list[Tensor]:
    """out and the gradients of q, k, v: one masked softmax in float64."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    q, k, v = leaves
    scores = (q.unflatten(1, (k.shape[1], -1)) @ k.unsqueeze(2).mT) * scale
    out = (scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ v.unsqueeze(2)).flatten(1, 2)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out.double())]


def _errors(ours: Sequence[Tensor], reference: Sequence[Tensor]) -> tuple[float, float]:
    errors = [
        ((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, reference, strict=True)
    ]
    return errors[0], max(errors[1:])


# ------------------------------------------------------------------------------------- plain flash attention


@dataclass(frozen=True)
class RowBorders:
    """Where rows begin and end on the packed axis, as varlen attention is told."""

    borders: tuple[int, ...]
    cu_seqlens: Tensor
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> RowBorders:
        borders = [0]
        for length in lengths:
            borders.append(borders[-1] + length)
        return cls(
            tuple(borders), torch.tensor(borders, dtype=torch.int32, device=device), max(lengths, default=0)
        )


def plain_attention(q: Tensor, k: Tensor, v: Tensor, rows: RowBorders, scale: float, kernel: str) -> Tensor:
    """Causal attention of rows side by side, differentiable; nothing of this project's attention in it.

    [1,H,T,D], [1,K,T,D] twice -> [1,H,T,D]. On a GPU one varlen call of the library that ``kernel`` comes
    from; on the CPU torch's attention, row by row.
    """
    if not q.is_cuda:
        sdpa = torch.nn.functional.scaled_dot_product_attention
        parts = [
            sdpa(*(x[:, :, a:b] for x in (q, k, v)), is_causal=True, scale=scale, enable_gqa=True)
            for a, b in pairwise(rows.borders)
        ]
        return torch.cat(parts, dim=2)
    operands = [x.squeeze(0).transpose(0, 1) for x in (q, k, v)]
    sequences = (rows.cu_seqlens, rows.cu_seqlens, rows.longest, rows.longest)
    if kernel == "flash_attn2":
        from flash_attn import flash_attn_varlen_func

        out = flash_attn_varlen_func(*operands, *sequences, softmax_scale=scale, causal=True)
    elif kernel == "flash_attn3":
        from flash_attn_interface import flash_attn_varlen_func

        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        options = dict(zip(names, sequences, strict=True))
        out = flash_attn_varlen_func(*operands, **options, softmax_scale=scale, causal=True)
    else:
        out = torch.ops.aten._flash_attention_forward(*operands, *sequences, 0.0, True, False, scale=scale)
    out = out[0] if isinstance(out, tuple) else out
    return out.transpose(0, 1).unsqueeze(0)


def flat_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature around ``plain_attention``."""
    rows, kernel = kwargs[ROWS_KEY]
    assert attention_mask is None and scaling is not None and not dropout
    return plain_attention(query, key, value, rows, scaling, kernel).transpose(1, 2), None


# -------------------------------------------------------------------------------------------------- timing


@dataclass(frozen=True)
class Contestant:
    """What takes turns."""

    run: Callable[[], Any]
    prepare: Callable[[], Any] = lambda: None
    """Before each run, outside its time."""
    losses: list[Tensor] = field(default_factory=list)
    """Of the latest run."""


def timed(contestant: Contestant, device: torch.device) -> float:
    """Wall seconds of one run, the device's work included."""
    contestant.prepare()
    _synchronize(device)
    start = time.perf_counter()
    contestant.run()
    _synchronize(device)
    return time.perf_counter() - start


def take_turns(
    contestants: dict[str, Contestant], repeats: int, clock: Clock, device: torch.device
) -> dict[str, list[float]]:
    """A B A B ...: seconds of each run. Stops early, after a whole round, when the budget is nearly used."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(repeats):
        round_seconds = sum(times[-1] for times in seconds.values() if times)
        if round_seconds and round_seconds > clock.left_seconds:
            break
        for name, contestant in contestants.items():
            seconds[name].append(timed(contestant, device))
    return seconds


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def make_rows(point: Point, vocab: int) -> list[Row]:
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, vocab, (point.prompt_tokens,), generator=generator)
    size = (point.group_size, point.response_tokens)
    return [Row("group", prompt, response) for response in torch.randint(0, vocab, size, generator=generator)]


# ------------------------------------------------------------------------------------------ attention alone


def measure_attention(sizes: Sizes, options: argparse.Namespace, clock: Clock, report: Report) -> None:
    """TFLOP/s of a tree's tiles, and of plain varlen attention on about as many FLOPs."""
    device = torch.device(options.device)
    seconds_for_the_rest = 0.75 * clock.left_seconds
    seconds_per_flop = 0.0
    for point in sorted(sizes.points, key=lambda point: point.tree_pairs):
        flop = 2 * sizes.attention_flop(point.tree_pairs)
        expected = seconds_per_flop * flop * (1 + options.repeats)
        spare = clock.left_seconds - seconds_for_the_rest
        if expected > spare:
            report.leave_out(
                f"attention {point}",
                f"needs about {expected:.0f} s of {max(spare, 0):.0f} s left for this part",
            )
            continue
        with report.guard(f"attention {point}"):
            entry = _measure_attention_point(point, sizes, options, clock, device)
            report.attention.append(entry)
            busy = entry["tiles_seconds"] + entry["varlen_seconds"]
            seconds_per_flop = busy / (entry["tiles_flop"] + entry["varlen_flop"])
            print(
                f"  {point!s:24} tiles {entry['tiles_tflop_per_second']:7.3g} TFLOP/s, "
                f"varlen {entry['varlen_tflop_per_second']:7.3g} TFLOP/s, "
                f"ratio {entry['tiles_over_varlen_rate']:.2f}",
                flush=True,
            )


def _measure_attention_point(
    point: Point, sizes: Sizes, options: argparse.Namespace, clock: Clock, device: torch.device
) -> dict[str, Any]:
    shape, scale = (sizes.heads, sizes.key_heads, sizes.head_dim), sizes.head_dim**-0.5
    packed = pack(fold(make_rows(point, sizes.vocab), "prompt"))
    program = compile_program(lower_local(packed.nodes), kernel=options.kernel)
    num_rows = max(1, round(point.tree_pairs / _causal_pairs(point.row_tokens)))
    rows = RowBorders.of([point.row_tokens] * num_rows, device)
    tree, flat = (
        _random(n, shape, sizes.dtype, device) for n in (point.tree_tokens, num_rows * point.row_tokens)
    )
    for x in (*tree[1:], *flat[1:]):
        x.requires_grad_()

    def tiles() -> None:
        torch.autograd.grad(tile_attention(*tree[1:], program, scale), tree[1:], tree[0])

    def varlen() -> None:
        out = plain_attention(*flat[1:], rows, scale, options.kernel)
        torch.autograd.grad(out, flat[1:], flat[0])

    runs = {"tiles": Contestant(tiles), "varlen": Contestant(varlen)}
    for run in runs.values():
        timed(run, device)
    seconds = take_turns(runs, options.repeats, clock, device)
    flop = {
        "tiles": sizes.attention_flop(point.tree_pairs),
        "varlen": sizes.attention_flop(num_rows * _causal_pairs(point.row_tokens)),
    }
    median = {name: statistics.median(times) for name, times in seconds.items()}
    rate = {name: flop[name] / median[name] / 1e12 for name in runs}
    return {
        **asdict(point),
        "kernel": choose_kernel(device, sizes.dtype, options.kernel, sizes.head_dim).name,
        "varlen_rows": num_rows,
        "repeats": len(seconds["tiles"]),
        **{f"{name}_flop": flop[name] for name in runs},
        **{f"{name}_seconds": median[name] for name in runs},
        **{f"{name}_tflop_per_second": rate[name] for name in runs},
        "tiles_over_varlen_rate": rate["tiles"] / rate["varlen"],
    }


# --------------------------------------------------------------------------------------------- tree or flat


class Stack:
    """A causal LM with few layers' worth of room to shrink, and what its passes cost."""

    def __init__(self, sizes: Sizes, device: torch.device, kernel: str) -> None:
        self.sizes, self.device, self.kernel = sizes, device, kernel
        config = Qwen2Config(
            vocab_size=sizes.vocab,
            hidden_size=sizes.hidden,
            intermediate_size=sizes.intermediate,
            num_hidden_layers=self._first_layers(),
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.key_heads,
            max_position_embeddings=1 << 18,
            tie_word_embeddings=False,
            use_sliding_window=False,
        )
        torch.manual_seed(0)
        with torch.device(device):
            self.model = AutoModelForCausalLM.from_config(config, dtype=sizes.dtype)
        self.model.train()
        prepare_model(self.model)
        AttentionInterface.register(FLAT_ATTENTION, flat_attention)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.options = PassOptions(head=HeadOptions(), kernel=kernel)
        self.bytes_per_token, self.bytes_per_token_and_layer = 0.0, 0.0

    def _first_layers(self) -> int:
        """As many as hold weights and gradients in a third of the memory."""
        free = free_bytes(self.device)
        if free is None:
            return self.sizes.max_layers
        layer = 2 * self.sizes.layer_parameters * self.sizes.dtype.itemsize
        return max(2, min(self.sizes.max_layers, int(free / 3 / layer)))

    @property
    def num_layers(self) -> int:
        return len(self.model.model.layers)

    def shrink(self, num_layers: int) -> None:
        """Drop layers for good; their memory goes to activations."""
        self.model.model.layers = self.model.model.layers[:num_layers]
        self.model.config.num_hidden_layers = num_layers
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def measure_memory(self) -> None:
        """Bytes a token costs in a pass, by layer, from two passes over a small tree."""
        point = self.sizes.points[0]
        peaks = {}
        layers = self.model.model.layers
        for num_layers in (1, 2):
            self.model.model.layers = layers[:num_layers]
            self.model.config.num_hidden_layers = num_layers
            contestant = self.tree(point)
            timed(contestant, self.device)
            peaks[num_layers] = peak_bytes(contestant, self.device)
        self.model.model.layers = layers
        self.model.config.num_hidden_layers = len(layers)
        self.bytes_per_token_and_layer = (peaks[2] - peaks[1]) / point.tree_tokens
        self.bytes_per_token = peaks[1] / point.tree_tokens - self.bytes_per_token_and_layer

    def pass_bytes(self, tokens: int, num_layers: int) -> float:
        return tokens * (self.bytes_per_token + num_layers * self.bytes_per_token_and_layer)

    def room_bytes(self, num_layers: int) -> float:
        """For a pass, after shrinking to so many layers."""
        free = free_bytes(self.device)
        if free is None:
            return float("inf")
        layer = 2 * self.sizes.layer_parameters * self.sizes.dtype.itemsize
        return MEMORY_SHARE * (free + (self.num_layers - num_layers) * layer)

    def tree(self, point: Point) -> Contestant:
        """One fused pass."""
        losses: list[Tensor] = []
        plan = plan_passes(
            make_rows(point, self.sizes.vocab), share="prompt", tokens_per_pass=point.tree_tokens
        )
        loss_fn = _loss_fn(point, self.device, losses)

        def run() -> None:
            run_passes(self.model, plan, loss_fn, self.options, device=self.device)

        return Contestant(run, lambda: self._prepare(ATTENTION_NAME, losses), losses)

    def flat(self, point: Point, rows_per_pass: int) -> Contestant:
        """The same rows side by side; the same layers, head and loss."""
        losses: list[Tensor] = []
        trees = fold(make_rows(point, self.sizes.vocab), "none")
        batches = [trees[i : i + rows_per_pass] for i in range(0, len(trees), rows_per_pass)]
        loss_fn = _loss_fn(point, self.device, losses)

        def run() -> None:
            for batch in batches:
                packed = pack(batch).to(self.device)
                borders = RowBorders.of([row.num_tokens for row in batch], self.device)
                with scoring_head(self.model.get_output_embeddings(), packed, self.options.head):
                    scores = self.model(
                        input_ids=packed.input_ids.unsqueeze(0),
                        position_ids=packed.position_ids.unsqueeze(0),
                        attention_mask=None,
                        use_cache=False,
                        logits_to_keep=packed.scored_positions,
                        **{ROWS_KEY: (borders, self.kernel)},
                    ).logits
                log_probs = packed.unfold(scores[0, 0])
                loss_fn(RowScores(row_indices=packed.row_indices, log_probs=log_probs)).backward()

        return Contestant(run, lambda: self._prepare(FLAT_ATTENTION, losses), losses)

    def _prepare(self, attention: str, losses: list[Tensor]) -> None:
        losses.clear()
        self.model.set_attn_implementation(attention)
        # Kept, so that memory above what is held before a run is the pass's own.
        self.model.zero_grad(set_to_none=False)

    def gradient_norm(self) -> float:
        norms = [parameter.grad.float().norm() for parameter in self.model.parameters()]
        return torch.stack(norms).norm().item()


def _loss_fn(point: Point, device: torch.device, losses: list[Tensor]) -> Callable[[RowScores], Tensor]:
    """A weight of its own for every response token, so that no two rows can be swapped unseen."""
    generator = torch.Generator().manual_seed(1)
    size = (point.group_size, point.response_tokens)
    weights = (torch.randn(size, generator=generator) / point.response_tokens).to(device)

    def loss_fn(scores: RowScores) -> Tensor:
        parts = zip(scores.row_indices, scores.log_probs, strict=True)
        loss = torch.stack([(weights[row] * log_probs).sum() for row, log_probs in parts]).sum()
        losses.append(loss.detach())
        return loss

    return loss_fn


def free_bytes(device: torch.device) -> int | None:
    """What torch could still allocate; None where nobody counts."""
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def peak_bytes(contestant: Contestant, device: torch.device) -> int:
    """Of one run, above what is held before it; 0 where nobody counts."""
    if device.type != "cuda":
        timed(contestant, device)
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    timed(contestant, device)
    return torch.cuda.max_memory_allocated(device) - before


def measure_tree_vs_flat(sizes: Sizes, options: argparse.Namespace, clock: Clock, report: Report) -> None:
    """Every point that fits in memory and time, the cheapest first."""
    device = torch.device(options.device)
    stack = Stack(sizes, device, options.kernel)
    stack.measure_memory()
    seconds_per_flop = 0.0
    for index, point in enumerate(sizes.points):
        share_seconds = clock.left_seconds / (len(sizes.points) - index)
        flop = sizes.layer_flop(point.tree_tokens, point.tree_pairs) + sizes.layer_flop(
            point.flat_tokens, point.flat_pairs
        )
        round_seconds = seconds_per_flop * flop
        refusal = _refusal(stack, point, round_seconds, clock)
        if refusal:
            report.leave_out(f"tree against flat {point}", refusal)
            continue
        stack.shrink(_layers_that_fit(stack, point, round_seconds * (1 + options.repeats), share_seconds))
        # The first round is untimed; what remains of the point's share goes to timed ones.
        rounds = share_seconds / max(round_seconds * stack.num_layers, 1e-9)
        repeats = max(1, min(options.repeats, int(rounds) - 1))
        with report.guard(f"tree against flat {point}"):
            entry = _measure_point(stack, point, repeats, clock)
            report.tree_vs_flat.append(entry)
            busy = entry["tree_seconds"] + entry["flat_seconds"]
            seconds_per_flop = busy / (flop * entry["num_layers"])
            _print_point(point, entry)
            report.save(options.json, clock)


def _refusal(stack: Stack, point: Point, round_seconds: float, clock: Clock) -> str | None:
    """Why not even one layer of a point can be measured. A point takes two rounds, the first untimed."""
    room = stack.room_bytes(1)
    for what, tokens in (("tree pass", point.tree_tokens), ("flat row", point.row_tokens)):
        need = stack.pass_bytes(tokens, 1)
        if need > room:
            return (
                f"a {what} of {tokens} tokens needs {need / 2**30:.1f} GiB, {room / 2**30:.1f} GiB are free"
            )
    if clock.left_seconds <= 2 * round_seconds:
        return f"needs about {2 * round_seconds:.0f} s, {max(0.0, clock.left_seconds):.0f} s are left"
    return None


def _layers_that_fit(stack: Stack, point: Point, layer_seconds: float, share_seconds: float) -> int:
    """The most layers with which both sides are one pass and all rounds fit in the point's share of the time.

    Where the flattened rows do not fit in one pass with a single layer, the tree's memory alone counts.
    """
    one_batch = stack.pass_bytes(point.flat_tokens, 1) <= stack.room_bytes(1)
    tokens = point.flat_tokens if one_batch else point.tree_tokens
    for num_layers in range(stack.num_layers, 1, -1):
        fits = stack.pass_bytes(tokens, num_layers) <= stack.room_bytes(num_layers)
        if fits and num_layers * layer_seconds <= share_seconds:
            return num_layers
    return 1


def _rows_per_pass(stack: Stack, point: Point) -> int:
    row_bytes = stack.pass_bytes(point.row_tokens, stack.num_layers)
    if row_bytes <= 0:
        return point.group_size
    fit = min(stack.room_bytes(stack.num_layers) / row_bytes, point.group_size)
    return max(1, int(fit))


def _measure_point(stack: Stack, point: Point, repeats: int, clock: Clock) -> dict[str, Any]:
    rows_per_pass = _rows_per_pass(stack, point)
    contestants = {"tree": stack.tree(point), "flat": stack.flat(point, rows_per_pass)}
    losses, peaks, norms = {}, {}, {}
    for name, contestant in contestants.items():
        peaks[name] = peak_bytes(contestant, stack.device)
        norms[name] = stack.gradient_norm()
        losses[name] = torch.stack(contestant.losses).sum().item()
    differences = {
        "loss_relative_difference": _relative_difference(losses["tree"], losses["flat"]),
        "gradient_norm_relative_difference": _relative_difference(norms["tree"], norms["flat"]),
    }
    bound = AGREEMENT[stack.sizes.dtype]
    if not max(differences.values()) <= bound:
        raise RuntimeError(f"tree and flat differ by more than {bound:.0e}: {differences}; not timed")
    seconds = take_turns(contestants, repeats, clock, stack.device)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    sizes = stack.sizes
    return {
        **asdict(point),
        "num_layers": stack.num_layers,
        "repeats": len(seconds["tree"]),
        "tree_tokens": point.tree_tokens,
        "flat_tokens": point.flat_tokens,
        "flat_passes": -(-point.group_size // rows_per_pass),
        "tree_seconds": median["tree"],
        "flat_seconds": median["flat"],
        "speedup": median["flat"] / median["tree"],
        "ideal_token_ratio": point.flat_tokens / point.tree_tokens,
        "ideal_flop_ratio": sizes.layer_flop(point.flat_tokens, point.flat_pairs)
        / sizes.layer_flop(point.tree_tokens, point.tree_pairs),
        "tree_peak_bytes": peaks["tree"],
        "flat_peak_bytes": peaks["flat"],
        **differences,
    }


def _relative_difference(a: float, b: float) -> float:
    return abs(a - b) / max(abs(a), abs(b), 1e-30)


def _print_point(point: Point, entry: dict[str, Any]) -> None:
    print(
        f"  {point!s:24} {entry['num_layers']:2} layers: tree {entry['tree_seconds']:.4g} s, flat "
        f"{entry['flat_seconds']:.4g} s in {entry['flat_passes']} passes, {entry['speedup']:.2f}x "
        f"(tokens {entry['ideal_token_ratio']:.2f}x, FLOPs {entry['ideal_flop_ratio']:.2f}x)",
        flush=True,
    )


# ---------------------------------------------------------------------------------------------------- main


def describe_machine(device: torch.device) -> dict[str, Any]:
    machine: dict[str, Any] = {
        "device": platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine |= {
            "device": properties.name,
            "device_memory_bytes": properties.total_memory,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "driver": _driver(),
        }
    return machine


def describe_settings(options: argparse.Namespace, sizes: Sizes, kernel: str) -> dict[str, Any]:
    return {
        "tiny": options.tiny,
        "kernel": kernel,
        "available_kernels": list(available_kernels(torch.device(options.device))),
        "dtype": _name(sizes.dtype),
        "budget_seconds": options.budget_seconds,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "query_heads": sizes.heads,
        "key_heads": sizes.key_heads,
        "head_dim": sizes.head_dim,
        "vocab_size": sizes.vocab,
    }


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return found.stdout.strip().split("\n")[0] or "unknown"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model at small points")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings here")
    parser.add_argument(
        "--budget-seconds", type=float, default=450, help="start nothing that would end later than this"
    )
    parser.add_argument("--repeats", type=int, default=3, help="timed rounds of each point")
    parser.add_argument("--kernel", default="auto", help="attention kernel of the timings")
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats}: give 1 or more")
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu would take days at these sizes; add --tiny")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "gpu_check: torch sees no CUDA device; try the script itself with --device cpu --tiny",
            file=sys.stderr,
        )
        return 2
    clock, device = Clock(options.budget_seconds), torch.device(options.device)
    sizes = TINY if options.tiny else QWEN_7B
    if options.device == "cuda":
        sizes = replace(sizes, dtype=torch.bfloat16)
    try:
        kernel = choose_kernel(device, sizes.dtype, options.kernel, sizes.head_dim).name
    except ConfigError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    report = Report(describe_machine(device), describe_settings(options, sizes, kernel))
    print(", ".join(f"{name} {value}" for name, value in report.machine.items()), flush=True)
    parts: dict[str, Callable[[], None]] = {
        "exactness": lambda: check_exactness(device, report),
        "attention": lambda: measure_attention(sizes, options, clock, report),
        "tree against flat": lambda: measure_tree_vs_flat(sizes, options, clock, report),
    }
    for title, run in parts.items():
        print(f"{title}:", flush=True)
        with report.guard(title):
            run()
        report.save(options.json, clock)
    print(f"{'passed' if report.passed else 'FAILED'} in {clock.elapsed_seconds:.0f} s", flush=True)
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
