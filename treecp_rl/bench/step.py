"""(prompt, response, group size) -> step time and memory of three engines -> ratios beside the ideal.

A step is what a GRPO iteration asks of a training worker: old log-probs with entropy, reference log-probs,
one update with optimizer. The engines take turns (A B C A B C ...) on the same rows in one process, so that
whatever else the machine does hits all of them; medians are reported, of CPU time and of wall time.

The ideal speed-up is the token ratio G (P + R) / (P + G R). Attention and the LM head can beat it (the
prompt's logits are never computed); the optimizer, which costs all engines the same, holds it down.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from treecp_rl.bench.engines import (
    Batch,
    Contestant,
    StockSettings,
    build_prefix_grouper,
    build_stock,
    build_treecp,
    make_batch,
    save_model,
    verl_world,
)
from treecp_rl.bench.memory import peak_bytes
from treecp_rl.errors import ConfigError, TreeCPError

PHASES = ("old_log_prob", "ref_log_prob", "update")
TREECP, FLAT, PREFIX_GROUPER = "treecp", "flat", "prefix_grouper"
FLAT_WHOLE_GROUP = "flat_whole_group"
_GRADIENT_NORM_TOLERANCE = 1e-4


class BenchError(TreeCPError):
    """The engines did not compute the same thing, so comparing their times means nothing."""


@dataclass(frozen=True)
class BenchOptions:
    """What `treecp-rl bench step` was asked for."""

    cases: tuple[tuple[int, int], ...] = ((2048, 64), (512, 512), (64, 2048))
    group_size: int = 8
    vocab_size: int = 4096
    repeats: int = 3
    threads: int = 1
    tuned_peer: bool = False
    """Give PrefixGrouper the causal kernel for prompts, which its padding masks do not allow it."""


@dataclass(frozen=True)
class Timing:
    """Medians over the rounds; seconds of each phase and of the whole step."""

    cpu: dict[str, float]
    wall: dict[str, float]

    @property
    def cpu_total(self) -> float:
        return sum(self.cpu.values())

    @property
    def wall_total(self) -> float:
        return sum(self.wall.values())


@dataclass(frozen=True)
class CaseReport:
    """One (prompt, response) shape. Dictionaries are keyed by engine."""

    prompt: int
    response: int
    group_size: int
    flat_settings: StockSettings
    timings: dict[str, Timing]
    peak_bytes: dict[str, int]
    attention_bytes: dict[str, int]

    @property
    def tokens_tree(self) -> int:
        return self.prompt + self.group_size * self.response

    @property
    def tokens_flat(self) -> int:
        return self.group_size * (self.prompt + self.response)

    @property
    def ideal_speedup(self) -> float:
        return self.tokens_flat / self.tokens_tree

    def speedup(self, other: str, clock: str = "cpu_total") -> float:
        return float(getattr(self.timings[other], clock) / getattr(self.timings[TREECP], clock))

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "response": self.response,
            "group_size": self.group_size,
            "tokens_tree": self.tokens_tree,
            "tokens_flat": self.tokens_flat,
            "ideal_speedup": self.ideal_speedup,
            "speedup_vs_flat": self.speedup(FLAT),
            "speedup_vs_prefix_grouper": self.speedup(PREFIX_GROUPER),
            "wall_speedup_vs_flat": self.speedup(FLAT, "wall_total"),
            "wall_speedup_vs_prefix_grouper": self.speedup(PREFIX_GROUPER, "wall_total"),
            "peak_bytes": self.peak_bytes[TREECP],
            "peak_bytes_flat": self.peak_bytes[FLAT],
            "peak_bytes_flat_whole_group": self.peak_bytes[FLAT_WHOLE_GROUP],
            "peak_bytes_prefix_grouper": self.peak_bytes[PREFIX_GROUPER],
            "attention_bytes": self.attention_bytes[TREECP],
            "attention_bytes_flat": self.attention_bytes[FLAT],
            "attention_bytes_prefix_grouper": self.attention_bytes[PREFIX_GROUPER],
            "flat_settings": asdict(self.flat_settings),
            "cpu_seconds": {name: timing.cpu for name, timing in self.timings.items()},
            "wall_seconds": {name: timing.wall for name, timing in self.timings.items()},
        }


@dataclass(frozen=True)
class BenchReport:
    """All shapes of one invocation, and what they ran on."""

    options: BenchOptions
    cases: tuple[CaseReport, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "model": "qwen2, 4 layers, hidden 256, intermediate 1024, 8 query and 2 key-value heads",
            "dtype": "float32",
            "vocab_size": self.options.vocab_size,
            "repeats": self.options.repeats,
            "threads": self.options.threads,
            "tuned_prefix_grouper": self.options.tuned_peer,
            "machine": {
                "processor": platform.machine(),
                "cores": os.cpu_count(),
                "torch": torch.__version__,
                "load_average": os.getloadavg()[0],
            },
            "cases": [case.as_json() for case in self.cases],
        }


def parse_cases(text: str) -> tuple[tuple[int, int], ...]:
    """'2048:64,512:512' -> ((2048, 64), (512, 512))."""
    cases = []
    for part in text.split(","):
        try:
            prompt, response = (int(number) for number in part.split(":"))
        except ValueError as error:
            raise ConfigError(
                f"--cases: cannot read {part!r}; write PROMPT:RESPONSE,... as 2048:64"
            ) from error
        if prompt < 1 or response < 1:
            raise ConfigError(f"--cases: {part!r} needs at least one prompt and one response token")
        cases.append((prompt, response))
    return tuple(cases)


def measure(options: BenchOptions, progress: Callable[[str], None] = lambda line: None) -> BenchReport:
    """Run every shape.

    Raises:
        BenchError: the engines' first updates have different gradient norms.
    """
    torch.set_num_threads(options.threads)
    # verl reports on stdout, which here belongs to the result.
    with (
        redirect_stdout(sys.stderr),
        tempfile.TemporaryDirectory(prefix="treecp-bench-") as folder,
        verl_world(),
    ):
        longest = max(prompt + response for prompt, response in options.cases)
        model = save_model(Path(folder), options.vocab_size, longest)
        cases = tuple(_measure_case(options, model, *lengths, progress) for lengths in options.cases)
    return BenchReport(options, cases)


def _measure_case(
    options: BenchOptions, model: Path, prompt: int, response: int, progress: Callable[[str], None]
) -> CaseReport:
    from treecp_rl.bench.attention import attention_bytes

    batch = make_batch(prompt, response, options.group_size, options.vocab_size)
    progress(f"prompt {prompt}, response {response}: warming up")
    whole = {"use_remove_padding": False, "micro_batch_size_per_gpu": options.group_size}
    treecp = Contestant(TREECP, build_treecp(model), whole)
    grouper = Contestant(PREFIX_GROUPER, build_prefix_grouper(model, tuned=options.tuned_peer), whole)
    norms = {treecp.name: _first_update(treecp, batch), grouper.name: _first_update(grouper, batch)}
    stock = _try_stock(model, batch, options.group_size, progress)
    fastest = min(stock, key=lambda one: one.seconds)
    flat, norms[FLAT] = fastest.contestant, fastest.gradient_norm
    _require_equal_norms(norms)
    contestants = (treecp, flat, grouper)
    rounds = []
    for number in range(options.repeats):
        rounds.append({contestant.name: _time_step(contestant, batch) for contestant in contestants})
        progress(f"prompt {prompt}, response {response}: round {number + 1} of {options.repeats}")
    return CaseReport(
        prompt=prompt,
        response=response,
        group_size=options.group_size,
        flat_settings=fastest.settings,
        timings={c.name: _median_timing([one[c.name] for one in rounds]) for c in contestants},
        peak_bytes={c.name: _peak_of_step(c, batch) for c in contestants}
        | {FLAT_WHOLE_GROUP: _peak_of_step(stock[-1].contestant, batch)},
        attention_bytes=attention_bytes(prompt, response, options.group_size, tuned_peer=options.tuned_peer),
    )


@dataclass(frozen=True)
class _Tried:
    """verl's own engine with one choice of settings."""

    settings: StockSettings
    contestant: Contestant
    seconds: float
    """CPU time of its first update, after a warm-up forward."""
    gradient_norm: float


