"""[GenerationRequest] -> waiting -> prefill each distinct prompt -> running batch, a token a step -> [Generation]

Continuous batching for small models on the CPU. Each step admits what waits, runs the prompts not seen yet
through the model (left-padded together, under a token budget), gives every sibling a copy of its prompt's keys
and values, and decodes one token for all running rows at once. Finished rows leave at once, so a long row keeps
nobody waiting.

Why not transformers' own continuous batching: it attends with one dense mask over all tokens of a batch and
computes logits at every prompt position. ``benchmarks/rollout_cpu.py``, 256 rows of 32 prompts (130-160 tokens), a
tiny Qwen2, fp32, one thread: with 2-8 new tokens it takes 20 times as long as this file, and one padded
``generate`` 3.7 times; with 2-64 new tokens 16 and 3.0 times.

A row's randomness comes from its own seed, so what it samples does not depend on what shares its batch (beyond
rounding). Nothing here knows verl or Ray.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel

from treecp_rl.workers.sampling import Sampling, sample

Prompt = tuple[int, ...]
KeyValues = list[tuple[Tensor, Tensor]]  # one (keys, values) a layer, [rows, heads, tokens, head_dim]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One row to generate. Example: ``GenerationRequest("a", (1, 2, 3), Sampling(max_tokens=8), seed=(42, 0))``."""

    request_id: str
    prompt: Prompt
    sampling: Sampling
    seed: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class Generation:
    """A row's tokens, the end-of-sequence token included, with the log-probability each was sampled with."""

    request_id: str
    token_ids: list[int]
    log_probs: list[float]
    finish: Literal["stop", "length", "aborted"]
    cached_tokens: int
    """Prompt tokens that were not computed for this row, because a sibling's prefill served it."""


@dataclass(slots=True)
class _Row:
    request: GenerationRequest
    random: np.random.Generator
    cached_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    def generation(self, finish: Literal["stop", "length", "aborted"]) -> Generation:
        return Generation(self.request.request_id, self.token_ids, self.log_probs, finish, self.cached_tokens)


@dataclass(frozen=True, slots=True)
class _Prefilled:
    """A prompt's keys and values ([heads, tokens, head_dim] a layer) and the logits after its last token."""

    key_values: KeyValues
    logits: Tensor


