"""verl's TensorDict -> rows, token budget; scores -> verl's model output. verl's keys are spelled only here.

verl hands a batch without padding: ``input_ids`` and ``position_ids`` are jagged [B, P+R], ``prompts``
[B, P], ``responses`` and ``loss_mask`` [B, R]; what concerns the whole batch (temperature, micro-batch options)
is non-tensor data. Its losses read log-probs as jagged [B, P+R] where entry t belongs to token t+1.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id

from treecp_rl.engine.passes import RowScores
from treecp_rl.errors import BatchError, ConfigError, UnsupportedModel
from treecp_rl.planner.profile import Factors
from treecp_rl.tree import Row
from treecp_rl.workers.options import TreeCPOptions
from treecp_rl.workers.planning import MicroBatch, decode_factors

FACTORS_KEY = "treecp_factors"
"""The planner's factors, as the trainer sends them with an update."""
_ROW_KEYS = ("input_ids", "position_ids", "prompts", "responses", "loss_mask", "uid")
_PADDING_UID = re.compile(r"pad[0-9a-f]{32}")
"""How verl names the rows it adds to fill a batch (``upsample_batch_to_divisible_size``)."""


@dataclass(frozen=True)
class Batch:
    """One rank's rows, and what verl asks to compute of them."""

    rows: tuple[Row, ...]
    is_padding: tuple[bool, ...]
    """Whether a row was added by verl to fill the batch."""
    num_loss_tokens: int
    wants_entropy: bool
    wants_sum_pi_squared: bool
    wants_model_output: bool
    """Keep per-row outputs of a training step as well."""

    @property
    def longest_row(self) -> int:
        return max((row.num_tokens for row in self.rows), default=1)


def read_batch(data: TensorDict) -> Batch:
    """Rows of a batch, checked.

    Raises:
        BatchError: a key is missing, or a row contradicts itself.
        UnsupportedModel: rows with images, audio or multi-axis positions.
    """
    if len(data) == 0:
        rows, loss_tokens, uids = (), 0, []
    else:
        for key in _ROW_KEYS:
            if key not in data:
                raise BatchError(f"the batch has no {key!r}; treecp needs {', '.join(_ROW_KEYS)}")
        _refuse_multimodal(data)
        uids = [str(tu.unwrap_non_tensor_data(uid)) for uid in data["uid"]]
        rows = _rows(data, uids)
        loss_tokens = int(data["loss_mask"].sum())
    return Batch(
        rows=rows,
        is_padding=tuple(_PADDING_UID.fullmatch(uid) is not None for uid in uids),
        num_loss_tokens=loss_tokens,
        wants_entropy=_flag(data, "calculate_entropy"),
        wants_sum_pi_squared=_flag(data, "calculate_sum_pi_squared"),
        wants_model_output=_flag(data, "return_model_output"),
    )


def token_budget(data: TensorDict, options: TreeCPOptions, longest_row: int) -> int:
    """Packed tokens of one forward, a rank.

    Raises:
        ConfigError: neither our option nor verl's micro-batch gives a budget.
    """
    micro_batch = MicroBatch(
        tu.get_non_tensor_data(data, "use_dynamic_bsz", True),
        tu.get_non_tensor_data(data, "max_token_len_per_gpu", None),
        tu.get_non_tensor_data(data, "micro_batch_size_per_gpu", None),
    )
    tokens = micro_batch.tokens_per_rank(options, longest_row)
    if tokens is None:
        key = "max_token_len_per_gpu" if micro_batch.use_dynamic_bsz else "micro_batch_size_per_gpu"
        raise ConfigError(
            f"no token budget for a forward: set actor_rollout_ref.actor.ppo_{key} (for log-probs its "
            "rollout/ref.log_prob_ counterpart) or actor_rollout_ref.actor.treecp.tokens_per_rank"
        )
    return int(tokens)


def factors_of(data: TensorDict) -> Factors | None:
    """The planner's factors that the trainer sent with an update."""
    return decode_factors(tu.get_non_tensor_data(data, FACTORS_KEY, None))


