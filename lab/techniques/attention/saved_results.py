"""Attention results that are computed once and used again when a checkpointed layer is recomputed."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lab.techniques.attention.flash import Kernel

Results = tuple[Tensor, ...]
"""What an attention forward computes and its backward needs: the output, and one LSE or several."""

ResultCache = Callable[[Callable[[], Results]], Results]
"""Returns the attention results of one forward pass of one layer. It takes the function that computes them:
it calls it the first time, and returns the stored results each time after. The attention receives it as the
keyword ``lab_cache``, one of the arguments with which a checkpointed layer is recomputed; so a recomputation
finds the results of its own forward pass.
"""


def no_cache(compute: Callable[[], Results]) -> Results:
    """The ``ResultCache`` that stores nothing: it computes the results each time."""
    return compute()


def with_cache(kernel: Kernel, cache: ResultCache) -> Kernel:
    """A kernel whose forward takes its results from ``cache``; its backward is that of ``kernel``."""
    if cache is no_cache:
        return kernel

    def forward(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None
    ) -> tuple[Tensor, Tensor]:
        out, lse = cache(lambda: kernel.forward(q, k, v, causal=causal, scale=scale))
        return out, lse

    return kernel._replace(forward=forward)
