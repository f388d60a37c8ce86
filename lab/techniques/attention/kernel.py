"""The type of attention kernels: a forward and a backward with the same arguments, whoever computes them.

Letters: b rows, h query heads, G query heads per key/value head, S' key tokens, D head_dim. The LSE
(log-sum-exp) of a query is the logarithm of its softmax's denominator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, NamedTuple

from torch import Tensor

Gradients = tuple[Tensor, Tensor, Tensor]
"""The gradients of q, k and v."""

Forward = Callable[Concatenate[Tensor, Tensor, Tensor, ...], tuple[Tensor, Tensor]]
"""Computes the output and the LSE from q, k and v; see ``flash_forward``."""

Backward = Callable[Concatenate[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, ...], Gradients]
"""Computes the gradients from that of the output, q, k, v, the output and the LSE; see ``flash_backward``."""

Accumulate = Callable[Concatenate[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, ...], None]
"""A ``Backward`` that takes two more tensors, the sums of dk and of dv, and returns nothing."""


class Kernel(NamedTuple):
    """A forward and a backward of attention, with the keywords ``causal`` and ``scale``.

    It computes on one rank or on a ring of ranks.

    Attributes:
        forward: See ``flash_forward``.
        backward: See ``flash_backward``.
        accumulate: A backward that writes dq over ``q``, and adds dk and dv to two sums [b, h/G, S', D] in
            the accumulation dtype, so that no tensor of the whole dq, dk or dv is made. None if the kernel
            has no such backward.
        sinks: The sinks of its query heads [h], which ``forward`` adds, see ``sink_kernel``; None if it adds
            none.
    """

    forward: Forward
    backward: Backward
    accumulate: Accumulate | None = None
    sinks: Tensor | None = None


def check_causal(technique: str, causal: bool) -> None:
    """Refuse attention to later keys, which a technique cannot compute.

    Raises:
        ValueError: ``causal`` is False.
    """
    if not causal:
        raise ValueError(f"causal=False with {technique} is not supported: pass causal=True")
