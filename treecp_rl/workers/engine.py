"""``TreeCPEngine``: verl's FSDP2 engine with one method of its own, the step.

Model loading, sharding, optimizer, schedule, clipping, checkpoints, offload, LoRA and weight export are
inherited. Importing this module registers the engine, and verl's own FSDP2 engine for the CPU.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.utils.device import get_device_id, get_device_name
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from treecp_rl.engine.capabilities import prepare_model
from treecp_rl.engine.head import HeadOptions
from treecp_rl.engine.passes import Domain, PassOptions, PassPlan, RowScores, plan_passes, run_passes
from treecp_rl.engine.planning import Planner
from treecp_rl.errors import BatchError, ConfigError
from treecp_rl.lost_ranks import naming_lost_ranks
from treecp_rl.planner.batch import decide
from treecp_rl.planner.schedule_batch import BatchPlan
from treecp_rl.planner.search import TreeLengths
from treecp_rl.planner.service import planner_client
from treecp_rl.workers import convert
from treecp_rl.workers.launch import engine_refusals
from treecp_rl.workers.metrics import LossMetrics, counts_of, fill_in_for_idle, planning_metrics
from treecp_rl.workers.options import TreeCPOptions
from treecp_rl.workers.planning import planning_of


class _RunsWithoutPinnedMemory:
    """verl pins the host memory of a forward-only FSDP2 model, which needs an accelerator."""

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        if get_device_name() != "cpu" or not self.engine_config.forward_only:
            return super()._build_fsdp_module(module)  # type: ignore[misc]
        self.engine_config.forward_only = False
        try:
            return super()._build_fsdp_module(module)  # type: ignore[misc]
        finally:
            self.engine_config.forward_only = True


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")
class FSDP2EngineOnCPU(_RunsWithoutPinnedMemory, FSDPEngineWithLMHead):
    """verl's own engine, so that ``trainer.backend=fsdp2`` compares like with like where there is no CUDA."""


@dataclass(frozen=True)
class Step:
    """A batch that every rank has agreed to run."""

    batch: convert.Batch
    plan: PassPlan
    num_loss_tokens: int
    """Over all ranks."""
    some_rank_is_idle: bool
    """A rank has no rows at all."""


