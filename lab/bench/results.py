"""The results of ``lab bench gpu`` as a table for each GPU, with a note for each item that is missing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from lab.bench.gpu_items import ITEMS, Item
from lab.bench.json_lines import Note, read_lines
from lab.bench.table import table_text
from lab.jupyter.notebook_files import FOLDER as NOTEBOOKS
from lab.units import GiB

FOLDER = NOTEBOOKS / "results"

GAP = "not measured yet"

SHOWN = (
    "TFLOP/s", "/ matmul", "worst error", "worst", "to host GB/s", "from host GB/s", "to host hidden",
    "from host hidden", "norm compiled / not", "MLP compiled / not", "floor", "cudnn, s a new length",
    "torch, s a new length",
)  # fmt: skip
"""The figures in the last column, if a row has them."""


def measured_rows(note: Note, folder: Path = FOLDER) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the rows in the files of ``folder`` by the name of the GPU, and then by that of the item.

    Rows of a CPU are left out. If a GPU has two rows of an item, one with figures counts before one that
    failed, and then the one with the later "time". Rows without a time are the oldest, in the order of the
    names of their files.

    Args:
        note: Reports each line that is left out.
        folder: The folder of the files.

    Raises:
        LabError: A file cannot be read.
    """
    rows = [row for file in sorted(folder.glob("*.jsonl")) for row in read_lines(file, note)]
    rows = [row for row in rows if row.get("machine") not in (None, "CPU")]
    machines: dict[str, dict[str, dict[str, Any]]] = {row["machine"]: {} for row in rows}
    for row in sorted(rows, key=lambda row: (not row.get("failed"), row.get("time") or 0)):
        machines[row["machine"]][row.get("name") or ""] = row
    return machines


def results_text(note: Note, *, folder: Path = FOLDER, items: Sequence[Item] = ITEMS) -> str:
    """Return a table for each GPU of the items in the files of ``folder``; others are "not measured yet".

    Below a table are the versions with which its rows were measured. If the versions differ, a number after
    the name of an item refers to its own.

    Args:
        note: Reports each line that is left out.
        folder: The folder of the files.
        items: The items.

    Raises:
        LabError: A file cannot be read.
    """
    machines = measured_rows(note, folder)
    if not machines:
        return _table({}, items)
    return "\n\n".join(f"{name}\n{_table(by_item, items)}" for name, by_item in machines.items())


def _table(by_item: dict[str, dict[str, Any]], items: Sequence[Item]) -> str:
    table = Table("measured on a GPU", "seconds", "peak, GiB", "planned / peak", "else", box=SIMPLE_HEAD)
    by_name = {item.name: software(by_item[item.name]) for item in items if item.name in by_item}
    versions = list(dict.fromkeys(by_name.values()))
    for item in items:
        mark = ""
        if len(versions) > 1 and item.name in by_name:
            mark = f" ({versions.index(by_name[item.name]) + 1})"
        table.add_row(item.name + mark, *_cells(by_item.get(item.name)))
    marks = [""] if len(versions) == 1 else [f"({number}) " for number in range(1, len(versions) + 1)]
    lines = (f"  {mark}with {version}" for mark, version in zip(marks, versions, strict=True))
    return "\n".join([table_text(table), *lines])


def software(row: dict[str, Any]) -> str:
    """Return the versions of a row. A row whose process was ended has the version of torch only."""
    torch = row.get("torch")
    return row.get("versions") or (f"torch {torch}" if torch else "unknown versions")


def _cells(row: dict[str, Any] | None) -> tuple[str, ...]:
    if row is None:
        return "-", "-", "-", GAP
    if row.get("failed"):
        return "-", "-", "-", f"failed: {row['failed']}"
    peak = row.get("device_peak")
    rest = ", ".join(f"{name} {row[name]:.3g}" for name in SHOWN if isinstance(row.get(name), int | float))
    return (
        _number(row.get("seconds")),
        _number(None if peak is None else peak / GiB),
        _number(row.get("plan_over_measured")),
        rest,
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
