"""One tile of attention: (q, k, v) -> (out, lse), and its backward fed the merged out and lse.

All kernels share one contract, so the executor never asks which one it runs. Layout legend:
H query heads, K key/value heads (H a multiple of K), S query tokens, L key tokens, T tokens of packed
segments, D head dim. Tensors are [1,H,S,D] and [1,K,L,D], lse is [1,H,S] (natural log, fp32 or wider).

A tile's backward takes the *global* out and lse of its queries: then p = exp(q k^T - lse) are the true
probabilities, and the gradients of a query's tiles simply add up (as in ring attention).

The CUDA kernels are written against their documented ops; benchmarks/gpu_check.py holds them to float64.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from itertools import pairwise
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from treecp_rl.errors import ConfigError, PlanError

Grads = tuple[Tensor, Tensor, Tensor]

Borders = tuple[int, ...]
"""0 = b0 < b1 < ... < bn = T: segment i is tokens [b_i, b_{i+1})."""

_HALF = (torch.bfloat16, torch.float16)
_FLOATS = (torch.float64, torch.float32, *_HALF)


@dataclass(frozen=True)
class Capabilities:
    """Where a kernel runs and what it takes."""

    dtypes: tuple[torch.dtype, ...] = _FLOATS
    device_type: str | None = None
    """None: any."""
    packs_segments: bool = False
    """Whether it is a ``SegmentKernel``."""
    max_head_dim: int | None = None
    compute_majors: range | None = None
    """Major compute capabilities of the GPUs it has code for."""
    module: str | None = None
    """What must be importable."""
    package: str | None = None
    """Where that comes from."""


class Kernel(Protocol):
    """What the executor needs of a kernel."""

    name: str
    capabilities: Capabilities

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """[1,H,S,D], [1,K,L,D], [1,K,L,D] -> out [1,H,S,D], lse [1,H,S]. A causal tile is square."""
        ...

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> Grads:
        """Gradients of q, k, v from this tile, given the merged ``out`` and ``lse`` of its queries."""
        ...


class SegmentKernel(Kernel, Protocol):
    """A kernel that runs all of a rank's causal tiles in one call."""

    def forward_segments(
        self, q: Tensor, k: Tensor, v: Tensor, borders: Borders, scale: float
    ) -> tuple[Tensor, Tensor]:
        """[1,H,T,D], [1,K,T,D] twice -> out [1,H,T,D], lse [1,H,T]; a segment attends causally to itself alone.

        Raises:
            PlanError: the borders do not ascend from 0 to T.
        """
        ...

    def backward_segments(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        borders: Borders,
        scale: float,
    ) -> Grads:
        """Gradients of q, k, v from these tiles, given the merged ``out`` and ``lse`` of all T queries."""
        ...


class MathKernel:
    """The formula itself, on any device and dtype: the reference the fast kernels are tested against."""

    name = "math"
    capabilities = Capabilities(packs_segments=True)

    def forward(self, q, k, v, causal, scale):  # type: ignore[no-untyped-def]
        scores = _scores(q, k, causal, scale)
        lse = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - lse.unsqueeze(-1))
        return _to_heads(weights.to(v.dtype) @ v.unsqueeze(2)), _to_heads(lse)

    def backward(self, grad_out, q, k, v, out, lse, causal, scale):  # type: ignore[no-untyped-def]
        num_groups = q.shape[1] // k.shape[1]
        grad, q_grouped = _to_groups(grad_out, k), _to_groups(q, k)
        delta = (_to_groups(grad_out, k).to(lse.dtype) * _to_groups(out, k).to(lse.dtype)).sum(
            -1, keepdim=True
        )
        scores = _scores(q, k, causal, scale)
        weights = torch.exp(scores - lse.unflatten(1, (-1, num_groups)).unsqueeze(-1))
        grad_v = (weights.to(grad.dtype).transpose(-1, -2) @ grad).sum(2)
        grad_weights = (grad @ v.unsqueeze(2).transpose(-1, -2)).to(weights.dtype)
        grad_scores = (weights * (grad_weights - delta) * scale).to(q.dtype)
        grad_q = _to_heads(grad_scores @ k.unsqueeze(2))
        grad_k = (grad_scores.transpose(-1, -2) @ q_grouped).sum(2)
        return grad_q, grad_k, grad_v

    def forward_segments(self, q, k, v, borders, scale):  # type: ignore[no-untyped-def]
        parts = [self.forward(*tensors, True, scale) for tensors in _segments(borders, q, k, v)]
        out, lse = (torch.cat(part, dim=2) for part in zip(*parts, strict=True))
        return out, lse

    def backward_segments(self, grad_out, q, k, v, out, lse, borders, scale):  # type: ignore[no-untyped-def]
        tiles = _segments(borders, grad_out, q, k, v, out, lse)
        parts = [self.backward(*tensors, True, scale) for tensors in tiles]
        grad_q, grad_k, grad_v = (torch.cat(part, dim=2) for part in zip(*parts, strict=True))
        return grad_q, grad_k, grad_v


