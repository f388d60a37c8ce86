"""The longest context of one recipe that fits a machine.

Two plans of a class of lengths (``scaling.py``) give the longest one that ends with a whole tile. It and the
next one say near which multiple of the ranks the memory ends. Where they are of two classes, two lengths
between them say it. Plans of multiples there, mostly two, say which it is. A length fits if the bytes fit
that CUDA's allocator reserves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import groupby
from math import inf

from lab.errors import DoesNotFitError
from lab.planning.allocator import reserved_bytes
from lab.planning.answers import Entry, answer, shape_of
from lab.planning.plan import Plan, most_tokens
from lab.planning.scaling import LengthClass, length_class
from lab.recipe.jobs import Job, Limit, Machine, memory_name
from lab.shape import Shape
from lab.units import Ki, format_bytes, format_tokens

JobOf = Callable[[int], Job]
"""Returns the job of so many tokens: that of a named recipe has tiles that derive from them."""


class NothingFits(DoesNotFitError):
    """Not even the shortest context fits.

    Attributes:
        plan: The plan of the shortest context.
    """

    def __init__(self, plan: Plan) -> None:
        assert plan.limit is not None
        given = plan.available(plan.limit)
        assert given is not None
        most = max(plan.peak.by_category.items(), key=lambda item: item[1])
        needed = f"{format_bytes(plan.needed(plan.limit))} of {memory_name(plan.limit)} needed"
        other = " or the recipe 'long'" if plan.recipe.optimizer == "device" else ""
        super().__init__(
            f"not even {format_tokens(plan.tokens)} tokens fit: {needed}, {format_bytes(given)} given; "
            f"{most[0]} {format_bytes(most[1])}; more ranks{other} need less"
        )
        self.plan = plan


def _longest_by(
    two: tuple[int, int], lengths: range, job_of: JobOf, machine: Machine, *, exact: bool = True
) -> int:
    """Return the longest length that fits, by the steps at two lengths; the first is not tried.

    Args:
        two: The lengths whose steps are planned.
        lengths: Those of which one is returned.
        job_of: The jobs.
        machine: What they are to fit.
        exact: See ``Scaling``.

    Raises:
        LookupError: The steps are not alike.
    """
    entry = Entry.of({tokens: answer(job_of(tokens), workspace=machine.workspace) for tokens in two})
    scalings = [replace(scaling, exact=exact) for scaling in entry.scalings]

    def is_over(tokens: int, *, reserved: bool = False) -> bool:
        ranks = job_of(tokens).ranks
        steps = [scaling.held(tokens, machine) for scaling in scalings]
        step = max(steps, key=lambda timeline: timeline.device_peak)
        host = max(timeline.host_peak for timeline in steps)

        def limit(device: int) -> Limit | None:
            device = max(device, entry.facts.start.device)
            return machine.limit(ranks, device=device, host=host, disk=step.disk_peak)

        if not reserved:
            return limit(step.device_peak) is not None
        return limit(reserved_bytes(step, ranks, expandable=True)) is not None

    last = bisect_left(lengths, True, lo=1, key=is_over) - 1
    if not machine.workspace or machine.device_memory is None:
        return lengths[last]
    # What the allocator keeps need not grow with the length. So lengths are tried from the longest whose
    # tensors fit, with steps that double, until one fits; then those between it and the one before it. The
    # first step is a 64th of it, less than what the allocator keeps of most steps.
    over, step = last + 1, max(last // 64, 1)
    while last > 0 and is_over(lengths[last], reserved=True):
        over, last, step = last, max(last - step, 0), 2 * step
    return lengths[bisect_left(lengths, True, lo=last + 1, hi=over, key=partial(is_over, reserved=True)) - 1]


def _whole_tiles(job_of: JobOf, machine: Machine, planned: Callable[[Job], Plan]) -> tuple[Plan, int]:
    """Return the plan of the longest context that fits and ends with a whole tile, and a length beyond it.

    The other length should not fit, by the steps of its class, or is longer than any that is planned.

    Args:
        job_of: The jobs.
        machine: What they are to fit.
        planned: Plans a job.

    Raises:
        NothingFits: Not even ``Ki`` tokens fit.
    """
    first = job_of(Ki)
    end = most_tokens(first)
    beyond = end + 1
    for which, lengths in reversed([*classes(job_of, shape_of(first.model, first.dtype))]):
        shortest = planned(job_of(lengths[0]))
        if shortest.limit is not None:
            if beyond > end and planned(first).limit is not None:
                break
            beyond = lengths[0]
            continue
        # Lengths of the class, which have the same remainder.
        grid, fewest = which.grid, lengths[0]
        most = fewest + (beyond - 1 - fewest) // grid * grid
        if which.only is not None or most <= fewest:
            return shortest, beyond
        two = (fewest, min(fewest + max(fewest // grid, 1) * grid, most))
        try:
            fewest = _longest_by(two, range(fewest, most + 1, grid), job_of, machine)
        except LookupError:
            # The longer one is of another class.
            return shortest, beyond
        longest = planned(job_of(fewest))
        # A length between those of the class may be of another one.
        return (longest, min(fewest + grid, beyond)) if longest.limit is None else (shortest, fewest)
    raise NothingFits(planned(first))


def longest_context(
    job_of: JobOf, machine: Machine, planned: Callable[[Job], Plan], *, resolution: float = inf
) -> tuple[Plan, Plan | None]:
    """Return the plans of the longest multiple of the ranks that fits, and of the next, which does not.

    The other is None if the longest one that the lab plans still fits.

    Args:
        job_of: The jobs.
        machine: What they are to fit.
        planned: Plans a job.
        resolution: The two lengths may differ by one part in so many, which takes fewer plans.

    Raises:
        NothingFits: Not even ``Ki`` tokens, or one token a rank, fit.
    """
    fits, beyond = _whole_tiles(job_of, machine, planned)
    unit, next_plan = fits.ranks, None
    most = most_tokens(fits.job)
    low, end = max(fits.tokens // unit, 1) * unit, most // unit * unit
    high = max(min(-(-beyond // unit) * unit, end + unit), low + unit)
    quarter = (high - low) // 4 // unit * unit
    guess, step = low + 2 * quarter, quarter or unit
    pairs = ((fits.tokens, min(beyond, most)), (low + quarter, low + 3 * quarter))
    for two in pairs if quarter and resolution == inf else ():
        with suppress(LookupError):
            guess, step = _longest_by(two, range(low, high, unit), job_of, machine, exact=False), unit
            break
    if low != fits.tokens:
        fits = planned(job_of(low))
    while fits.limit is not None:
        if low == unit:
            raise NothingFits(fits)
        next_plan, high, low = fits, low, max(low // (2 * unit), 1) * unit
        fits = planned(job_of(low))
    # First the guess, then further from it with each plan until one fits and one does not.
    tokens, shortest = max(min(guess, high - unit), low + unit), low
    while next_plan is None or high - low > max(unit, low // resolution):
        if low == end:
            return fits, None
        tried = planned(job_of(tokens))
        if tried.limit is None:
            fits, low = tried, tokens
        else:
            next_plan, high = tried, tokens
        if next_plan is None:
            # Beyond `high`, which was not planned, from step to step.
            tokens = min(low + step, high if low < high else end, end)
        elif low == shortest:
            tokens = max(high - step, low + unit)
        else:
            tokens = low + (high - low) // (2 * unit) * unit
        step *= 2
    return fits, next_plan


def classes(job_of: JobOf, shape: Shape) -> Iterator[tuple[LengthClass, list[int]]]:
    """Yield the classes of lengths, each with its powers of two in order."""
    lengths = [Ki << power for power in range((most_tokens(job_of(Ki)) // Ki).bit_length())]
    for which, group in groupby(lengths, lambda tokens: length_class(job_of(tokens), shape)):
        yield which, [*group]
