"""What a bench prints: rows of named figures, as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

Row = Mapping[str, str | int | float | None]
Say = Callable[[str], None]
"""Is told what is measured now."""


def write(rows: Sequence[Row], *, as_json: bool) -> str:
    """The rows as text; columns are the names in the first row, a missing figure is a dash.

    What all say of the "machine" that they were measured on stands below the table, once.
    """
    if as_json:
        return json.dumps([dict(row) for row in rows], indent=2)
    names = [name for name in rows[0] if name != "machine"]
    table = Table(*names, box=SIMPLE_HEAD)
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in names))
    machines = dict.fromkeys(str(row["machine"]) for row in rows if row.get("machine"))
    return "\n".join([printed(table), *(f"  on {machine}" for machine in machines)])


def printed(table: Table) -> str:
    """Return a table as plain text, in a notebook too. Brackets in its cells are text, and no markup."""
    console = Console(width=130, force_jupyter=False, color_system=None, markup=False, emoji=False)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines() if line.strip())


def _cell(value: str | float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
