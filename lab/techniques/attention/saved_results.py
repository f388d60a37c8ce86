"""Attention results that are computed once and used again when a checkpointed layer is recomputed."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lab.techniques.attention.kernel import Kernel

Results = tuple[Tensor, ...]
"""The tensors that attention's forward computes and its backward needs: the output, and one or more LSEs.

An LSE is the log-sum-exp of each row of attention scores.
"""

ResultCache = Callable[[Callable[[], Results]], Results]
"""A function that returns the attention results of one forward pass of one layer.

Its argument is the function that computes the results. The first call runs that function and stores the
results; later calls return the stored results. Attention receives a ``ResultCache`` as the keyword
``lab_cache``. A checkpointed layer is recomputed with the same keywords, so the recomputation gets the
results of its own forward pass.
"""


def no_cache(compute: Callable[[], Results]) -> Results:
    """Compute the results at each call: this ``ResultCache`` stores nothing."""
    return compute()


def with_cache(kernel: Kernel, cache: ResultCache) -> Kernel:
    """Return a kernel whose forward gets its results from ``cache``, with the backward of ``kernel``."""
    if cache is no_cache:
        return kernel

    def forward(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None
    ) -> tuple[Tensor, Tensor]:
        out, lse = cache(lambda: kernel.forward(q, k, v, causal=causal, scale=scale))
        return out, lse

    return kernel._replace(forward=forward)
