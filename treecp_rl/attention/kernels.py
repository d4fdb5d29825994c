"""One tile of attention: (q, k, v) -> (out, lse), and its backward fed the merged out and lse.

All kernels share one contract, so the executor never asks which one it runs. Layout legend:
B = 1, H query heads, K key/value heads (H a multiple of K), S query tokens, L key tokens, D head dim.

A tile's backward takes the *global* out and lse of its queries: then p = exp(q k^T - lse) are the true
probabilities, and the gradients of a query's tiles simply add up (as in ring attention).
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from treecp_rl.errors import ConfigError

Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Kernel(Protocol):
    """What the executor needs of a kernel."""

    name: str

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[B,H,S,D], [B,K,L,D], [B,K,L,D] -> out [B,H,S,D], lse [B,H,S] (natural log, fp32 or wider)."""
        ...

    def backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        causal: bool,
        scale: float,
    ) -> Grads:
        """Gradients of q, k, v from this tile, given the merged ``out`` and ``lse`` of its queries."""
        ...


@dataclass(frozen=True)
class MathKernel:
    """The formula itself, on any device and dtype: the reference the fast kernels are tested against."""

    name: str = "math"

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


@dataclass(frozen=True)
class CpuFlashKernel:
    """torch's fused CPU kernel; grouped heads natively, no scores in memory."""

    name: str = "cpu_flash"

    def forward(self, q, k, v, causal, scale):  # type: ignore[no-untyped-def]
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)

    def backward(self, grad_out, q, k, v, out, lse, causal, scale):  # type: ignore[no-untyped-def]
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, lse, 0.0, causal, scale=scale
        )


@dataclass(frozen=True)
class CudaFlashKernel:
    """torch's CUDA flash attention (bf16 and fp16). Written against the documented op, not yet run."""

    name: str = "cuda_flash"

    def forward(self, q, k, v, causal, scale):  # type: ignore[no-untyped-def]
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            causal,
            False,
            scale=scale,
        )
        return out.transpose(1, 2), lse

    def backward(self, grad_out, q, k, v, out, lse, causal, scale):  # type: ignore[no-untyped-def]
        no_rng = torch.empty(0, dtype=torch.uint64, device=q.device)
        grads = torch.ops.aten._flash_attention_backward(
            grad_out.transpose(1, 2),
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            out.transpose(1, 2),
            lse,
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            causal,
            no_rng,
            no_rng,
            scale=scale,
        )
        grad_q, grad_k, grad_v = (grad.transpose(1, 2) for grad in grads)
        return grad_q, grad_k, grad_v


_KERNELS: dict[str, Kernel] = {
    kernel.name: kernel for kernel in (MathKernel(), CpuFlashKernel(), CudaFlashKernel())
}


def choose_kernel(device: torch.device, dtype: torch.dtype, name: str = "auto") -> Kernel:
    """The fast kernel of a device and dtype, or the one asked for by ``name``.

    Raises:
        ConfigError: the name is unknown.
    """
    if name != "auto":
        if name not in _KERNELS:
            raise ConfigError(
                f"attention kernel {name!r} does not exist; choose one of auto, {', '.join(_KERNELS)}"
            )
        return _KERNELS[name]
    if device.type == "cpu":
        return _KERNELS["cpu_flash"]
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        return _KERNELS["cuda_flash"]
    return _KERNELS["math"]


def _to_groups(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[B,H,S,D] -> [B,K,H/K,S,D]: query heads beside the key head they read."""
    return x.unflatten(1, (k.shape[1], -1))


def _to_heads(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(1, 2)


def _scores(q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    """[B,K,H/K,S,L] scaled scores in fp32 or wider; -inf above the diagonal of a causal (square) tile."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (_to_groups(q, k).to(wide) @ k.unsqueeze(2).to(wide).transpose(-1, -2)) * scale
    if causal:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(mask, float("-inf"))
    return scores
