"""Fit: of the recipes that fit the memory, the fastest; then the time that each step down in memory costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product

from cluster.progress import hide_progress, progress, say
from lab.errors import LabError
from lab.models import ModelLike
from lab.models.lora import Lora
from lab.planning.bill import Bill, Order, make_order
from lab.planning.closed_form_disk import estimate_on, fits_node
from lab.planning.hardware import make_machine
from lab.planning.plan import Plan, has_fp32_state, plan_job, shape_of
from lab.recipe.jobs import Job, Limit, Machine, check_host_memory, make_job
from lab.recipe.knobs import BY_NAME
from lab.recipe.ladder import OTHER_RECIPES, attention_tile
from lab.recipe.recipe import Recipe
from lab.shape import Shape
from lab.techniques.ulysses_degrees import degree_pairs
from lab.units import format_bytes, format_lines, format_seconds, format_tokens

MARGIN = 1.1
"""A recipe whose closed-form estimate is further than this over the memory is not planned: the estimate is
within 5% of the plan."""

NEARLY = 1.05
"""Other degrees are worth a plan if by the closed form they need less memory by more than this factor."""

SHOWN = 7
"""How many of the recipes that fit are in the text of all of them."""


class Fits(tuple[Plan, ...]):
    """The plans of the recipes that fit, the fastest first.

    Attributes:
        order: The tokens to be trained in all, and the price of a GPU hour; None if they were not given.
    """

    order: Order | None

    def __new__(cls, plans: Iterable[Plan], order: Order | None = None) -> Fits:
        """Keep the order with the plans."""
        fits = super().__new__(cls, plans)
        fits.order = order
        return fits

    @property
    def bills(self) -> tuple[Bill, ...]:
        """What the order takes with each recipe; nothing without an order."""
        return () if self.order is None else tuple(plan.bill(self.order) for plan in self)

    def __repr__(self) -> str:
        front = pareto_front(self)
        title = (
            f"{len(self)} recipes fit {self[0].job.subject}. Those that need less device memory than every "
            "faster one:"
        )
        lines = {
            f"{number}": f"{format_seconds(plan.step_seconds)} per step (estimate), "
            f"{format_bytes(plan.device_peak)} per rank: {plan.recipe.summary}"
            for number, plan in enumerate(self, start=1)
            if plan in front[:SHOWN]
        }
        more = {"...": f"{len(front) - SHOWN} more"} if len(front) > SHOWN else {}
        return format_lines(title, {"state": self[0].state} | lines | more)


@progress("choosing the recipes to plan")
def fit(
    model: ModelLike,
    *,
    tokens: int | str,
    ranks: int,
    rows: int = 1,
    accumulate: int = 1,
    lora: Lora | str | None = None,
    dtype: str | None = None,
    device_memory: int | str | None = None,
    host_memory: int | str = "2TiB",
    ranks_per_node: int = 8,
    device: str = "h100",
    workspace: bool = True,
    disk: int | str | None = None,
    disk_rate: int | str | None = None,
    tokens_total: int | str | None = None,
    price: float | str | None = None,
    watch: Callable[[int, int, Plan], None] | None = None,
) -> Fits:
    """Plan every recipe that may fit, and return those that do, the fastest first.

    All shard by FSDP, and the sequence over all ranks; they differ in degrees, head chunk, tiles,
    checkpointing and offload, and some have streamed layers. Of recipes that differ in degrees alone, two are
    planned: that with the ladder's degrees, and the one that needs the least memory by the closed form. A
    head chunk smaller than the ladder's Ulysses degree takes more time, as the optimizer on the host does,
    and segments, and so these are planned only if nothing else may fit. Parameters that are not all in fp32
    have no closed form: every recipe with the ladder's degrees is planned, and others only if none fits.

    With ``lora``, such as "r=16", adapters are trained and the model is frozen, as by ``lab.plan``. A step
    has ``accumulate`` micro-batches of ``rows`` rows. ``dtype`` is as in ``lab.plan``.

    With ``disk``, the long tensors of streamed layers are on a disk of these bytes per node.

    With ``tokens_total``, the tokens of the whole training, such as "10B" (decimal: 10^10), ``Fits.bills``
    has the steps, days, node hours and GPU hours that each recipe takes. With ``price``, the money for one
    hour of one GPU in any currency, it also has the money. All are estimates, as the seconds of a step are.

    ``device_memory`` is per rank, by default that of the device; ``host_memory`` is per node; the rest as
    ``lab.plan``. ``watch`` is called with each plan, its number, and how many there will be so far.

    Raises:
        LabError: as ``lab.plan``; or none fits, with the leanest and what it needs; a price that is none or
            has no ``tokens_total``, or a total smaller than a step.
    """
    hide_progress(watch)
    check_host_memory(host_memory)
    order = make_order(tokens_total, price)
    machine = make_machine(
        device=device,
        device_memory=device_memory,
        host_memory=host_memory,
        ranks_per_node=ranks_per_node,
        workspace=workspace,
        disk=disk,
        disk_rate=disk_rate,
    )
    shape = shape_of(model, dtype)
    base = make_job(
        model,
        "tiling",
        tokens=tokens,
        ranks=ranks,
        rows=rows,
        accumulate=accumulate,
        lora=lora,
        dtype=dtype,
        shape=shape,
    )
    if order is not None:
        order.steps_of(base)  # refused before anything is planned
    recipes = dict.fromkeys(candidates(base.recipe, shape, ranks, base.tokens))
    jobs = [replace(base, recipe=recipe, recipe_name=None) for recipe in recipes]
    plans: list[Plan] = []
    groups = _groups(base, jobs)
    if has_fp32_state(base):
        groups = iter([_promising(shape, base.recipe, jobs, machine)])
    for group in groups:
        known = len(plans) + len(group)
        for number, job in enumerate(group, start=len(plans) + 1):
            say(f"planning recipe {number} of {known}")
            job.recipe.check(shape, ranks)
            plans.append(plan_job(job, machine))
            if watch is not None:
                watch(number, known, plans[-1])
        if any(plan.fits for plan in plans):
            break
    fitting = sorted((p for p in plans if p.fits), key=lambda p: (p.step_seconds, p.device_peak))
    if not fitting:
        raise LabError(_none_fits(min(plans, key=lambda p: p.device_peak)))
    return Fits(fitting, order)


def _promising(shape: Shape, base: Recipe, jobs: list[Job], machine: Machine) -> list[Job]:
    """The jobs that fit by the closed form, or nearly do; if there are none, the one of the least memory."""
    assert machine.device_memory is not None
    estimates = {job.recipe: estimate_on(machine, shape, job) for job in jobs}
    peaks = {recipe: needs.device_peak for recipe, needs in estimates.items()}
    fitting = [
        job
        for job in jobs
        if peaks[job.recipe] <= machine.device_memory * MARGIN
        and fits_node(machine, estimates[job.recipe], job.ranks, MARGIN)
    ]
    if not fitting:
        return [min(jobs, key=lambda job: peaks[job.recipe])]
    fewest = min(_slower(job.recipe, base) for job in fitting)
    return _two_of_each([job for job in fitting if _slower(job.recipe, base) == fewest], base, peaks)


def _groups(base: Job, jobs: list[Job]) -> Iterator[list[Job]]:
    """Yield all jobs in groups: those that are slower for memory alone come last, and other degrees than the
    ladder's after those.
    """
    for slower in sorted({_slower(job.recipe, base.recipe) for job in jobs}):
        alike = [job for job in jobs if _slower(job.recipe, base.recipe) == slower]
        for usual in (True, False):
            group = [job for job in alike if (job.recipe.ulysses == base.recipe.ulysses) is usual]
            if group:
                yield group


def _slower(recipe: Recipe, base: Recipe) -> int:
    """Count what a recipe has that takes more time and is for memory alone."""
    small_chunk = (recipe.head_chunk or base.ulysses) < base.ulysses
    return small_chunk + (recipe.optimizer == "host") + (recipe.segment > 1)


def _two_of_each(jobs: list[Job], base: Recipe, peaks: dict[Recipe, int]) -> list[Job]:
    """Of jobs that differ in degrees alone, the one with the degrees of ``base``, and the leanest.

    attention_tile follows from the degrees.
    """
    alike: dict[Recipe, list[Job]] = {}
    for job in jobs:
        alike.setdefault(replace(job.recipe, ulysses=1, ring=1, attention_tile=None), []).append(job)
    chosen: list[Job] = []
    for group in alike.values():
        usual = [job for job in group if job.recipe.ulysses == base.ulysses]
        leanest = min(group, key=lambda job: peaks[job.recipe])
        if not usual or peaks[leanest.recipe] < peaks[usual[0].recipe] / NEARLY:
            usual.append(leanest)
        chosen += usual
    return chosen


def candidates(base: Recipe, shape: Shape, ranks: int, tokens: int) -> Iterator[Recipe]:
    """Every pair of degrees and head chunk, without checkpointing and with each offload; the loss tiled, or
    all, or nothing. And streamed layers with each offload that they can have, on their own, with the
    optimizer on the host, and with segments too.
    """
    offloads = BY_NAME["offload"].choices
    keeps = [(False, offloads[0]), *((True, offload) for offload in offloads)]
    tiles = (
        (None, None, None),
        (None, None, base.loss_tile),
        (base.mlp_tile, base.norm_tile, base.loss_tile),
    )
    tile = base.mlp_tile or base.stream
    long = {"segment": min(OTHER_RECIPES["long"][1]["segment"], shape.L), "optimizer": "host"}
    kinds = ({"segment": 1}, {"segment": 1, "optimizer": "host"}, long)
    for ulysses, ring in degree_pairs(shape, ranks):
        chunks = [u for u in range(ulysses, shape.H + 1, ulysses) if shape.H % u == 0]
        for chunk, (checkpoint, offload), (mlp, norm, loss) in product([None, *chunks], keeps, tiles):
            yield replace(
                base,
                ulysses=ulysses,
                ring=ring,
                head_chunk=chunk,
                checkpoint=checkpoint,
                offload=offload,
                mlp_tile=mlp,
                norm_tile=norm,
                loss_tile=loss,
                stream=None,
                segment=1,
            )
        streamed = replace(
            base,
            ulysses=ulysses,
            ring=ring,
            attention_tile=attention_tile(tokens, ring),
            checkpoint=True,
            mlp_tile=None,
            stream=tile,
        )
        for chunk, offload, kind in product([None, *chunks], offloads[1:], kinds):
            yield replace(streamed, **{"head_chunk": chunk, "offload": offload, **kind})


def pareto_front(plans: Sequence[Plan]) -> list[Plan]:
    """Of plans sorted by time, those that need less device memory than every faster one."""
    steps: list[Plan] = []
    for plan in plans:
        if not steps or plan.device_peak < steps[-1].device_peak:
            steps.append(plan)
    return steps


def _none_fits(leanest: Plan) -> str:
    needs = " and ".join(
        f"{format_bytes(leanest.needed(memory))} of {format_bytes(available)} {where}"
        for memory, where in _PLACES.items()
        if (available := leanest.available(memory)) is not None
    )
    return (
        f"no recipe fits {format_tokens(leanest.tokens)} tokens on {leanest.ranks} ranks: the leanest needs "
        f"{needs}; more ranks or a shorter context need less"
    )


_PLACES: dict[Limit, str] = {"device": "on each device", "host": "on each host", "disk": "on each disk"}
