"""Trainers of transformers and TRL on the ranks of a cluster, which accelerate takes for torchrun's."""

import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from cluster.ranks import Cluster
from cluster.remote import leave

SECONDS = 60
"""The timeout of a collective in a world that is smaller than the cluster."""


def launch(cluster: Cluster, ranks: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Runs ``fn(*args, **kwargs)`` on the first ranks of a cluster as if torchrun had started them.

    Where ``ranks`` is fewer than the cluster has, they are a world of their own during the call, and the
    others do nothing.

    Returns:
        The results of the ranks, in their order.
    """
    if ranks == cluster.ranks:
        return cluster.apply(_as_torchrun, fn, args, kwargs)
    # The ranks that do nothing do not import what they do not run.
    call = cloudpickle.dumps((fn, args, kwargs))
    with tempfile.TemporaryDirectory() as folder:
        try:
            results = cluster.apply(_in_a_smaller_world, ranks, Path(folder) / "store", call)
        finally:
            if not cluster.broken:
                # Its own world again.
                cluster.recover()
    return results[:ranks]


@contextmanager
def fresh_process(**variables: str) -> Iterator[None]:
    """A trainer's process: what transformers and accelerate set for all of a process ends with the block.

    That is environment variables, accelerate's singletons, the seeds, and a process group that was made
    inside.

    Args:
        variables: The environment variables of the process, such as torchrun sets.
    """
    seeds = random.getstate(), np.random.get_state(), torch.get_rng_state()
    group = dist.is_initialized()
    _reset_accelerate()
    try:
        with patch.dict(os.environ, variables):
            yield
    finally:
        _reset_accelerate()
        random.setstate(seeds[0])
        np.random.set_state(seeds[1])
        torch.set_rng_state(seeds[2])
        if dist.is_initialized() and not group:
            leave()


class Gradients(TrainerCallback):
    """Notes the whole gradients of each update, as the optimizer gets them."""

    def __init__(self) -> None:
        self.updates: list[dict[str, Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note those of this update; every rank gathers them."""
        self.updates.append(whole(kwargs["model"], gradients=True))


def whole(model: nn.Module, *, gradients: bool = False) -> dict[str, Tensor]:
    """Returns a copy of a model's parameters, or of their gradients, as if they were not sharded."""
    found = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.grad if gradients else parameter.detach()
        if tensor is not None:
            found[name] = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
    return found


def _as_torchrun(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    with fresh_process(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size):
        return fn(*args, **kwargs)


def _in_a_smaller_world(size: int, store: Path, call: bytes) -> Any:
    rank = dist.get_rank()
    leave()
    if rank >= size:
        return None
    rendezvous = dist.FileStore(str(store), size)  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo", store=rendezvous, rank=rank, world_size=size, timeout=timedelta(seconds=SECONDS)
    )
    return _as_torchrun(*cloudpickle.loads(call))


def _reset_accelerate() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
