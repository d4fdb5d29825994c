"""verl's batch -> rows and budget, scores -> verl's outputs, in one process."""

import pytest
import torch

from tests.workers.engine_cases import Case, Group, batch_of, rows_of
from treecp_rl.engine.passes import RowScores
from treecp_rl.errors import BatchError, ConfigError
from treecp_rl.tree import Row
from treecp_rl.workers import convert
from treecp_rl.workers.options import TreeCPOptions

CASE = Case(ranks=((Group("a", 5, (2, 3)), Group("b", 4, (1,))),), temperature=0.5)


def test_rows_are_the_batch_byte_for_byte():
    batch = convert.read_batch(batch_of(CASE, 0))
    for row, expected in zip(batch.rows, rows_of(CASE, 0), strict=True):
        assert row.uid == expected["uid"]
        assert torch.equal(row.prompt, expected["prompts"])
        assert torch.equal(row.response, expected["responses"])
        assert row.temperature == 0.5
    assert batch.num_loss_tokens == 6
    assert batch.longest_row == 8


@pytest.mark.parametrize("uid", [7, -3, "x"])
def test_uids_of_any_type(uid):
    from verl.utils import tensordict_utils as tu

    data = batch_of(CASE, 0)
    tu.assign_non_tensor(data, uid=[uid, uid, 0])
    assert [row.uid for row in convert.read_batch(data).rows] == [str(uid), str(uid), "0"]


def test_temperature_may_differ_by_row():
    data = batch_of(CASE, 0)
    data["temperature"] = torch.tensor([1.0, 0.5, 2.0])
    assert [row.temperature for row in convert.read_batch(data).rows] == [1.0, 0.5, 2.0]


def test_padding_rows_are_known_by_verls_name_for_them():
    pad = "pad" + "0123456789abcdef" * 2
    batch = convert.read_batch(batch_of(Case(ranks=((Group(pad, 5, (1,)), Group("padded", 5, (1,))),)), 0))
    assert batch.is_padding == (True, False)


def test_no_rows():
    batch = convert.read_batch(batch_of(Case(ranks=((),)), 0))
    assert (batch.rows, batch.num_loss_tokens, batch.longest_row) == ((), 0, 1)


@pytest.mark.parametrize("key", ["input_ids", "position_ids", "prompts", "responses", "loss_mask", "uid"])
def test_missing_key_is_named(key):
    data = batch_of(CASE, 0)
    data.pop(key)
    with pytest.raises(BatchError, match=f"no '{key}'"):
        convert.read_batch(data)


BUDGETS = {
    "option": ({"micro_rows": 3}, 77, 77),
    "static": ({"micro_rows": 3}, None, 24),
    "dynamic": ({"micro_rows": None, "micro_tokens": 40}, None, 40),
}


@pytest.mark.parametrize("kind", BUDGETS)
def test_token_budget(kind):
    micro, option, expected = BUDGETS[kind]
    options = TreeCPOptions(tokens_per_rank=option)
    data = batch_of(Case(ranks=CASE.ranks, **micro), 0)
    assert convert.token_budget(data, options, longest_row=8) == expected


@pytest.mark.parametrize("dynamic", [True, False])
def test_no_budget_at_all_names_the_keys(dynamic):
    data = batch_of(Case(ranks=CASE.ranks, micro_rows=None, extra={"use_dynamic_bsz": dynamic}), 0)
    with pytest.raises(ConfigError, match=r"treecp\.tokens_per_rank"):
        convert.token_budget(data, TreeCPOptions(), longest_row=8)


def test_outputs_are_shifted_left_and_in_row_order():
    rows = [Row("a", torch.arange(3), torch.arange(2)), Row("b", torch.arange(1), torch.arange(3))]
    second = RowScores((1,), [torch.tensor([4.0, 5.0, 6.0])])
    first = RowScores((0,), [torch.tensor([1.0, 2.0])])
    ((name, values),) = convert.model_output(rows, [second, first]).items()
    assert name == "log_probs"
    assert [row.tolist() for row in values.unbind()] == [[0, 0, 1, 2, 0], [4, 5, 6, 0]]


def test_a_batch_without_loss_tokens_is_normalised_by_one():
    data = batch_of(CASE, 0)
    convert.announce_totals(data, num_loss_tokens=0, dp_size=2)
    assert (data["batch_num_tokens"], data["dp_size"]) == (1, 2)
