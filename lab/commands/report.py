"""What the commands print: answers in, text for a terminal out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from lab.bench.table import printed
from lab.errors import LabError
from lab.planning.fit import steps_down
from lab.planning.hardware import outside_workspace
from lab.planning.max_context import MaxContext
from lab.planning.plan import Plan
from lab.planning.quick_plan import QuickPlan
from lab.recipe.recipe import Recipe
from lab.rehearsing.rehearsal import Rehearsal
from lab.training.records import Run
from lab.units import Mi, format_bytes, format_seconds

BAR = 32
"""Characters of the longest bar."""


def plan_text(plan: Plan) -> str:
    """One plan: its peaks, what is at the device peak, what the step costs."""
    peak, costs = plan.peak, plan.costs
    lines = [
        plan.title,
        recipe_text(plan.recipe),
        "",
        f"device peak   {format_bytes(plan.device_peak)} a rank"
        f"{_of(plan.device_peak, plan.machine.device_memory)}",
        f"host peak     {format_bytes(plan.host_peak)} a rank, {format_bytes(plan.host_peak_per_node)} a node"
        f"{_of(plan.host_peak_per_node, plan.machine.host_memory)}",
        f"at the peak   {peak.phase}: {_short(peak.op)} {peak.shapes}".rstrip(),
    ]
    lines += [f"              in {peak.module}"] if peak.module else []
    lines += [
        f"  {category:<12}{format_bytes(held):>10}  {_bar(held, plan.device_peak)}".rstrip()
        for category, held in peak.by_category.items()
    ]
    tokens = plan.job.rows * plan.tokens / plan.step_seconds / plan.ranks
    lines += [
        f"a rank        {costs.flops:.3g} operations, {format_bytes(costs.link_bytes)} over links "
        f"({format_seconds(costs.link_seconds)} of waiting), {format_bytes(costs.host_bytes)} to and from "
        "the host",
        f"a step        {format_seconds(plan.step_seconds)} on {plan.device}, {tokens:.4g} tokens a second "
        "and rank (estimate)",
        *_repeated(plan),
        *(f"note          {note}" for note in plan.notes),
        f"verdict       {_verdict(plan)}",
        f"planned in    {plan.planning_seconds:.1f} s",
    ]
    return "\n".join(lines)


def _repeated(plan: Plan) -> list[str]:
    """A note where ranks have nothing of their own to do."""
    groups = plan.ranks // (plan.recipe.ulysses * plan.recipe.ring)
    rows = plan.job.rows
    if groups <= rows:
        return []
    return [
        f"note          {groups} groups of ranks share {rows} row(s): some repeat the work of others; "
        f"--set ring={plan.recipe.ring * groups // rows}, or more rows, would use them"
    ]


def quick_text(plan: QuickPlan) -> str:
    """The closed form's answer: the two peaks, and what is held at the device peak."""
    estimate = plan.estimate
    verdict = {None: "no memory was given", True: "it fits", False: "it does not fit"}[plan.fits]
    held = estimate.parts | ({"workspace": plan.device_peak - estimate.device_peak})
    return "\n".join(
        (
            plan.job.title,
            recipe_text(plan.job.recipe),
            "",
            f"device peak   {format_bytes(plan.device_peak)} a rank"
            f"{_of(plan.device_peak, plan.machine.device_memory)}",
            f"host peak     {format_bytes(estimate.host_peak)} a rank, "
            f"{format_bytes(plan.host_peak_per_node)} a node"
            f"{_of(plan.host_peak_per_node, plan.machine.host_memory)}",
            f"at the peak   {estimate.moment}",
            *(
                f"  {part:<20}{format_bytes(size):>10}  {_bar(size, plan.device_peak)}".rstrip()
                for part, size in held.items()
                if size
            ),
            f"verdict       {verdict}, by the closed form; lab plan without --quick plans the step itself",
        )
    )


def ladder_text(plans: Mapping[str, Plan]) -> str:
    """A bar a rung; one far beyond the leanest is cut, and marked as cut."""
    first, longest = next(iter(plans.values())), _longest_bar(plans)
    table = Table("rung", "device peak a rank", "", "host a rank", "at the peak", box=SIMPLE_HEAD)
    table.columns[1].justify = table.columns[3].justify = "right"
    for name, plan in plans.items():
        bar = _bar(min(plan.device_peak, longest), longest) + ("»" if plan.device_peak > longest else "")
        table.add_row(
            name,
            format_bytes(plan.device_peak) + {None: "", True: "  fits", False: "  ✗"}[plan.fits],
            bar,
            format_bytes(plan.host_peak) if plan.host_peak else "-",
            f"{plan.peak.phase}: {_short(plan.peak.op)}",
        )
    return f"{_title(first)}\n{printed(table)}"


