"""Flash attention by torch's own kernels: forward and backward as pure functions, and one with gradients.

Letters: b rows, h query heads, G query heads per key/value head, S query tokens, S' key tokens, D head_dim,
w bytes per element. The LSE (log-sum-exp) of a query is the logarithm of its softmax's denominator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lab.errors import RecipeError
from lab.techniques.attention.kernel import Backward, Forward, Gradients, Kernel
from lab.techniques.attention.matrix_products import exact_backward, exact_forward
from lab.techniques.attention.sinks import sink_gradients
from lab.techniques.limits import flash_takes, query_limit_refusal
from lab.torch_private import (
    cpu_flash_attention,
    cpu_flash_attention_backward,
    cuda_flash_attention,
    cuda_flash_attention_backward,
)

HALF_DTYPES = (torch.bfloat16, torch.float16)
"""The dtypes that flash kernels on CUDA support."""

# ---- what all kernels share: their arguments --------------------------------------------------------------


def forward_by(
    library: Forward, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Compute ``flash_forward`` by ``library``, which takes q, k, v, causal and scale by position.

    Matrix products compute one query or one key, because cuDNN refuses such sequences. The library computes
    everything else. It gets tensors in which D is innermost, because kernels read D elements that follow each
    other, whatever the strides are.

    Raises:
        ValueError: ``causal`` with S' != S.
    """
    scale = check_arguments(q, k, causal, scale)
    if 1 in (q.shape[2], k.shape[2]):
        return exact_forward(q, k, v, causal=causal, scale=scale)
    q, k, v = _head_dim_innermost(q, k, v)
    return library(q, k, v, causal, scale)


def backward_by(
    library: Backward, *tensors: Tensor, causal: bool = True, scale: float | None = None
) -> Gradients:
    """Compute ``flash_backward`` by ``library``, which takes the tensors, causal and scale by position.

    See ``forward_by``.

    Raises:
        ValueError: ``causal`` with S' != S.
    """
    *whole, lse = tensors
    _, q, k, *_ = whole
    scale = check_arguments(q, k, causal, scale)
    if 1 in (q.shape[2], k.shape[2]):
        return exact_backward(*tensors, causal=causal, scale=scale)
    return library(*_head_dim_innermost(*whole), lse, causal, scale)


def check_arguments(q: Tensor, k: Tensor, causal: bool, scale: float | None) -> float:
    """Check the shapes that every kernel requires, and return the scale: 1/sqrt(D) if ``scale`` is None.

    Raises:
        ValueError: ``causal`` with S' != S.
    """
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(
            f"causal attention of {q.shape[2]} queries to {k.shape[2]} keys: give as many keys as queries"
        )
    return q.shape[-1] ** -0.5 if scale is None else scale


def _head_dim_innermost(*tensors: Tensor) -> list[Tensor]:
    """Return tensors [b, h, S, D] in which D is innermost: copies of those in which it is not."""
    return [t if t.stride(-1) == 1 else t.contiguous() for t in tensors]


