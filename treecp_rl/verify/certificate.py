"""model config, lengths, dtype, world size -> every case compared with the dense oracle -> certificate.

A case passes when log-probs, entropy, sum of squared probabilities, loss, and EVERY parameter's gradient
are within the bound of the dtype:

float64     1e-12 everywhere: treecp and the oracle are the same function.
float32     5e-6 for gradients (relative) and loss, 2e-5 for log-probs (absolute). Where flattened float32 training
            on the same rows comes near 5e-6 itself (rows of hundreds of tokens), 1.5 x its error.
bfloat16    the whole gradient's relative L2 error is at most 1.25 x that of flattened bfloat16 training on
            the same rows and weights. Maxima over few rounded numbers are luck (either side wins by up to
            2 x on a batch without any sharing), so worst parameter and worst token may be 3 x flattened's.

A gradient's error is max|a-b| / max|b| over one parameter, the worst parameter counts. Score errors are
absolute; the loss's is relative where the loss exceeds 1.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from treecp_rl.engine.capabilities import require_supported
from treecp_rl.errors import ConfigError
from treecp_rl.planner.batch import Mode
from treecp_rl.tree import Share
from treecp_rl.verify.cases import Case, Lengths, bind_loss
from treecp_rl.verify.jobs import Job, build_cases, run_world
from treecp_rl.verify.losses import BatchLoss, LossSpec
from treecp_rl.verify.models import DTYPES, load_config, parameter_count, random_model
from treecp_rl.verify.oracle import (
    DenseScores,
    DenseStep,
    dense_step,
    max_relative_gradient_error,
    relative_l2_error,
)
from treecp_rl.verify.subject import Outcome

WORLD_SIZES = (1, 2, 4, 8)
PLANS: tuple[Mode, ...] = get_args(Mode)
DEFAULT_TIMEOUT_SECONDS = 600.0

_FLOAT64_BOUND = 1e-12
_FLOAT32_GRADIENT_BOUND = 5e-6
_FLOAT32_FLAT_FACTOR = 1.5
_FLOAT32_SCORE_BOUND = 2e-5
_HALF_L2_FACTOR = 1.25
_HALF_MAX_FACTOR = 3.0
# Matrix products of a model below this size gain nothing from a second thread, and lose much when the machine
# is shared: threads wait for each other longer than they compute.
_SMALL_MODEL_PARAMETERS = 5_000_000
# Below this, half-precision errors are rounding luck of single tokens.
_HALF_FLOOR = 2e-3
# In half precision a policy ratio that lands on the other side of a clip changes a gradient by more than any
# rounding does, in flattened training as well; so its cases use the family's smooth member.
_HALF_LOSS = LossSpec(
    objective="reinforce", aggregation="token-mean", kl="k2", kl_coef=0.1, entropy_coef=0.01
)


@dataclass(frozen=True)
class VerifyOptions:
    """What `treecp-rl verify` was asked for."""

    model_config: str | None = None
    num_layers: int | None = None
    vocab_size: int | None = None
    lengths: tuple[Lengths, ...] | None = None
    dtype: Literal["float64", "float32", "bfloat16", "all"] = "float64"
    world_size: int = 1
    share: Share = "prompt"
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    plans: tuple[Mode, ...] = ()
    """Empty: each rank has rows of its own. Otherwise all ranks share every pass, by each of these modes in turn."""

    def __post_init__(self) -> None:
        if self.world_size not in WORLD_SIZES:
            raise ConfigError(
                f"--world-size {self.world_size}: choose one of {', '.join(map(str, WORLD_SIZES))}"
            )

        unknown = sorted(set(self.plans) - set(PLANS))
        if unknown:
            raise ConfigError(f"--plans {','.join(unknown)}: choose all, or some of {', '.join(PLANS)}")

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(DTYPES) if self.dtype == "all" else (self.dtype,)


@dataclass(frozen=True)
class Errors:
    """Distances of one run of a case from the oracle."""

    gradient: float
    """max|a-b| / max|b| of the worst parameter."""
    gradient_l2: float
    """|a-b| / |b| of all parameters' gradients as one vector."""
    worst_parameter: str
    logprob: float
    entropy: float
    sum_pi_squared: float
    loss: float


@dataclass(frozen=True)
class Bounds:
    """What each distance may be."""

    gradient: float
    gradient_l2: float
    logprob: float
    entropy: float
    sum_pi_squared: float
    loss: float


@dataclass(frozen=True)
class CaseResult:
    """One case in one dtype."""

    name: str
    dtype: str
    world_size: int
    plan: Mode | None
    """None: each rank had rows of its own."""
    passed: bool
    errors: Errors
    bounds: Bounds
    flat: Errors | None
    """The same distances for flattened training in this dtype; None in float64, where bounds are absolute."""
    tokens_computed: int
    tokens_flat: int


