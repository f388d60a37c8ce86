"""The kernel: flash attention forward and backward as pure functions, on CPU and CUDA, and with gradients."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from lab.errors import RecipeError
from lab.techniques.attention.matrix_products import exact_backward, exact_forward
from lab.torch_private import (
    cpu_flash_attention,
    cpu_flash_attention_backward,
    cuda_flash_attention,
    cuda_flash_attention_backward,
)

HALF = (torch.bfloat16, torch.float16)
"""What flash kernels on CUDA compute in."""

MOST_HEAD_DIM = 256
"""The largest D that they take."""

TORCH_MOST = 2**31
"""From so many numbers of queries on, tokens x heads x D, a call of torch's CUDA kernel is refused.

FlashAttention-2 counts them in 32 bits where ``row_offset_dq_accum`` in ``flash_bwd_kernel.h`` has ``128``,
and in 64 bits where it has ``128ll``. No release of torch has been measured past them.
"""


# ---- the kernel: [b, h, S, D], k and v may have fewer heads -----------------------------------------------


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention, and the logarithm of its softmax's denominators, by torch's own flash kernels.

    ``q`` [b, h, S, D], ``k, v`` [b, h/G, S', D] -> out [b, h, S, D], lying in memory as q does, and LSE
    [b, h, S] in fp32 (fp64 for fp64). Query head i attends to key/value head i // G, without k and v being
    expanded. Any strides will do where D is innermost. ``scale`` is 1/sqrt(D) unless given. ``causal`` wants
    S == S', because kernels disagree on the corner a mask of another shape starts from.

    CPU takes fp64, fp32 and bf16. CUDA takes bf16 and fp16, and a D that 8 does not divide costs a padded
    copy of q, k and v; fp32, fp64 and a D above 256 take ``exact_forward`` there.

    Saves: S*S'/(D+1) of the memory of the scores. Costs: 4*b*h*S*S'*D flops, half of it if causal.
    Source: FlashAttention (arXiv 2205.14135), section 3.1; FlashAttention-2 (arXiv 2307.08691), section 3.1.

    Raises:
        ValueError: causal with S != S'.
        RecipeError: more queries than torch's CUDA kernel can count.
    """
    scale = checked(q, k, causal, scale)
    if not _flash_takes(q):
        return exact_forward(q, k, v, causal=causal, scale=scale)
    if q.device.type != "cuda":
        return cpu_flash_attention(q, k, v, causal=causal, scale=scale)
    refusal = past_torch(q.shape[2], q.shape[1], q.shape[3])
    if refusal is not None:
        raise RecipeError(refusal)
    return cuda_forward(q, k, v, causal=causal, scale=scale)


def cuda_forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """As ``flash_forward`` on CUDA, also past what its backward may count: for measuring whether it does."""
    head_dim = q.shape[-1]
    q, k, v = padded(q), padded(k), padded(v)
    out, lse = cuda_flash_attention(q, k, v, causal=causal, scale=scale)
    return out[..., :head_dim], lse


def flash_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from what ``flash_forward`` gave; the attention itself is not run again.

    ``grad_out, q, out`` [b, h, S, D], ``k, v`` [b, h/G, S', D], ``lse`` [b, h, S] -> dq like q, dk and dv
    like k, on CPU lying in memory as [b, S, h, D]. ``out`` and ``lse`` may come from an attention over more
    keys than these: then the results are these keys' exact share of the gradients, which is what ring
    attention is built on.

    Costs: 2.5 times the forward's flops. On CUDA the kernel takes an fp32 dq and, where G > 1, dk and dv of
    all h heads inside itself.
    Source: FlashAttention (arXiv 2205.14135), appendix B.4.

    Raises:
        ValueError: causal with S != S'.
    """
    scale = checked(q, k, causal, scale)
    if not _flash_takes(q):
        return exact_backward(grad_out, q, k, v, out, lse, causal=causal, scale=scale)
    if q.device.type != "cuda":
        return cpu_flash_attention_backward(grad_out, q, k, v, out, lse, causal=causal, scale=scale)
    head_dim = q.shape[-1]
    grad_out, q, k, v, out = (padded(t) for t in (grad_out, q, k, v, out))
    dq, dk, dv = cuda_flash_attention_backward(
        grad_out, q, k, v, out, lse.contiguous(), causal=causal, scale=scale
    )
    return dq[..., :head_dim], dk[..., :head_dim], dv[..., :head_dim]


def checked(q: Tensor, k: Tensor, causal: bool, scale: float | None) -> float:
    """What every kernel wants of its arguments; the scale, 1/sqrt(D) unless given.

    Raises:
        ValueError: causal with S != S'.
    """
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(f"causal attention of {q.shape[2]} queries to {k.shape[2]} keys: give as many keys")
    return q.shape[-1] ** -0.5 if scale is None else scale


def past_torch(tokens: int, heads: int, head_dim: int) -> str | None:
    """Why torch's CUDA kernel is not called for so many queries; None where it is."""
    numbers = tokens * heads * (-(-head_dim // 32) * 32)
    if numbers < TORCH_MOST:
        return None
    return (
        f"{heads} heads of {tokens} tokens in one call of torch's attention kernel on CUDA: its backward may "
        f"count in 32 bits, and {numbers} numbers are past them; set a smaller head_chunk or a larger "
        "ulysses, or kernel='cudnn' where lab doctor shows it"
    )


def _flash_takes(q: Tensor) -> bool:
    """Whether torch has a flash kernel for these queries; on CPU it takes every dtype and every D."""
    return q.device.type != "cuda" or (q.dtype in HALF and q.shape[-1] <= MOST_HEAD_DIM)


def padded(x: Tensor) -> Tensor:
    """Zeros added to D up to the next multiple of 8: they change neither scores nor outputs."""
    return pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x


# ---- the same as a differentiable function -----------------------------------------------------------


class _Forward(Protocol):
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None
    ) -> tuple[Tensor, Tensor]: ...


class _Backward(Protocol):
    def __call__(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool = True,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class Kernel(NamedTuple):
    """An attention forward and its backward from out and LSE: flash on one rank, or a ring of ranks."""

    forward: _Forward
    backward: _Backward


FLASH = Kernel(flash_forward, flash_backward)
"""Torch's kernel of one rank, and the default everywhere; others by name are in ``kernels.py``."""


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, scale: float | None) -> Tensor:
        out, lse = kernel.forward(q, k, v, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse)
        # Not the kernel: its forward may hold what waits for this backward, and the graph outlives that.
        ctx.run, ctx.scale = kernel.backward, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.run(grads[0], *ctx.saved_tensors, scale=ctx.scale), None, None


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, kernel: Kernel = FLASH
) -> Tensor:
    """Causal attention with gradients: ``q`` [b, h, S, D], ``k, v`` [b, h/G, S, D] -> [b, h, S, D].

    Keeps q, k, v, out and LSE for backward: w*b*h*S*D*(2 + 2/G) + 4*b*h*S bytes at w bytes an element.
    """
    return _Attention.apply(q, k, v, kernel, scale)  # type: ignore[no-any-return, no-untyped-call]