def _try_stock(
    model: Path, batch: Batch, group_size: int, progress: Callable[[str], None]
) -> tuple[_Tried, ...]:
    """verl's own engine with each of its settings; the whole group in one micro-batch comes last.

    Several rows in one micro-batch without padding are left out: torch's attention then needs a dense mask
    over all of them, which was two to four times slower than one row at a time wherever it was measured.
    """
    tried = []
    for settings in (
        StockSettings(remove_padding=True, micro_batch_rows=1),
        StockSettings(remove_padding=False, micro_batch_rows=1),
        StockSettings(remove_padding=False, micro_batch_rows=group_size),
    ):
        options = {
            "use_remove_padding": settings.remove_padding,
            "micro_batch_size_per_gpu": settings.micro_batch_rows,
        }
        contestant = Contestant(FLAT, build_stock(model, settings.remove_padding), options)
        contestant.ref_log_probs(batch)
        with _stopwatch() as elapsed:
            norm = _first_update(contestant, batch)
        progress(f"  an update of verl's engine with {settings}: {elapsed[0]:.2f} s of CPU")
        tried.append(_Tried(settings, contestant, elapsed[0], norm))
    return tuple(tried)


def _first_update(contestant: Contestant, batch: Batch) -> float:
    """Gradient norm of the first update, which also warms the engine up; all start from the same weights."""
    return float(contestant.update(batch)["metrics"]["grad_norm"])


