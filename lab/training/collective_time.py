"""How long a collective of a training on GPUs may take: three times the longest layer of its plan."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from lab.planning.hardware import nearest
from lab.planning.plan import plan
from lab.step.on_ranks import Training
from lab.units import format_seconds

if TYPE_CHECKING:
    from cluster.ranks import Cluster

LAYERS = 3
"""NCCL counts from when a collective was enqueued, and the host runs about one layer ahead of the device."""


def on_cluster(training: Training, cluster: Cluster) -> float | None:
    """Seconds for ``Cluster.apply``, printed; None where the cluster's own are enough.

    They are on a CPU: its ranks count from when they wait, and the plan's rates are those of GPUs.
    """
    if cluster.device_type != "cuda":
        return None
    device = cluster.apply(torch.cuda.get_device_name)[0]
    return layers_time(training, cluster.ranks, device, cluster.timeout)


def layers_time(
    training: Training, ranks: int, device: str, default: float, *, tells: bool = True
) -> float | None:
    """Seconds on GPUs of the name ``device``; None where ``default``, in seconds, is at least as much.

    What is returned is printed on stderr, unless ``tells`` is false.
    """
    planned = plan(
        training.model,
        training.recipe,
        tokens=training.tokens,
        ranks=ranks,
        rows=training.rows,
        device=nearest(device),
    )
    layer = planned.longest_layer
    if LAYERS * layer <= default:
        return None
    if tells:
        print(
            f"a collective may take {format_seconds(LAYERS * layer)} and not {format_seconds(default)}: "
            f"{LAYERS} times the longest layer of the plan, {format_seconds(layer)} on {planned.device}",
            file=sys.stderr,
        )
    return LAYERS * layer
