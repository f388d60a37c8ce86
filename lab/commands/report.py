"""The results of commands as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from lab.bench.table import table_text
from lab.errors import LabError
from lab.planning.cuda_workspace import outside_workspace
from lab.planning.model_flops import MFU_LEGEND
from lab.shape import Shape
from lab.units import format_bytes, format_seconds, format_share, round_tokens

# Imported for their types alone: they import torch, which a saved text does not need.
if TYPE_CHECKING:
    from lab.memory.holders import Holders
    from lab.planning.fit import Fits
    from lab.planning.max_context_table import LongestContext
    from lab.planning.plan import Fit, Plan
    from lab.show.picture import Picture
    from lab.training.records import Run

MARKS: dict[Fit | None, str] = {
    None: "",
    "fits": "  fits",
    "fits with expandable segments": "  (fits)",
    "does not fit": "  ✗",
}
"""How a plan fits, behind its device peak."""

EXPANDABLE = "(fits): only with expandable segments, which the lab sets"

BAR = 32
"""The length of the longest bar, in characters."""


def plan_text(plan: Plan) -> str:
    """Return the text of `lab plan`: the peaks, the bytes at the device peak, and the cost of the step."""
    peak, costs = plan.peak, plan.costs
    lines = [
        plan.title,
        plan.recipe.summary,
        plan.state,
        "",
        *_weights_line(plan.shape),
        f"device peak   {format_bytes(plan.device_peak)} per rank"
        f"{format_share(plan.device_peak, plan.machine.device_memory)}",
        *([f"reserved      {plan.reserved_text}"] if plan.reserved_text else []),
        f"host peak     {format_bytes(plan.host_peak)} per rank, "
        f"{format_bytes(plan.host_peak_per_node)} per node"
        f"{format_share(plan.host_peak_per_node, plan.available('host'))}",
        *_on_disk(
            plan,
            f"disk peak     {format_bytes(plan.disk_peak)} per rank, ",
            f" per node, busy for {format_seconds(costs.disk_seconds)} of a step",
        ),
        f"at the peak   {peak.phase}: {peak.operator} {peak.shapes}".rstrip(),
    ]
    lines += [f"              in {peak.module}"] if peak.module else []
    lines += [
        f"  {category:<26}{format_bytes(held):>10}  {_bar(held, plan.device_peak)}".rstrip()
        for category, held in peak.by_category.items()
        if held
    ]
    tokens = plan.job.step_rows * plan.tokens / plan.step_seconds / plan.ranks
    lines += [
        f"a rank        {costs.flops:.3g} operations, {format_bytes(costs.link_bytes)} over links "
        f"({format_seconds(costs.link_seconds)} of waiting), {format_bytes(costs.host_bytes)} to and from "
        "the host",
        f"a step        {plan.seconds_text} on {plan.device} (estimate)",
        f"throughput    {tokens:.4g} tokens per second and rank with {plan.hardware.kernel}",
        f"MFU           {plan.mfu:.1%} (estimate): of the peak of {plan.ranks} GPUs in dense bf16, by "
        f"{plan.model_flops:.3g} operations of the model (attention's causal half; nothing twice)",
        *_idle_ranks_note(plan),
        *(f"note          {note}" for note in plan.notes),
        f"verdict       {plan.verdict}",
        f"planned in    {plan.planning_seconds:.1f} s",
    ]
    return "\n".join(lines)


def _weights_line(shape: Shape) -> list[str]:
    """Return the weights of a model with experts; nothing for one that computes each token with all."""
    return [f"weights       {shape.weights_text}"] if shape.experts else []


def _on_disk(plan: Plan, before: str, after: str = "") -> list[str]:
    """Return a line with what the disk of a node holds, between two texts; nothing without a disk."""
    if plan.machine.disk is None:
        return []
    share = format_share(plan.disk_peak_per_node, plan.machine.disk_bytes)
    return [f"{before}{format_bytes(plan.disk_peak_per_node)}{share}{after}"]


def _idle_ranks_note(plan: Plan) -> list[str]:
    """Return a note if some ranks have no rows of their own, else nothing."""
    groups = plan.ranks // (plan.recipe.ulysses * plan.recipe.ring)
    rows = plan.job.rows
    if groups <= rows:
        return []
    # A ring that sends takes one document per row.
    ring = "" if plan.job.documents else f"--set ring={plan.recipe.ring * groups // rows}, or "
    return [
        f"note          {groups} groups of ranks share {rows} row(s): some repeat the work of others; "
        f"{ring}more rows{',' if ring else ''} would use them"
    ]


def ladder_text(plans: Mapping[str, Plan]) -> str:
    """Return the text of `lab ladder`, with a bar for each rung. A bar that is cut ends with »."""
    first, longest = next(iter(plans.values())), _longest_bar(plans)
    table = Table("rung", "device peak per rank", "", "host per rank", "at the peak", box=SIMPLE_HEAD)
    table.columns[1].justify = table.columns[3].justify = "right"
    for name, plan in plans.items():
        bar = _bar(min(plan.device_peak, longest), longest) + ("»" if plan.device_peak > longest else "")
        table.add_row(
            name,
            format_bytes(plan.device_peak) + MARKS[plan.fit],
            bar,
            format_bytes(plan.host_peak) if plan.host_peak else "-",
            f"{plan.peak.phase}: {plan.peak.operator}",
        )
    return "\n".join([first.job.subject, first.state, table_text(table), *_legend(plans.values())])


def _legend(plans: Iterable[Plan]) -> list[str]:
    """Return the line that explains the mark of plans that fit with expandable segments, if there is one."""
    return [EXPANDABLE] if any(plan.fit == "fits with expandable segments" for plan in plans) else []


def draw_ladder(plans: Mapping[str, Plan], path: Path) -> None:
    """Draw the bars of `lab ladder` into a PNG file, split by category of bytes.

    Raises:
        LabError: The file cannot be written.
    """
    from lab.show import stack

    first = next(iter(plans.values()))
    picture = stack(
        {name: plan.peak for name, plan in plans.items()},
        title=first.job.subject,
        limit=first.machine.device_memory,
        longest=_longest_bar(plans),
    )
    _write_picture(picture, path)


def _write_picture(picture: Picture, path: Path) -> None:
    try:
        path.write_bytes(picture.png)
    except OSError as error:
        raise LabError(f"{path} cannot be written: {error.strerror}") from error


def check_figure(path: Path) -> None:
    """Check that a path names a PNG file that can be written, before the work for the file is done.

    Raises:
        LabError: The name does not end in .png, or the folder does not exist.
    """
    if path.suffix.lower() != ".png":
        raise LabError(
            f"{path} cannot be written: the figure is a PNG file, so give a name that ends in .png"
        )
    if not path.absolute().parent.is_dir():
        raise LabError(f"{path} cannot be written: there is no folder {path.parent}")


def _longest_bar(plans: Mapping[str, Plan]) -> int:
    """Return the bytes at which bars are cut: twice the device memory, or twice the smallest peak."""
    peaks = [plan.device_peak for plan in plans.values()]
    memory = next(iter(plans.values())).machine.device_memory
    return min(2 * max(memory or 0, min(peaks)), max(peaks))


def context_table_text(cells: Sequence[LongestContext]) -> str:
    """Return the text of `lab max-context --table`: rows of models, and the assumptions."""
    rentals = list(dict.fromkeys(cell.rental for cell in cells))
    table = Table("model", *(rental.title for rental in rentals), box=SIMPLE_HEAD)
    for model in dict.fromkeys(cell.model for cell in cells):
        table.add_row(
            model,
            *(
                f"{round_tokens(cell.tokens)} {cell.recipe_name}\n{cell.limit or 'nothing'} stops it"
                if cell.tokens
                else f"nothing fits\n{cell.limit} stops it"
                for cell in cells
                if cell.model == model
            ),
        )
    lines = [table_text(table), *(f"{rental.title:<14}{rental.description}" for rental in rentals)]
    return "\n".join([*lines, *(cell.summary for cell in cells if cell.refusal)])


def draw_context_table(cells: Sequence[LongestContext], path: Path) -> None:
    """Draw the table of `lab max-context --table` into a PNG file.

    Raises:
        LabError: The file cannot be written.
    """
    from lab.show.context_table import context_table

    _write_picture(context_table(cells), path)


def fit_text(plans: Fits) -> str:
    """Return the text of `lab fit`: the recipes that fit, the fastest first.

    An arrow marks a recipe that needs less device memory than every faster one. With an order, each recipe
    has the days and the money that it takes.
    """
    from lab.planning.fit import pareto_front

    fastest, down = plans[0], pareto_front(plans)
    has_disk = plans[0].machine.disk is not None
    disk = ["disk a node"] if has_disk else []
    bills = [(bill.days_text, bill.money_text) for bill in plans.bills]
    of_order = ("days", "money") if bills else ()
    memories = ("device peak", "host a node", *disk)
    table = Table("", "a step", "slower", "MFU", *of_order, *memories, "recipe", box=SIMPLE_HEAD)
    for number, plan in enumerate(plans, start=1):
        table.add_row(
            f"{number}" + (" ↓" if plan in down else ""),
            format_seconds(plan.step_seconds),
            f"+{plan.step_seconds / fastest.step_seconds - 1:.1%}",
            f"{plan.mfu:.1%}",
            *(bills[number - 1] if bills else ()),
            format_bytes(plan.device_peak) + (MARKS[plan.fit] if plan.fit != "fits" else ""),
            format_bytes(plan.host_peak_per_node),
            *([format_bytes(plan.disk_peak_per_node)] if has_disk else []),
            plan.recipe.summary,
        )
    legend = "↓ needs less device memory than every faster one: its price is the time it is slower."
    what = f"Seconds, and what follows from them, are estimates with {fastest.hardware.kernel}"
    estimates = f"{what}.\n{MFU_LEGEND}."
    reserved = [f"The fastest reserves {fastest.reserved_text}."] if fastest.reserved_text else []
    whole = [f"The fastest: {fastest.bill(plans.order).text(plans.order)}."] if plans.order else []
    notes = dict.fromkeys(f"note: {note}" for plan in plans for note in plan.notes)
    head = [fastest.job.subject, fastest.state]
    texts = [legend, *_legend(plans), *whole, estimates, *reserved, fastest.verdict, *notes]
    return "\n".join([*head, table_text(table), *texts])


def planned_peak(run: Run, plan: Plan) -> int:
    """Return the planned device peak; on CUDA without the bytes outside torch, which a run cannot measure."""
    return plan.device_peak - (outside_workspace(plan.ranks) if run.allocated else 0)


def run_text(run: Run, plan: Plan) -> str:
    """Return the text of `lab run`: losses and seconds by step, and measured and planned peaks."""
    planned = planned_peak(run, plan)
    steps = enumerate(zip(run.losses, run.seconds, strict=True), 1)
    on_disk = f"disk peak     {format_bytes(run.disk_peak)} per rank, planned {format_bytes(plan.disk_peak)}"
    disk = [on_disk] if run.disk_peak else []
    return "\n".join(
        [
            run.title,
            plan.recipe.summary,
            plan.state,
            *filter(None, (run.weights,)),
            "",
            *(f"step {step:<9}loss {loss:.4f}, {format_seconds(seconds)}" for step, (loss, seconds) in steps),
            f"device peak   {format_bytes(run.device_peak)} per rank, planned {format_bytes(planned)}",
            f"host peak     {format_bytes(run.host_peak)} per rank, planned {format_bytes(plan.host_peak)}",
            *disk,
            f"planned       {planned / run.device_peak:.4f} of the measured device peak",
        ]
    )


def run_json(run: Run, plan: Plan) -> dict[str, Any]:
    """Return the content of `run_text` as values for JSON."""
    return {
        "title": run.title,
        "state": plan.state,
        "weights": run.weights,
        "losses": list(run.losses),
        "seconds": list(run.seconds),
        "device_peak": run.device_peak,
        "host_peak": run.host_peak,
        "disk_peak": run.disk_peak,
        "planned_device_peak": planned_peak(run, plan),
        "planned_host_peak": plan.host_peak,
        "planned_disk_peak": plan.disk_peak,
    }


def holders_text(plan: Plan, holders: Holders, rows: int) -> str:
    """Return the text of `lab plan --holders`: the tensors that the step holds at its peak."""
    where = "the step's peak, which is below that of the start" if plan.peak.phase == "start" else "the peak"
    legend = "A = one hidden state of the rank, b x s x E elements; alike tensors of several layers in a line"
    return f"held at {where}\n{holders.table(rows)}\n{legend}"


def _bar(part: int, whole: int) -> str:
    return "█" * round(BAR * part / whole) if whole else ""