def draw_ladder(plans: Mapping[str, Plan], path: Path) -> None:
    """The same as a picture, split by what holds the bytes.

    Raises:
        LabError: the file cannot be written.
    """
    from lab.show import stack

    first = next(iter(plans.values()))
    picture = stack(
        {name: plan.peak for name, plan in plans.items()},
        title=_title(first),
        limit=first.machine.device_memory,
        longest=_longest_bar(plans),
    )
    try:
        path.write_bytes(picture.png)
    except OSError as error:
        raise LabError(f"{path} cannot be written: {error.strerror}") from error


def check_folder(path: Path) -> None:
    """Refuse a file that cannot be written, before the work for it is done.

    Raises:
        LabError: its folder is not there.
    """
    if not path.absolute().parent.is_dir():
        raise LabError(f"{path} cannot be written: there is no folder {path.parent}")


def _title(plan: Plan) -> str:
    """The plan's, without its recipe."""
    model, _, *where = plan.title.split(" · ")
    return " · ".join((model, *where))


def _longest_bar(plans: Mapping[str, Plan]) -> int:
    """Twice the memory, or the leanest rung where none is given: what is beyond is cut."""
    peaks = [plan.device_peak for plan in plans.values()]
    given = next(iter(plans.values())).machine.device_memory
    return min(2 * max(given or 0, min(peaks)), max(peaks))


def tried_text(plan: Plan) -> str:
    """One plan of a search, in a few words."""
    said = "fits" if plan.fits else f"too much for the {plan.limit}"
    return f"{plan.tokens / Mi:.2f}M tokens, {format_bytes(plan.device_peak)} a device: {said}"


def max_context_text(found: MaxContext) -> str:
    """The longest context, what holds the next one back, and where."""
    plan, wall = found.plan, found.next_plan
    return "\n".join(
        (
            plan.title,
            recipe_text(plan.recipe),
            "",
            f"longest context   {found.tokens / Mi:.2f}M tokens ({found.tokens:,})",
            f"a device holds    {format_bytes(plan.device_peak)}"
            f"{_of(plan.device_peak, plan.machine.device_memory)}",
            f"a host holds      {format_bytes(plan.host_peak_per_node)}"
            f"{_of(plan.host_peak_per_node, plan.machine.host_memory)}",
            f"stopped by        {found.limit} memory at {wall.tokens / Mi:.2f}M tokens",
            f"at its peak       {wall.peak.phase}: {_short(wall.peak.op)} in {wall.peak.module or '-'}",
        )
    )


def fit_text(plans: Sequence[Plan]) -> str:
    """All that fit, the fastest first; marked are the steps down in memory, each with its price in time."""
    fastest, down = plans[0], steps_down(plans)
    table = Table("", "a step", "slower", "device peak", "host a node", "recipe", box=SIMPLE_HEAD)
    for number, plan in enumerate(plans, start=1):
        table.add_row(
            f"{number}" + (" ↓" if plan in down else ""),
            format_seconds(plan.step_seconds),
            f"+{plan.step_seconds / fastest.step_seconds - 1:.1%}",
            format_bytes(plan.device_peak),
            format_bytes(plan.host_peak_per_node),
            recipe_text(plan.recipe),
        )
    said = "↓ needs less device memory than every faster one: its price is the time it is slower."
    return f"{_title(fastest)}\n{printed(table)}\n{said}"


