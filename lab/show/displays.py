"""A result as the last line of a notebook cell: a table, and below it a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from typing import TypeAlias

from IPython.display import display

from lab.memory.moment import Moment
from lab.memory.timeline import Timeline
from lab.planning.fit import Fits, pareto_front
from lab.planning.max_context import MaxContext
from lab.planning.plan import Plan
from lab.rehearsing.rehearsal import Rehearsal
from lab.show.comparisons import stack
from lab.show.figures import timeline
from lab.show.html_tables import byte_cell, cell, line_table, peak_table, table
from lab.show.memory_vs_speed import memory_vs_speed
from lab.show.picture import Picture
from lab.training.records import Run
from lab.units import format_seconds

Result: TypeAlias = Plan | Run | Rehearsal | Timeline | MaxContext | Fits
"""What a notebook displays as a table and a picture."""

MOST_RANKS = 8
"""The most ranks of a run that are displayed."""


@dataclass(frozen=True)
class DisplayedResult:
    """What a notebook displays of a result.

    Attributes:
        title: The line above the table.
        lines: Texts by label.
        numbers: A table of numbers, as HTML.
        draw: Draws the picture; None for a result without rows.
    """

    title: str
    lines: Mapping[str, str]
    numbers: str
    draw: Callable[[], Picture] | None

    @property
    def html(self) -> str:
        """The title, the lines and the numbers."""
        tables = f"{line_table(self.lines)}{self.numbers}"
        return f'<div style="overflow-x: auto"><b>{escape(self.title)}</b>{tables}</div>'


def display_result(result: Result) -> None:
    """Display the table of a result, and then its picture.

    They are two outputs, because a front end shows only one format of an output.
    """
    shown = display_of(result)
    display({"text/plain": repr(result), "text/html": shown.html}, raw=True)  # type: ignore[no-untyped-call]
    if shown.draw is not None:
        display(shown.draw())  # type: ignore[no-untyped-call]


def display_of(result: Result) -> DisplayedResult:
    """Return what a notebook displays of a result."""
    match result:
        case Plan():
            numbers = peak_table({"": _peaks(result)})
            return DisplayedResult(result.title, result.description, numbers, lambda: timeline(result))
        case Timeline():
            return _of_timeline(result)
        case Run():
            return _of_run(result)
        case Rehearsal():
            return _of_rehearsal(result)
        case MaxContext():
            return _of_max_context(result)
        case Fits():
            return _of_fits(result)


def _of_timeline(rows: Timeline) -> DisplayedResult:
    title = f"Timeline of {len(rows):,} rows"
    if not len(rows):
        return DisplayedResult(title, {}, "", None)
    return DisplayedResult(
        title, {"at the peak": str(rows.peak)}, peak_table({"": _peaks(rows)}), lambda: timeline(rows)
    )


def _of_run(run: Run) -> DisplayedResult:
    """The numbers are those of the ranks that hold the most. The panels of more ranks could not be read."""
    ranks = {rank: rows for rank, rows in enumerate(run.timelines) if len(rows)}
    if not ranks:
        return DisplayedResult(run.title, run.description, "", None)
    fullest = sorted(ranks, key=lambda rank: -ranks[rank].device_peak)[:MOST_RANKS]
    peaks = {f"rank {rank}": _peaks(ranks[rank]) for rank in sorted(fullest)}
    if len(fullest) == len(run.timelines):
        return DisplayedResult(run.title, run.description, peak_table(peaks), lambda: timeline(run))
    numbers = peak_table(peaks, f"{len(fullest)} of {len(run.timelines)} ranks")
    drawn = {f"rank {fullest[0]}": ranks[fullest[0]]}
    return DisplayedResult(run.title, run.description, numbers, lambda: timeline(drawn))


def _of_rehearsal(rehearsal: Rehearsal) -> DisplayedResult:
    peaks = {"measured": _peaks(rehearsal.timeline), "planned": _peaks(rehearsal.plan.timeline)}
    if rehearsal.layers < rehearsal.of_layers:
        peaks[f"planned, {rehearsal.of_layers} layers"] = _peaks(rehearsal.whole.timeline)
    title, numbers = rehearsal.job.title, peak_table(peaks)
    return DisplayedResult(title, rehearsal.description, numbers, lambda: timeline(rehearsal))


def _of_max_context(result: MaxContext) -> DisplayedResult:
    """The picture has the bytes of the memory that stops a longer context, and a line at its limit."""
    plans = {f"{plan.tokens:,} tokens": plan for plan in (result.plan, result.next_plan)}

    def draw() -> Picture:
        if result.limit == "device":
            return stack(
                {name: plan.peak for name, plan in plans.items()}, limit=result.plan.available("device")
            )
        memory: str = result.limit
        nodes = {name: {memory: plan.needed(result.limit)} for name, plan in plans.items()}
        return stack(nodes, limit=result.plan.available(result.limit))

    numbers = peak_table({name: _peaks(plan) for name, plan in plans.items()})
    return DisplayedResult(result.plan.title, result.description, numbers, draw)


def _of_fits(fits: Fits) -> DisplayedResult:
    """The recipes that need less device memory than every faster one; a table of all recipes is folded."""
    job, fastest, front = fits[0].job, fits[0].step_seconds, pareto_front(fits)
    numbered = dict(enumerate(fits, start=1))
    bills = [(cell(bill.days_text), cell(bill.money_text)) for bill in fits.bills]
    of_order = ("days", "money") if bills else ()
    names = ("", "step", "slower", *of_order, "device peak", "host per node", "verdict")
    header = [*(cell(name, tag="th", wrap=True) for name in names), cell("recipe", tag="th", align="left")]
    rows = {
        number: [
            cell(str(number), tag="th"),
            cell(format_seconds(plan.step_seconds)),
            cell(f"+{plan.step_seconds / fastest - 1:.1%}"),
            *(bills[number - 1] if bills else ()),
            byte_cell(plan.device_peak),
            byte_cell(plan.host_peak_per_node),
            cell(plan.fit or ""),
            cell(plan.recipe.summary, align="left", wrap=True),
        ]
        for number, plan in numbered.items()
    }
    chosen = [number for number, plan in numbered.items() if plan in front]
    numbers = table([header, *(rows[number] for number in chosen)])
    if len(chosen) < len(fits):
        every = table([header, *rows.values()])
        numbers += f"<details><summary>all {len(fits)} recipes</summary>{every}</details>"
    lines = {
        "state": fits[0].state,
        "recipes": f"{len(fits)} fit; {len(chosen)} of them need less device memory than every faster one",
    }
    points = {
        str(number): (
            numbered[number].device_peak,
            job.step_rows * job.tokens / numbered[number].step_seconds,
        )
        for number in chosen
    }
    return DisplayedResult(job.subject, lines, numbers, lambda: memory_vs_speed(points))


def _peaks(held: Timeline | Plan) -> tuple[Moment, int, int]:
    """Return the instant of the device peak, and the peaks of the host and of the disk in bytes."""
    return held.peak, held.host_peak, held.disk_peak
