"""What rank 0 does for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from lab.errors import LabError

T = TypeVar("T")


def from_first_rank(work: Callable[[], T]) -> T:
    """Call a function on rank 0, and return its result on every rank; every rank calls this.

    Raises:
        LabError: ``work`` raised it on rank 0. Every rank raises it.
    """
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = work()
        except LabError as error:
            answer[1] = error
    dist.broadcast_object_list(answer, src=0)
    result, refusal = answer
    if refusal is not None:
        raise refusal
    return cast(T, result)