@dataclass(frozen=True)
class Certificate:
    """All cases of one invocation."""

    model_type: str
    parameters: int
    dtype: str
    world_size: int
    share: str
    cases: tuple[CaseResult, ...]

    @property
    def passed(self) -> bool:
        return all(case.passed for case in self.cases)

    @property
    def max_relative_gradient_error(self) -> float:
        return max(case.errors.gradient for case in self.cases)

    @property
    def max_logprob_error(self) -> float:
        return max(case.errors.logprob for case in self.cases)

    def as_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "model_type": self.model_type,
            "parameters": self.parameters,
            "dtype": self.dtype,
            "world_size": self.world_size,
            "share": self.share,
            "max_relative_gradient_error": self.max_relative_gradient_error,
            "max_logprob_error": self.max_logprob_error,
            "cases": [_case_json(case) for case in self.cases],
        }


def certify(options: VerifyOptions) -> Certificate:
    """Run every case.

    Raises:
        UnsupportedModel: the config cannot run exactly.
        RankFailure: a spawned rank raised or hung.
    """
    config = load_config(options.model_config, options.num_layers, options.vocab_size)
    require_supported(config)
    parameters = parameter_count(config)
    _require_memory(config, parameters)
    with _threads_for(parameters):
        cases = tuple(result for dtype in options.dtypes for result in _certify_dtype(options, config, dtype))
    return Certificate(
        model_type=config.model_type,
        parameters=parameters,
        dtype=options.dtype,
        world_size=options.world_size,
        share=options.share,
        cases=cases,
    )


