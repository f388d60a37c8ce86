"""The closed form of a step on a machine: with its disk, and with attention by matrix products on CUDA."""

from __future__ import annotations

from dataclasses import replace

from lab.planning.closed_form import Estimate, estimate_job, host_bytes
from lab.planning.closed_form_products import with_products
from lab.planning.closed_form_streamed import streamed_host
from lab.planning.closed_form_terms import sizes_of
from lab.recipe.jobs import Job, Machine
from lab.shape import Shape


def estimate_on(machine: Machine, shape: Shape, job: Job) -> Estimate:
    """Return the peaks of one step of a job: ``estimate_job``, with what the machine adds.

    Args:
        machine: Its disk, if it has one, holds the tiles of streamed layers. If it counts the workspace of
            CUDA, attention that runs as matrix products holds its scores; see ``with_products``.
        shape: The shape of the job's model.
        job: The job.
    """
    needs = estimate_job(shape, job)
    if machine.workspace:
        needs = with_products(needs, shape, job)
    if machine.disk is None or job.recipe.stream is None:
        return needs
    z = sizes_of(shape, job)
    disk = max(tiles for tiles, _ in streamed_host(z))
    return replace(needs, host_peak=host_bytes(z, tiles=False), disk_peak=disk)


def fits_node(machine: Machine, needs: Estimate, ranks: int, margin: float = 1.0) -> bool:
    """Return whether an estimate for each rank of a node fits the node's host memory and disk.

    Args:
        machine: Has the memory and the disk of a node; without a size, one has no limit.
        needs: The peaks of a rank.
        ranks: The ranks of the process group.
        margin: By which factor an estimate may be larger.
    """
    of_node = min(ranks, machine.ranks_per_node)
    pairs = (needs.host_peak, machine.host_memory), (needs.disk_peak, machine.disk_bytes)
    return all(limit is None or peak * of_node <= limit * margin for peak, limit in pairs)
