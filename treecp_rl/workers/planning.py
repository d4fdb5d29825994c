"""config, lengths -> PlanRequests: the same on the driver, which asks ahead, and on ranks, which need the plans.

A step's plan depends on its lengths, the model's profile, verl's micro-batch options and the profile's factors, which
the trainer refines from the steps that ranks report. All of these are known on both sides.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from treecp_rl.errors import ConfigError
from treecp_rl.planner.estimates import dims_of, estimate
from treecp_rl.planner.forms import RunOptions
from treecp_rl.planner.profile import FORMS, ClusterProfile, Factors, Form, StepReport, load_profile
from treecp_rl.planner.request import ArrangedRequest, PlanRequest, arrange
from treecp_rl.planner.search import TreeLengths
from treecp_rl.workers.options import OPTIONS_KEY, TreeCPOptions

ESTIMATED_HARDWARE = {"cpu": "cpu", "cuda": "h100"}
"""Whose estimate stands in where no profile is named."""


@dataclass(frozen=True)
class MicroBatch:
    """verl's options of how much a forward holds: tokens, or rows."""

    use_dynamic_bsz: bool
    max_tokens: int | None
    max_rows: int | None

    def tokens_per_rank(self, options: TreeCPOptions, longest_row: int) -> int | None:
        """Packed tokens of one forward, a rank: our option, else what verl's own micro-batch would hold; None: no
        option says."""
        if options.tokens_per_rank is not None:
            return options.tokens_per_rank
        if self.use_dynamic_bsz:
            return self.max_tokens
        return None if self.max_rows is None else self.max_rows * longest_row


@dataclass(frozen=True)
class RowLengths:
    """What the trainer knows of a row."""

    uid: str
    prompt: int
    response: int


@dataclass(frozen=True)
class Planning:
    """How the trees of a domain are planned."""

    profile: ClusterProfile
    num_ranks: int
    checkpointing: bool

    def request(
        self,
        trees: Sequence[TreeLengths],
        tokens_per_rank: int,
        *,
        needs_gradients: bool,
        factors: Factors | None = None,
    ) -> ArrangedRequest:
        """What is asked of the planner.

        Args:
            factors: the trainer's, of an update; None: the profile's own.
        """
        options = RunOptions(self.checkpointing, needs_gradients, tokens_per_rank)
        profile = self.profile if factors is None else replace(self.profile, factors=factors)
        return arrange(trees, self.num_ranks, profile, options)


def plans(options: TreeCPOptions) -> bool:
    """Whether there is something to choose: no mode is forced, and a domain has several ranks."""
    return options.mode == "auto" and options.domain_size > 1


def planning_of(
    options: TreeCPOptions, hf_config: Any, device: str, *, checkpointing: bool
) -> Planning | None:
    """How this run plans; None where there is nothing to choose.

    Args:
        hf_config: of the model.
        device: "cpu" or "cuda".

    Raises:
        ConfigError: a profile that does not exist or is of another model, or a model that no estimate fits.
    """
    if not plans(options):
        return None
    if options.profile is None:
        name = getattr(hf_config, "model_type", "model")
        profile = estimate(ESTIMATED_HARDWARE[device], name, dims_of(hf_config))
    else:
        profile = load_profile(options.profile)
        try:
            profile.require_model(dims_of(hf_config).shape(profile.shape.itemsize))
        except ConfigError as error:
            raise ConfigError(f"{OPTIONS_KEY}.profile={options.profile}: {error}") from error
    return Planning(profile, options.domain_size, checkpointing)


def lengths_of_rows(rows: Sequence[RowLengths]) -> list[TreeLengths]:
    """The trees that ``engine.planning.lengths_of`` will find in rows that share prompts and nothing else."""
    groups: dict[tuple[str, int], list[int]] = {}
    for row in rows:
        groups.setdefault((row.uid, row.prompt), []).append(row.response)
    trees = []
    for (_, prompt), responses in groups.items():
        below = tuple(length for length in responses if length)
        trees.append(TreeLengths(prompt, below) if below else TreeLengths(max(1, prompt - 1), (1,)))
    return trees


