"""Trainers of transformers and TRL on the first ranks of a cluster, and what is noted of them."""

import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

import lab.hf
from cluster.ranks import Cluster
from cluster.remote import leave
from lab.hf.ranks import as_torchrun

SECONDS = 60
"""The timeout of a collective in a world that is smaller than the cluster."""


def launch(cluster: Cluster, ranks: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Runs ``fn(*args, **kwargs)`` by ``lab.hf.on_ranks``, on the first ranks of a cluster.

    Where ``ranks`` is fewer than the cluster has, they are a world of their own during the call, and the
    others do nothing.

    Returns:
        The results of the ranks, in their order.
    """
    if ranks == cluster.ranks:
        return lab.hf.on_ranks(cluster, fn, *args, **kwargs)
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


def _in_a_smaller_world(size: int, store: Path, call: bytes) -> Any:
    rank = dist.get_rank()
    leave()
    if rank >= size:
        return None
    rendezvous = dist.FileStore(str(store), size)  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo", store=rendezvous, rank=rank, world_size=size, timeout=timedelta(seconds=SECONDS)
    )
    return as_torchrun(*cloudpickle.loads(call))
