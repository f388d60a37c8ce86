"""This process as one rank of N, the others not there: what a plan and a rehearsal stand in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cluster.torch_private import clear_mesh_caches
from lab.errors import LabError
from lab.recipe.recipe import Recipe
from lab.step import loopback
from lab.techniques.gathered import Windows, fullest_ranks
from lab.torch_private import FakeStore

_TURN = Lock()
"""A process has one default group: what is planned and rehearsed in several threads at once takes turns."""


def ring_ranks(
    recipe: Recipe, lengths: Iterable[int], documents: tuple[int, ...] | None = None, windows: Windows = ()
) -> list[int]:
    """The ring ranks of which one holds the most device bytes in a training step under ``recipe``.

    ``lengths`` are the sizes of dimension 0 of the parameters, ``documents`` those of a row with its
    padding, and ``windows`` those of the layers. Of the ranks of one ring rank, the first holds the most: all
    have the same activations, and FSDP gives no rank a larger shard than the rank before it.

    At step t > 0 of a ring of R, ring rank i attends in one of two ways. Q, k and L are those of
    ``apply_ring``.

    - First way, t <= i: all queries meet half of the keys. The kernel makes Q + L bytes forward, and Q + k
      backward.
    - Second way, t > i: half of the queries meet all keys. The kernel makes (Q + L)/2 bytes forward, and
      Q/2 + 2k backward.

    Which way holds more depends on Q/k (under UPipe, on that of each run), on the dtype, and on what the
    kernel takes inside itself. All else is the same on every ring rank, and less at the last step, where no
    keys travel on. So, by activations:

    - R > 3: ring rank 1 holds the most. It attends in the first way at step 1, and in the second at step 2.
    - R = 2 or 3: ring rank 0 or 1 holds the most. At step 1 they attend in different ways.

    For R > 3 ring rank 0 holds more parameters only if a parameter has so few rows that the first rank of
    ring rank 1, rank C, gets none: C or fewer. The host holds the same bytes on every rank; with
    the optimizer on the host, a rank with smaller shards holds less of Adam's state.

    If keys and values are gathered, ring rank 0 holds the most: the last piece of the sequence attends to the
    most keys. With documents, it may be any rank; see ``fullest_ranks``.
    """
    if recipe.ring == 1 or (recipe.ring_exchange == "gather" and documents is None):
        return [0]
    if recipe.ring_exchange == "gather":
        fullest = fullest_ranks(documents or (), recipe.ring, windows)
        # A rank before one of them may have a larger shard.
        smaller = recipe.fsdp and any(length <= recipe.ulysses * max(fullest) for length in lengths)
        return [*range(max(fullest) + 1)] if smaller else fullest
    smaller_shard = recipe.fsdp and any(length <= recipe.ulysses for length in lengths)
    return [1, 0] if recipe.ring < 4 or smaller_shard else [1]


@contextmanager
def one_rank(
    recipe: Recipe,
    ranks: int,
    backend: Literal["fake", "loopback"],
    device_type: str = "cpu",
    *,
    ring_rank: int = 1,
) -> Iterator[DeviceMesh]:
    """Join a group of ``ranks`` as the first rank of ``ring_rank`` under ``recipe``; leave it at the end.

    In a ring of one, every ``ring_rank`` is the only one. A "fake" group's collectives return at once, with
    whatever lies in their buffers; a "loopback" group's are answered from this rank's own data. Several
    threads take turns.

    Raises:
        LabError: the process is one of a group already.
    """
    rank = min(ring_rank, recipe.ring - 1) * recipe.ulysses
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
            # DTensor would find a later mesh in its caches as an equal one of this group, which is gone. On
            # fake tensors a step runs in this thread alone.
            clear_mesh_caches(of_all_threads=backend != "fake")