@dataclass(frozen=True)
class Ahead:
    """What the trainer asks for before its ranks need it."""

    planning: Planning
    options: TreeCPOptions
    log_prob: MicroBatch
    ref: MicroBatch | None
    update: MicroBatch

    def requests(
        self, rows_of_ranks: Sequence[Sequence[RowLengths]], num_mini_batches: int, factors: Factors
    ) -> list[PlanRequest]:
        """Of every data-parallel rank's log-probs, reference pass and mini-batches, in the order of their use."""
        found = [
            request
            for budget in (self.log_prob, self.ref)
            if budget is not None
            for rows in rows_of_ranks
            for request in self._request(rows, budget, None)
        ]
        for number in range(num_mini_batches):
            for rows in rows_of_ranks:
                width = len(rows) // num_mini_batches
                mini_batch = rows[number * width : (number + 1) * width]
                found += self._request(mini_batch, self.update, factors)
        return found

    def _request(
        self, rows: Sequence[RowLengths], budget: MicroBatch, factors: Factors | None
    ) -> list[PlanRequest]:
        tokens = budget.tokens_per_rank(
            self.options, max((row.prompt + row.response for row in rows), default=1)
        )
        if not rows or tokens is None:
            return []
        trees = lengths_of_rows(rows)
        needs_gradients = factors is not None
        return [
            self.planning.request(trees, tokens, needs_gradients=needs_gradients, factors=factors).request
        ]


def ahead_of(config: Any, load_hf_config: Callable[[], Any]) -> Ahead | None:
    """What the trainer may ask ahead of its ranks; None where ranks plan nothing, or trees depend on tokens.

    Args:
        config: the whole of it.
        load_hf_config: of the model; called where it is needed.
    """
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    options = TreeCPOptions.from_mapping(actor.treecp)
    if not plans(options) or options.share != "prompt":
        return None
    planning = planning_of(
        options,
        load_hf_config(),
        config.trainer.device,
        checkpointing=bool(config.actor_rollout_ref.model.enable_gradient_checkpointing),
    )
    assert planning is not None
    log_prob = _log_prob_budget(rollout, actor.use_dynamic_bsz)
    return Ahead(
        planning,
        options,
        log_prob=log_prob,
        ref=_reference_budget(config, log_prob) if _uses_reference(config) else None,
        update=MicroBatch(
            actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size_per_gpu
        ),
    )


def _log_prob_budget(node: Any, use_dynamic_bsz: bool) -> MicroBatch:
    return MicroBatch(
        bool(use_dynamic_bsz), node.log_prob_max_token_len_per_gpu, node.log_prob_micro_batch_size_per_gpu
    )


def _reference_budget(config: Any, of_actor: MicroBatch) -> MicroBatch:
    """The reference model's own, or the actor's where a LoRA actor without its adapter is the reference."""
    model, ref = config.actor_rollout_ref.model, config.actor_rollout_ref.ref
    lora_rank = (model.get("lora") or {}).get("rank", 0) or model.get("lora_rank", 0)
    if lora_rank > 0 or model.get("lora_adapter_path") is not None:
        return of_actor
    return _log_prob_budget(ref, ref.log_prob_use_dynamic_bsz)


def _uses_reference(config: Any) -> bool:
    return bool(config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward)


@dataclass
class Refiner:
    """Factors of the profile, nudged by the steps that ranks report. A form that nobody has measured yet follows the
    others, so that what is wrong with all of them does not decide between them."""

    factors: Factors
    _measured: set[Form] = field(default_factory=set)

    def take(self, profile: ClusterProfile, metrics: Mapping[str, Any], prefix: str) -> None:
        """Take in the step metrics of an update; one of both forms says nothing about either."""
        predicted = float(metrics.get(f"{prefix}predicted_seconds", 0.0))
        measured = float(metrics.get(f"{prefix}measured_seconds", 0.0))
        replayed, groups = metrics.get(f"{prefix}groups_replayed", 0), metrics.get(f"{prefix}groups", 0)
        if predicted <= 0 or measured <= 0 or 0 < replayed < groups:
            return
        form: Form = "split" if replayed else "fused"
        self._measured.add(form)
        refined = replace(profile, factors=self.factors)
        for other in FORMS:
            if other == form or other not in self._measured:
                refined = refined.refine(StepReport(other, predicted, measured))
        self.factors = refined.factors


def encode_factors(factors: Factors) -> str:
    """As they travel with a batch."""
    return ",".join(map(repr, astuple(factors)))


def decode_factors(text: str | None) -> Factors | None:
    """What ``encode_factors`` wrote, to the bit."""
    return None if text is None else Factors(*map(float, text.split(",")))
