"""rows -> replay trees -> packed tokens -> per-row values again.

``fold`` finds what rows share, ``pack`` lays trees out depth first on one token axis, and
``PackedTrees.unfold`` gives every per-token result back to the row (and order) it came from.

Shapes: T packed tokens, S scored positions, N scored pairs, P / R tokens of one row's prompt / response.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from treecp_rl.errors import BatchError, ConfigError, RowTooLong
from treecp_rl.plan import Node

Share = Literal["none", "prompt", "prefix"]
Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Row:
    """One prompt + response sequence of the caller's batch."""

    uid: str
    """The group the row was sampled for (verl's ``uid``)."""
    prompt: torch.Tensor
    """[P] int64 token ids, P >= 1."""
    response: torch.Tensor
    """[R] int64 token ids, R >= 0; every one of them is scored, masks are the loss's business."""
    temperature: float = 1.0

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.response)


@dataclass(frozen=True)
class TreeNode:
    """A run of tokens that the rows below it share."""

    parent: int
    """Index in the tree's nodes, -1 for the prompt."""
    depth: int
    """Position of the first token in its rows."""
    tokens: Tokens
    """[n] token ids, n >= 1."""


@dataclass(frozen=True)
class RowPath:
    """Where one row lives in its tree: the nodes from the prompt to the row's last token."""

    row: int
    """Index in the caller's batch."""
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class ReplayTree:
    """The prefix tree of rows with one prompt. ``nodes`` are in depth-first order, the prompt first."""

    nodes: tuple[TreeNode, ...]
    rows: tuple[RowPath, ...]
    temperature: float

    @property
    def num_tokens(self) -> int:
        """Tokens the tree computes."""
        return sum(len(node.tokens) for node in self.nodes)

    @property
    def num_flat_tokens(self) -> int:
        """Tokens its rows would compute one by one."""
        return sum(len(self.nodes[node].tokens) for path in self.rows for node in path.nodes)


@dataclass(frozen=True)
class PackedTrees:
    """Trees of one pass, ready for the model. A scored pair is (position that predicts, label)."""

    input_ids: torch.Tensor
    """[T] int64."""
    position_ids: torch.Tensor
    """[T] int64, the position each token has in its rows."""
    nodes: tuple[Node, ...]
    scored_positions: torch.Tensor
    """[S] int64, ascending packed positions whose hidden state reaches the LM head."""
    position_temperature: torch.Tensor
    """[S] float64."""
    pair_position: torch.Tensor
    """[N] int64 ascending indices into ``scored_positions``."""
    pair_label: torch.Tensor
    """[N] int64 token ids."""
    row_indices: tuple[int, ...]
    """The caller's row numbers, ascending."""
    row_lengths: tuple[int, ...]
    """R of each of them."""
    row_pairs: torch.Tensor
    """[sum of R] int64: pair of every response token, row after row."""

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    def unfold(self, pair_values: torch.Tensor) -> list[torch.Tensor]:
        """[N] values of pairs -> one [R] tensor a row, in the order of ``row_indices``; differentiable."""
        return list(torch.split(pair_values[self.row_pairs], list(self.row_lengths)))

    def with_idle_tokens(self, count: int) -> "PackedTrees":
        """The same pass with ``count`` more one-token trees that score nothing and serve no row."""
        stop = self.num_tokens
        more = torch.zeros(count, dtype=torch.int64, device=self.input_ids.device)
        return replace(
            self,
            input_ids=torch.cat([self.input_ids, more]),
            position_ids=torch.cat([self.position_ids, more]),
            nodes=(*self.nodes, *(Node(-1, stop + i, stop + i + 1, stop + i + 1) for i in range(count))),
        )

    def cut(self, own_tokens: torch.Tensor) -> tuple["PackedTrees", torch.Tensor]:
        """What one rank runs of the pass.

        Args:
            own_tokens: [T'] int64 ascending packed tokens of the rank.

        Returns:
            Its tokens with the pairs they predict (and no rows: those need all ranks' pairs), and the pass's
            number of each of these pairs.
        """
        local_of = torch.full((self.num_tokens,), -1, dtype=torch.int64, device=self.input_ids.device)
        local_of[own_tokens] = torch.arange(len(own_tokens), device=self.input_ids.device)
        scored_here = local_of[self.scored_positions] >= 0
        pairs = scored_here[self.pair_position].nonzero().squeeze(1)
        renumbered = scored_here.cumsum(0) - 1
        local = replace(
            self,
            input_ids=self.input_ids[own_tokens],
            position_ids=self.position_ids[own_tokens],
            nodes=(),
            scored_positions=local_of[self.scored_positions[scored_here]],
            position_temperature=self.position_temperature[scored_here],
            pair_position=renumbered[self.pair_position[pairs]],
            pair_label=self.pair_label[pairs],
            row_indices=(),
            row_lengths=(),
            row_pairs=self.row_pairs[:0],
        )
        return local, pairs

    def to(self, device: torch.device | str) -> "PackedTrees":
        """The same pass with its tensors on ``device``."""
        tensors: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, torch.Tensor)
        }
        return replace(self, **tensors)