def rehearsal_text(found: Rehearsal) -> str:
    """What was measured, the plan beside it, and what that makes of the whole model."""
    peak, seconds, whole = found.timeline.peak, found.seconds, found.layers == found.of_layers
    allocator = (
        f", {format_bytes(found.reserved_peak)} reserved ({found.alloc_retries} retries), "
        f"{format_bytes(found.outside_torch)} outside torch"
        if found.reserved_peak is not None and found.outside_torch is not None
        else ""
    )
    lines = [
        found.job.title,
        recipe_text(found.job.recipe),
        "",
        f"measured      as one rank of {found.job.ranks} on {found.machine}, "
        f"{found.layers} of {found.of_layers} layers",
        f"device peak   {format_bytes(found.device_peak)}{allocator}",
        f"host peak     {format_bytes(found.host_peak)}",
        f"at the peak   {peak.phase}: {_short(peak.op)} {peak.shapes}".rstrip(),
        f"planned       {found.plan_over_measured:.4f} of the measured peak",
        f"a step        {format_seconds(found.step_seconds)}"
        f"{'' if found.timed_steps else ', the first one, with pinning and the meter'}: "
        + ", ".join(f"{phase} {format_seconds(took)}" for phase, took in seconds.items()),
        f"a rank sends  {format_bytes(found.link_bytes)}, and would wait "
        f"{format_seconds(found.plan.costs.link_seconds)} for the links of {found.plan.device}",
    ]
    if found.device_memory is not None and found.device_memory_asked is not None:
        less = found.device_memory < found.device_memory_asked
        whole_gpu = f", all that the GPU has: {format_bytes(found.device_memory_asked)} were asked for"
        lines.insert(4, f"device memory {format_bytes(found.device_memory)}{whole_gpu if less else ''}")
    if not whole:
        lines += [
            f"extrapolated  to {found.of_layers} layers by the ratio of their plan to these layers':",
            f"              {format_bytes(found.whole_device_peak)} a device, "
            f"{format_seconds(found.whole_seconds)} a step",
        ]
    lines += [
        f"tokens        {found.tokens_per_second:.4g} a second and rank if links were free, "
        f"{found.tokens_per_second_with_links:.4g} with their time added"
    ]
    return "\n".join(lines)


def planned_peak(run: Run, plan: Plan) -> int:
    """The planned device peak, in bytes, less what a run does not measure: what CUDA takes outside torch."""
    return plan.device_peak - (outside_workspace(plan.ranks) if run.allocated else 0)


def run_text(run: Run, plan: Plan) -> str:
    """The losses and seconds of each step, and the measured peaks beside the planned ones."""
    planned = planned_peak(run, plan)
    steps = enumerate(zip(run.losses, run.seconds, strict=True), 1)
    return "\n".join(
        [
            run.title,
            recipe_text(plan.recipe),
            "",
            *(f"step {step:<9}loss {loss:.4f}, {format_seconds(seconds)}" for step, (loss, seconds) in steps),
            f"device peak   {format_bytes(run.device_peak)} a rank, planned {format_bytes(planned)}",
            f"host peak     {format_bytes(run.host_peak)} a rank, planned {format_bytes(plan.host_peak)}",
            f"planned       {planned / run.device_peak:.4f} of the measured device peak",
        ]
    )


def run_json(run: Run, plan: Plan) -> dict[str, Any]:
    """The same as values for JSON: bytes, seconds, losses."""
    return {
        "title": run.title,
        "losses": list(run.losses),
        "seconds": list(run.seconds),
        "device_peak": run.device_peak,
        "host_peak": run.host_peak,
        "planned_device_peak": planned_peak(run, plan),
        "planned_host_peak": plan.host_peak,
    }


def recipe_text(recipe: Recipe) -> str:
    """The knobs that are not at their default, in one line; tiles that are all the same, as one."""
    knobs = {f.name: getattr(recipe, f.name) for f in fields(recipe) if getattr(recipe, f.name) != f.default}
    tiles = [name for name in ("mlp_tile", "norm_tile", "loss_tile") if name in knobs]
    if len(tiles) == 3 and len({knobs[name] for name in tiles}) == 1:
        knobs["tiles"] = knobs["mlp_tile"]
        for name in tiles:
            del knobs[name]
    return " ".join(name if value is True else f"{name}={value}" for name, value in knobs.items()) or "plain"


def _short(op: str) -> str:
    """An operator as it is known, on whatever device."""
    return op.removeprefix("aten.").replace("_scaled_dot_product_flash_attention_for_cpu", "flash_attention")


def _of(needed: int, given: int | None) -> str:
    return "" if given is None else f" of {format_bytes(given)} ({needed / given:.0%})"


def _verdict(plan: Plan) -> str:
    if plan.fits is None:
        return "none without --device-memory or --host-memory"
    return "fits" if plan.fits else f"does not fit: {plan.limit} memory"


def _bar(part: int, whole: int) -> str:
    return "█" * round(BAR * part / whole) if whole else ""
