"""Keeping: an attention forward that runs once, and whose results come back when its layer runs again."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lab.techniques.attention.flash import Kernel

Results = tuple[Tensor, ...]
"""What attention makes and its backward needs: the output, and one LSE or several."""

Keep = Callable[[Callable[[], Results]], Results]
"""Belongs to one forward pass of one layer, and is given what makes the results. It makes them the first
time, and has them brought back each time after. It travels to the attention as the keyword ``lab_keep``, in
the arguments with which the checkpointed layer runs again: so each recomputation meets its own forward's.
"""


def make(making: Callable[[], Results]) -> Results:
    """The ``Keep`` that keeps nothing: results are made each time."""
    return making()


def kept(kernel: Kernel, keep: Keep) -> Kernel:
    """A kernel whose forward goes by ``keep``; its backward is the kernel's, from the same out and LSE."""
    if keep is make:
        return kernel

    def forward(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None
    ) -> tuple[Tensor, Tensor]:
        out, lse = keep(lambda: kernel.forward(q, k, v, causal=causal, scale=scale))
        return out, lse

    return kernel._replace(forward=forward)