@contextmanager
def _threads_for(parameters: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if parameters < _SMALL_MODEL_PARAMETERS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _certify_dtype(options: VerifyOptions, config: PretrainedConfig, dtype: str) -> Iterator[CaseResult]:
    cases = build_cases(config, options.lengths)
    if options.plans:
        # Ranks of a domain all hold the same rows.
        cases = tuple(case for case in cases if not case.is_about_dealing)
    oracle = random_model(config, torch.float64, drawn_in=DTYPES[dtype])
    references, losses = zip(*(_reference(oracle, case, dtype) for case in cases), strict=True)
    plans = options.plans or (None,)
    names = tuple(case.name for case in cases)
    job = Job(config, dtype, options.share, options.lengths, names, tuple(losses), plans)
    outcomes = run_world(job, options.world_size, options.timeout_seconds)
    flats: list[Errors | None] = [None] * len(cases)
    if dtype != "float64":
        model = random_model(config, DTYPES[dtype], drawn_in=DTYPES[dtype])
        flats = [
            _distance(_as_outcome(dense_step(model, case.rows, loss, math_attention=False)), reference)
            for case, loss, reference in zip(cases, losses, references, strict=True)
        ]
    of_case = list(zip(cases, references, flats, strict=True))
    runs = [(plan, *entry) for plan in plans for entry in of_case]
    for (plan, case, reference, flat), outcome in zip(runs, outcomes, strict=True):
        errors, bounds = _distance(outcome, reference), _bounds(dtype, flat)
        yield CaseResult(
            name=case.name,
            dtype=dtype,
            world_size=options.world_size,
            plan=plan,
            passed=_within(errors, bounds),
            errors=errors,
            bounds=bounds,
            flat=flat,
            tokens_computed=outcome.tokens_computed,
            tokens_flat=outcome.tokens_flat,
        )


def _reference(oracle: nn.Module, case: Case, dtype: str) -> tuple[DenseStep, BatchLoss]:
    """The oracle's step and the loss it took; old and reference policies lie near the oracle's own scores."""
    bound: list[BatchLoss] = []

    def loss(scores: DenseScores) -> Tensor:
        bound.append(bind_loss(case, scores.log_probs, _HALF_LOSS if dtype == "bfloat16" else None))
        return bound[0](scores)

    step = dense_step(oracle, case.rows, loss)
    if not any(gradient.any() for gradient in step.gradients.values()):
        # Zero compared with zero proves nothing.
        raise ConfigError(
            f"case {case.name} has a gradient of exactly zero and would prove nothing; "
            "give it response tokens (--lengths)"
        )
    return step, bound[0]


def _distance(outcome: Outcome, reference: DenseStep) -> Errors:
    gradient = max_relative_gradient_error(outcome.gradients, reference.gradients)

    def scores_error(name: str) -> float:
        expected = getattr(reference.scores, name)
        seen = [recorded[name] for recorded in (outcome.update, outcome.forward_only)]
        return max((_max_difference(rows, expected) for rows in seen), default=0.0)

    return Errors(
        gradient=gradient.error,
        gradient_l2=relative_l2_error(outcome.gradients, reference.gradients),
        worst_parameter=gradient.parameter,
        logprob=scores_error("log_probs"),
        entropy=scores_error("entropy"),
        sum_pi_squared=scores_error("sum_pi_squared"),
        loss=abs(outcome.loss - reference.loss) / max(1.0, abs(reference.loss)),
    )


def _max_difference(rows: dict[int, Tensor], expected: Sequence[Tensor]) -> float:
    """Worst absolute difference; a row that is missing or has another length is infinitely wrong."""
    if rows.keys() != set(range(len(expected))):
        return float("inf")
    worst = 0.0
    for row, values in rows.items():
        if values.shape != expected[row].shape:
            return float("inf")
        if values.numel():
            difference = (values.double() - expected[row].cpu()).abs().max().item()
            worst = max(worst, difference if difference == difference else float("inf"))
    return worst


def _as_outcome(step: DenseStep) -> Outcome:
    scores = {
        name: dict(enumerate(getattr(step.scores, name)))
        for name in ("log_probs", "entropy", "sum_pi_squared")
    }
    return Outcome(scores, scores, step.loss, step.gradients, tokens_computed=0, tokens_flat=0)


def _bounds(dtype: str, flat: Errors | None) -> Bounds:
    if dtype == "float64":
        return Bounds(*[_FLOAT64_BOUND] * 6)
    assert flat is not None
    if dtype == "float32":
        bound, score = _FLOAT32_GRADIENT_BOUND, _FLOAT32_SCORE_BOUND
        gradient = max(bound, _FLOAT32_FLAT_FACTOR * flat.gradient)
        return Bounds(gradient, bound, score, score, score, bound)
    return Bounds(
        gradient=_HALF_MAX_FACTOR * flat.gradient,
        gradient_l2=_HALF_L2_FACTOR * flat.gradient_l2,
        logprob=_HALF_MAX_FACTOR * flat.logprob + _HALF_FLOOR,
        entropy=_HALF_MAX_FACTOR * flat.entropy + _HALF_FLOOR,
        sum_pi_squared=_HALF_MAX_FACTOR * flat.sum_pi_squared + _HALF_FLOOR,
        loss=_HALF_MAX_FACTOR * flat.loss + _HALF_FLOOR,
    )


def _within(errors: Errors, bounds: Bounds) -> bool:
    # Written so that a nan fails.
    return all(getattr(errors, name) <= bound for name, bound in asdict(bounds).items())


def _case_json(case: CaseResult) -> dict[str, Any]:
    errors = asdict(case.errors)
    return {
        "name": case.name,
        "dtype": case.dtype,
        "world_size": case.world_size,
        "plan": case.plan,
        "passed": case.passed,
        "max_relative_gradient_error": errors.pop("gradient"),
        "gradient_l2_error": errors.pop("gradient_l2"),
        "worst_parameter": errors.pop("worst_parameter"),
        **{f"max_{name}_error": error for name, error in errors.items()},
        "bounds": asdict(case.bounds),
        "flat": asdict(case.flat) if case.flat is not None else None,
        "tokens_computed": case.tokens_computed,
        "tokens_flat": case.tokens_flat,
    }


def _require_memory(config: PretrainedConfig, parameters: int) -> None:
    """Oracle and engine each hold weights and two copies of gradients in up to 8 bytes a number."""
    needed = 6 * 8 * parameters
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > available:
        raise ConfigError(
            f"{config.model_type} with {parameters / 1e6:,.0f} M parameters needs about "
            f"{needed / 2**30:.0f} GiB to verify, this machine has {available / 2**30:.0f} GiB; "
            "pass --num-layers and --vocab-size"
        )


def render(certificate: Certificate) -> str:
    """The certificate as a table for the screen."""
    header = (
        f"{'case':<29}{'plan':<20}{'dtype':<10}{'gradient':>10}{'(L2)':>10}{'log-prob':>10}{'entropy':>10}{'loss':>10}"
        f"{'bound':>10}{'tokens':>8}{'flat':>7}  "
    )
    lines = [header, "-" * len(header)]
    for case in certificate.cases:
        errors = case.errors
        numbers = (
            errors.gradient,
            errors.gradient_l2,
            errors.logprob,
            errors.entropy,
            errors.loss,
            case.bounds.gradient_l2,
        )
        lines.append(
            f"{case.name:<29}{case.plan or '-':<20}{case.dtype:<10}"
            + "".join(f"{number:>10.1e}" for number in numbers)
            + f"{case.tokens_computed:>8}{case.tokens_flat:>7}  {'ok' if case.passed else 'MISSED'}"
        )
        if not case.passed:
            lines.append(f"    worst parameter {errors.worst_parameter}; bounds {asdict(case.bounds)}")
    lines.append("-" * len(header))
    lines.append(
        f"{'exact' if certificate.passed else 'NOT exact'}: {certificate.model_type}, "
        f"{certificate.parameters:,} parameters, world size {certificate.world_size}, "
        f"share={certificate.share}; worst gradient error {certificate.max_relative_gradient_error:.1e}, "
        f"worst log-prob error {certificate.max_logprob_error:.1e}"
    )
    return "\n".join(lines)