class CpuFlashKernel:
    """torch's fused CPU kernel; grouped heads natively, no scores in memory."""

    name = "cpu_flash"
    capabilities = Capabilities(device_type="cpu")

    def forward(self, q, k, v, causal, scale):  # type: ignore[no-untyped-def]
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)

    def backward(self, grad_out, q, k, v, out, lse, causal, scale):  # type: ignore[no-untyped-def]
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, lse, 0.0, causal, scale=scale
        )


@dataclass(frozen=True)
class Launch:
    """How one flash op reads its operands: a dense tile [1,S,H,D], or packed segments [T,H,D]."""

    causal: bool
    scale: float
    longest_q: int
    longest_k: int
    cu_seqlens: Tensor | None = None
    """[n+1] int32 borders of the segments; None: a dense tile."""

    @property
    def sequences(self) -> dict[str, Any]:
        """What flash-attn calls these; empty for a dense tile."""
        if self.cu_seqlens is None:
            return {}
        return {
            "cu_seqlens_q": self.cu_seqlens,
            "cu_seqlens_k": self.cu_seqlens,
            "max_seqlen_q": self.longest_q,
            "max_seqlen_k": self.longest_k,
        }

    def operand(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[1,H,S,D] -> tokens before heads, D padded with zeros to a multiple of 8 and contiguous."""
        x = x.to(dtype).transpose(1, 2)
        if self.cu_seqlens is not None:
            x = x.squeeze(0)
        if x.shape[-1] % 8:
            x = torch.nn.functional.pad(x, (0, -x.shape[-1] % 8))
        return x if x.stride(-1) == 1 else x.contiguous()

    def result(self, x: Tensor, head_dim: int) -> Tensor:
        """The way back, to [1,H,S,D]."""
        x = x if self.cu_seqlens is None else x.unsqueeze(0)
        return x[..., :head_dim].transpose(1, 2)


class FlashKernel:
    """What the CUDA flash kernels share: layout, padding, and one launch for all causal tiles.

    A subclass launches: it receives operands as ``Launch`` lays them out and lse as the op wants it,
    fp32 and contiguous, [1,H,S] of a dense tile and [H,T] of packed segments.
    """

    name: str
    capabilities: Capabilities

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        return self._forward(q, k, v, Launch(causal, scale, q.shape[2], k.shape[2]))

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> Grads:
        return self._backward(grad_out, q, k, v, out, lse, Launch(causal, scale, q.shape[2], k.shape[2]))

    def forward_segments(
        self, q: Tensor, k: Tensor, v: Tensor, borders: Borders, scale: float
    ) -> tuple[Tensor, Tensor]:
        return self._forward(q, k, v, _packed(borders, q, scale))

    def backward_segments(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        borders: Borders,
        scale: float,
    ) -> Grads:
        return self._backward(grad_out, q, k, v, out, lse, _packed(borders, q, scale))

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch) -> tuple[Tensor, Tensor]:
        operands = (launch.operand(x, q.dtype) for x in (q, k, v))
        out, lse = self.launch_forward(*operands, launch)
        return launch.result(out, q.shape[3]), lse.view(1, *q.shape[1:3])

    def _backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, launch: Launch
    ) -> Grads:
        operands = (launch.operand(x, q.dtype) for x in (grad_out, q, k, v, out))
        lse = lse.to(torch.float32).contiguous()
        grads = self.launch_backward(*operands, lse if launch.cu_seqlens is None else lse[0], launch)
        grad_q, grad_k, grad_v = (launch.result(grad, q.shape[3]) for grad in grads)
        return grad_q, grad_k, grad_v

    def launch_forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch) -> tuple[Tensor, Tensor]:
        """out like q, lse."""
        raise NotImplementedError

    def launch_backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, launch: Launch
    ) -> Grads:
        """Gradients like q, k, v; bit-identical from run to run if torch is asked to be deterministic."""
        raise NotImplementedError


class CudaFlashKernel(FlashKernel):
    """torch's CUDA flash attention. Not yet run."""

    name = "cuda_flash"
    capabilities = Capabilities(
        dtypes=_HALF, device_type="cuda", packs_segments=True, max_head_dim=256, compute_majors=range(8, 13)
    )

    def launch_forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch) -> tuple[Tensor, Tensor]:
        cu, longest = launch.cu_seqlens, (launch.longest_q, launch.longest_k)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, cu, cu, *longest, 0.0, launch.causal, False, scale=launch.scale
        )
        return out, lse

    def launch_backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, launch: Launch
    ) -> Grads:
        cu, longest = launch.cu_seqlens, (launch.longest_q, launch.longest_k)
        operands = (grad_out, q, k, v, out, lse, cu, cu, *longest)
        # The op wants the state of a dropout that does not happen.
        grad_q, grad_k, grad_v = torch.ops.aten._flash_attention_backward(
            *operands, 0.0, launch.causal, *_no_dropout_state(q.device), scale=launch.scale
        )
        return grad_q, grad_k, grad_v


