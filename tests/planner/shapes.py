"""Trees that the planner's tests share."""

from treecp_rl.plan import Decision, Node, Schedule

KINDS = ("gather", "gather_whole", "heads", "ring", "tree_move_kv", "move_q", "dcp_fused")


def trees(*groups):
    """(prompt, responses) lengths -> nodes of one-level trees on one axis."""
    nodes, cursor = [], 0
    for prompt, responses in groups:
        root, stop = len(nodes), cursor + prompt + sum(responses)
        nodes.append(Node(-1, cursor, cursor + prompt, stop))
        cursor += prompt
        for response in responses:
            nodes.append(Node(root, cursor, cursor + response, cursor + response))
            cursor += response
    return nodes


def chain(num_nodes, tokens):
    """One row in ``num_nodes`` nodes, each the only child of the one before."""
    stop = num_nodes * tokens
    return [Node(i - 1, i * tokens, (i + 1) * tokens, stop) for i in range(num_nodes)]


def turns(num_turns, turn_tokens, leaf_tokens):
    """A conversation whose every turn has a leaf besides the next turn; the turns come first on the axis."""
    leaves_start = num_turns * turn_tokens
    stop_of = [leaves_start + (num_turns - i) * leaf_tokens for i in range(num_turns)]
    return [
        *(Node(i - 1, i * turn_tokens, (i + 1) * turn_tokens, stop_of[i]) for i in range(num_turns)),
        *(Node(i, stop_of[i] - leaf_tokens, stop_of[i], stop_of[i]) for i in reversed(range(num_turns))),
    ]


def decision(kind, degree, first_rank=0):
    lanes = 2 if kind in ("tree_move_kv", "heads") and degree % 2 == 0 else 1
    return Decision(kind, first_rank, degree, lanes)


def num_tiles(schedule: Schedule) -> int:
    return sum(len(stage.tiles) for stage in schedule.stages)
