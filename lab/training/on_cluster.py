"""The call of a function that trains on all ranks of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from cluster.errors import RankError
from lab.errors import CheckpointError, DivergedError, HostFileError
from lab.step.kernel_limits import check_kernel
from lab.step.on_ranks import Training
from lab.techniques.attention.kernels import KernelSupport, kernel_support
from lab.training.collective_time import on_cluster

if TYPE_CHECKING:
    # A machine without ipyparallel can still import the lab, to plan and to rehearse.
    from cluster.ranks import Cluster
    from cluster.waiting import OnRecord


def train_on_cluster(
    cluster: Cluster,
    training: Training,
    function: Callable[..., Any],
    *arguments: Any,
    timeout: float | None = None,
    on_record: OnRecord | None = None,
) -> list[Any]:
    """Call ``function(job, settings, *arguments)`` on all ranks, and return their results.

    Args:
        cluster: The ranks.
        training: Has the job and the settings.
        function: Trains on a rank.
        arguments: Further arguments of the function.
        timeout: Seconds for a collective; None for those of ``collective_time.on_cluster``.
        on_record: Called with a rank and each record that it publishes.

    Raises:
        RecipeError: torch's attention kernel on GPUs would refuse the step; nothing is planned or made then.
        CheckpointError, DivergedError, HostFileError: a rank raised it.
        RankError: a rank failed otherwise.
    """
    job = training.job

    def machine() -> KernelSupport:
        machines: list[KernelSupport] = cluster.apply(kernel_support, torch.device("cuda"))
        return machines[0]

    check_kernel(job, training.config, cluster.device_type, machine)
    seconds = on_cluster(job, cluster) if timeout is None else timeout
    try:
        return cluster.apply(
            function, job, training.settings, *arguments, timeout=seconds, on_record=on_record
        )
    except RankError as error:
        if isinstance(error.cause, CheckpointError | DivergedError | HostFileError):
            raise error.cause from error
        raise
