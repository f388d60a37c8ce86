"""Fit: of the recipes that fit the memory, the fastest; then the time that each step down in memory costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import inf, isqrt
from operator import ge
from typing import Any, Literal

from cluster.progress import hide_progress, progress, say
from lab.errors import DoesNotFitError, RecipeError
from lab.models import ModelLike
from lab.models.lora import Lora
from lab.planning.answers import shape_of
from lab.planning.bill import Bill, Order, make_order
from lab.planning.freeing import CHEAPEST_FIRST, smallest_tile
from lab.planning.hardware import make_machine
from lab.planning.max_context import DEGREES
from lab.planning.plan import Plan, plan_job
from lab.recipe.jobs import Job, Limit, check_host_memory, make_job, memory_name
from lab.recipe.ladder import RECIPE_NAMES, attention_tile
from lab.recipe.recipe import Recipe
from lab.shape import Shape
from lab.techniques.ulysses_degrees import degree_pairs
from lab.units import LARGEST, format_bytes, format_lines, format_seconds, format_tokens

KEEPS: tuple[dict[str, Any], ...] = (
    {"checkpoint": False, "offload": "none"},
    {"checkpoint": True, "offload": "none"},
    {"checkpoint": True, "offload": "attention"},
    {"checkpoint": True, "offload": "inputs"},
)
"""What layers keep for backward, each with less on the device than the one before."""

FEW_TOKENS = 4
"""With fewer tokens of a rank than so many times the width of a hidden state, tiles may need more than they
save."""

FEW_LAYERS = 8
"""With fewer layers, tensors on the host may need more on the device, for transfers, than they save."""

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
    **knobs: Any,
) -> Fits:
    """Plan the recipes that may be the fastest that fits, and return those that fit, the fastest first.

    The named recipes with FSDP are planned first, and ``streamed`` with attention's results on the host, then
    those of ``candidates``, which turn one knob after the other in the order of its price. Of these, a recipe
    is not planned if a recipe that differs from it in leaner settings alone needs too much, or one that
    differs in milder settings alone takes as long as the fastest that fits: the next one is that whose plan
    rules out the most. Only if none fits, the leanest with each other pair of degrees is planned. So more
    memory gives no slower answer.

    With ``lora``, such as "r=16", adapters are trained and the model is frozen, as by ``lab.plan``. A step
    has ``accumulate`` micro-batches of ``rows`` rows. ``dtype`` is as in ``lab.plan``.

    With ``disk``, the long tensors of streamed layers are on a disk of these bytes per node.

    With ``tokens_total``, the tokens of the whole training, such as "10B" (decimal: 10^10), ``Fits.bills``
    has the steps, days, node hours and GPU hours that each recipe takes. With ``price``, the money for one
    hour of one GPU in any currency, it also has the money. All are estimates, as the seconds of a step are.

    ``device_memory`` is per rank, by default that of the device; ``host_memory`` is per node; the rest as
    ``lab.plan``. ``watch`` is called with the number of each plan, the number of those that there may be at
    most, and the plan. ``knobs`` are set by hand in each recipe, as in ``lab.plan``.

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
    named = {
        name: make_job(
            model,
            name,
            tokens=tokens,
            ranks=ranks,
            rows=rows,
            accumulate=accumulate,
            lora=lora,
            dtype=dtype,
            shape=shape,
            **knobs,
        )
        for name in RECIPE_NAMES
        if name != "plain"
    }
    job = named[RECIPE_NAMES[-1]]
    if order is not None:
        order.steps_of(job)  # refused before anything is planned
    recipes = {name: job.recipe for name, job in named.items()}
    plans: list[Plan] = []

    def by_hand(candidates: Iterable[Recipe]) -> Iterator[Recipe]:
        for recipe in candidates:
            # The knobs by hand, or the model, may forbid a candidate.
            with suppress(RecipeError):
                held = replace(recipe, **knobs)
                held.check(shape, ranks)
                yield held

    def plan_those(candidates: Iterable[Recipe]) -> None:
        waiting = list(dict.fromkeys(candidates))
        while waiting:
            recipe, number, most = _middle_of(waiting), len(plans) + 1, len(plans) + len(waiting)
            fastest = min((plan for plan in plans if plan.fits), key=_time, default=None)
            so_far = "" if fastest is None else f"; the fastest so far: {fastest.summary}"
            say(f"planning recipe {number} of at most {most}{so_far}")
            plans.append(plan_job(replace(job, recipe=recipe, recipe_name=None), machine))
            if watch is not None:
                watch(number, most, plans[-1])
            waiting.remove(recipe)
            waiting = [one for one in waiting if one in always or _may_be_fastest(one, plans)]

    # Streamed layers that keep attention's results are a large step down in memory that costs little time.
    streamed = [recipe for name, recipe in recipes.items() if name == "streamed"]
    always = [*recipes.values(), *by_hand(replace(recipe, offload="attention") for recipe in streamed)]
    plan_those(always)
    small = smallest_tile(job.local_sizes[1])
    plan_those(one for one in by_hand(candidates(recipes, shape, small)) if _may_be_fastest(one, plans))
    if not any(plan.fits for plan in plans) and not DEGREES & knobs.keys():
        others = [*with_other_degrees(recipes, shape, small, job)]
        if any(plan.limit == "host" for plan in plans):
            # The state of the optimizer, which is on the host, may be too much there.
            others += [replace(one, optimizer="device") for one in others]
        plan_those(by_hand(others))
    fitting = sorted((plan for plan in plans if plan.fits), key=_time)
    if not fitting:
        raise DoesNotFitError(
            _none_fits(min(plans, key=lambda plan: max(_over(plan, place) for place in _PLACES)))
        )
    return Fits(fitting, order)


