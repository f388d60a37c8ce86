"""The closed form of attention by matrix products on CUDA: what it holds where flash kernels stop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lab.memory.categories import CATEGORIES
from lab.planning.closed_form import Estimate
from lab.planning.closed_form_terms import Sizes, kernel_heads, sizes_of, window_calls
from lab.planning.cuda_workspace import matrix_products_workspace
from lab.recipe.jobs import Job
from lab.shape import Shape
from lab.techniques.attention.flash_limits import flash_takes

*_, OTHER = CATEGORIES

FORWARD = ("streamed forward", "attention again", "attention recomputed")
"""The moments in which attention runs forward, without the number of their layer."""


def with_products(needs: Estimate, shape: Shape, job: Job) -> Estimate:
    """Return an estimate with the matrices of scores that attention holds on CUDA.

    A flash kernel has none, and its own workspace is left out. Forward has no pairs of tiles, so with
    ``attention_tile`` it may hold more than backward. Where no moment of the estimate is the forward that
    runs again, the backward of attention stands for both.

    Args:
        needs: The estimate of the job, as of ``estimate_job``.
        shape: The shape of the job's model.
        job: The job.
    """
    z = sizes_of(shape, job)
    if flash_takes(z.w, z.D):
        return needs
    forward, backward = (
        max(_inside(z, window, backward=backward) for window in set(z.windows)) for backward in (False, True)
    )
    again = any(name.startswith(FORWARD) for name in needs.moments)
    of_moments = dict.fromkeys(FORWARD, forward) | {
        "attention backward": backward if again else max(forward, backward)
    }
    return replace(
        needs,
        moments={
            name: parts | {"matrix products": {OTHER: of_moments[kind]}}
            if (kind := name.partition(",")[0]) in of_moments
            else parts
            for name, parts in needs.moments.items()
        },
    )


def _inside(z: Sizes, window: int | None, *, backward: bool) -> int:
    """What the largest call of a layer's kernel holds inside: of all tokens, a pair of tiles, or windows."""
    heads = max(kernel_heads(z)) // z.recipe.ulysses
    kv_heads = -(-heads * z.K // z.H)
    return max(
        matrix_products_workspace(
            rows, heads, kv_heads, length, length, z.D, width=z.w, copies=int(z.w < z.f), backward=backward
        )
        for rows, length in _calls(z, window, z.recipe.attention_tile if backward else None)
    )


def _calls(z: Sizes, window: int | None, tile: int | None) -> Iterator[tuple[int, int]]:
    """The rows and the tokens of the calls of a kernel; a pair of tiles is a call."""
    tokens = z.s * z.recipe.ulysses
    if window in (None, tokens):
        yield z.b, min(tile or tokens, tokens)
        return
    for blocks, length, _ in window_calls(z, window):
        yield blocks, min(tile or length, length)
