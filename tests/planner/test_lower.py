"""Proves that a lowered schedule computes every valid (query, key) pair exactly once, and nothing else."""

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treecp_rl.plan import Node
from treecp_rl.planner.lower import lower_local
from treecp_rl.tree import Row, fold, pack


def allowed_pairs(nodes, num_tokens):
    """The definition: a token attends to itself, what is before it in its node, and all its ancestors."""
    allowed = torch.zeros(num_tokens, num_tokens, dtype=torch.int64)
    for node in nodes:
        for query in range(node.start, node.stop):
            allowed[query, node.start : query + 1] = 1
            parent = node.parent
            while parent >= 0:
                allowed[query, nodes[parent].start : nodes[parent].stop] = 1
                parent = nodes[parent].parent
    return allowed


def computed_pairs(schedule):
    """How often a schedule computes each pair."""
    counted = torch.zeros(schedule.num_tokens, schedule.num_tokens, dtype=torch.int64)
    for tile in itertools.chain.from_iterable(stage.tiles for stage in schedule.stages):
        block = torch.ones(
            tile.query_stop - tile.query_start, tile.key_stop - tile.key_start, dtype=torch.int64
        )
        block = block.tril() if tile.causal else block
        assert int(block.sum()) == tile.num_pairs
        counted[tile.query_start : tile.query_stop, tile.key_start : tile.key_stop] += block
    return counted


responses = st.lists(st.lists(st.integers(0, 1), max_size=7), min_size=1, max_size=7)


@given(st.lists(st.tuples(st.integers(1, 6), responses), min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_local_schedule_covers_every_pair_once(groups):
    rows = [
        Row(str(uid), torch.full((prompt,), uid), torch.tensor(response, dtype=torch.int64))
        for uid, (prompt, members) in enumerate(groups)
        for response in members
    ]
    packed = pack(fold(rows, "prefix"))
    schedule = lower_local(packed.nodes)
    assert torch.equal(computed_pairs(schedule), allowed_pairs(packed.nodes, packed.num_tokens))


def test_digest_tells_schedules_apart():
    one = lower_local([Node(-1, 0, 3, 5), Node(0, 3, 5, 5)])
    same = lower_local([Node(-1, 0, 3, 5), Node(0, 3, 5, 5)])
    other = lower_local([Node(-1, 0, 2, 5), Node(0, 2, 5, 5)])
    assert one.digest == same.digest != other.digest
