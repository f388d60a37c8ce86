"""An attention that computes a small part, to measure the bytes of a long step in seconds.

Its results are wrong, so nothing but the "hollow" items of ``lab bench gpu`` uses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lab.planning.cuda_workspace import flash_backward_workspace
from lab.techniques.attention.kernel import Kernel
from lab.techniques.attention.kernels import KERNELS
from lab.torch_private import FakeTensor

TOKENS = 4096
"""The first tokens, for which attention is computed. All other results are zeros."""


@contextmanager
def hollow_attention() -> Iterator[int]:
    """Replace every kernel that a recipe can name by its hollow form, and yield ``TOKENS``.

    The bytes that a kernel allocates inside itself in backward are those of the workspace model of torch's
    kernel, so this measures all bytes of a step but those. A plan, on fake tensors, has the whole kernels.
    """
    kernels = dict(KERNELS)
    KERNELS.update({name: _hollow(kernel) for name, kernel in kernels.items()})
    try:
        yield TOKENS
    finally:
        KERNELS.update(kernels)


def _hollow(kernel: Kernel) -> Kernel:
    def forward(q: Tensor, *keys: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
        if isinstance(q, FakeTensor):
            return kernel.forward(q, *keys, **settings)
        out, lse = kernel.forward(*map(_first, (q, *keys)), **settings)
        return _extend(out, q.shape[2]), _extend(lse, q.shape[2])

    def backward(
        grad_out: Tensor, q: Tensor, k: Tensor, *rest: Tensor, **settings: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        if isinstance(q, FakeTensor):
            return kernel.backward(grad_out, q, k, *rest, **settings)
        tokens, keys = q.shape[2], k.shape[2]
        dq, dk, dv = kernel.backward(*map(_first, (grad_out, q, k, *rest)), **settings)
        # Those of the first tokens are freed, because a whole kernel has none.
        dq, dk, dv = _extend(dq, tokens), _extend(dk, keys), _extend(dv, keys)
        rows, heads, _, head_dim = q.shape
        nbytes = flash_backward_workspace(rows, heads, k.shape[1], tokens, keys, head_dim) if q.is_cuda else 0
        # The allocator hands it out and takes it back, as it does the kernel's own.
        torch.empty(nbytes, dtype=torch.uint8, device=q.device)
        return dq, dk, dv

    return kernel._replace(forward=forward, backward=backward)


def _first(x: Tensor) -> Tensor:
    return x[:, :, :TOKENS]


def _extend(first: Tensor, tokens: int) -> Tensor:
    """Return ``first`` [b, h, n, ...] with zeros up to ``tokens``, in the same order in memory."""
    if tokens == first.shape[2]:
        return first
    order = sorted(range(first.dim()), key=first.stride, reverse=True)
    shape = (*first.shape[:2], tokens, *first.shape[3:])
    whole = torch.empty_permuted(shape, order, dtype=first.dtype, device=first.device).zero_()
    _first(whole).copy_(first)
    return whole
