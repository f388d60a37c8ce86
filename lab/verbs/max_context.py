"""Max context: the longest sequence whose step fits, and what stops the next one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from lab.errors import LabError
from lab.models import ModelLike
from lab.recipe import Recipe
from lab.units import Ki, Mi, format_bytes, format_tokens
from lab.verbs.plan import Plan, plan

RESOLUTION = 128
"""The answer is exact to one part in so many: a plan more would halve that."""

LONGEST = 1024 * Mi
"""Where the search ends: beyond a billion tokens nothing is stopped by memory that this lab knows of."""


@dataclass(frozen=True, eq=False)
class MaxContext:
    """The longest context that fits.

    ``limit`` is the memory that refuses the next longer one that was tried, ``next_plan``; ``plan`` is that
    of ``tokens`` itself.
    """

    tokens: int
    limit: Literal["device", "host"]
    plan: Plan
    next_plan: Plan

    def to_json(self) -> dict[str, Any]:
        """The answer as plain values."""
        return {
            "tokens": self.tokens,
            "limit": self.limit,
            "device_peak": self.plan.device_peak,
            "host_peak": self.plan.host_peak,
            "recipe": self.plan.recipe.to_json(),
        }


def max_context(
    model: ModelLike,
    recipe: str | Recipe = "upipe",
    *,
    ranks: int,
    device_memory: int | str = "80GiB",
    host_memory: int | str = "2TiB",
    watch: Callable[[Plan], None] | None = None,
    **settings: Any,
) -> MaxContext:
    """Search for the longest context that fits ``device_memory`` a rank and ``host_memory`` a node.

    A ladder's name gives each length its own recipe, for tiles derive from it. ``settings`` are those of
    ``lab.plan`` (rows, ranks_per_node, workspace, device, knobs); ``watch`` is called with each plan made.

    Raises:
        LabError: as ``lab.plan``; or nothing fits, and what holds the memory; or nothing stops it.
    """

    def planned(tokens: int) -> Plan:
        made = plan(
            model,
            recipe,
            tokens=tokens,
            ranks=ranks,
            device_memory=device_memory,
            host_memory=host_memory,
            **settings,
        )
        if watch is not None:
            watch(made)
        return made

    fits, beyond = _bracket(planned)
    misses = 0
    while (gap := beyond.tokens - fits.tokens) > (step := max(Ki, fits.tokens // RESOLUTION)):
        # Memory grows nearly in a line: one plan just below its crossing, one just beyond, and the answer is
        # between them. Where the line bends, the middle.
        target = _crossing(fits, beyond)
        target += -step // 2 if target - fits.tokens > step else step // 2
        middle = planned(_whole(fits.tokens + gap // 2 if misses == 2 else target, fits, beyond))
        fits, beyond = (middle, beyond) if middle.fits else (fits, middle)
        misses = misses % 2 + 1 if beyond.tokens - fits.tokens > gap // 2 else 0
    assert beyond.limit is not None
    return MaxContext(fits.tokens, beyond.limit, fits, beyond)


def _bracket(planned: Callable[[int], Plan]) -> tuple[Plan, Plan]:
    """A plan that fits and a longer one that does not, by the straight line through the last two."""
    before, last = None, planned(Ki)
    if last.limit is not None:
        raise LabError(_nothing_fits(last))
    while last.limit is None:
        if last.tokens == LONGEST:
            raise LabError(f"{format_tokens(LONGEST)} tokens still fit: give less memory, or another recipe")
        near = 512 * Ki if before is None else max(2 * last.tokens, _crossing(before, last) * 17 // 16)
        before, last = last, planned(min(_up(near), LONGEST))
    assert before is not None
    return before, last


def _crossing(one: Plan, other: Plan) -> int:
    """Tokens at which the line through two plans' loads reaches 1."""
    rise = _load(other) - _load(one)
    return LONGEST if rise <= 0 else int(one.tokens + (1 - _load(one)) / rise * (other.tokens - one.tokens))


def _load(made: Plan) -> float:
    """The fuller of the two memories, as a share of what was given."""
    assert made.device_memory is not None
    assert made.host_memory is not None
    return max(made.device_peak / made.device_memory, made.host_peak_per_node / made.host_memory)


def _up(tokens: int) -> int:
    return -(-tokens // Ki) * Ki


def _whole(tokens: int, fits: Plan, beyond: Plan) -> int:
    """A whole Ki that lies between the two."""
    return min(max(_up(tokens), fits.tokens + Ki), beyond.tokens - Ki)


def _nothing_fits(made: Plan) -> str:
    given, needed = (
        (made.device_memory, made.device_peak)
        if made.limit == "device"
        else (made.host_memory, made.host_peak_per_node)
    )
    assert given is not None
    most = max(made.peak.by_category.items(), key=lambda item: item[1])
    return (
        f"not even {format_tokens(made.tokens)} tokens fit: {format_bytes(needed)} of {made.limit} memory "
        f"needed, {format_bytes(given)} given; {most[0]} hold {format_bytes(most[1])}; more ranks or "
        "fsdp need less"
    )
