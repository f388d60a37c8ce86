"""Fit: of the recipes that fit the memory, the fastest; then the price of each step down in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product

from lab.errors import LabError
from lab.models import ModelLike
from lab.planning.closed_form import estimate_job
from lab.planning.plan import Plan, plan_job, shape_of
from lab.recipe.jobs import Job, Machine, make_job, make_machine
from lab.recipe.knobs import BY_NAME
from lab.recipe.recipe import Recipe
from lab.shape import Shape
from lab.units import format_bytes, format_tokens

MARGIN = 1.1
"""A recipe whose closed-form estimate is further than this over the memory is not planned: the two agree to a
twentieth."""


def fit(
    model: ModelLike,
    *,
    tokens: int | str,
    ranks: int,
    rows: int = 1,
    device_memory: int | str = "80GiB",
    host_memory: int | str = "2TiB",
    ranks_per_node: int = 8,
    device: str = "h100",
    workspace: bool = True,
    watch: Callable[[int, int, Plan], None] | None = None,
) -> tuple[Plan, ...]:
    """Plan every recipe that may fit, and return those that do, the fastest first.

    All shard by FSDP and over the largest Ulysses degree; they differ in head chunk, tiles, checkpointing and
    offload. ``device_memory`` is per rank, ``host_memory`` per node; the rest as ``lab.plan``.
    ``watch`` is called with each plan, its number, and how many there will be.

    Raises:
        LabError: as ``lab.plan``; or none fits, with the leanest and what it needs.
    """
    machine = make_machine(
        device=device,
        device_memory=device_memory,
        host_memory=host_memory,
        ranks_per_node=ranks_per_node,
        workspace=workspace,
    )
    shape = shape_of(model)
    base = make_job(model, "tiling", tokens=tokens, ranks=ranks, rows=rows, shape=shape)
    recipes = dict.fromkeys(candidates(base.recipe, shape.H))
    jobs = [replace(base, recipe=recipe, recipe_name=None) for recipe in recipes]
    tried, plans = _promising(shape, jobs, machine), []
    for number, job in enumerate(tried, start=1):
        job.recipe.check(shape, ranks)
        plans.append(plan_job(job, machine))
        if watch is not None:
            watch(number, len(tried), plans[-1])
    fitting = sorted((p for p in plans if p.fits), key=lambda p: (p.step_seconds, p.device_peak))
    if not fitting:
        raise LabError(_none_fits(min(plans, key=lambda p: p.device_peak)))
    return tuple(fitting)


def _promising(shape: Shape, jobs: list[Job], machine: Machine) -> list[Job]:
    """The jobs that fit by the closed form, or nearly do; if there are none, the one of the least memory."""
    assert machine.device_memory is not None
    assert machine.host_memory is not None
    estimates = [estimate_job(shape, job) for job in jobs]
    of_node = min(jobs[0].ranks, machine.ranks_per_node)
    fitting = [
        job
        for job, needs in zip(jobs, estimates, strict=True)
        if needs.device_peak <= machine.device_memory * MARGIN
        and needs.host_peak * of_node <= machine.host_memory * MARGIN
    ]
    leanest = min(range(len(jobs)), key=lambda index: estimates[index].device_peak)
    return fitting or [jobs[leanest]]


def candidates(base: Recipe, heads: int) -> Iterator[Recipe]:
    """Every head chunk, without checkpointing and with each offload; the loss tiled, or all, or nothing."""
    chunks = [u for u in range(base.ulysses, heads + 1, base.ulysses) if heads % u == 0]
    offloads = BY_NAME["offload"].choices
    keeps = [(False, offloads[0]), *((True, offload) for offload in offloads)]
    tiles = (
        (None, None, None),
        (None, None, base.loss_tile),
        (base.mlp_tile, base.norm_tile, base.loss_tile),
    )
    for chunk, (checkpoint, offload), (mlp, norm, loss) in product([None, *chunks], keeps, tiles):
        yield replace(
            base,
            head_chunk=chunk,
            checkpoint=checkpoint,
            offload=offload,
            mlp_tile=mlp,
            norm_tile=norm,
            loss_tile=loss,
        )


def pareto_front(plans: Sequence[Plan]) -> list[Plan]:
    """Of plans sorted by time, those that need less device memory than every faster one."""
    steps: list[Plan] = []
    for plan in plans:
        if not steps or plan.device_peak < steps[-1].device_peak:
            steps.append(plan)
    return steps


def _none_fits(leanest: Plan) -> str:
    machine = leanest.machine
    assert machine.device_memory is not None
    assert machine.host_memory is not None
    return (
        f"no recipe fits {format_tokens(leanest.tokens)} tokens on {leanest.ranks} ranks: the leanest needs "
        f"{format_bytes(leanest.device_peak)} of {format_bytes(machine.device_memory)} on each device and "
        f"{format_bytes(leanest.host_peak_per_node)} of {format_bytes(machine.host_memory)} on each host; "
        "more ranks or a shorter context need less"
    )