def fold(
    rows: Sequence[Row], share: Share = "prompt", members: Iterable[int] | None = None
) -> tuple[ReplayTree, ...]:
    """Group rows by (uid, prompt tokens, temperature) and build each group's prefix tree.

    Args:
        rows: the caller's batch, in any order.
        share: "prompt" computes each prompt once; "prefix" also merges what responses have in common;
            "none" keeps every row on its own (the flattened batch, for comparison).
        members: fold only these row indices.

    Returns:
        Trees in the order in which their first row appears; rows keep the caller's indices.

    Raises:
        BatchError: a row has an empty prompt (nothing would predict its first response token), or a
            temperature that is not above 0.
        ConfigError: ``share`` is none of these.
    """
    if share not in get_args(Share):
        raise ConfigError(f"share={share!r} is not one of {', '.join(get_args(Share))}")
    groups: dict[tuple[object, ...], list[int]] = {}
    for index in range(len(rows)) if members is None else members:
        row = rows[index]
        if len(row.prompt) == 0:
            raise BatchError(
                f"row {index} (uid {row.uid}) has an empty prompt: nothing predicts its first response token; "
                "give it at least one prompt token (a BOS token will do)"
            )
        if not 0 < row.temperature < float("inf"):
            raise BatchError(
                f"row {index} (uid {row.uid}) has temperature {row.temperature}: log-probs are of logits / "
                "temperature; set rollout.temperature above 0"
            )
        key = (
            row.uid,
            _array(row.prompt).tobytes(),
            float(row.temperature),
            index if share == "none" else None,
        )
        groups.setdefault(key, []).append(index)
    return tuple(_grow_tree(rows, members, share) for members in groups.values())


def split_tree(
    tree: ReplayTree, rows: Sequence[Row], share: Share, tokens_per_pass: int
) -> tuple[ReplayTree, ...]:
    """Cut a tree that exceeds a token budget into trees over fewer of its rows; each repeats the prompt.

    Rows are taken in depth-first order, so that rows which share a prefix stay together.

    Raises:
        RowTooLong: one row alone exceeds the budget.
    """
    if tree.num_tokens <= tokens_per_pass:
        return (tree,)
    runs: list[list[int]] = []
    tokens = 0
    previous: tuple[int, ...] = ()
    for path in sorted(tree.rows, key=lambda path: path.nodes):
        own = sum(len(tree.nodes[node].tokens) for node in path.nodes)
        if own > tokens_per_pass:
            raise RowTooLong(
                f"row {path.row} (uid {rows[path.row].uid}) has {own} tokens, a pass may hold {tokens_per_pass}; "
                "raise actor_rollout_ref.actor.ppo_max_token_len_per_gpu (for log-probs: "
                "rollout/ref.log_prob_max_token_len_per_gpu) or actor.treecp.tokens_per_rank, "
                "or lower data.max_response_length"
            )
        new = sum(len(tree.nodes[node].tokens) for node in path.nodes if node not in previous)
        if runs and tokens + new <= tokens_per_pass:
            runs[-1].append(path.row)
            tokens += new
        else:
            runs.append([path.row])
            tokens = own
        previous = path.nodes
    return tuple(tree for run in runs for tree in fold(rows, share, members=sorted(run)))


def pack(trees: Sequence[ReplayTree]) -> PackedTrees:
    """Lay trees out depth first on one token axis, and list which position scores which token."""
    nodes = _place_nodes(trees)
    flat_nodes = [node for tree in trees for node in tree.nodes]
    input_ids = np.concatenate([node.tokens for node in flat_nodes])
    position_ids = np.concatenate(
        [np.arange(node.depth, node.depth + len(node.tokens)) for node in flat_nodes]
    )

    # Every token below a prompt is one label; its predictor is the token before it, or its parent's last.
    predictor = np.arange(-1, len(input_ids) - 1)
    is_label = np.ones(len(input_ids), dtype=bool)
    for node in nodes:
        if node.parent < 0:
            is_label[node.start : node.stop] = False
        else:
            predictor[node.start] = nodes[node.parent].stop - 1
    labels = np.flatnonzero(is_label)
    labels = labels[np.argsort(predictor[labels], kind="stable")]
    pair_of_token = np.empty(len(input_ids), dtype=np.int64)
    pair_of_token[labels] = np.arange(len(labels))
    scored_positions, pair_position = np.unique(predictor[labels], return_inverse=True)

    row_tokens = _row_tokens(trees, nodes)
    row_indices = sorted(row_tokens)
    temperature = np.repeat(
        np.array([tree.temperature for tree in trees]), [tree.num_tokens for tree in trees]
    )
    return PackedTrees(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(position_ids),
        nodes=nodes,
        scored_positions=torch.from_numpy(scored_positions),
        position_temperature=torch.from_numpy(temperature[scored_positions]),
        pair_position=torch.from_numpy(pair_position.astype(np.int64)),
        pair_label=torch.from_numpy(input_ids[labels]),
        row_indices=tuple(row_indices),
        row_lengths=tuple(len(row_tokens[row]) for row in row_indices),
        row_pairs=torch.from_numpy(
            np.concatenate([pair_of_token[row_tokens[row]] for row in row_indices]).astype(np.int64)
        ),
    )


