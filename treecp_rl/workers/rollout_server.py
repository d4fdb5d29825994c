"""verl's generate calls -> one ``BatchGenerator`` on the CPU -> ``TokenOutput``. One Ray actor a replica.

Everything below runs on the actor's event loop except the model itself, which runs step by step in one worker
thread. Requests that arrive while a step runs join at the next one. ``_model_lock`` is held during a step, so new
weights, an abort or a cleared cache never meet a half-done step.
"""

import asyncio
import logging
import zlib
from array import array
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import TokenOutput

from treecp_rl.errors import BatchError, ConfigError, TreeCPError
from treecp_rl.workers.generation import BatchGenerator, Generation, GenerationRequest
from treecp_rl.workers.rollout_model import eos_token_ids, load_model, load_weights, server_limits
from treecp_rl.workers.sampling import Sampling

logger = logging.getLogger(__name__)

# A first request waits this long for company: until none came for QUIET, at most LIMIT. A step on a tiny model
# takes about as long, so a batch that trickles in costs a few small steps and nothing more.
GATHER_QUIET_SECONDS = 0.01
GATHER_LIMIT_SECONDS = 0.1

_NO_EFFECT = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_p": 0.0,
    "n": 1,
}
_SUPPORTED = ("max_tokens", "max_new_tokens", "temperature", "top_p", "top_k", "ignore_eos", "logprobs")