class BatchGenerator:
    """The requests in flight on one model. Not thread-safe, except that ``submit`` may come from any thread."""

    def __init__(
        self,
        model: PreTrainedModel,
        eos_token_ids: Iterable[int],
        *,
        max_rows: int = 256,
        prefill_tokens: int = 8192,
        cached_prompt_tokens: int = 16384,
        raw_log_probs: bool = False,
    ) -> None:
        """``prefill_tokens`` bounds one prefill, ``cached_prompt_tokens`` what is kept of prompts between steps."""
        self.model = model.eval()
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_rows = max_rows
        self.prefill_tokens = prefill_tokens
        self.raw_log_probs = raw_log_probs
        self._waiting: deque[GenerationRequest] = deque()
        self._running: _RunningBatch | None = None
        self._prompts = _PromptCache(cached_prompt_tokens)

    def submit(self, request: GenerationRequest) -> None:
        self._waiting.append(request)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or self._running is not None

    @torch.inference_mode()
    def step(self) -> list[Generation]:
        """Admit what waits, decode one token for every running row, and return the rows that ended."""
        ended = self._admit()
        if self._running is not None:
            ended += self._decode(self._running)
        return ended

    def abort(self) -> list[Generation]:
        """Stop every row; each comes back with the tokens it has."""
        rows = self._running.rows if self._running is not None else []
        waiting = [_start(request) for request in self._waiting]
        self._running = None
        self._waiting.clear()
        return [row.generation("aborted") for row in [*rows, *waiting]]

    def forget_prompts(self) -> None:
        """Drop the keys and values kept of prompts: after new weights they are wrong."""
        self._prompts.clear()

    def _admit(self) -> list[Generation]:
        free = self.max_rows - (len(self._running.rows) if self._running is not None else 0)
        rows = [_start(self._waiting.popleft()) for _ in range(min(free, len(self._waiting)))]
        if not rows:
            return []
        prompts = self._prefill_missing(rows)
        ended, kept = self._sample(rows, torch.stack([prompts[row.request.prompt].logits for row in rows]))
        if kept:
            batch = _RunningBatch.start([rows[i] for i in kept], prompts)
            self._running = batch if self._running is None else self._running.join(batch)
        return ended

    def _prefill_missing(self, rows: Sequence[_Row]) -> dict[Prompt, _Prefilled]:
        """Every row's prompt, from the cache or computed now; notes on each row what it did not cost."""
        found: dict[Prompt, _Prefilled] = {}
        missing: dict[Prompt, None] = {}
        for row in rows:
            prompt = row.request.prompt
            if prompt not in found and (cached := self._prompts.get(prompt)) is not None:
                found[prompt] = cached
            if prompt in found or prompt in missing:
                row.cached_tokens = len(prompt)
            else:
                missing[prompt] = None
        for prompts in _under_budget(sorted(missing, key=len), self.prefill_tokens):
            for prompt, prefilled in zip(prompts, self._prefill(prompts), strict=True):
                found[prompt] = prefilled
                self._prompts.put(prompt, prefilled)
        return found

    def _prefill(self, prompts: Sequence[Prompt]) -> Iterator[_Prefilled]:
        length = max(map(len, prompts))
        padding = [length - len(prompt) for prompt in prompts]
        input_ids = torch.tensor(
            [[0] * gap + list(prompt) for gap, prompt in zip(padding, prompts, strict=True)]
        )
        mask = torch.arange(length) >= torch.tensor(padding)[:, None]
        output = self.model(
            input_ids=input_ids,
            attention_mask=mask.long(),
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            past_key_values=DynamicCache(),
            use_cache=True,
            logits_to_keep=1,
        )
        layers = output.past_key_values.layers
        for i, gap in enumerate(padding):
            # Cloned, so that a cached prompt does not keep the padded batch it was computed in.
            key_values = [
                (layer.keys[i, :, gap:].clone(), layer.values[i, :, gap:].clone()) for layer in layers
            ]
            yield _Prefilled(key_values, output.logits[i, -1].float())

    def _decode(self, batch: "_RunningBatch") -> list[Generation]:
        last_tokens = torch.tensor([[row.token_ids[-1]] for row in batch.rows])
        positions = torch.tensor([[len(row.request.prompt) + len(row.token_ids) - 1] for row in batch.rows])
        batch.mask = pad(batch.mask, (0, 1), value=1)
        output = self.model(
            input_ids=last_tokens,
            attention_mask=batch.mask,
            position_ids=positions,
            past_key_values=batch.cache,
            use_cache=True,
        )
        ended, kept = self._sample(batch.rows, output.logits[:, -1].float())
        if not kept:
            self._running = None
        elif ended:
            batch.keep(kept)
        return ended

    def _sample(self, rows: Sequence[_Row], logits: Tensor) -> tuple[list[Generation], list[int]]:
        """Give every row its next token; return the rows that ended and the indices of the others."""
        uniform = torch.tensor([row.random.random() for row in rows], dtype=torch.float64)
        tokens, log_probs = sample(
            logits, [row.request.sampling for row in rows], uniform, raw_log_probs=self.raw_log_probs
        )
        ended, kept = [], []
        for i, (row, token, log_prob) in enumerate(
            zip(rows, tokens.tolist(), log_probs.tolist(), strict=True)
        ):
            row.token_ids.append(token)
            row.log_probs.append(log_prob)
            if token in self.eos_token_ids and not row.request.sampling.ignore_eos:
                ended.append(row.generation("stop"))
            elif len(row.token_ids) >= row.request.sampling.max_tokens:
                ended.append(row.generation("length"))
            else:
                kept.append(i)
        return ended, kept


