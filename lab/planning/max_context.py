"""Max context: the longest sequence whose step fits, and what stops the next one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from cluster.progress import hide_progress, progress, say
from lab.errors import LabError
from lab.models import ModelLike
from lab.models.lora import Lora
from lab.planning.answers import shape_of
from lab.planning.hardware import make_machine
from lab.planning.longest import JobOf, NothingFits, longest_context
from lab.planning.plan import Plan, most_tokens, plan_job
from lab.recipe.jobs import Job, Limit, check_host_memory, make_job, memory_name
from lab.recipe.recipe import Recipe
from lab.techniques.ulysses_degrees import degree_pairs
from lab.units import Ki, format_bytes, format_lines, format_tokens, round_tokens

RESOLUTION = 128
"""Contexts that differ by less than one part in so many are as good as equal."""

Degrees: TypeAlias = Mapping[str, int]
"""A Ulysses and a ring degree, by the names of their knobs; or none, for those of the recipe."""

DEGREES = {"ulysses", "ring", "ring_exchange", "head_chunk", "ulysses_backend"}
"""The knobs that decide on the degrees, or that are legal with few of them."""


SHOWN = ("device peak", "reserved", "host peak", "disk peak", "verdict")
"""The lines of the plan's description that a ``MaxContext`` shows."""


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
            **{name: plan.description[name] for name in SHOWN},
            "stopped by": f"{memory_name(self.limit)} at {next_plan.tokens:,} tokens, which "
            f"need {format_bytes(next_plan.needed(self.limit))}",
            "at its peak": str(next_plan.peak),
            "note": "; ".join(plan.notes),
        }

    def to_json(self) -> dict[str, Any]:
        """The answer as plain values."""
        return {
            "tokens": self.tokens,
            "limit": self.limit,
            "verdict": self.plan.fit,
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
    accumulate: int = 1,
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

    A multiple of the ranks is found: it fits, and the next does not.

    A ladder's name gives each length its own recipe, for tiles derive from it. Other Ulysses and ring degrees
    than the ladder's are taken if their context is longer by one part in ``RESOLUTION``, and by 1K tokens.
    Knobs by hand hold: with ``ulysses``, ``ring``, ``ring_exchange``, ``head_chunk`` or ``ulysses_backend``
    among them nothing is compared.

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
            accumulate=accumulate,
            lora=lora,
            dtype=dtype,
            shape=shape,
            **settings,
        )

    def planned(asked: Job) -> Plan:
        say(f"planning {format_tokens(asked.tokens)} tokens")
        tried = plan_job(asked, machine)
        if watch is not None:
            watch(tried)
        return tried

    usual = job(Ki, {}).recipe
    pairs: list[Degrees] = [{}]
    if isinstance(recipe, str) and usual.ulysses * usual.ring == ranks and not DEGREES & knobs.keys():
        others = (pair for pair in degree_pairs(shape, ranks) if pair != (usual.ulysses, usual.ring))
        pairs += [{"ulysses": ulysses, "ring": ring} for ulysses, ring in others]
    found: tuple[Plan, Plan | None] | None = None
    refusal = None
    for degrees in pairs:
        job_of: JobOf = partial(job, degrees=degrees)
        if found is not None or refusal is not None:
            longer = Ki if found is None else found[0].tokens + max(found[0].tokens // RESOLUTION, Ki)
            if longer > most_tokens(job_of(Ki)) or planned(job_of(longer)).limit is not None:
                continue
        try:
            other = longest_context(job_of, machine, planned)
        except NothingFits as error:
            refusal = refusal or error
            continue
        # What the allocator reserves need not grow with the length: that `longer` fits may be an exception.
        if found is None or other[0].tokens > found[0].tokens:
            found = other
    if found is None:
        assert refusal is not None
        raise refusal
    fits, next_plan = found
    if next_plan is None:
        raise LabError(f"{format_tokens(fits.tokens)} tokens still fit: give less memory, or another recipe")
    assert next_plan.limit is not None
    if machine.disk is not None and isinstance(recipe, str) and fits.recipe.stream and "offload" not in knobs:
        kept = replace(fits.recipe, offload="attention")
        faster = plan_job(replace(fits.job, recipe=kept), machine)
        fits = fits if faster.limit else faster
    return MaxContext(fits.tokens, next_plan.limit, fits, next_plan)