class CPUServer:
    """Serves one replica: holds the model, gathers requests, generates, takes new weights."""

    def __init__(
        self, config: RolloutConfig, model_config: HFModelConfig, replica_rank: int, num_threads: int
    ) -> None:
        self.config: RolloutConfig = omega_conf_to_dataclass(config)
        self.model_config: HFModelConfig = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
        self.replica_rank = replica_rank
        self.global_steps: int | None = None
        self.limits = server_limits(self.config, self.model_config)

        torch.set_num_threads(num_threads)
        self._model = load_model(self.config, self.model_config)
        self._awaits_weights = "dummy" in self.config.load_format
        self._generator = BatchGenerator(
            self._model,
            eos_token_ids(self.model_config),
            max_rows=self.config.max_num_seqs,
            prefill_tokens=self.config.max_num_batched_tokens,
            cached_prompt_tokens=2 * self.config.max_num_batched_tokens
            if self.config.enable_prefix_caching
            else 0,
            raw_log_probs=self.config.logprobs_mode == "raw_logprobs",
        )
        # OpenMP keeps its thread count per calling thread, so it is set in the thread that computes.
        self._compute = ThreadPoolExecutor(
            1, "generation", initializer=torch.set_num_threads, initargs=(num_threads,)
        )
        self._model_lock = asyncio.Lock()
        self._has_requests = asyncio.Event()
        self._admitting = asyncio.Event()
        self._admitting.set()
        self._rejecting = False
        self._results: dict[str, asyncio.Future[Generation]] = {}
        self._seen: Counter[tuple[int, ...]] = Counter()
        self._updates = 0
        self._incoming: list[tuple[str, Tensor]] = []
        self._loop_task: asyncio.Task[None] | None = None

    async def ready(self) -> None:
        """Returns once the model is loaded; starts generating."""
        if self._loop_task is None:
            self._loop_task = asyncio.create_task(self._generate_forever())

    # Requests

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        audio_data: list[Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> TokenOutput:
        """The tokens after ``prompt_ids``, each with its log-probability where ``logprobs`` is set."""
        if image_data or video_data or audio_data:
            raise BatchError(
                "rollout treecp_cpu generates from text only; use actor_rollout_ref.rollout.name=vllm"
            )
        if self._awaits_weights:
            raise TreeCPError(
                "rollout treecp_cpu was asked to generate before it got weights: load_format is "
                f"{self.config.load_format!r}, so call update_weights first or set "
                "actor_rollout_ref.rollout.load_format=auto"
            )
        prompt = tuple(int(token) for token in prompt_ids)
        vocabulary = self._model.get_input_embeddings().num_embeddings
        if not prompt or not 0 <= min(prompt) <= max(prompt) < vocabulary:
            raise BatchError(
                f"a prompt needs token ids from 0 to {vocabulary - 1}, and at least one; got {len(prompt)} from "
                f"{min(prompt, default=None)} to {max(prompt, default=None)}: does the tokenizer fit the model?"
            )
        sampling, want_log_probs = self._sampling(sampling_params, len(prompt))
        while not self._admitting.is_set():
            if self._rejecting:
                return self._output(Generation(request_id, [], [], "aborted", 0), want_log_probs)
            await self._admitting.wait()
        if request_id in self._results:
            raise BatchError(f"request id {request_id!r} is in flight already; ids must be unique")
        seed = self._seed(prompt, request_id)
        result = self._results[request_id] = asyncio.get_running_loop().create_future()
        self._generator.submit(GenerationRequest(request_id, prompt, sampling, seed))
        self._has_requests.set()
        try:
            return self._output(await result, want_log_probs)
        finally:
            self._results.pop(request_id, None)

    def _sampling(self, params: dict[str, Any], prompt_tokens: int) -> tuple[Sampling, bool]:
        """verl's (vLLM's) sampling options as ours; refuses what would change the result and is not done here."""
        for key, value in params.items():
            if key not in _SUPPORTED and value is not None and value != _NO_EFFECT.get(key):
                raise ConfigError(
                    f"rollout treecp_cpu cannot do {key}={value!r}: it knows {', '.join(_SUPPORTED)}; leave "
                    f"{key} out or use actor_rollout_ref.rollout.name=vllm"
                )
        asked = params.get("max_tokens", params.get("max_new_tokens"))
        sampling = Sampling(
            max_tokens=self.limits.max_tokens(prompt_tokens, asked),
            temperature=float(params.get("temperature", self.config.temperature)),
            top_p=float(params.get("top_p", self.config.top_p)),
            top_k=max(int(params.get("top_k", self.config.top_k)), 0),
            ignore_eos=bool(params.get("ignore_eos", self.config.ignore_eos)),
        )
        return sampling, bool(params.get("logprobs", False))

    def _seed(self, prompt: tuple[int, ...], request_id: str) -> tuple[int, ...]:
        """From the config's seed, the weights' version, the prompt and how often it came: not from the clock.

        Siblings may arrive in any order, which permutes a group's samples and changes none of them. Under
        ``full_determinism`` verl sends stable request ids and the seed follows them instead.
        """
        if self.config.full_determinism:
            return (self.config.seed, *request_id.encode())
        version = self._updates if self.global_steps is None else self.global_steps
        ordinal = self._seen[prompt]
        self._seen[prompt] += 1
        return (
            self.config.seed,
            self.replica_rank,
            version,
            ordinal,
            zlib.crc32(array("q", prompt).tobytes()),
        )

    def _output(self, generation: Generation, want_log_probs: bool) -> TokenOutput:
        return TokenOutput(
            token_ids=generation.token_ids,
            log_probs=generation.log_probs if want_log_probs else None,
            stop_reason="aborted" if generation.finish == "aborted" else "completed",
            num_preempted=0,
            extra_fields={
                "global_steps": self.global_steps,
                "num_cached_tokens": generation.cached_tokens,
            },
        )

    # Generation

    async def _generate_forever(self) -> None:
        while True:
            await self._has_requests.wait()
            await self._gather()
            while self._generator.has_work:
                async with self._model_lock:
                    await self._step()
                await asyncio.sleep(0)  # arrivals and control calls get their turn between steps
            self._has_requests.clear()

    async def _gather(self) -> None:
        """Let requests sent together arrive together."""
        waited, count = 0.0, 0
        while waited < GATHER_LIMIT_SECONDS and count < len(self._results) < self.config.max_num_seqs:
            count = len(self._results)
            await asyncio.sleep(GATHER_QUIET_SECONDS)
            waited += GATHER_QUIET_SECONDS

    async def _step(self) -> None:
        """One token for every row. If it fails, every request in flight gets the error, and none waits for ever."""
        try:
            ended = await self._in_compute_thread(self._generator.step)
        except Exception as error:
            logger.exception("generation failed; its %d requests fail with it", len(self._results))
            self._generator.abort()
            for result in self._results.values():
                if not result.done():
                    result.set_exception(error)
            return
        self._deliver(ended)

    def _deliver(self, generations: list[Generation]) -> None:
        for generation in generations:
            result = self._results.get(generation.request_id)
            if result is not None and not result.done():
                result.set_result(generation)

    async def _in_compute_thread(self, function, *args):
        return await asyncio.get_running_loop().run_in_executor(self._compute, function, *args)

    # Control: what verl's replica and trainer ask of a server

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """End every request with the tokens it has; later ones wait (or are rejected) until resume_generation."""
        self._admitting.clear()
        self._rejecting = reject_request
        async with self._model_lock:
            aborted = self._generator.abort()
            self._deliver(aborted)
            self._generator.forget_prompts()
        return {
            "aborted_count": len(aborted),
            "request_ids": [generation.request_id for generation in aborted],
        }

    async def resume_generation(self) -> None:
        self._rejecting = False
        self._admitting.set()

    async def receive_weights(
        self, bucket: list[tuple[str, Tensor]], last: bool = True, global_steps: int | None = None
    ) -> None:
        """Collect named tensors; at the last bucket put all of them into the model between two steps."""
        self._incoming += bucket
        if not last:
            return
        weights, self._incoming = dict(self._incoming), []
        async with self._model_lock:
            await self._in_compute_thread(load_weights, self._model, weights)
            self._generator.forget_prompts()
            self._seen.clear()
            self._updates += 1
            self._awaits_weights = False
            if global_steps is not None:
                self.global_steps = global_steps

    async def set_global_steps(self, global_steps: int) -> None:
        self.global_steps = global_steps

    async def clear_kv_cache(self) -> None:
        async with self._model_lock:
            self._generator.forget_prompts()

    async def release_kv_cache(self) -> None:
        await self.clear_kv_cache()

    async def sleep(self) -> None:
        """Give back what is cached. The weights stay: main memory is not what the trainer is short of."""
        await self.clear_kv_cache()

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Nothing was taken away that would have to come back."""

    async def resume_kv_cache(self) -> None:
        """Nothing was taken away that would have to come back."""

    async def start_profile(self, **kwargs: Any) -> None:
        """No profiler of its own."""

    async def stop_profile(self) -> None:
        """No profiler of its own."""

    async def get_rollout_config(self) -> RolloutConfig:
        return self.config
