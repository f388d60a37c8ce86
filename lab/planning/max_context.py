"""Max context: the longest sequence whose step fits, and what stops the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, get_args

from cluster.progress import hide_progress, progress, say
from lab.errors import LabError
from lab.models import ModelLike
from lab.models.lora import Lora
from lab.planning.closed_form import Estimate
from lab.planning.closed_form_disk import estimate_on, fits_node
from lab.planning.hardware import make_machine
from lab.planning.plan import Plan, has_fp32_state, plan_job, shape_of
from lab.recipe.jobs import Job, Limit, Machine, check_host_memory, make_job, memory_name
from lab.recipe.recipe import Recipe
from lab.techniques.ulysses_degrees import degree_pairs
from lab.units import Ki, Mi, format_bytes, format_lines, format_tokens, round_tokens

RESOLUTION = 128
"""The answer is exact to one part in so many: a plan more would halve that."""

LONGEST = 1024 * Mi
"""Where the search ends: beyond a billion tokens nothing is stopped by memory that this lab knows of."""

Degrees: TypeAlias = Mapping[str, int]
"""A Ulysses and a ring degree, by the names of their knobs; or none, for those of the recipe."""

DEGREES = {"ulysses", "ring", "head_chunk", "ulysses_backend"}
"""The knobs that decide on the degrees, or that are legal with few of them."""


@dataclass(frozen=True, eq=False)
class MaxContext:
    """The longest context that fits.

    ``limit`` is the memory that refuses the next longer one that was tried, ``next_plan``; ``plan`` is that
    of ``tokens`` itself.
    """

    tokens: int
    limit: Limit
    plan: Plan
    next_plan: Plan

    def __repr__(self) -> str:
        return format_lines(f"MaxContext of {self.plan.title}", self.description)

    @property
    def description(self) -> dict[str, str]:
        """What a terminal and a notebook show: texts by label."""
        plan, next_plan = self.plan, self.next_plan
        return {
            "recipe": plan.recipe.summary,
            "state": plan.state,
            "max context": f"{round_tokens(self.tokens)} tokens ({self.tokens:,})",
            "device peak": plan.description["device peak"],
            "host peak": plan.description["host peak"],
            "disk peak": plan.description["disk peak"],
            "stopped by": f"{memory_name(self.limit)} at {round_tokens(next_plan.tokens)} tokens, which "
            f"need {format_bytes(next_plan.needed(self.limit))}",
            "at its peak": str(next_plan.peak),
        }

    def to_json(self) -> dict[str, Any]:
        """The answer as plain values."""
        return {
            "tokens": self.tokens,
            "limit": self.limit,
            "device_peak": self.plan.device_peak,
            "host_peak": self.plan.host_peak,
            "disk_peak": self.plan.disk_peak,
            "recipe": self.plan.recipe.to_json(),
            "state": self.plan.state,
        }


@progress("searching the longest context")
def max_context(
    model: ModelLike,
    recipe: str | Recipe = "upipe",
    *,
    ranks: int,
    rows: int = 1,
    lora: Lora | str | None = None,
    dtype: str | None = None,
    device_memory: int | str | None = None,
    host_memory: int | str = "2TiB",
    ranks_per_node: int = 8,
    workspace: bool = True,
    device: str = "h100",
    disk: int | str | None = None,
    disk_rate: int | str | None = None,
    watch: Callable[[Plan], None] | None = None,
    **knobs: Any,
) -> MaxContext:
    """Search for the longest context that fits ``device_memory`` a rank and ``host_memory`` a node.

    Without ``device_memory``, a rank has the memory of ``device``.

    A ladder's name gives each length its own recipe, for tiles derive from it. It is searched with the
    Ulysses degree and the ring degree of the longest context: by the closed form, or by plans if not all
    parameters are fp32. Of pairs that are equal to within the resolution, the ladder's is taken, or else that
    of the largest Ulysses degree. Knobs by hand hold: with ``ulysses``, ``ring``, ``head_chunk`` or
    ``ulysses_backend`` among them nothing is compared.

    With ``disk``, the long tensors of streamed layers are on a disk of these bytes per node. If the attention
    of the longest context fits there too, the answer has ``offload="attention"``, unless ``offload`` is among
    the knobs by hand: it runs one attention forward of a layer and not two.

    The rest are the settings of ``lab.plan``; ``watch`` is called with each plan.

    Raises:
        LabError: as ``lab.plan``; or nothing fits, and what holds the memory; or nothing stops it.
    """
    hide_progress(watch)
    check_host_memory(host_memory)
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

    def job(tokens: int, degrees: Degrees) -> Job:
        settings = {**knobs, **degrees}
        return make_job(
            model,
            recipe,
            tokens=tokens,
            ranks=ranks,
            rows=rows,
            lora=lora,
            dtype=dtype,
            shape=shape,
            **settings,
        )

    def estimated(tokens: int, degrees: Degrees) -> Estimate:
        return estimate_on(machine, shape, job(tokens, degrees))

    def longest(degrees: Degrees) -> int:
        return longest_estimated(lambda tokens: estimated(tokens, degrees), machine, ranks)

    def planned(tokens: int, degrees: Degrees) -> Plan:
        say(f"planning {format_tokens(tokens)} tokens")
        tried = plan_job(job(tokens, degrees), machine)
        if watch is not None:
            watch(tried)
        return tried

    first = job(Ki, {})
    usual, pairs = first.recipe, []
    if isinstance(recipe, str) and usual.ulysses * usual.ring == ranks and not DEGREES & knobs.keys():
        pairs = degree_pairs(shape, ranks)
    if has_fp32_state(first):
        degrees: Degrees = best_degrees(usual, pairs, longest) if pairs else {}
        fits, beyond = _search(
            lambda tokens: planned(tokens, degrees),
            lambda near, _: _wall(near, lambda tokens: estimated(tokens, degrees)),
        )
    else:
        fits, beyond = _search_pairs(planned, usual, pairs)
    assert beyond.limit is not None
    if machine.disk is not None and isinstance(recipe, str) and fits.recipe.stream and "offload" not in knobs:
        kept = replace(fits.recipe, offload="attention")
        faster = plan_job(replace(fits.job, recipe=kept), machine)
        fits = fits if faster.limit else faster
    return MaxContext(fits.tokens, beyond.limit, fits, beyond)


def best_degrees(
    usual: Recipe, pairs: Iterable[tuple[int, int]], longest: Callable[[Degrees], int]
) -> Degrees:
    """The degrees of the longest context; the usual ones, or else those of the first pair, if it is nearly as
    long with them.
    """
    tokens = {pair: longest({"ulysses": pair[0], "ring": pair[1]}) for pair in pairs}
    enough = max(tokens.values()) * (1 - 1 / RESOLUTION)
    ulysses, ring = next(p for p in [(usual.ulysses, usual.ring), *tokens] if tokens[p] >= enough)
    return {"ulysses": ulysses, "ring": ring}


def _search_pairs(
    planned: Callable[[int, Degrees], Plan], usual: Recipe, pairs: Iterable[tuple[int, int]]
) -> tuple[Plan, Plan]:
    """Search with each pair of degrees, the ladder's first, by plans alone.

    Another pair is searched only if it fits a context that is longer by more than the resolution.
    """

    def search(degrees: Degrees) -> tuple[Plan, Plan]:
        return _search(lambda tokens: planned(tokens, degrees), _wall_by_plans)

    fits, beyond = search({})
    for ulysses, ring in pairs:
        if (ulysses, ring) == (usual.ulysses, usual.ring):
            continue
        other: Degrees = {"ulysses": ulysses, "ring": ring}
        longer = planned(min(_up(fits.tokens + max(Ki, fits.tokens // RESOLUTION) + 1), LONGEST), other)
        if longer.limit is None:
            fits, beyond = search(other)
    return fits, beyond


def _search(planned: Callable[[int], Plan], wall_of: Callable[[Plan, Plan | None], int]) -> tuple[Plan, Plan]:
    """The longest plan that fits and the next that does not, no further apart than the resolution.

    ``wall_of`` says by the last plan, and the one before, how many tokens should fit: so the plans that are
    made stand close to the wall, one just before it, one just behind.
    """
    last, before = planned(Ki), None
    if last.limit is not None:
        raise LabError(_nothing_fits(last))
    fits, beyond, misses = last, None, 0
    while True:
        fewest, most = fits.tokens, LONGEST if beyond is None else beyond.tokens
        gap = most - fewest
        if beyond is not None and gap <= max(Ki, fewest // RESOLUTION):
            return fits, beyond
        wall = wall_of(last, before)
        step = max(Ki, wall // RESOLUTION)
        target = wall - step // 2 if wall - fewest > step else wall + step // 2
        if misses == 2:
            target = (fewest + most) // 2
        before = last
        last = planned(min(max(_up(target), fewest + Ki), most - Ki if beyond else LONGEST))
        if last.limit is None:
            fits, left = last, most - last.tokens
        else:
            beyond, left = last, last.tokens - fewest
        if fits.tokens == LONGEST:
            raise LabError(f"{format_tokens(LONGEST)} tokens still fit: give less memory, or another recipe")
        misses = misses % 2 + 1 if left > gap // 2 else 0


def _wall_by_plans(near: Plan, before: Plan | None) -> int:
    """The most tokens that fit if memory grows with the tokens as from one of two plans to the other.

    It is at most 16 times the tokens of the longer one.
    """
    if before is None:
        return 16 * near.tokens
    walls = [16 * max(near.tokens, before.tokens)]
    for memory in get_args(Limit):
        available = near.available(memory)
        grown = near.needed(memory) - before.needed(memory)
        if available is not None and grown * (near.tokens - before.tokens) > 0:
            left = available - near.needed(memory)
            walls.append(near.tokens + left * (near.tokens - before.tokens) // grown)
    return max(min(walls), Ki)


def _wall(near: Plan, estimated: Callable[[int], Estimate]) -> int:
    """The most tokens that fit by the closed form, as far off as it is at this plan."""
    off = near.device_peak - estimated(near.tokens).device_peak
    return longest_estimated(estimated, near.machine, near.ranks, off)


def longest_estimated(
    estimated: Callable[[int], Estimate], machine: Machine, ranks: int, off: int = 0
) -> int:
    """The most tokens whose estimate fits, with ``off`` bytes more on the device."""
    device_memory = machine.device_memory
    assert device_memory is not None
    machine = replace(machine, host_memory=machine.available("host", ranks))
    low, high = 1, LONGEST // Ki
    while high - low > 1:
        middle = (low + high) // 2
        needs = estimated(middle * Ki)
        on_device = needs.device_peak + off <= device_memory
        fits = on_device and fits_node(machine, needs, ranks)
        low, high = (middle, high) if fits else (low, middle)
    return high * Ki if high == LONGEST // Ki else low * Ki


def _up(tokens: int) -> int:
    return -(-tokens // Ki) * Ki


def _nothing_fits(plan: Plan) -> str:
    assert plan.limit is not None
    given = plan.available(plan.limit)
    assert given is not None
    most = max(plan.peak.by_category.items(), key=lambda item: item[1])
    needed = f"{format_bytes(plan.needed(plan.limit))} of {memory_name(plan.limit)} needed"
    other = " or the recipe 'long'" if plan.recipe.optimizer == "device" else ""
    return (
        f"not even {format_tokens(plan.tokens)} tokens fit: {needed}, {format_bytes(given)} given; {most[0]} "
        f"{format_bytes(most[1])}; more ranks{other} need less"
    )
