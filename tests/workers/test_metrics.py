"""Counts add up over ranks and mini-batches, loss metrics do not depend on passes, gauges show in a run."""

import time
import urllib.request
import warnings

import pytest
import torch
from verl.utils.metric import AggregationType, Metric

from treecp_rl.engine.passes import StepReport, plan_passes
from treecp_rl.tree import Row
from treecp_rl.workers import metrics
from treecp_rl.workers.convert import Batch

PADDING = "pad" + "0" * 32


def row(uid: str, prompt: int, response: int) -> Row:
    return Row(uid, torch.arange(prompt), torch.arange(response))


def counts(rows: list[Row], dp_size: int = 1) -> dict[str, float]:
    plan = plan_passes(rows, tokens_per_pass=1000)
    trees = plan.trees
    report = StepReport(
        tokens_computed=sum(tree.num_tokens for tree in trees),
        tokens_flat=sum(tree.num_flat_tokens for tree in trees),
        pad_tokens=2,
        num_passes=len(plan.passes),
        num_groups=plan.num_groups,
        num_rows=len(rows),
        num_groups_without_reuse=plan.num_groups_without_reuse,
        num_groups_cut=0,
        num_groups_replayed=0,
        moved_bytes=0,
        scores=(),
    )
    batch = Batch(tuple(rows), tuple(r.uid == PADDING for r in rows), 1, False, False, False)
    return {k: float(m.aggregate()) for k, m in metrics.counts_of(batch, plan, report, dp_size).items()}


def test_padding_rows_count_as_pad_tokens_only():
    real = [row("a", 5, 2), row("a", 5, 3), row("b", 4, 1)]
    without, with_padding = counts(real), counts([*real, row(PADDING, 7, 1), row(PADDING, 7, 1)])
    assert without["treecp/tokens_computed"] == 5 + 2 + 3 + 4 + 1
    assert without["treecp/tokens_flat"] == 7 + 8 + 5
    assert without["treecp/groups"] == 2
    assert without["treecp/groups_without_reuse"] == 1
    assert with_padding.pop("treecp/pad_tokens") == without.pop("treecp/pad_tokens") + 9
    assert with_padding == without


def test_counts_add_up_over_ranks_and_mini_batches():
    """The way verl takes: mean over ranks, then a list over mini-batches, then the driver's mean."""
    rows = [row("a", 5, 2), row("a", 5, 3)]
    ranks = [Metric(AggregationType.SUM, counts(rows, dp_size=2)["treecp/tokens_flat"]) for _ in range(2)]
    worker_metrics = {
        "treecp/tokens_flat": [Metric.aggregate_dp(ranks) for _mini_batch in range(3)],
        "kl_coef": [1.0],
    }
    metrics.add_up_mini_batches(worker_metrics)
    assert worker_metrics["treecp/tokens_flat"] == [2 * 3 * 15]


def test_loss_metrics_do_not_depend_on_passes():
    whole, cut = metrics.LossMetrics(), metrics.LossMetrics()
    whole.add({"loss": Metric("sum", 6.0), "clipfrac": Metric("mean", 0.25), "kl_coef": 0.1}, loss_tokens=8)
    cut.add({"loss": Metric("sum", 4.0), "clipfrac": Metric("mean", 1.0), "kl_coef": 0.1}, loss_tokens=2)
    cut.add({"loss": Metric("sum", 2.0), "clipfrac": Metric("mean", 0.0), "kl_coef": 0.1}, loss_tokens=6)
    for name, value in {"loss": 6.0, "clipfrac": 0.25}.items():
        assert whole.result()[name].values == cut.result()[name].values == [value]
    assert whole.result()["kl_coef"] == cut.result()["kl_coef"] == [0.1]


def test_loss_metrics_of_masked_passes_are_a_plain_mean():
    collected = metrics.LossMetrics()
    collected.add({"clipfrac": Metric("mean", 0.0)}, loss_tokens=0)
    collected.add({"clipfrac": Metric("mean", 1.0)}, loss_tokens=0)
    assert collected.result()["clipfrac"].values == [0.5]


def test_final_names():
    step = {"actor/treecp/rows": 12.0, "actor/treecp/groups": 3.0, "actor/pg_loss": 0.5}
    metrics.publish(step)
    assert step == {
        "treecp/rows": 12.0,
        "treecp/groups": 3.0,
        "treecp/group_size/mean": 4.0,
        "actor/pg_loss": 0.5,
    }


@pytest.mark.slow
def test_gauges_show_on_rays_metrics_endpoint(tmp_path):
    ray = pytest.importorskip("ray")
    ray.init(
        num_cpus=1, include_dashboard=False, _temp_dir="/tmp/ray_treecp_gauges", _metrics_export_port=None
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for value in (1.0, 2.0):  # a second step must not define the gauge again
                metrics.publish(
                    {
                        "actor/treecp/tokens_computed": 1234.0 * value,
                        "actor/treecp/groups": 8.0,
                        "actor/treecp/rows": 64.0,
                    }
                )
        wanted = {"ray_treecp_tokens_computed": 2468.0, "ray_treecp_group_size_mean": 8.0}
        deadline = time.monotonic() + 60
        while not wanted.items() <= (seen := scrape(ray)).items():
            assert time.monotonic() < deadline, {k: v for k, v in seen.items() if "treecp" in k}
            time.sleep(1)
    finally:
        ray.shutdown()


def scrape(ray) -> dict[str, float]:
    """name -> value of the node's Prometheus endpoint."""
    (node,) = ray.nodes()
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(address, timeout=10) as response:
        lines = response.read().decode().splitlines()
    values = {}
    for line in lines:
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            values[name.partition("{")[0]] = float(value)
    return values
