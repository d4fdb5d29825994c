"""What a step computed, and what verl's loss reported -> verl's metrics -> gauges on Ray's metrics endpoint.

verl sums a metric over micro-batches and takes the mean over ranks, then the mean over mini-batches. A count
is therefore handed over as SUM of count x ranks, and ``add_up_mini_batches`` turns the last mean into a sum.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
import torch.distributed as dist
from verl.utils.metric import AggregationType, Metric

from treecp_rl.engine.passes import PassPlan, StepReport
from treecp_rl.planner.schedule_batch import BatchPlan
from treecp_rl.planner.service import PlannerClient
from treecp_rl.workers.convert import Batch

PREFIX = "treecp/"
COUNTS = (
    "tokens_computed",
    "tokens_flat",
    "pad_tokens",
    "groups",
    "groups_without_reuse",
    "groups_cut",
    "groups_replayed",
    "rows",
    "passes",
    "moved_bytes",
)


def counts_of(batch: Batch, plan: PassPlan, report: StepReport, dp_size: int) -> dict[str, Metric]:
    """Counts of a step. Rows that verl added to fill the batch count as pad tokens and nowhere else."""
    padding = [t for t in plan.trees if batch.is_padding[t.rows[0].row]]
    padding_tokens = sum(tree.num_tokens for tree in padding)
    padding_rows = [row for row, is_padding in zip(batch.rows, batch.is_padding, strict=True) if is_padding]
    padding_sizes = Counter(row.uid for row in padding_rows)
    values = {
        "tokens_computed": report.tokens_computed - padding_tokens,
        "tokens_flat": report.tokens_flat - sum(tree.num_flat_tokens for tree in padding),
        "pad_tokens": report.pad_tokens + padding_tokens,
        "groups": report.num_groups - len(padding_sizes),
        "groups_without_reuse": report.num_groups_without_reuse
        - sum(size == 1 for size in padding_sizes.values()),
        "groups_cut": report.num_groups_cut,
        "groups_replayed": report.num_groups_replayed,
        "rows": report.num_rows - len(padding_rows),
        "passes": report.num_passes,
        "moved_bytes": report.moved_bytes,
    }
    return {PREFIX + name: Metric(AggregationType.SUM, values[name] * dp_size) for name in COUNTS}


PLAN_COUNTS = ("plans_fetched", "planner_fallbacks")
"""Plans that a rank fetched from the service, and that it solved because the service had none."""
PLAN_SECONDS = ("plan_seconds", "predicted_seconds", "measured_seconds")
"""That a rank waited for plans or solved them; of its passes, as the planner predicted them and as they were."""


def planning_metrics(
    chosen: BatchPlan | None, measured_seconds: float, client: PlannerClient, dp_size: int
) -> dict[str, Metric]:
    """What an update says of its plan, and all plans since the last update; counts sum over ranks, seconds average."""
    sources, seconds = client.take_counts()
    counts = (sources["fetched"], sources["fallback"])
    predicted = 0.0 if chosen is None else chosen.predicted_seconds
    times = (seconds, predicted, 0.0 if chosen is None else measured_seconds)
    values = dict(zip(PLAN_COUNTS, (count * dp_size for count in counts), strict=True))
    values |= dict(zip(PLAN_SECONDS, times, strict=True))
    return {PREFIX + name: Metric(AggregationType.SUM, value) for name, value in values.items()}


class LossMetrics:
    """Metrics of a loss function over the passes of a step, one value each at the end.

    Sums are added up. Means are weighted by loss tokens, so that they do not depend on how rows were cut into
    passes, and every rank hands over exactly one value, as verl requires, however many passes it ran.
    """

    def __init__(self) -> None:
        self._values: dict[str, list[tuple[float, int]]] = defaultdict(list)
        self._kinds: dict[str, AggregationType | None] = {}

    def add(self, metrics: Mapping[str, Any], loss_tokens: int) -> None:
        """Take in one pass's metrics."""
        for name, metric in metrics.items():
            value = metric.aggregate() if isinstance(metric, Metric) else metric
            self._values[name].append((float(value), loss_tokens))
            self._kinds[name] = metric.aggregation if isinstance(metric, Metric) else None

    def result(self) -> dict[str, Metric | list[float]]:
        """One value a name, in the types verl expects of a micro-batch list."""
        return {name: self._reduce(self._kinds[name], values) for name, values in self._values.items()}

    @staticmethod
    def _reduce(kind: AggregationType | None, values: list[tuple[float, int]]) -> Metric | list[float]:
        numbers = [value for value, _ in values]
        if kind in (AggregationType.SUM, AggregationType.MIN, AggregationType.MAX):
            combine = {AggregationType.SUM: sum, AggregationType.MIN: min, AggregationType.MAX: max}[kind]
            return Metric(kind, combine(numbers))
        weights = [weight for _, weight in values]
        if not any(weights):
            weights = [1] * len(values)
        mean = float(np.average(numbers, weights=weights)) if len(set(numbers)) > 1 else numbers[0]
        return [mean] if kind is None else Metric(kind, mean)


def fill_in_for_idle(metrics: MutableMapping[str, Any], group: dist.ProcessGroup | None) -> None:
    """Give a rank that had no rows a zero for every sum its peers report. All ranks of ``group`` call it."""
    kinds = {name: getattr(metric, "aggregation", None) for name, metric in metrics.items()}
    sums = [name for name, kind in kinds.items() if kind is AggregationType.SUM]
    of_ranks: list[list[str]] = [[]] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, sums, group=group)
    for name in (name for names in of_ranks for name in names):
        metrics.setdefault(name, Metric(AggregationType.SUM, 0.0))


def add_up_mini_batches(metrics: MutableMapping[str, Any]) -> None:
    """Replace each count's list over mini-batches by its sum."""
    for name in (*COUNTS, *PLAN_COUNTS, *PLAN_SECONDS):
        if PREFIX + name in metrics:
            metrics[PREFIX + name] = [sum(metrics[PREFIX + name])]


def publish(metrics: MutableMapping[str, Any]) -> None:
    """Final names in a trainer's step metrics, and the same figures as gauges."""
    for name in [name for name in metrics if name.startswith(f"actor/{PREFIX}")]:
        metrics[name.removeprefix("actor/")] = metrics.pop(name)
    groups = metrics.get(f"{PREFIX}groups", 0)
    if groups:
        metrics[f"{PREFIX}group_size/mean"] = metrics[f"{PREFIX}rows"] / groups
    predicted = metrics.get(f"{PREFIX}predicted_seconds", 0)
    if predicted:
        metrics[f"{PREFIX}measured_over_predicted"] = metrics[f"{PREFIX}measured_seconds"] / predicted
    for name, value in metrics.items():
        if name.startswith(PREFIX):
            gauge(name).set(float(value))


_GAUGES: dict[str, Any] = {}


def gauge(name: str) -> Any:
    """Ray's gauge for a metric, made once a process: ``treecp/groups`` shows as ``ray_treecp_groups``."""
    if name not in _GAUGES:
        from ray.util.metrics import Gauge

        _GAUGES[name] = Gauge(name.replace("/", "_"), description=f"{name} of the last training step")
    return _GAUGES[name]