def announce_totals(data: TensorDict, *, num_loss_tokens: int, dp_size: int) -> None:
    """Write what verl's losses normalise with: totals over all ranks, so that passes add up.

    A batch without a single loss token is normalised by one: its loss is 0, not 0/0.
    """
    tu.assign_non_tensor(data, sp_size=1, dp_size=dp_size, batch_num_tokens=max(1, num_loss_tokens))


def select_rows(data: TensorDict, row_indices: Sequence[int]) -> TensorDict:
    """The rows of one pass, on the engine's device, as a loss function expects a micro-batch."""
    return tu.index_select_tensor_dict(data, list(row_indices)).to(get_device_id())


def model_output(rows: Sequence[Row], scores: Sequence[RowScores]) -> dict[str, torch.Tensor]:
    """Scores -> verl's outputs: jagged [B, P+R] of the given passes' rows, ascending by row index.

    Prompt positions, and the last one, which predicts nothing of the row, are zero.
    """
    output = {}
    for name in ("log_probs", "entropy", "sum_pi_squared"):
        if any(getattr(score, name) is None for score in scores):
            continue
        of_row = {}
        for score in scores:
            of_row.update(zip(score.row_indices, getattr(score, name), strict=True))
        if of_row:
            output[name] = _jagged([_shift_left(rows[index], of_row[index]) for index in sorted(of_row)])
    return output


def _shift_left(row: Row, values: torch.Tensor) -> torch.Tensor:
    """[R] -> [P+R], where entry t speaks of token t+1."""
    before = values.new_zeros(len(row.prompt) - 1)
    return torch.cat([before, values, values.new_zeros(1)])


def _jagged(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    lengths = torch.tensor([0, *map(len, rows)], device=rows[0].device)
    return torch.nested.nested_tensor_from_jagged(torch.cat(list(rows)), lengths.cumsum(0))


def _flag(data: TensorDict, key: str) -> bool:
    return bool(tu.get_non_tensor_data(data, key, False))


def _rows(data: TensorDict, uids: Sequence[str]) -> tuple[Row, ...]:
    rows = []
    columns = [data[key].unbind() for key in ("input_ids", "position_ids", "prompts", "responses")]
    temperatures = _temperatures(data, len(uids))
    for index, (tokens, positions, prompt, response) in enumerate(zip(*columns, strict=True)):
        name = f"row {index} (uid {uids[index]})"
        if not torch.equal(tokens, torch.cat([prompt, response])):
            raise BatchError(
                f"{name}: input_ids ({len(tokens)} tokens) are not prompts ({len(prompt)}) followed by "
                f"responses ({len(response)}); the batch must hold rows without padding"
            )
        if not torch.equal(positions, torch.arange(len(tokens), device=positions.device)):
            raise BatchError(
                f"{name}: position_ids must run from 0 to {len(tokens) - 1}, they run from {int(positions[0])} "
                f"to {int(positions[-1])}; recompute them from the attention mask"
            )
        rows.append(Row(uids[index], prompt, response, temperatures[index]))
    return tuple(rows)


def _temperatures(data: TensorDict, num_rows: int) -> list[float]:
    temperature = tu.get_non_tensor_data(data, "temperature", None)
    if temperature is None:
        raise BatchError("the batch has no 'temperature'; pass rollout.temperature along with it")
    if isinstance(temperature, torch.Tensor) and temperature.dim() > 0:
        return [float(value) for value in temperature]
    return [float(temperature)] * num_rows


def _refuse_multimodal(data: TensorDict) -> None:
    if data["position_ids"].dim() > 2:
        raise UnsupportedModel(
            f"position_ids have {data['position_ids'].dim()} axes (multimodal rope); treecp runs text models, "
            "train this one with trainer.backend=fsdp2"
        )
    for index, inputs in enumerate(data.get("multi_modal_inputs", ())):
        if tu.unwrap_non_tensor_data(inputs):
            raise UnsupportedModel(
                f"row {index} has multi_modal_inputs: prompts are told apart by text tokens alone; "
                "train this model with trainer.backend=fsdp2"
            )