def candidates(named: Mapping[str, Recipe], shape: Shape, small: int) -> Iterator[Recipe]:
    """Yield the recipes with the ladder's degrees that are planned beside the named ones.

    The first is the leanest. Then come those without streamed layers: with the optimizer on the device or on
    the host, and with each of ``KEEPS``, the tiles and the head chunk of ``upipe`` are set one after the
    other, the cheapest first. Then come streamed layers that keep their inputs, or also the results of
    attention, with tiles as in ``streamed`` or the smallest, with the optimizer on the host, and with
    segments too. The last has checkpointing without the host, and the smallest tiles.

    Args:
        named: The named recipes.
        shape: The shape of the model.
        small: The tokens of the smallest tile.
    """
    lean = leanest(named, shape, small)
    yield lean
    upipe, streamed = named["upipe"], named["streamed"]
    turned = [name for name in CHEAPEST_FIRST if name == "head_chunk" or name in _TILES]
    places: tuple[Literal["device", "host"], ...] = ("device", "host")
    for optimizer, keep in product(places, reversed(KEEPS)):
        base = replace(named["ulysses"], **keep, optimizer=optimizer)
        for count in range(len(turned), -1, -1):
            yield replace(base, **{name: getattr(upipe, name) for name in turned[:count]})
    fields = ("optimizer", "segment")
    small_stream: dict[str, Any] = dict.fromkeys(("stream", "norm_tile", "loss_tile"), small)
    small_tiles: dict[str, Any] = dict.fromkeys(_TILES, small)
    for count, keep in product(range(3), KEEPS[2:]):
        kind = {name: getattr(lean, name) for name in fields[:count]}
        yield replace(streamed, **keep, **kind)
        yield replace(streamed, **keep, **kind, **small_stream)
    yield replace(upipe, **KEEPS[1], **small_tiles)


_TILES = ("mlp_tile", "norm_tile", "loss_tile")


def leanest(named: Mapping[str, Recipe], shape: Shape, small: int) -> Recipe:
    """Return the recipe that needs the least with the ladder's degrees: ``long`` with the smallest tiles.

    Segments of the square root of the layers keep the fewest inputs at once.
    """
    long = named["long"]
    return replace(
        long, stream=small, norm_tile=small, loss_tile=small, segment=max(long.segment, isqrt(shape.L))
    )


def with_other_degrees(named: Mapping[str, Recipe], shape: Shape, small: int, job: Job) -> Iterator[Recipe]:
    """Yield the leanest recipe with each other pair of degrees, and what follows from them."""
    lean = leanest(named, shape, small)
    for ulysses, ring in degree_pairs(shape, job.ranks):
        if (ulysses, ring) != (lean.ulysses, lean.ring):
            tile = attention_tile(job.tokens, ring)
            yield replace(lean, ulysses=ulysses, ring=ring, head_chunk=ulysses, attention_tile=tile)


