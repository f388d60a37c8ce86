"""The longest context of models on machines that people rent, each with the best of the named recipes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lab.errors import RecipeError
from lab.models.presets import PRESETS
from lab.planning.answers import shape_of
from lab.planning.hardware import make_machine
from lab.planning.longest import NothingFits, longest_context
from lab.planning.max_context import RESOLUTION
from lab.planning.plan import Plan, most_tokens, plan_job
from lab.recipe.jobs import Job, Limit, Machine, make_job
from lab.recipe.ladder import RECIPE_NAMES
from lab.units import Ki, format_bytes, round_tokens


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

    Each recipe has the ladder's degrees. Of recipes whose contexts differ by less than one part in
    ``RESOLUTION``, the first name is taken. A multiple of the ranks is found: it fits, and with one part in
    ``RESOLUTION`` more it does not.

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


def _cell(model: str, rental: Rental, say: Callable[[str], None]) -> LongestContext:
    shape, machine, ranks = shape_of(model), rental.machine, rental.gpus
    found: tuple[Plan, Plan | None] | None = None
    refusals: list[NothingFits] = []

    def job_of(name: str, tokens: int) -> Job:
        return make_job(model, name, tokens=tokens, ranks=ranks, shape=shape)

    def planned(job: Job) -> Plan:
        say(f"{model} on {rental.title}: planning {job.recipe_name} at {round_tokens(job.tokens)}")
        return plan_job(job, machine)

    enough = 0
    # The last recipes mostly have the longest contexts: then one plan of each of the others is enough.
    for name in reversed(RECIPE_NAMES):
        try:
            if enough > most_tokens(job_of(name, Ki)) or (enough and planned(job_of(name, enough)).limit):
                continue
            other = longest_context(partial(job_of, name), machine, planned, resolution=2 * RESOLUTION)
        except NothingFits as refusal:
            refusals.append(refusal)
            continue
        except RecipeError:
            # The model or the number of ranks forbids this recipe.
            continue
        # What the allocator reserves need not grow with the length: that `enough` fits may be an exception.
        if found is None or other[0].tokens > found[0].tokens * (1 - 1 / RESOLUTION):
            found = other
            enough = max(enough, found[0].tokens * (2 * RESOLUTION - 1) // (2 * RESOLUTION) // ranks * ranks)
    if found is None:
        leanest = min(refusals, key=lambda refusal: refusal.plan.device_peak)
        return LongestContext(model, rental, None, leanest.plan.limit, str(leanest))
    fits, next_plan = found
    return LongestContext(model, rental, fits, next_plan.limit if next_plan else None)
