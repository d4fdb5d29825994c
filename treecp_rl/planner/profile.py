"""JSON file <-> ClusterProfile: what a model costs on a cluster, in seconds and bytes, for every term of a plan.

A profile belongs to one model. It is measured once (``treecp-rl calibrate``) or estimated from data sheets, and nudged
by step reports, each of which is bounded, so that one odd step cannot spoil it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

from treecp_rl.errors import ConfigError
from treecp_rl.planner.cost import ModelShape

Form = Literal["fused", "split", "flat"]
"""Prompt and responses in one pass; a prefill pass and replay rounds; every row on its own."""
FORMS: tuple[Form, ...] = ("fused", "split", "flat")

SHIPPED = Path(__file__).parent.parent / "profiles"
REFINE_WEIGHT = 0.1
"""Part of a step's surprise that a factor takes over."""
SURPRISE_LIMIT = math.log(1.25)
"""A step's measured time counts as at most this much (log) above or below the predicted one."""
FACTOR_LIMIT = 4.0
"""No factor leaves [1 / limit, limit]: beyond it the profile is of another machine, to be measured anew."""


@dataclass(frozen=True, slots=True)
class Affine:
    """Seconds of n tokens, n > 0: ``fixed_s + n * per_token_s``."""

    fixed_s: float
    per_token_s: float


@dataclass(frozen=True, slots=True)
class TileCost:
    """Seconds of one attention kernel call over all heads: ``per_tile_s + pairs * per_pair_s``. Tiles that the executor
    joins are one call."""

    per_tile_s: float
    per_pair_s: float