def _middle_of(recipes: Sequence[Recipe]) -> Recipe:
    """Return the recipe whose plan rules out the most others, whether it fits or not."""

    def ruled_out(recipe: Recipe) -> int:
        leaner = sum(_is_leaner(one, recipe) for one in recipes)
        return min(leaner, sum(_is_leaner(recipe, one) for one in recipes))

    return max(recipes, key=ruled_out)


def _may_be_fastest(recipe: Recipe, plans: Sequence[Plan]) -> bool:
    """Return whether plans leave it open that a recipe fits and takes less time than those that fit."""
    best = min((plan.step_seconds for plan in plans if plan.fits), default=inf)
    for plan in plans:
        other = plan.recipe
        if _is_leaner(recipe, other):
            # Of results of attention on the host it depends on the length whether they save time. A leaner
            # recipe may copy less, but the device computes as much.
            comparable = not other.checkpoint or (recipe.offload == "attention") == (
                other.offload == "attention"
            )
            if recipe == other or (comparable and plan.costs.device_seconds >= best):
                return False
        # With fuller settings the tensors need more; what the allocator keeps of them may be less.
        if not plan.tensors_fit and _is_leaner(other, recipe) and _have_like_buffers(recipe, plan):
            return False
        like_segments = plan.shape.L >= FEW_LAYERS or recipe.segment == other.segment
        if max(_over(plan, "host"), _over(plan, "disk")) > 0 and _is_fuller(recipe, other) and like_segments:
            return False
    return True


def _have_like_buffers(recipe: Recipe, plan: Plan) -> bool:
    """Return whether the buffers of a planned recipe take less than it saves, compared with another recipe.

    Those of streamed layers may take more. With few tokens, so may the sums of the gradients of weights over
    tiles; with few layers, so may the buffers of transfers.
    """
    other, shape, (rows, tokens) = plan.recipe, plan.shape, plan.job.local_sizes
    few_tokens = rows * tokens * shape.active_weights < FEW_TOKENS * shape.E * shape.weights
    return (
        (recipe.stream is None) == (other.stream is None)
        and (
            not few_tokens
            or [t is None for t in (recipe.mlp_tile, recipe.loss_tile)]
            == [t is None for t in (other.mlp_tile, other.loss_tile)]
        )
        and (shape.L >= FEW_LAYERS or recipe.offload == other.offload)
    )


def _is_leaner(one: Recipe, other: Recipe) -> bool:
    """Return whether a recipe has, at each knob, the other's setting or one that needs less device memory."""

    def levels(recipe: Recipe) -> tuple[int, ...]:
        tiles = (
            recipe.stream or recipe.mlp_tile, recipe.norm_tile, recipe.loss_tile, recipe.attention_tile,
            recipe.head_chunk,
        )  # fmt: skip
        return (
            KEEPS.index({"checkpoint": recipe.checkpoint, "offload": recipe.offload}),
            *(-(tile or LARGEST) for tile in tiles),
            recipe.stream is not None,
            recipe.optimizer == "host",
            recipe.segment,
        )

    same_degrees = (one.ulysses, one.ring) == (other.ulysses, other.ring)
    return same_degrees and all(map(ge, levels(one), levels(other)))


def _is_fuller(one: Recipe, other: Recipe) -> bool:
    """Return whether a recipe has, at each knob, the other's setting or one that needs more host memory."""

    def levels(recipe: Recipe) -> tuple[int, ...]:
        offload = ("none", "inputs", "attention").index(recipe.offload)
        return offload, recipe.optimizer == "host", -recipe.segment

    # With another head chunk, attention returns other tensors.
    names = ("ulysses", "ring", "stream", "head_chunk")
    same = all(getattr(one, name) == getattr(other, name) for name in names)
    return same and all(map(ge, levels(one), levels(other)))


def _over(plan: Plan, memory: Limit) -> float:
    """Return by how many bytes a plan is over a memory; below 0 where it fits."""
    available = plan.available(memory)
    return -inf if available is None else plan.needed(memory) - available


def _time(plan: Plan) -> tuple[float, int]:
    return plan.step_seconds, plan.device_peak


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
    over = " and ".join(memory_name(memory) for memory in _PLACES if _over(leanest, memory) > 0)
    return (
        f"no recipe fits {format_tokens(leanest.tokens)} tokens on {leanest.ranks} ranks: the leanest needs "
        f"{needs}: not enough {over} ({leanest.recipe.summary}); more ranks or a shorter context need less"
    )


_PLACES: dict[Limit, str] = {"device": "on each device", "host": "on each host", "disk": "on each disk"}
