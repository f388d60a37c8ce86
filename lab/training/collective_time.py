"""How long a collective of a training on GPUs may take: three times the longest layer of its plan."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from lab.planning.hardware import hardware, nearest
from lab.planning.plan import plan_job
from lab.recipe.jobs import Job, Machine
from lab.training.planning_process import answer_on_all_ranks
from lab.units import format_seconds

if TYPE_CHECKING:
    from cluster.ranks import Cluster

LAYERS = 3
"""NCCL counts from when a collective was enqueued, and the host runs about one layer ahead of the device."""


def on_cluster(job: Job, cluster: Cluster) -> float | None:
    """Seconds for ``Cluster.apply``, printed; None where the cluster's own are enough.

    They are on a CPU: its ranks count from when they wait, and the plan's rates are those of GPUs.
    """
    if cluster.device_type != "cuda":
        return None
    device = cluster.apply(torch.cuda.get_device_name)[0]
    return layers_time(job, device, cluster.timeout)


def on_this_rank(job: Job, default: float) -> float | None:
    """Return what ``layers_time`` returns for this rank's GPU; every rank of the process group calls this.

    Rank 0 plans for all ranks. It plans in another process, because a plan joins a process group of its own
    and this process has joined one already.

    Raises:
        LabError: the plan failed on rank 0.
    """
    seconds: float | None = answer_on_all_ranks(
        "how long a collective may take", layers_time, job, torch.cuda.get_device_name(), default
    )
    return seconds


def layers_time(job: Job, device: str, default: float) -> float | None:
    """Return three times the seconds of the plan's longest layer, and print them on stderr.

    Args:
        job: What is trained.
        device: The name of the GPUs.
        default: Seconds. If they are at least as many, None is returned and nothing is printed.
    """
    machine = Machine(device=nearest(device))
    layer, gpu = plan_job(job, machine).longest_layer, hardware(machine.device).name
    if LAYERS * layer <= default:
        return None
    print(
        f"a collective may take {format_seconds(LAYERS * layer)} and not {format_seconds(default)}: "
        f"{LAYERS} times the longest layer of the plan, {format_seconds(layer)} on {gpu}",
        file=sys.stderr,
    )
    return LAYERS * layer