@dataclass(slots=True)
class _RunningBatch:
    """The rows being decoded, left-padded to one length so that they share one key-value cache."""

    rows: list[_Row]
    cache: DynamicCache
    mask: Tensor  # [rows, tokens] int64, 0 on padding

    @classmethod
    def start(cls, rows: list[_Row], prompts: dict[Prompt, _Prefilled]) -> "_RunningBatch":
        """Rows fresh from prefill: each distinct prompt is padded once, then copied to its rows."""
        index = {prompt: i for i, prompt in enumerate(dict.fromkeys(row.request.prompt for row in rows))}
        length = max(map(len, index))
        source = torch.tensor([index[row.request.prompt] for row in rows])
        mask = (
            torch.arange(length) >= torch.tensor([length - len(row.request.prompt) for row in rows])[:, None]
        )

        def stacked(layer: int, which: int) -> Tensor:
            parts = [_pad_left(prompts[prompt].key_values[layer][which], length) for prompt in index]
            return torch.stack(parts).index_select(0, source)

        layers = range(len(prompts[rows[0].request.prompt].key_values))
        return cls(rows, DynamicCache([(stacked(i, 0), stacked(i, 1)) for i in layers]), mask.long())

    def join(self, other: "_RunningBatch") -> "_RunningBatch":
        length = max(self.mask.shape[1], other.mask.shape[1])

        def joined(name: str, layer: int) -> Tensor:
            parts = [getattr(batch.cache.layers[layer], name) for batch in (self, other)]
            return torch.cat([_pad_left(part, length) for part in parts])

        key_values = [(joined("keys", i), joined("values", i)) for i in range(len(self.cache.layers))]
        masks = [pad(batch.mask, (length - batch.mask.shape[1], 0)) for batch in (self, other)]
        return _RunningBatch(self.rows + other.rows, DynamicCache(key_values), torch.cat(masks))

    def keep(self, indices: list[int]) -> None:
        """Drop all other rows, and the padding that no remaining row needs to be wider."""
        chosen = torch.tensor(indices)
        self.rows = [self.rows[i] for i in indices]
        self.mask = self.mask[chosen]
        first = int(self.mask.any(0).long().argmax())
        self.mask = self.mask[:, first:]
        for layer in self.cache.layers:
            layer.keys = layer.keys[:, :, first:].index_select(0, chosen)
            layer.values = layer.values[:, :, first:].index_select(0, chosen)


class _PromptCache:
    """The prompts computed last, up to a number of tokens; the one used longest ago leaves first."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.tokens = 0
        self._entries: OrderedDict[Prompt, _Prefilled] = OrderedDict()

    def get(self, prompt: Prompt) -> _Prefilled | None:
        if prompt in self._entries:
            self._entries.move_to_end(prompt)
        return self._entries.get(prompt)

    def put(self, prompt: Prompt, prefilled: _Prefilled) -> None:
        self._entries[prompt] = prefilled
        self.tokens += len(prompt)
        while self.tokens > self.max_tokens:
            oldest, _ = self._entries.popitem(last=False)
            self.tokens -= len(oldest)

    def clear(self) -> None:
        self._entries.clear()
        self.tokens = 0


def _start(request: GenerationRequest) -> _Row:
    return _Row(request, np.random.default_rng(request.seed))


def _pad_left(tensor: Tensor, length: int) -> Tensor:
    """Zeros before the tokens of ``[..., tokens, head_dim]`` up to ``length``."""
    return pad(tensor, (0, 0, length - tensor.shape[-2], 0))


def _under_budget(prompts: Sequence[Prompt], tokens: int) -> Iterator[list[Prompt]]:
    """Prompts, shortest first, cut into padded batches of at most ``tokens`` tokens (one prompt at least)."""
    batch: list[Prompt] = []
    for prompt in prompts:
        if batch and len(prompt) * (len(batch) + 1) > tokens:
            yield batch
            batch = []
        batch.append(prompt)
    if batch:
        yield batch
