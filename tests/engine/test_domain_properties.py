"""Proves what holds of any plan over ranks: the same bits twice, responses that do not see each other, and domains
with unlike work in lockstep."""

import pytest
import torch
import torch.distributed as dist

from tests.engine.test_domain import BOUND, by_row, fresh_model, rows_of, step
from treecp_rl.engine.passes import Domain
from treecp_rl.tree import Row
from treecp_rl.verify.oracle import gradients_of, max_relative_gradient_error
from treecp_rl.verify.ranks import run_on_ranks

MODES = ("gather", "heads", "tree_move_kv", "move_q", "split", "split_move_q")


def with_another_token(rows, changed):
    """The same rows, but for the first response token of one of them."""
    response = rows[changed].response.clone()
    response[0] = (response[0] + 1) % 96 + 1
    return [Row(r.uid, r.prompt, response if i == changed else r.response) for i, r in enumerate(rows)]


def repeat_and_perturb(rank, world_size):
    domain = Domain(rank, world_size, dist.group.WORLD)
    model = fresh_model(sharded=True)
    rows = rows_of("ragged")
    found = {}
    for mode in MODES:
        (old, _, gradients), (again, _, gradients_again) = (
            step(model, rows, domain, mode=mode, share="prompt") for _ in range(2)
        )
        first, second = by_row(old), by_row(again)
        same = all(torch.equal(first[row], second[row]) for row in first) and all(
            torch.equal(gradients[name], gradients_again[name]) for name in gradients
        )
        perturbed = by_row(step(model, with_another_token(rows, 2), domain, mode=mode, share="prompt")[0])
        moved = {row: (first[row] - perturbed[row]).abs().max().item() for row in first if len(first[row])}
        found[mode] = (same, moved)
    return found


def test_the_same_step_twice_is_bit_identical_and_siblings_do_not_see_each_other():
    for found in run_on_ranks(repeat_and_perturb, 2, timeout_seconds=300):
        for mode, (same, moved) in found.items():
            assert same, mode
            assert moved.pop(2) > 1e-3, mode
            assert max(moved.values()) == 0.0, mode


def tokens(seed, count):
    return torch.randint(1, 97, (count,), generator=torch.Generator().manual_seed(seed))


def rows_of_domain(number):
    """Domain 0 has a tree that takes three rounds, domain 1 one that fits and, in another pass, a small one."""
    if number == 0:
        return [Row("long", tokens(1, 100), tokens(2 + i, 90)) for i in range(3)]
    return [Row(f"short{i}", tokens(9 + i, 80), tokens(19 + i, 70)) for i in range(2)]


def unlike_domains(rank, world_size):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    domain = Domain(rank % 2, 2, groups[rank // 2])
    found = []
    for reshard in (True, False):
        model = fresh_model(sharded=True, reshard=reshard)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        old, report, _ = step(model, rows_of_domain(rank // 2), domain, tokens_per_pass=200)
        counts = (report.num_passes, report.num_groups_replayed, report.pad_tokens)
        found.append((by_row(old), gradients_of(model), counts))
    return found


@pytest.mark.slow
def test_domains_with_rounds_and_without_stay_in_lockstep():
    alone = [step(fresh_model(sharded=False), rows_of_domain(number)) for number in range(2)]
    expected = {name: (alone[0][2][name] + alone[1][2][name]) / 2 for name in alone[0][2]}
    for rank, found in enumerate(run_on_ranks(unlike_domains, 4, timeout_seconds=300)):
        for log_probs, gradients, (num_passes, num_replayed, pad_tokens) in found:
            for row, values in by_row(alone[rank // 2][0]).items():
                assert torch.allclose(log_probs[row], values, rtol=0, atol=1e-12)
            assert max_relative_gradient_error(gradients, expected).error <= BOUND
            # A prefill with three rounds, and a pass for the second small tree.
            assert num_passes == 5
            assert num_replayed == (rank < 2)
            assert pad_tokens > 0
