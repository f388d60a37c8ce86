"""The closed form of a step on a machine whose disk holds the long tensors of streamed layers."""

from __future__ import annotations

from dataclasses import replace

from lab.planning.closed_form import WIDTHS, Estimate, estimate_job, local_sizes
from lab.recipe.jobs import Job, Machine
from lab.shape import Shape
from lab.techniques.host_pieces import piece_sizes
from lab.techniques.upipe.schedule import schedule


def estimate_on(machine: Machine, shape: Shape, job: Job) -> Estimate:
    """Return the peaks of one step of a job: ``estimate_job``, with streamed layers on the machine's disk.

    Args:
        machine: Its disk, if it has one, holds the tiles of streamed layers.
        shape: The shape of the job's model.
        job: The job.
    """
    needs = estimate_job(shape, job)
    if machine.disk is None or job.recipe.stream is None:
        return needs
    disk = _tiles(shape, job)
    # What the host holds besides what layers keep: the optimizer's state, its gradients, or nothing.
    keeping_nothing = replace(job.recipe, stream=None, segment=1, offload="none")
    least = estimate_job(shape, replace(job, recipe=keeping_nothing)).host_peak
    return replace(needs, host_peak=max(needs.host_peak - disk, least), disk_peak=disk)


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


def _tiles(shape: Shape, job: Job) -> int:
    """The most bytes in tiles of streamed layers: when the backward of a segment's last layer runs.

    There are the inputs of the segments up to this one and of its layers, the outputs of heads of its layers
    (of all layers up to it, if they are kept), and the gradients in that backward.
    """
    recipe, (b, s) = job.recipe, local_sizes(job)
    hidden, head = (WIDTHS[recipe.compute_dtype] * b * s * width for width in (shape.E, shape.D))
    plan = schedule(shape.H, shape.K, recipe.ulysses, recipe.head_chunk or shape.H)
    stages, of_stage = len(plan.stages), _pages(plan.chunk * head)
    kept, most = recipe.offload == "attention", 0
    for number, first in enumerate(range(0, shape.L, recipe.segment), start=1):
        length = min(recipe.segment, shape.L - first)
        outputs = (first * kept + length) * stages * of_stage
        most = max(most, (number + length - 1) * _pages(hidden) + outputs)
    # A stage frees the gradients of its outputs, after the next ones' if these overlap, and adds dk and dv.
    made, grads = 0, stages * of_stage
    for number, runs in enumerate(plan.stages, start=1):
        slots = (len(run.slots) for run in runs if run.closes)
        made += sum(2 * _pages(head * n * plan.ranks // plan.replicas) for n in slots)
        waiting = stages - number - (recipe.overlap and recipe.ulysses > 1)
        grads = max(grads, max(waiting, 0) * of_stage + made)
    return most + grads


def _pages(nbytes: int) -> int:
    return sum(piece_sizes(nbytes))