def dummy_pack() -> PackedTrees:
    """One prompt token that scores one label and serves no row: what a rank without work runs in lockstep."""
    token = torch.zeros(1, dtype=torch.int64)
    packed = pack(fold([Row("dummy", token, token)]))
    return replace(packed, row_indices=(), row_lengths=(), row_pairs=token[:0])


def _array(tokens: torch.Tensor) -> Tokens:
    return np.ascontiguousarray(tokens.detach().cpu().numpy(), dtype=np.int64)


def _grow_tree(rows: Sequence[Row], members: Sequence[int], share: Share) -> ReplayTree:
    """Prefix tree of rows with equal prompts, in depth-first order."""
    prompt = _array(rows[members[0]].prompt)
    responses = {index: _array(rows[index].response) for index in members}
    nodes = [TreeNode(parent=-1, depth=0, tokens=prompt)]
    paths: dict[int, tuple[int, ...]] = {i: (0,) for i in members if len(responses[i]) == 0}

    def branches(below: Sequence[int], path: tuple[int, ...], start: int) -> list[_Branch]:
        """The children of a node, the first to grow last."""
        longer = [index for index in below if len(responses[index]) > start]
        by_token: dict[int, list[int]] = {}
        for index in longer:
            by_token.setdefault(int(responses[index][start]) if share == "prefix" else index, []).append(
                index
            )
        return [_Branch(path, child, start) for child in reversed(by_token.values())]

    stack = branches(members, (0,), 0)
    while stack:
        branch = stack.pop()
        stop = _shared_stop([responses[index] for index in branch.rows], branch.start)
        tokens = responses[branch.rows[0]][branch.start : stop]
        nodes.append(TreeNode(branch.path[-1], len(prompt) + branch.start, tokens))
        path = (*branch.path, len(nodes) - 1)
        paths.update((index, path) for index in branch.rows if len(responses[index]) == stop)
        stack.extend(branches(branch.rows, path, stop))
    return ReplayTree(
        nodes=tuple(nodes),
        rows=tuple(RowPath(index, paths[index]) for index in members),
        temperature=float(rows[members[0]].temperature),
    )


@dataclass(frozen=True)
class _Branch:
    """A node still to be made: the rows it serves, the path to its parent, its first response token."""

    path: tuple[int, ...]
    rows: Sequence[int]
    start: int


def _shared_stop(responses: Sequence[Tokens], start: int) -> int:
    """End of the run of tokens, from ``start`` on, that all responses have in common."""
    first = responses[0]
    stop = len(first)
    for other in responses[1:]:
        stop = min(stop, len(other))
        differing = np.flatnonzero(first[start:stop] != other[start:stop])
        if len(differing):
            stop = start + int(differing[0])
    return stop


def _place_nodes(trees: Sequence[ReplayTree]) -> tuple[Node, ...]:
    """Spans of all trees' nodes on the pass's token axis."""
    nodes: list[Node] = []
    cursor = 0
    for tree in trees:
        first = len(nodes)
        subtree_tokens = [len(node.tokens) for node in tree.nodes]
        for index in range(len(tree.nodes) - 1, 0, -1):
            subtree_tokens[tree.nodes[index].parent] += subtree_tokens[index]
        for node, below in zip(tree.nodes, subtree_tokens, strict=True):
            parent = -1 if node.parent < 0 else first + node.parent
            nodes.append(Node(parent, cursor, cursor + len(node.tokens), cursor + below))
            cursor += len(node.tokens)
    return tuple(nodes)


def _row_tokens(trees: Sequence[ReplayTree], nodes: Sequence[Node]) -> dict[int, Tokens]:
    """Row -> packed positions of its response tokens, in order."""
    tokens: dict[int, Tokens] = {}
    first = 0
    for tree in trees:
        for path in tree.rows:
            spans = [nodes[first + node] for node in path.nodes[1:]]
            runs = [np.arange(span.start, span.stop) for span in spans]
            tokens[path.row] = np.concatenate([np.empty(0, dtype=np.int64), *runs])
        first += len(tree.nodes)
    return tokens
