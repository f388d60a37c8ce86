"""The rows of a benchmark, as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

Row = Mapping[str, str | int | float | None]
"""Figures by name; None is a figure that is missing."""

Say = Callable[[str], None]
"""Shows a text that says what is measured now."""


def rows_text(rows: Sequence[Row], *, as_json: bool) -> str:
    """Return rows as a table or as JSON.

    The columns are the names in the first row. Those for which a line has no room follow in another table,
    which has the first column too. A missing figure is a dash. Each value of "machine", where a row was
    measured, is printed once below the tables.
    """
    if as_json:
        return json.dumps([dict(row) for row in rows], indent=2)
    first, *others = [name for name in rows[0] if name != "machine"]
    parts = [[first]]
    for name in others:
        # Rich breaks texts at spaces, and cuts words for which even that leaves no room.
        if len(parts[-1]) > 1 and "…" in table_text(_table(rows, [*parts[-1], name])):
            parts.append([first])
        parts[-1].append(name)
    tables = [table_text(_table(rows, columns)) for columns in parts]
    machines = dict.fromkeys(str(row["machine"]) for row in rows if row.get("machine"))
    return "\n".join([*tables, *(f"  on {machine}" for machine in machines)])


def _table(rows: Sequence[Row], columns: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column(columns[0], no_wrap=True)
    for name in columns[1:]:
        table.add_column(name)
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in columns))
    return table


def table_text(table: Table) -> str:
    """Return a table as plain text, also in a notebook. Brackets in its cells are text and not markup."""
    console = Console(width=140, force_jupyter=False, color_system=None, markup=False, emoji=False)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines() if line.strip())


def _cell(value: str | float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