class FlashAttention2Kernel(FlashKernel):
    """Package flash-attn, version 2.7 and newer. Not yet run."""

    name = "flash_attn2"
    capabilities = Capabilities(
        dtypes=_HALF,
        device_type="cuda",
        packs_segments=True,
        max_head_dim=256,
        compute_majors=range(8, 13),
        module="flash_attn.flash_attn_interface",
        package="flash-attn>=2.7",
    )

    def launch_forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch) -> tuple[Tensor, Tensor]:
        ops = _load(self.capabilities.module)
        run = ops._flash_attn_varlen_forward if launch.sequences else ops._flash_attn_forward
        out, lse, *_ = run(q, k, v, **launch.sequences, **self._options(launch), return_softmax=False)
        return out, lse

    def launch_backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, launch: Launch
    ) -> Grads:
        ops = _load(self.capabilities.module)
        run = ops._flash_attn_varlen_backward if launch.sequences else ops._flash_attn_backward
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        deterministic = torch.are_deterministic_algorithms_enabled()
        options = {**launch.sequences, **self._options(launch), "deterministic": deterministic}
        run(grad_out, q, k, v, out, lse, *grads, **options)
        return grads

    @staticmethod
    def _options(launch: Launch) -> dict[str, Any]:
        return {
            "dropout_p": 0.0,
            "softmax_scale": launch.scale,
            "causal": launch.causal,
            "window_size_left": -1,
            "window_size_right": -1,
            "softcap": 0.0,
            "alibi_slopes": None,
        }


class FlashAttention3Kernel(FlashKernel):
    """flash-attention's Hopper kernels, through the ops that the package registers with torch. Not yet run."""

    name = "flash_attn3"
    capabilities = Capabilities(
        dtypes=_HALF,
        device_type="cuda",
        packs_segments=True,
        max_head_dim=256,
        compute_majors=range(9, 10),
        module="flash_attn_interface",
        package="flash_attn_3, built from the folder hopper of flash-attention",
    )

    def launch_forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch) -> tuple[Tensor, Tensor]:
        _load(self.capabilities.module)
        # One split: partial results of several would be summed in an order that depends on the batch.
        options = {**launch.sequences, "softmax_scale": launch.scale, "is_causal": launch.causal}
        out, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, **options, num_splits=1)
        return out, lse

    def launch_backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, launch: Launch
    ) -> Grads:
        _load(self.capabilities.module)
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        options = {**launch.sequences, "softmax_scale": launch.scale, "is_causal": launch.causal}
        deterministic = torch.are_deterministic_algorithms_enabled()
        torch.ops.flash_attn_3.bwd(
            grad_out, q, k, v, out, lse, *grads, **options, deterministic=deterministic
        )
        return grads


_KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        MathKernel(),
        CpuFlashKernel(),
        CudaFlashKernel(),
        FlashAttention2Kernel(),
        FlashAttention3Kernel(),
    )
}

_AUTO = ("cpu_flash", "cuda_flash", "math")
"""What "auto" takes: the first that can run."""


