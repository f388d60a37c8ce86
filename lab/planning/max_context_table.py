"""The longest context of models on machines that people rent, each with the best of the named recipes.

The closed form chooses the recipe of a cell, and the context; plans of that recipe alone confirm them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.errors import RecipeError
from lab.models import ModelLike
from lab.models.presets import PRESETS
from lab.planning.closed_form import Estimate
from lab.planning.closed_form_disk import estimate_on
from lab.planning.cuda_workspace import fixed_workspace
from lab.planning.fit import MARGIN
from lab.planning.hardware import make_machine
from lab.planning.max_context import LONGEST, RESOLUTION, Degrees, best_degrees, longest_estimated
from lab.planning.plan import Plan, plan_job, shape_of
from lab.recipe.jobs import Job, Limit, Machine, make_job
from lab.recipe.ladder import RECIPE_NAMES
from lab.shape import Shape
from lab.techniques.ulysses_degrees import degree_pairs
from lab.units import Ki, format_bytes, format_tokens, round_tokens

MISSES = 3
"""So many plans that did not fit end the search of a cell that has one that fits."""


@dataclass(frozen=True)
class Rental:
    """GPUs of one kind, and what is assumed of the nodes that they are in.

    Attributes:
        gpus: How many GPUs there are; each is a rank.
        device: The name of the GPU in the hardware table, whose memory it has.
        host_memory: The host memory of a node, as text.
        gpus_per_node: The GPUs of a node, which share its host memory.
        assumption: Where the host memory comes from.
    """

    gpus: int
    device: str
    host_memory: str
    gpus_per_node: int
    assumption: str

    @property
    def title(self) -> str:
        """The GPUs as text: "8 x H100"."""
        return f"{self.gpus} x {self.device.upper().replace('RTX', 'RTX ')}"

    @property
    def machine(self) -> Machine:
        """The machine that plans are made for."""
        return make_machine(
            device=self.device, host_memory=self.host_memory, ranks_per_node=self.gpus_per_node
        )

    def available(self, memory: Limit) -> int:
        """Return the bytes that a step may take of a memory of the machine; see ``Machine.available``."""
        available = self.machine.available(memory, self.gpus)
        assert available is not None, "a rental has no disk"
        return available

    @property
    def description(self) -> str:
        """The memory as text, with what is assumed."""
        return (
            f"{format_bytes(self.available('device'))} per GPU, {self.host_memory} per host: "
            f"{self.assumption}; {format_bytes(self.available('host'))} of it for the step"
        )


RENTALS = (
    Rental(1, "rtx4090", "64GiB", 1, "a workstation"),
    Rental(1, "h100", "1TiB", 1, "half of the memory of a node, for one of its GPUs"),
    Rental(8, "h100", "2TiB", 8, "a node such as DGX H100"),
    Rental(16, "h100", "2TiB", 8, "two nodes such as DGX H100"),
    Rental(8, "b200", "2TiB", 8, "a node such as DGX B200"),
    Rental(1, "gh200", "447GiB", 1, "the 480 GB of LPDDR5X of its Grace CPU"),
)
"""The columns of the table."""

MODELS = tuple(name for name in PRESETS if name != "tiny")
"""The rows of the table: the published models. ``tiny`` is a model for lessons."""


@dataclass(frozen=True, eq=False)
class LongestContext:
    """One cell of the table.

    Attributes:
        model: The name of the preset.
        rental: The GPUs and their hosts.
        plan: The plan of the longest context; None if not even 1K tokens fit.
        limit: The memory that stops a longer context, or that stops 1K tokens; None if nothing stops any.
        refusal: Why not even 1K tokens fit; empty if they do.
    """

    model: str
    rental: Rental
    plan: Plan | None
    limit: Limit | None
    refusal: str = ""

    @property
    def tokens(self) -> int:
        """The tokens of the longest context; 0 if not even 1K fit."""
        return self.plan.tokens if self.plan else 0

    @property
    def recipe_name(self) -> str:
        """The name of the best recipe; empty if nothing fits."""
        return (self.plan.job.recipe_name or "") if self.plan else ""

    @property
    def summary(self) -> str:
        """The cell in a line."""
        subject = f"{self.model} on {self.rental.title}"
        if self.plan is None:
            return f"{subject}: {self.refusal}"
        stop = f"stopped by {self.limit} memory" if self.limit else "and nothing stops more"
        return f"{subject}: {round_tokens(self.tokens)} tokens with {self.recipe_name}, {stop}"

    def to_json(self) -> dict[str, Any]:
        """The cell as plain values."""
        plan = self.plan
        return {
            "model": self.model,
            "gpus": self.rental.gpus,
            "device": self.rental.device,
            "host_memory": self.rental.host_memory,
            "gpus_per_node": self.rental.gpus_per_node,
            "tokens": self.tokens,
            "recipe_name": self.recipe_name,
            "recipe": plan.recipe.to_json() if plan else None,
            "device_peak": plan.device_peak if plan else None,
            "host_peak_per_node": plan.host_peak_per_node if plan else None,
            "step_seconds": plan.step_seconds if plan else None,
            "limit": self.limit,
            "refusal": self.refusal,
        }


def longest_contexts(
    models: Sequence[str] = MODELS,
    rentals: Sequence[Rental] = RENTALS,
    *,
    say: Callable[[str], None] | None = None,
    watch: Callable[[LongestContext], None] | None = None,
) -> tuple[LongestContext, ...]:
    """Find the longest context of each model on each of ``rentals``, with the best of ``RECIPE_NAMES``.

    The best recipe is that of the longest context by the closed form, with its best pair of degrees. Of
    recipes that are equal to within the resolution of ``max_context``, the first name is taken. The context
    in a cell was planned with this recipe, and fits. By the closed form, corrected by this plan, the longest
    context that fits is longer by the resolution at most.

    Args:
        models: The names of presets.
        rentals: The columns.
        say: Called with a text before each step that takes seconds.
        watch: Called with each cell.

    Returns:
        The cells, model by model.
    """
    cells = []
    for model in models:
        for rental in rentals:
            cells.append(_cell(model, rental, say or (lambda _: None)))
            if watch is not None:
                watch(cells[-1])
    return tuple(cells)


@dataclass(frozen=True)
class _Candidate:
    """A named recipe on a machine: its jobs by tokens, and its longest context by the closed form."""

    name: str
    job: Callable[[int], Job]
    estimated: Callable[[int], Estimate]
    tokens: int


def _cell(model: str, rental: Rental, say: Callable[[str], None]) -> LongestContext:
    subject = f"{model} on {rental.title}"
    say(f"{subject}: comparing recipes")
    shape, machine = shape_of(model), rental.machine
    candidates = [*_candidates(model, shape, rental, machine)]
    longest = max(candidate.tokens for candidate in candidates)
    enough = longest * (1 - 1 / RESOLUTION)
    best = next(candidate for candidate in candidates if candidate.tokens >= enough)
    if longest < Ki:
        best = min(candidates, key=lambda candidate: candidate.estimated(Ki).device_peak)
        refusal = _refusal_by_estimate(best.estimated(Ki), machine, rental)
        if refusal is not None:
            return LongestContext(model, rental, None, *refusal)

    def planned(tokens: int) -> Plan:
        say(f"{subject}: planning {best.name} at {round_tokens(tokens)}")
        return plan_job(best.job(tokens), machine)

    return _confirmed(model, rental, best, planned)


def _candidates(model: ModelLike, shape: Shape, rental: Rental, machine: Machine) -> list[_Candidate]:
    found = []
    for name in RECIPE_NAMES:
        try:
            found.append(_candidate(name, model, shape, rental, machine))
        except RecipeError:
            # The model or the number of ranks forbids this recipe: it is no candidate.
            continue
    return found


def _candidate(name: str, model: ModelLike, shape: Shape, rental: Rental, machine: Machine) -> _Candidate:
    """The recipe of this name, with the degrees of the longest context."""

    def job(tokens: int, degrees: Degrees) -> Job:
        return make_job(model, name, tokens=tokens, ranks=rental.gpus, shape=shape, **dict[str, Any](degrees))

    def longest(degrees: Degrees) -> int:
        return _longest(lambda tokens: estimate_on(machine, shape, job(tokens, degrees)), machine, rental)

    degrees: Degrees = {}
    usual = job(Ki, degrees).recipe
    if usual.ulysses * usual.ring == rental.gpus > 1:
        degrees = best_degrees(usual, degree_pairs(shape, rental.gpus), longest)
    return _Candidate(
        name,
        lambda tokens: job(tokens, degrees),
        lambda tokens: estimate_on(machine, shape, job(tokens, degrees)),
        longest(degrees),
    )


def _longest(estimated: Callable[[int], Estimate], machine: Machine, rental: Rental) -> int:
    """The longest context by the closed form, with what CUDA takes; 0 if not even 1K tokens fit."""
    outside = fixed_workspace(rental.gpus)
    if _limit(estimated(Ki), machine, rental, outside) is not None:
        return 0
    return longest_estimated(estimated, machine, rental.gpus, outside)


def _limit(needs: Estimate, machine: Machine, rental: Rental, off: int) -> Limit | None:
    """The memory that is too small for an estimate, with ``off`` bytes more on the device."""
    assert machine.device_memory is not None
    if needs.device_peak + off > machine.device_memory:
        return "device"
    return "host" if needs.host_peak * machine.node_ranks(rental.gpus) > rental.available("host") else None


def _refusal_by_estimate(needs: Estimate, machine: Machine, rental: Rental) -> tuple[Limit, str] | None:
    """What stops 1K tokens, and in words, where the closed form leaves no doubt; None where it does."""
    assert machine.device_memory is not None
    needed = needs.device_peak + fixed_workspace(rental.gpus)
    if needed > MARGIN * machine.device_memory:
        return "device", _refusal("device", needed, rental, needs.by_category)
    if _limit(needs, machine, rental, 0) == "host":
        of_node = needs.host_peak * machine.node_ranks(rental.gpus)
        return "host", _refusal("host", of_node, rental)
    return None


def _refusal(limit: Limit, needed: int, rental: Rental, held: Mapping[str, int] | None = None) -> str:
    """What stops 1K tokens, in words; with the category that a device has the most of, if that is given."""
    most = ""
    if held is not None:
        category = max(held, key=lambda name: held[name])
        most = f"; {category} {format_bytes(held[category])}"
    return (
        f"not even {format_tokens(Ki)} tokens fit: {format_bytes(needed)} of {limit} memory needed, "
        f"{format_bytes(rental.available(limit))} given{most}"
    )


def _confirmed(
    model: str, rental: Rental, best: _Candidate, planned: Callable[[int], Plan]
) -> LongestContext:
    """Plan the candidate's context; shorten or lengthen it by as much as the closed form is off there."""
    fits: Plan | None = None
    refused, misses, machine = LONGEST + Ki, 0, rental.machine
    # The closed form leaves out what kernels take inside: a step before its wall the first plan mostly fits.
    tokens = max((best.tokens - best.tokens // RESOLUTION) // Ki * Ki, Ki)
    while True:
        plan = planned(tokens)
        off = plan.device_peak - best.estimated(tokens).device_peak
        wall = longest_estimated(best.estimated, machine, rental.gpus, off)
        step = max(Ki, wall // RESOLUTION)
        if plan.limit is None:
            fits = plan
        elif tokens == Ki:
            held = plan.peak.by_category if plan.limit == "device" else None
            refusal = _refusal(plan.limit, plan.needed(plan.limit), rental, held)
            return LongestContext(model, rental, None, plan.limit, refusal)
        else:
            refused, misses = tokens, misses + 1
        if fits is not None and (min(wall, refused) - fits.tokens <= step or misses >= MISSES):
            break
        # Half a step before the wall and before what was refused, and further with each plan that is refused.
        tokens = max((min(wall, refused) - (step << misses) // 2) // Ki * Ki, Ki)
        if fits is not None and tokens <= fits.tokens:
            break
    longer = best.estimated(longest_estimated(best.estimated, machine, rental.gpus, off) + Ki)
    return LongestContext(model, rental, fits, _limit(longer, machine, rental, off))