@dataclass(frozen=True, slots=True)
class Link:
    """Seconds of one exchange: ``latency_s + bytes * per_byte_s``, bytes being those of the busiest direction."""

    latency_s: float
    per_byte_s: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a rank."""

    bytes_per_rank: int
    """What a pass may hold: weights, gradients and optimizer states are not in it."""
    checkpointed_bytes_per_token: int
    """Activations outside of attention of one token where layers are checkpointed: all inputs of layers, and what the
    layer keeps that is recomputed."""
    kept_bytes_per_token: int
    """What all layers keep where they are not."""


@dataclass(frozen=True, slots=True)
class Factors:
    """Measured over predicted seconds of each form (the paper's gamma, Eq. 7)."""

    fused: float = 1.0
    split: float = 1.0
    flat: float = 1.0


@dataclass(frozen=True, slots=True)
class ClusterProfile:
    """What one model costs on one cluster. SI units: seconds, bytes."""

    name: str
    date: str
    """Of the measurement or estimate, ISO."""
    kind: Literal["measured", "estimate"]
    sources: tuple[str, ...]
    """Where the numbers come from: the command that measured them, or publications."""
    model: str
    shape: ModelShape
    ranks_per_node: int
    dense_forward: Affine
    """A layer's linear parts, of the tokens of one rank."""
    dense_backward: Affine
    head_forward: Affine
    """The LM head and log-probs, of one rank's scored tokens."""
    head_backward: Affine
    attention_forward: TileCost
    attention_backward: TileCost
    node_link: Link
    """Between ranks of a node, of one rank."""
    cluster_link: Link
    """Between nodes, of one rank."""
    layer_forward_s: float
    """Host and launch time of a layer whatever its tokens."""
    layer_backward_s: float
    stage_s: float
    """Host time of one stage with moves, in each direction."""
    move_s: float
    """Host time of one move at either of its ends, in each direction; closed forms leave it out."""
    gradient_sync_s: float
    """Of reducing gradients over the ranks that shard the model, once a step: what no computing hides."""
    overlap: float
    """Part of a stage's computing time under which the next stage's moves travel, 0 to 1."""
    memory: Memory
    factors: Factors = Factors()

    @property
    def digest(self) -> str:
        """Eight hex digits that equal profiles share."""
        return sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]

    def require_model(self, shape: ModelShape) -> None:
        """Refuse a profile of another model. Its number format may differ: that scales every plan alike.

        Raises:
            ConfigError: with both shapes.
        """
        own, other = (
            (one.num_layers, one.num_heads, one.num_kv_heads, one.head_dim) for one in (self.shape, shape)
        )
        if own != other:
            raise ConfigError(
                f"profile {self.name} is of {self.model}, {self.shape}; the run has {shape}: run "
                "treecp-rl calibrate with this model, or name its profile"
            )

    def refine(self, report: StepReport) -> ClusterProfile:
        """The profile after one more step: the form's factor follows what was measured, by a bounded amount.

        A report moves a factor by at most ``REFINE_WEIGHT * SURPRISE_LIMIT`` (log), 2.3 %.

        Raises:
            ConfigError: a report without positive finite seconds.
        """
        if not all(math.isfinite(s) and s > 0 for s in (report.predicted_seconds, report.measured_seconds)):
            raise ConfigError(f"{report} has no positive finite seconds; leave such steps out")
        surprise = math.log(report.measured_seconds / report.predicted_seconds)
        step = REFINE_WEIGHT * min(SURPRISE_LIMIT, max(-SURPRISE_LIMIT, surprise))
        factor = getattr(self.factors, report.form) * math.exp(step)
        factor = min(FACTOR_LIMIT, max(1 / FACTOR_LIMIT, factor))
        return replace(self, factors=replace(self.factors, **{report.form: factor}))


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step of one form was predicted to take, and what it took."""

    form: Form
    predicted_seconds: float
    measured_seconds: float


def save_profile(profile: ClusterProfile, path: Path | str) -> None:
    """Write a profile as JSON."""
    Path(path).write_text(json.dumps(asdict(profile), indent=2) + "\n")


def load_profile(name_or_path: Path | str) -> ClusterProfile:
    """A shipped profile by its name, or a profile's JSON file.

    Raises:
        ConfigError: no such profile, no JSON, a term that is missing, unknown, negative or of the wrong type.
    """
    path = Path(name_or_path)
    if not path.suffix and not path.exists():
        path = SHIPPED / f"{name_or_path}.json"
    if not path.is_file():
        names = ", ".join(sorted(found.stem for found in SHIPPED.glob("*.json")))
        raise ConfigError(f"no profile {name_or_path}: name a JSON file, or one of {names}")
    try:
        record = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from error
    return parse_profile(record, str(path))


def parse_profile(record: Any, where: str = "profile") -> ClusterProfile:
    """A profile from its JSON object.

    Raises:
        ConfigError: names the term.
    """
    profile = _parse(ClusterProfile, record, where)
    if profile.kind not in ("measured", "estimate"):
        raise ConfigError(f"{where}: kind is {profile.kind!r}; write measured or estimate")
    if profile.overlap > 1:
        raise ConfigError(f"{where}: overlap is {profile.overlap}; it is a part, 0 to 1")
    for term in ("ranks_per_node", "shape.num_layers", "shape.num_heads", "shape.num_kv_heads"):
        _require_positive(profile, term, where)
    for term in ("attention_forward.per_pair_s", "dense_forward.per_token_s", "memory.bytes_per_rank"):
        _require_positive(profile, term, where)
    for form in FORMS:
        _require_positive(profile, f"factors.{form}", where)
    return profile


def _require_positive(profile: ClusterProfile, term: str, where: str) -> None:
    value: Any = profile
    for name in term.split("."):
        value = getattr(value, name)
    if value <= 0:
        raise ConfigError(f"{where}: {term} is {value}; it must be above 0")


_T = TypeVar("_T")


def _parse(cls: type[_T], record: Any, where: str) -> _T:
    """An object of nested dataclasses from nested JSON objects, every number finite and not negative."""
    if not isinstance(record, Mapping):
        raise ConfigError(f"{where} is {type(record).__name__}; it must be an object")
    hints = get_type_hints(cls)
    known = fields(cls)  # type: ignore[arg-type]
    required = {one.name for one in known if one.name not in _OPTIONAL}
    if missing := sorted(required - set(record)):
        raise ConfigError(f"{where} lacks {', '.join(missing)}; measure it with treecp-rl calibrate")
    if unknown := sorted(set(record) - {one.name for one in known}):
        raise ConfigError(f"{where} has the unknown term {', '.join(unknown)}; remove it")
    return cls(**{name: _value(hints[name], value, f"{where}: {name}") for name, value in record.items()})


_OPTIONAL = {"factors", "accumulate_itemsize"}


def _value(hint: Any, value: Any, where: str) -> Any:
    if is_dataclass(hint):
        return _parse(hint, value, where)  # type: ignore[arg-type]
    if hint in (int, float):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < 0 or (hint is int and value != int(value)):
            kind = "whole number" if hint is int else "finite number"
            raise ConfigError(f"{where} is {value!r}; it must be a {kind} of 0 or more")
        return hint(value)
    if hint == tuple[str, ...]:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ConfigError(f"{where} is {value!r}; it must be a list of texts")
        return tuple(map(str, value))
    if not isinstance(value, str):
        raise ConfigError(f"{where} is {value!r}; it must be a text")
    return value