def choose_kernel(
    device: torch.device, dtype: torch.dtype, name: str = "auto", head_dim: int | None = None
) -> Kernel:
    """The fast kernel of a device and dtype, or the one asked for by ``name``.

    Raises:
        ConfigError: the name is unknown, or that kernel cannot run this.
    """
    if name == "auto":
        return next(k for k in map(_KERNELS.__getitem__, _AUTO) if not _refusal(k, device, dtype, head_dim))
    if name not in _KERNELS:
        raise ConfigError(
            f"attention kernel {name!r} does not exist; choose one of auto, {', '.join(_KERNELS)}"
        )
    refusal = _refusal(_KERNELS[name], device, dtype, head_dim)
    if refusal:
        raise ConfigError(f"attention kernel {name!r} {refusal}")
    return _KERNELS[name]


def available_kernels(device: torch.device) -> tuple[str, ...]:
    """Names of the kernels that are installed and run on this device, for at least some dtype."""
    return tuple(name for name, kernel in _KERNELS.items() if not _refusal(kernel, device))


def _refusal(
    kernel: Kernel, device: torch.device, dtype: torch.dtype | None = None, head_dim: int | None = None
) -> str | None:
    """Why a kernel cannot run this, and what to do; None if it can."""
    can = kernel.capabilities
    if can.module is not None and isinstance(error := _try_import(can.module), ImportError):
        return f"needs {can.package}, which cannot be imported ({error}); install it or choose auto"
    if can.device_type not in (None, device.type):
        return f"runs on {can.device_type}, the tensors are on {device.type}; choose auto or math"
    if can.compute_majors is not None:
        major, minor = _compute_capability(device)
        if major not in can.compute_majors:
            have = " or ".join(f"{known}.x" for known in can.compute_majors)
            return (
                f"has code for compute capability {have}, this GPU has {major}.{minor}; choose auto or math"
            )
    if dtype is not None and dtype not in can.dtypes:
        known = ", ".join(str(x).removeprefix("torch.") for x in can.dtypes)
        return f"takes {known}, not {str(dtype).removeprefix('torch.')}; train in one of these or choose math"
    if head_dim is not None and can.max_head_dim is not None and head_dim > can.max_head_dim:
        return f"takes heads of up to {can.max_head_dim} numbers, this model has {head_dim}; choose math"
    return None


@cache
def _compute_capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@cache
def _try_import(module: str) -> ModuleType | ImportError:
    try:
        return import_module(module)
    except ImportError as error:
        return error


def _load(module: str | None) -> Any:
    """A module that ``_refusal`` has found importable."""
    assert module is not None
    return _try_import(module)


@cache
def _no_dropout_state(device: torch.device) -> tuple[Tensor, Tensor]:
    """Seed and offset."""
    return torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)


def _packed(borders: Borders, q: Tensor, scale: float) -> Launch:
    _require_borders(borders, q.shape[2])
    cu_seqlens, longest = _cu_seqlens(borders, q.device)
    return Launch(True, scale, longest, longest, cu_seqlens)


@lru_cache(maxsize=64)
def _cu_seqlens(borders: Borders, device: torch.device) -> tuple[Tensor, int]:
    """[n+1] int32 on the device, kept so that the layers of a pass share it; the longest segment."""
    longest = max(stop - start for start, stop in pairwise(borders))
    return torch.tensor(borders, dtype=torch.int32, device=device), longest


@lru_cache(maxsize=64)
def _require_borders(borders: Borders, num_tokens: int) -> None:
    ascend = all(start < stop for start, stop in pairwise(borders))
    if len(borders) < 2 or borders[0] != 0 or borders[-1] != num_tokens or not ascend:
        raise PlanError(
            f"{len(borders)} segment borders ({', '.join(map(str, borders[:8]))}, ...) do not ascend from 0 to the "
            f"{num_tokens} tokens given; list each segment's start, then the end"
        )


def _segments(borders: Borders, *tensors: Tensor) -> Iterator[list[Tensor]]:
    """The tensors of each segment; tokens are dim 2."""
    _require_borders(borders, tensors[0].shape[2])
    for start, stop in pairwise(borders):
        yield [x[:, :, start:stop] for x in tensors]


def _to_groups(x: Tensor, k: Tensor) -> Tensor:
    """[1,H,S,D] -> [1,K,H/K,S,D]: query heads beside the key head they read."""
    return x.unflatten(1, (k.shape[1], -1))


def _to_heads(x: Tensor) -> Tensor:
    return x.flatten(1, 2)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """[1,K,H/K,S,L] scaled scores in fp32 or wider; -inf above the diagonal of a causal (square) tile."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (_to_groups(q, k).to(wide) @ k.unsqueeze(2).to(wide).transpose(-1, -2)) * scale
    if causal:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(mask, float("-inf"))
    return scores
