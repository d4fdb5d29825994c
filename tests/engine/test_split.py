"""Proves that a tree split into a prefill and rounds of replay has the gradients of the fused pass, on one rank."""

import re

import pytest
import torch

from tests.engine.test_domain import HEAD, fresh_model, loss_of, rows_of
from treecp_rl.attention import kernels
from treecp_rl.attention.leaves import Leaves
from treecp_rl.engine.passes import PassOptions, plan_passes, run_passes
from treecp_rl.errors import PlanError, RowTooLong
from treecp_rl.tree import Row
from treecp_rl.verify.oracle import gradients_of, max_relative_gradient_error

BOUND = 1e-12


def step(
    rows, *, mode="auto", tokens_per_pass=10_000, checkpointing=False, model=None, share="prefix", **options
):
    model = fresh_model(sharded=False) if model is None else model
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    plan = plan_passes(rows, share=share, tokens_per_pass=tokens_per_pass, mode=mode)
    chosen = PassOptions(HEAD, mode=mode, **options)
    old = run_passes(model, plan, None, chosen)
    report = run_passes(model, plan, loss_of, chosen)
    return old, report, gradients_of(model)


def log_probs_by_row(report):
    return {
        row: values
        for scores in report.scores
        for row, values in zip(scores.row_indices, scores.log_probs, strict=True)
    }


def require_equal(ours, expected):
    assert log_probs_by_row(ours[0]).keys() == log_probs_by_row(expected[0]).keys()
    for row, values in log_probs_by_row(expected[0]).items():
        assert torch.allclose(log_probs_by_row(ours[0])[row], values, rtol=0, atol=1e-12), f"row {row}"
    worst = max_relative_gradient_error(ours[2], expected[2])
    assert worst.error <= BOUND, worst


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("share", ["prompt", "prefix"])
@pytest.mark.parametrize(
    ("case", "tokens_per_pass", "num_forwards"),
    [
        ("ragged", 10_000, 6),  # three trees, each a prefill and one round
        ("ragged", 240, 7),  # the largest tree takes two rounds
        ("7 and 29", 40, 4),
        ("one valid token", 100, 2),
    ],
)
def test_split_equals_fused(case, tokens_per_pass, num_forwards, share, checkpointing):
    rows = rows_of(case)
    ours = step(rows, mode="split", tokens_per_pass=tokens_per_pass, share=share, checkpointing=checkpointing)
    require_equal(ours, step(rows))
    assert ours[1].num_passes == num_forwards


def test_auto_splits_only_the_tree_that_exceeds_the_budget_and_computes_its_prompt_once():
    rows = rows_of("ragged")
    ours, expected = step(rows, tokens_per_pass=240), step(rows)
    require_equal(ours, expected)
    assert (ours[1].num_groups_replayed, ours[1].num_groups_cut) == (1, 0)
    cut = step(rows, tokens_per_pass=240, mode="fused")
    require_equal(cut, expected)
    assert (cut[1].num_groups_replayed, cut[1].num_groups_cut) == (0, 1)
    assert cut[1].tokens_computed - ours[1].tokens_computed >= 140


def test_leaves_offloaded_to_the_host_change_nothing(monkeypatch):
    from treecp_rl.attention.offload import HostCopy

    returned = []
    on_device = HostCopy.on_device
    monkeypatch.setattr(HostCopy, "on_device", lambda self: returned.append(1) or on_device(self))
    rows = rows_of("ragged")
    require_equal(step(rows, mode="split", tokens_per_pass=240, offload_leaves=True), step(rows))
    assert returned


def test_rows_without_a_response_need_no_replay():
    rows = [Row("a", torch.arange(1, 9), torch.empty(0, dtype=torch.int64)), *rows_of("one valid token")]
    plan = plan_passes(rows, tokens_per_pass=1000, mode="split")
    assert [len(one.rounds) for one in plan.passes] == [1, 0]
    old = run_passes(fresh_model(sharded=False), plan, None, PassOptions(HEAD, mode="split"))
    assert [len(log_probs_by_row(old)[row]) for row in range(2)] == [0, 1]


def test_a_row_that_fits_no_round_is_refused_with_the_budget_it_needs():
    with pytest.raises(RowTooLong, match="has 230 tokens, a pass may hold 200"):
        plan_passes(rows_of("ragged"), share="none", tokens_per_pass=200)


def test_the_packed_kernel_launch_is_the_same_function():
    rows = rows_of("ragged")
    require_equal(step(rows, kernel="math"), step(rows))
    require_equal(step(rows, kernel="math", mode="split", tokens_per_pass=240), step(rows))


class CountingKernel(kernels.CpuFlashKernel):
    pairs = 0

    def forward(self, q, k, v, causal, scale):
        CountingKernel.pairs += q.shape[2] * k.shape[2]
        return super().forward(q, k, v, causal, scale)


def test_saved_outputs_spare_the_recomputation_of_the_costliest_trees_within_the_budget(monkeypatch):
    """Two layers, 8 heads of 8 in float64: 2 * 8 * (8 * 8 + 8) = 1152 bytes a token."""
    monkeypatch.setattr("treecp_rl.attention.executor.choose_kernel", lambda *_: CountingKernel())
    rows = rows_of("ragged")
    expected = step(rows, checkpointing=True)
    counts = {}
    for budget_tokens in (0, 14, 242, 10_000):
        CountingKernel.pairs = 0
        ours = step(rows, checkpointing=True, save_attention_bytes=budget_tokens * 1152)
        require_equal(ours, expected)
        counts[budget_tokens] = CountingKernel.pairs
    # The larger tree has 242 tokens, the smaller ones 7: dearest attention first.
    assert counts[0] > counts[14] > counts[242] > counts[10_000]
    assert counts[10_000] == pytest.approx(counts[0] * 2 / 3, rel=1e-3)


def test_nothing_is_saved_where_nothing_is_recomputed():
    rows = rows_of("ragged")
    require_equal(step(rows, save_attention_bytes=10**9), step(rows))


def test_a_plan_over_its_memory_is_refused_with_the_number_that_would_do():
    with pytest.raises(
        PlanError, match=r"rank 0 needs 0\.00 GiB \((\d+) bytes\).* raise the budget to \d+ bytes"
    ):
        step(rows_of("ragged"), attention_bytes_per_rank=1000)
    with pytest.raises(PlanError) as refusal:
        step(rows_of("ragged"), attention_bytes_per_rank=1000)
    enough = int(re.search(r"raise the budget to (\d+) bytes", str(refusal.value)).group(1))
    step(rows_of("ragged"), attention_bytes_per_rank=enough)
    # Checkpointing holds one layer's tensors at a time.
    step(rows_of("ragged"), attention_bytes_per_rank=enough - 1, checkpointing=True)


def test_leaves_are_freed_tree_by_tree(monkeypatch):
    """Two trees in rounds: when the second's layers put their K/V down, the first's are gone."""
    alive: list[int] = []
    every: list[Leaves] = []
    make, put = Leaves.__init__, Leaves.put

    def made(self, offload=False):
        make(self, offload)
        every.append(self)

    def watched(self, layer, key, value):
        put(self, layer, key, value)
        alive.append(sum(bool(leaves._kept) for leaves in every))

    monkeypatch.setattr(Leaves, "__init__", made)
    monkeypatch.setattr(Leaves, "put", watched)
    step(rows_of("7 and 29"), mode="split")
    assert len(every) == 4 and set(alive) == {1}
    assert not any(leaves._kept or leaves._grads for leaves in every)