@EngineRegistry.register(model_type="language_model", backend="treecp", device=["cpu", "cuda"])
class TreeCPEngine(_RunsWithoutPinnedMemory, FSDPEngineWithLMHead):
    """Computes every prompt once a group, in the actor update, in old log-probs and in the reference pass."""

    def __init__(
        self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any
    ) -> None:
        for refusal in engine_refusals(engine_config, model_config):
            raise ConfigError(refusal)
        self.options = TreeCPOptions.from_mapping(engine_config.get("treecp"))
        heads = getattr(model_config.hf_config, "num_key_value_heads", None)
        if heads is not None:
            # Refuses a forced kind that the model cannot run, before anything is loaded.
            decide([self.options.domain_size], self.options.domain_size, self.options.mode, heads)
        self.planning = planning_of(
            self.options,
            model_config.hf_config,
            get_device_name(),
            checkpointing=bool(model_config.enable_gradient_checkpointing),
        )
        # verl chose this class by the strategy's name; what it builds underneath is FSDP2.
        object.__setattr__(engine_config, "strategy", "fsdp2")
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)

    def _init_device_mesh(self) -> None:
        self.domain, self._data_parallel_group = _join_domain(self.options)
        super()._init_device_mesh()

    # Ranks of a domain are one data-parallel rank to verl: they get the same rows, the first one answers.

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank() // self.options.domain_size

    def get_data_parallel_size(self) -> int:
        return dist.get_world_size() // self.options.domain_size

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._data_parallel_group

    def is_mp_src_rank_with_outputs(self) -> bool:
        return self.domain is None or self.domain.rank == 0

    def _build_module(self) -> torch.nn.Module:
        module = super()._build_module()
        prepare_model(module)
        return module

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """One step over this rank's rows: forward, verl's loss, and backward unless ``forward_only``.

        Every rank enters together, with any number of rows; those of a domain with the same rows.

        Returns:
            As verl's engines: ``model_output`` (jagged, in the caller's row order), ``loss``, ``metrics``.

        Raises:
            RankLost: another rank ended in mid-step.
        """
        with naming_lost_ranks():
            return self._step(data, loss_function, forward_only)

    def _step(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool
    ) -> dict[str, Any]:
        step = self._agree_on_step(data, forward_only)
        batch, dp_size = step.batch, self.get_data_parallel_size()
        convert.announce_totals(data, num_loss_tokens=step.num_loss_tokens, dp_size=dp_size)
        losses: list[float] = []
        metrics = LossMetrics()
        kept: list[RowScores] = []

        def loss_of(scores: RowScores) -> torch.Tensor:
            """verl's loss of one pass, on exactly the rows of that pass."""
            rows = convert.select_rows(data, scores.row_indices)
            loss, loss_metrics = loss_function(
                model_output=convert.model_output(batch.rows, [scores]),
                data=rows,
                dp_group=self.get_data_parallel_group(),
            )
            losses.append(loss.detach().item())
            metrics.add(loss_metrics, int(rows["loss_mask"].sum()))
            if batch.wants_model_output:
                kept.append(_detached(scores))
            return loss

        head = HeadOptions(batch.wants_entropy, batch.wants_sum_pi_squared, self.options.head_chunk_tokens)
        started = time.perf_counter()
        report = run_passes(
            self.module,
            step.plan,
            None if forward_only else loss_of,
            _pass_options(self.options, head),
            device=get_device_id(),
            domain=self.domain,
            forward_context=self._autocast,
            sync_context=self._gradient_sync(forward_only),
        )
        measured_seconds = _seconds_since(started)
        if forward_only:
            kept = list(report.scores)
            if loss_function is not None:
                for scores in report.scores:
                    loss_of(scores)

        reported = metrics.result() | counts_of(batch, step.plan, report, dp_size)
        if self.planning is not None and not forward_only:
            reported |= planning_metrics(step.plan.chosen, measured_seconds, planner_client(), dp_size)
        if step.some_rank_is_idle:
            fill_in_for_idle(reported, self.get_data_parallel_group())
        return {"model_output": convert.model_output(batch.rows, kept), "loss": losses, "metrics": reported}

    def _agree_on_step(self, data: TensorDict, forward_only: bool) -> Step:
        """Read and plan this rank's rows.

        What fails on any rank is raised on all of them, so that none is left waiting in a collective.
        """
        failure = None
        try:
            batch = convert.read_batch(data)
            tokens_per_rank = convert.token_budget(data, self.options, batch.longest_row)
            plan = plan_passes(
                batch.rows,
                share=self.options.share,
                tokens_per_pass=tokens_per_rank * self.options.domain_size,
                mode=self.options.mode,
                planner=self._planner(data, tokens_per_rank, needs_gradients=not forward_only),
            )
            mine = [batch.num_loss_tokens, int(not batch.rows), 0]
        except Exception as error:
            failure, mine = error, [0, 0, 1]
        totals = torch.tensor(mine, dtype=torch.int64, device=get_device_id())
        dist.all_reduce(totals)
        num_loss_tokens, num_idle, num_failures = totals.tolist()
        if failure is not None:
            raise failure
        if num_failures:
            raise BatchError(f"{num_failures} other rank(s) refused their rows; their message says why")
        # A domain's ranks have counted the same rows.
        return Step(batch, plan, num_loss_tokens // self.options.domain_size, num_idle > 0)

    def _planner(self, data: TensorDict, tokens_per_rank: int, *, needs_gradients: bool) -> Planner | None:
        """Finds the plan of a step where ranks share passes and no mode is forced."""
        planning = self.planning
        if planning is None:
            return None
        factors = convert.factors_of(data)

        def plan(trees: Sequence[TreeLengths]) -> BatchPlan:
            arranged = planning.request(
                trees, tokens_per_rank, needs_gradients=needs_gradients, factors=factors
            )
            return arranged.restore(planner_client().find(arranged.request))

        return plan

    def _autocast(self) -> AbstractContextManager[None]:
        """As verl's engine: mixed precision by autocast, none at all in fp32."""
        if self._autocast_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(device_type=get_device_name(), dtype=self._autocast_dtype)

    def _gradient_sync(self, forward_only: bool) -> Callable[[bool], AbstractContextManager[None]]:
        if forward_only:
            return lambda is_last: nullcontext()
        return lambda is_last: self._gradient_sync_context(is_last_micro_batch=is_last)


def _seconds_since(started: float) -> float:
    """Wall time once the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _pass_options(options: TreeCPOptions, head: HeadOptions) -> PassOptions:
    return PassOptions(
        head=head,
        mode=options.mode,
        streaming=options.streaming,
        resend=options.resend,
        save_attention_bytes=options.save_attention_bytes,
        offload_leaves=options.offload_leaves,
        attention_bytes_per_rank=options.attention_bytes_per_rank,
    )


def _join_domain(options: TreeCPOptions) -> tuple[Domain | None, dist.ProcessGroup]:
    """This rank's domain (None if it is alone) and the data-parallel group across domains.

    Every rank calls it together: groups are made by all ranks in the same order.

    Raises:
        ConfigError: the domain does not divide the world.
    """
    domain_size, world_size, rank = options.domain_size, dist.get_world_size(), dist.get_rank()
    options.require_domain_divides(world_size)
    if domain_size == 1:
        return None, dist.group.WORLD
    starts = range(0, world_size, domain_size)
    domains = [dist.new_group(list(range(start, start + domain_size))) for start in starts]
    across = [dist.new_group(list(range(first, world_size, domain_size))) for first in range(domain_size)]
    domain = Domain(rank % domain_size, domain_size, domains[rank // domain_size])
    return domain, across[rank % domain_size]


def _detached(scores: RowScores) -> RowScores:
    """The same scores without their graph."""
    values = {
        name: value if name == "row_indices" or value is None else [tensor.detach() for tensor in value]
        for name, value in vars(scores).items()
    }
    return RowScores(**values)