# ---- forward and backward by torch ------------------------------------------------------------------------


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Compute attention and its LSE by torch's own flash kernels.

    Query head i attends to key/value head i // G; k and v are not expanded to h heads. On CPU the dtype may
    be fp64, fp32 or bf16. On CUDA, the flash kernel supports bf16 and fp16 and D up to 256; ``exact_forward``
    computes the other cases. If 8 does not divide D on CUDA, q, k and v are copied with padding.

    Args:
        q: [b, h, S, D], of any strides; where D is not innermost, a copy is made. The same holds for ``k``
            and ``v``.
        k: [b, h/G, S', D].
        v: [b, h/G, S', D].
        causal: A query attends only to keys that are not after it. S' must be S, because kernels disagree
            about causal masks of other shapes.
        scale: Multiplies the scores; by default 1/sqrt(D).

    Returns:
        The output [b, h, S, D], with the memory layout of ``q``, and the LSE [b, h, S] in fp32 (fp64 for
        fp64).

    Saves:
        The scores, b*h*S*S' elements; the output and the LSE have b*h*S*(D + 1).
    Costs:
        4*b*h*S*S'*D floating-point operations, half as many if causal.
    Source:
        FlashAttention (arXiv 2205.14135), section 3.1; FlashAttention-2 (arXiv 2307.08691), section 3.1.

    Raises:
        ValueError: ``causal`` with S' != S.
        RecipeError: See ``query_limit_refusal``.
    """
    return forward_by(_torch_forward, q, k, v, causal=causal, scale=scale)


def _torch_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    if not _flash_takes(q):
        return exact_forward(q, k, v, causal=causal, scale=scale)
    if q.device.type != "cuda":
        return cpu_flash_attention(q, k, v, causal=causal, scale=scale)
    refusal = query_limit_refusal(q.shape[2], q.shape[1], q.shape[3])
    if refusal is not None:
        raise RecipeError(refusal)
    return cuda_forward(q, k, v, causal=causal, scale=scale)


def cuda_forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Compute ``flash_forward`` on CUDA without the limit ``TORCH_QUERY_LIMIT``, to measure beyond it."""
    head_dim = q.shape[-1]
    q, k, v = pad_head_dim(q), pad_head_dim(k), pad_head_dim(v)
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
) -> Gradients:
    """Compute the gradients of attention from the results of ``flash_forward``, without another forward.

    ``out`` and ``lse`` may be the results of attention to more keys than ``k``. The gradients are then the
    exact part that these keys contribute. Ring attention depends on this.

    Args:
        grad_out: The gradient of the output, [b, h, S, D].
        q: [b, h, S, D].
        k: [b, h/G, S', D].
        v: [b, h/G, S', D].
        out: The output of forward, [b, h, S, D].
        lse: The LSE of forward, [b, h, S].
        causal: As in ``flash_forward``.
        scale: As in ``flash_forward``.

    Returns:
        The gradients of ``q``, ``k`` and ``v``, in their shapes and dtypes. On CPU their memory layout is
        that of a contiguous tensor [b, S, h, D].

    Costs:
        2.5 times the floating-point operations of forward. On CUDA, the kernel allocates dq in fp32 and, if
        G > 1, dk and dv of all h heads.
    Source:
        FlashAttention (arXiv 2205.14135), appendix B.4.

    Raises:
        ValueError: ``causal`` with S' != S.
    """
    return backward_by(_torch_backward, grad_out, q, k, v, out, lse, causal=causal, scale=scale)


def _torch_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> Gradients:
    if not _flash_takes(q):
        return exact_backward(grad_out, q, k, v, out, lse, causal=causal, scale=scale)
    if q.device.type != "cuda":
        return cpu_flash_attention_backward(grad_out, q, k, v, out, lse, causal=causal, scale=scale)
    head_dim = q.shape[-1]
    grad_out, q, k, v, out = (pad_head_dim(t) for t in (grad_out, q, k, v, out))
    dq, dk, dv = cuda_flash_attention_backward(
        grad_out, q, k, v, out, lse.contiguous(), causal=causal, scale=scale
    )
    return dq[..., :head_dim], dk[..., :head_dim], dv[..., :head_dim]


def _flash_takes(q: Tensor) -> bool:
    """Return whether torch has a flash kernel for these queries; on CPU it has one for every dtype and D."""
    return q.device.type != "cuda" or flash_takes(q.dtype.itemsize, q.shape[-1])


def pad_head_dim(x: Tensor) -> Tensor:
    """Add zeros to D up to the next multiple of 8, which changes neither scores nor outputs."""
    return pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x


# ---- attention as a differentiable function ----------------------------------------------------------


FLASH = Kernel(flash_forward, flash_backward)
"""Torch's kernels on one rank, which are the default. ``kernels.py`` has the others by name."""


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        kernel: Kernel,
        scale: float | None,
    ) -> Tensor:
        out, lse = kernel.forward(q, k, v, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        # The graph must not refer to the forward of the kernel, which may hold a cache of results that should
        # be freed before the graph.
        ctx.kernel_backward, ctx.scale = kernel.backward, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, sinks = ctx.saved_tensors
        dsinks: Tensor | None = None
        if ctx.needs_input_grad[3]:
            out, lse = tensors[3:]
            dsinks = sink_gradients(grads[0], out, lse, sinks).to(sinks.dtype)
        return *ctx.kernel_backward(grads[0], *tensors, scale=ctx.scale), dsinks, None, None


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, kernel: Kernel = FLASH
) -> Tensor:
    """Compute causal attention with gradients.

    For backward it saves q, k, v, the output and the LSE: w*b*h*S*D*(2 + 2/G) + 4*b*h*S bytes. The sinks of
    the kernel get gradients too.

    Args:
        q: [b, h, S, D].
        k: [b, h/G, S, D].
        v: [b, h/G, S, D].
        scale: Multiplies the scores; by default 1/sqrt(D).
        kernel: Computes forward and backward.

    Returns:
        [b, h, S, D].
    """
    return _Attention.apply(q, k, v, kernel.sinks, kernel, scale)  # type: ignore[no-any-return, no-untyped-call]
