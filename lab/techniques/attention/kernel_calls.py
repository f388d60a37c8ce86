"""Attention kernels of other libraries, with the arguments of ``flash_forward`` and ``flash_backward``.

A library is imported when its kernel is called. The releases whose signatures are used stand in the headings.
Letters: b rows, h heads, S tokens, D head_dim; LSE is the log-sum-exp of the scores.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from lab.techniques.attention.flash import Kernel, backward_by, forward_by, pad_head_dim
from lab.torch_private import cudnn_attention, cudnn_attention_backward

MODULES = {
    "flash-attn-2": "flash_attn.flash_attn_interface",
    "flash-attn-3": "flash_attn_interface",
    "flash-attn-4": "flash_attn.cute.interface",
}
"""The module from which the kernels of a package are imported, by the kernel's name."""


# ---- for all libraries: pad D ------------------------------------------------------------------------------


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    library: Callable[..., tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Compute ``flash_forward`` by the function ``library``, which takes q, k, v, causal and scale."""

    def padded(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = library(*map(pad_head_dim, (q, k, v)), causal, scale)
        return out[..., : q.shape[-1]], lse

    return forward_by(padded, q, k, v, causal, scale)


def _backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    library: Callable[..., tuple[Tensor, Tensor, Tensor]],
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``flash_backward`` by the function ``library``, which takes the same arguments by position."""
    head_dim = q.shape[-1]

    def padded(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
        *tensors, lse, causal, scale = given
        dq, dk, dv = library(*map(pad_head_dim, tensors), lse.contiguous(), causal, scale)
        return dq[..., :head_dim], dk[..., :head_dim], dv[..., :head_dim]

    return backward_by(padded, grad_out, q, k, v, out, lse, causal, scale)


# ---- cuDNN, in torch 2.9 and later: [b, h, S, D], fewer heads in k and v, LSE [b, h, S, 1] -----------------


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return cudnn_attention(q, k, v, causal=causal, scale=scale)


def _cudnn_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    # Torch keeps the graph of a call by the shapes and strides of q, k and v alone. The graph has the strides
    # of out and grad_out too, so a call with other ones would read them wrongly: measured on an H100, the
    # gradients were off by 70%.
    grad_out, out = (_in_layout_of(q, x) for x in (grad_out, out))
    return cudnn_attention_backward(grad_out, q, k, v, out, lse, causal=causal, scale=scale)


def _in_layout_of(q: Tensor, x: Tensor) -> Tensor:
    """Return ``x`` [b, h, S, D] with the strides of ``q``: itself, or a copy.

    A slice of x, such as a document or a tile, has the strides of the same slice of q.
    """
    strides = zip(x.shape, x.stride(), q.stride(), strict=True)
    same = all(own == wanted for size, own, wanted in strides if size > 1)
    return x if same else q.new_empty_strided(q.shape, q.stride()).copy_(x)


# ---- flash-attn 2.8 and 3: [b, S, h, D], LSE [b, h, S]; backward writes into dq, dk and dv -----------------


def _flash_2_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = import_module(MODULES["flash-attn-2"])._flash_attn_forward(
        *_swap_heads_and_tokens(q, k, v),
        **_flash_2_settings(causal, scale),
        return_softmax=False,
    )
    return out.transpose(1, 2), lse


def _flash_2_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grad_out, q, k, v, out = _swap_heads_and_tokens(grad_out, q, k, v, out)
    dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
    import_module(MODULES["flash-attn-2"])._flash_attn_backward(
        grad_out,
        *(q, k, v),
        out,
        lse,
        *(dq, dk, dv),
        **_flash_2_settings(causal, scale),
        deterministic=False,
    )
    dq, dk, dv = _swap_heads_and_tokens(dq, dk, dv)
    return dq, dk, dv


def _flash_2_settings(causal: bool, scale: float) -> dict[str, float | None]:
    """Return the arguments that are passed by name: no window, no dropout, no bias."""
    whole = {"window_size_left": -1, "window_size_right": -1, "alibi_slopes": None}
    return {"dropout_p": 0.0, "softmax_scale": scale, "causal": causal, "softcap": 0.0, **whole}


# flash-attn 3: arguments are passed by position, because releases differ in names and defaults. The unused
# ones are for caches, packed sequences, and rotations inside the kernel.


def _flash_3_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    unused = (None,) * 20
    out, lse, *_ = import_module(MODULES["flash-attn-3"])._flash_attn_forward(
        *_swap_heads_and_tokens(q, k, v), *unused, scale, causal
    )
    return out.transpose(1, 2), lse


def _flash_3_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grad_out, q, k, v, out = _swap_heads_and_tokens(grad_out, q, k, v, out)
    dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
    unused = (None,) * 6
    import_module(MODULES["flash-attn-3"])._flash_attn_backward(
        grad_out, q, k, v, out, lse, *unused, dq, dk, dv, scale, causal
    )
    dq, dk, dv = _swap_heads_and_tokens(dq, dk, dv)
    return dq, dk, dv


# flash-attn 4, betas 0 to 27: the layouts of the other two, but backward returns dq, dk and dv. Arguments are
# passed by name, because a release inserted one after v. Forward returns the LSE if it is asked for.


def _flash_4_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = import_module(MODULES["flash-attn-4"])._flash_attn_fwd(
        *_swap_heads_and_tokens(q, k, v), softmax_scale=scale, causal=causal, return_lse=True
    )
    return out.transpose(1, 2), lse


def _flash_4_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grad_out, q, k, v, out = _swap_heads_and_tokens(grad_out, q, k, v, out)
    dq, dk, dv = import_module(MODULES["flash-attn-4"])._flash_attn_bwd(
        q, k, v, out, grad_out, lse, softmax_scale=scale, causal=causal
    )
    dq, dk, dv = _swap_heads_and_tokens(dq, dk, dv)
    return dq, dk, dv


def _swap_heads_and_tokens(*tensors: Tensor) -> list[Tensor]:
    """View tensors [b, h, S, D] as [b, S, h, D], or the other way around."""
    return [t.transpose(1, 2) for t in tensors]


def _kernel(
    forward: Callable[..., tuple[Tensor, Tensor]], backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
) -> Kernel:
    return Kernel(partial(_forward, library=forward), partial(_backward, library=backward))


CUDNN = _kernel(_cudnn_forward, _cudnn_backward)
FLASH_2 = _kernel(_flash_2_forward, _flash_2_backward)
FLASH_3 = _kernel(_flash_3_forward, _flash_3_backward)
FLASH_4 = _kernel(_flash_4_forward, _flash_4_backward)
