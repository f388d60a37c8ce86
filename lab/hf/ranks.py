"""Trainers on the ranks of a cluster, as if torchrun had started them."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState

from cluster.ranks import Cluster
from cluster.remote import leave


def on_ranks(cluster: Cluster, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Call a function that makes and trains a trainer on all ranks of a cluster.

    During the call, the ranks have the environment variables that torchrun sets, which accelerate reads. What
    a trainer prints stays on the ranks, so set its ``report_to`` and ``disable_tqdm``.

    Args:
        cluster: The ranks, such as ``lab.Cluster(ranks=2)`` after its ``start()``.
        function: The function. Like its arguments and its results it is pickled by cloudpickle, so it
            returns numbers and not the trainer.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Returns:
        The results of the ranks, in their order.

    Raises:
        RankError: The function failed on a rank.
        LabError: See ``cluster.ranks.Cluster.apply``.
    """
    return cluster.apply(as_torchrun, function, args, kwargs)


def as_torchrun(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function on this rank of a process group, with the environment that torchrun would give it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    hosts: list[str] = [""] * size
    dist.all_gather_object(hosts, socket.gethostname())
    own = hosts[rank]
    with fresh_process(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(hosts[:rank].count(own)),
        LOCAL_WORLD_SIZE=str(hosts.count(own)),
    ):
        return function(*args, **kwargs)


@contextmanager
def fresh_process(**variables: str) -> Iterator[None]:
    """Run a block as if it were a process of its own, and undo what trainers set for the whole process.

    The block starts without accelerate's singletons. At its end, the environment variables and the random
    states of Python, NumPy and torch's CPU are what they were before, accelerate's singletons are reset, and
    a process group that was made in the block is destroyed.

    Args:
        variables: Environment variables that are set in the block.
    """
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    group = dist.is_initialized()
    _reset_accelerate()
    try:
        with patch.dict(os.environ, variables):
            yield
    finally:
        _reset_accelerate()
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if dist.is_initialized() and not group:
            leave()


def _reset_accelerate() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
