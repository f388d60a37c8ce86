"""Attention kernels of other libraries, with the arguments of ``flash_forward`` and ``flash_backward``.

A library is imported when its kernel is called. The releases whose signatures are used stand in the headings.
Letters: b rows, h heads, S tokens, D head_dim; LSE is the log-sum-exp of the scores.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from lab.techniques.attention.flash import backward_by, forward_by, pad_head_dim
from lab.techniques.attention.kernel import Backward, Forward, Gradients, Kernel
from lab.torch_private import cudnn_attention, cudnn_attention_backward

MODULES = {
    "flash-attn-2": "flash_attn.flash_attn_interface",
    "flash-attn-3": "flash_attn_interface",
    "flash-attn-4": "flash_attn.cute.interface",
}
"""The module from which the kernels of a package are imported, by the kernel's name."""


# ---- cuDNN, in torch 2.9 and later: [b, h, S, D], fewer heads in k and v, LSE [b, h, S, 1] -----------------


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return cudnn_attention(q, k, v, causal=causal, scale=scale)


def _cudnn_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> Gradients:
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
        q, k, v, **_flash_2_settings(causal, scale), return_softmax=False
    )
    return out, lse


def _flash_2_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> Gradients:
    dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
    settings = _flash_2_settings(causal, scale)
    import_module(MODULES["flash-attn-2"])._flash_attn_backward(
        grad_out, q, k, v, out, lse, dq, dk, dv, **settings, deterministic=False
    )
    return dq, dk, dv


def _flash_2_settings(causal: bool, scale: float) -> dict[str, float | None]:
    """Return the arguments that are passed by name: no window, no dropout, no bias."""
    whole = {"window_size_left": -1, "window_size_right": -1, "alibi_slopes": None}
    return {"dropout_p": 0.0, "softmax_scale": scale, "causal": causal, "softcap": 0.0, **whole}


# flash-attn 3: arguments are passed by position, because releases differ in names and defaults. The unused
# ones are for caches, packed sequences, and rotations inside the kernel.


def _flash_3_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    unused = (None,) * 20
    out, lse, *_ = import_module(MODULES["flash-attn-3"])._flash_attn_forward(q, k, v, *unused, scale, causal)
    return out, lse


def _flash_3_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> Gradients:
    dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
    unused = (None,) * 6
    import_module(MODULES["flash-attn-3"])._flash_attn_backward(
        grad_out, q, k, v, out, lse, *unused, dq, dk, dv, scale, causal
    )
    return dq, dk, dv


# flash-attn 4, betas 0 to 36: the layouts of the other two, but backward returns dq, dk and dv. Arguments are
# passed by name, because a release inserted one after v. Forward returns the LSE if it is asked for.


def _flash_4_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = import_module(MODULES["flash-attn-4"])._flash_attn_fwd(
        q, k, v, softmax_scale=scale, causal=causal, return_lse=True
    )
    return out, lse


def _flash_4_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> Gradients:
    dq, dk, dv = import_module(MODULES["flash-attn-4"])._flash_attn_bwd(
        q, k, v, out, grad_out, lse, softmax_scale=scale, causal=causal
    )
    return dq, dk, dv


# ---- for all libraries: pad D, and give tensors their layout ---------------------------------------------


def _kernel(forward: Forward, backward: Backward, *, tokens_first: bool = True) -> Kernel:
    """Return the kernel of a library's functions, which take the tensors, causal and scale by position.

    ``tokens_first`` says that their tensors are [b, S, h, D]. D is a multiple of 8 in all tensors that they
    get.
    """

    def prepare(x: Tensor) -> Tensor:
        return in_layout(pad_head_dim(x))

    def in_layout(x: Tensor) -> Tensor:
        return x.transpose(1, 2) if tokens_first else x

    def forward_of_library(q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
        out, lse = forward(prepare(q), prepare(k), prepare(v), *settings)
        return in_layout(out)[..., : q.shape[-1]], lse

    def backward_of_library(*given: Any) -> Gradients:
        *tensors, lse, causal, scale = given
        gradients = backward(*map(prepare, tensors), lse.contiguous(), causal, scale)
        dq, dk, dv = (in_layout(gradient)[..., : given[1].shape[-1]] for gradient in gradients)
        return dq, dk, dv

    return Kernel(partial(forward_by, forward_of_library), partial(backward_by, backward_of_library))


CUDNN = _kernel(_cudnn_forward, _cudnn_backward, tokens_first=False)
FLASH_2 = _kernel(_flash_2_forward, _flash_2_backward)
FLASH_3 = _kernel(_flash_3_forward, _flash_3_backward)
FLASH_4 = _kernel(_flash_4_forward, _flash_4_backward)