def _require_equal_norms(norms: dict[str, float]) -> None:
    expected = norms[FLAT]
    for name, norm in norms.items():
        if not abs(norm - expected) <= _GRADIENT_NORM_TOLERANCE * expected:
            raise BenchError(
                f"the first gradient norm of {name} is {norm:.6f}, verl's own engine has {expected:.6f}; "
                "run `treecp-rl verify` to find which of them is wrong"
            )


def _time_step(contestant: Contestant, batch: Batch) -> Timing:
    cpu, wall = {}, {}
    work = (contestant.old_log_probs, contestant.ref_log_probs, contestant.update)
    for phase, run in zip(PHASES, work, strict=True):
        with _stopwatch() as elapsed:
            run(batch)
        cpu[phase], wall[phase] = elapsed
    return Timing(cpu, wall)


@contextmanager
def _stopwatch() -> Iterator[list[float]]:
    """[CPU seconds (user and system, all threads), wall seconds], filled in on leaving."""
    elapsed: list[float] = []
    cpu, wall = time.process_time(), time.perf_counter()
    yield elapsed
    elapsed.extend((time.process_time() - cpu, time.perf_counter() - wall))


def _median_timing(timings: Sequence[Timing]) -> Timing:
    def median(clock: str) -> dict[str, float]:
        return {phase: statistics.median(getattr(one, clock)[phase] for one in timings) for phase in PHASES}

    return Timing(median("cpu"), median("wall"))


def _peak_of_step(contestant: Contestant, batch: Batch) -> int:
    """Most bytes above weights and optimizer state, over the three phases."""
    contestant.engine.optimizer_zero_grad()

    def step() -> None:
        for run in (contestant.old_log_probs, contestant.ref_log_probs, contestant.update):
            run(batch)

    return peak_bytes(step)


def render(report: BenchReport) -> str:
    """Ratios beside the ideal, one line a shape."""
    header = (
        f"{'prompt':>7}{'response':>9}{'G':>4}{'ideal':>8}{'vs flat':>9}{'(wall)':>8}{'vs PG':>8}{'(wall)':>8}"
        f"{'peak MiB':>10}{'flat':>8}{'PG':>8}{'attn MiB':>10}{'flat':>8}{'PG':>8}"
    )
    lines = [header, "-" * len(header)]
    for case in report.cases:
        mib = [case.peak_bytes[name] / 2**20 for name in (TREECP, FLAT, PREFIX_GROUPER)]
        attention = [case.attention_bytes[name] / 2**20 for name in (TREECP, FLAT, PREFIX_GROUPER)]
        lines.append(
            f"{case.prompt:>7}{case.response:>9}{case.group_size:>4}{case.ideal_speedup:>8.2f}"
            f"{case.speedup(FLAT):>9.2f}{case.speedup(FLAT, 'wall_total'):>8.2f}"
            f"{case.speedup(PREFIX_GROUPER):>8.2f}{case.speedup(PREFIX_GROUPER, 'wall_total'):>8.2f}"
            f"{mib[0]:>10.0f}{mib[1]:>8.0f}{mib[2]:>8.0f}{attention[0]:>10.1f}{attention[1]:>8.1f}{attention[2]:>8.1f}"
        )
    lines.append("-" * len(header))
    lines.append(
        "Speed-ups are ratios of CPU time (wall time beside them), medians of "
        f"{report.options.repeats} interleaved rounds, {report.options.threads} thread(s)."
    )
    for case in report.cases:
        lines.append(f"flat at {case.prompt}:{case.response} ran with {case.flat_settings}")
    return "\n".join(lines)
