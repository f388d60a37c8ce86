"""This process as one rank of N, the others not there: what a plan and a rehearsal stand in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from lab.errors import LabError
from lab.recipe import Recipe
from lab.verbs import loopback

_TURN = Lock()
"""A process has one default group: what is planned and rehearsed in several threads at once takes turns."""


@contextmanager
def one_rank(
    recipe: Recipe, ranks: int, backend: Literal["fake", "loopback"], device_type: str = "cpu"
) -> Iterator[DeviceMesh]:
    """Join a group of ``ranks`` as the one that holds the most under ``recipe``; leave it at the end.

    A "fake" group's collectives return at once, with whatever lies in their buffers; a "loopback" group's are
    answered from this rank's own data. Several threads take turns.

    Raises:
        LabError: the process is one of a group already.
    """
    # Of a ring the second rank: it meets all its queries with half of the keys of the first, and holds more
    # than the first, which never does. Else the first, for where shards are not equal the last is smaller.
    rank = recipe.ulysses if recipe.ring > 1 else 0
    if backend == "loopback":
        loopback.register()
    with _TURN:
        if dist.is_initialized():
            raise LabError(
                "this process is one of a group of ranks, and to plan or rehearse it makes its own: do that "
                "elsewhere"
            )
        dist.init_process_group(backend, rank=rank, world_size=ranks, store=FakeStore())
        try:
            yield init_device_mesh(device_type, (ranks,))
        finally:
            dist.destroy_process_group()
