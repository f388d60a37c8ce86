"""``lab bench results``: what a GPU measured, and a plan of each of these steps, made now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lab.bench.gpu_items import ITEMS, Item
from lab.bench.gpu_row import jobs
from lab.bench.json_lines import Note
from lab.bench.machine import device_of, write_device
from lab.bench.results import measured_rows, software
from lab.bench.table import Row, Say
from lab.errors import LabError
from lab.planning.cuda_workspace import outside_workspace
from lab.planning.hardware import DEVICE_FILE, make_machine, of_name
from lab.planning.plan import plan_job
from lab.recipe.jobs import Job, Machine
from lab.rehearsing.rehearsal import seconds_alone
from lab.units import GiB


def replan(folder: Path, note: Note, say: Say, *, items: Sequence[Item] = ITEMS) -> Iterator[Row]:
    """Plan each step that the files in a folder have, and yield a row for it: measured figures and ratios.

    Rows that failed are left out; so are those whose recipe has other knobs now, with a note. A figure that
    an item does not measure is None: a "hidden" item measures seconds alone, and a "hollow" one bytes alone.
    The seconds of a "first step" include the pinning of host memory, and the first call of each kernel.

    - "planned / peak" has the bytes that torch's allocator counts, without NCCL's buffers and CUDA's context,
      which torch does not see. "printed / peak" has the device peak that `lab plan` prints, with them.
    - "planned / reserved" has what torch's allocator reserves in the simulation, with the item's segments.
    - "planned / seconds" has the planned seconds without the waits for links, because a rehearsal has no
      peers; with the rates of this GPU in the hardware table, and None if it is not there.
    - "own rates / seconds" has these with the rates that the files have of this GPU, see ``device_of``; None
      if they have none.

    Args:
        folder: The folder of the files.
        note: Reports each line of the files, and each row, that is left out.
        say: Shows what is planned now.
        items: The items; rows of others are left out.

    Raises:
        LabError: There is no such folder, a file cannot be read, or no row is of a training step on a GPU.
    """
    if not folder.is_dir():
        raise LabError(f"{folder} is not a folder: give one in which `lab bench gpu` has written rows")
    machines = measured_rows(note, folder)
    found = [
        (machine, item, rows[item.name])
        for machine, rows in machines.items()
        for item in items
        # Items with a recipe measure a training step.
        if item.recipe and item.name in rows and not rows[item.name].get("failed")
    ]
    compared = 0
    with TemporaryDirectory() as devices:
        own = {machine: _own_machine(rows, Path(devices)) for machine, rows in machines.items()}
        for machine, item, row in found:
            say(item.name)
            _, job = jobs(item)
            now, then = job.recipe.to_json(), row.get("recipe_knobs")
            changed = [
                knob for knob in now if isinstance(then, dict) and then.get(knob, now[knob]) != now[knob]
            ]
            if changed:
                note(f"{item.name} had another {', '.join(changed)}: it is left out")
                continue
            compared += 1
            step = item.name if row.get("timed_steps") != 0 else f"{item.name}, first step"
            where = f"{machine}, {software(row)}"
            yield {
                "step": step,
                **_compared(item, row, job, of_name(machine), own[machine]),
                "machine": where,
            }
    if not compared:
        raise LabError(
            f"{folder} has no row of a training step on a GPU: `lab bench gpu --minutes 9 --out {folder}` "
            "measures them"
        )


def _own_machine(rows: dict[str, dict[str, Any]], folder: Path) -> Machine | None:
    """Return a machine with the rates that these rows have; None if they have none."""
    file = folder / f"{len([*folder.iterdir()])}{DEVICE_FILE}"
    try:
        write_device(device_of(rows.values()), file)
        return make_machine(device=str(file))
    except LabError:
        return None


def _compared(item: Item, row: dict[str, Any], job: Job, device: str | None, own: Machine | None) -> Row:
    plan = plan_job(job, make_machine(device=device or Machine.device))
    again = own and plan_job(job, own)
    outside = outside_workspace(job.ranks)
    peak, reserved = row.get("device_peak"), row.get("reserved_peak")
    seconds = row.get("seconds", row.get("step s"))
    planned_reserved = plan.reserved_peak(expandable=item.expandable)
    assert planned_reserved is not None, "the plan has the workspace of a GPU"
    return {
        "peak, GiB": peak and peak / GiB,
        "planned / peak": peak and (plan.timeline.device_peak - outside) / peak,
        "printed / peak": peak and plan.device_peak / peak,
        "reserved, GiB": reserved and reserved / GiB,
        "planned / reserved": reserved and (planned_reserved - outside) / reserved,
        "seconds": seconds,
        "planned / seconds": seconds_alone(plan) / seconds if seconds and device else None,
        "own rates / seconds": seconds_alone(again) / seconds if seconds and again else None,
    }
