"""Tables as HTML for notebooks, in the colours of the page that shows them, so that they suit every theme."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape

from lab.memory.categories import CATEGORIES
from lab.memory.moment import Moment
from lab.show.palette import COLOURS
from lab.units import format_bytes


def table(rows: Iterable[Iterable[str]]) -> str:
    """Return a table of rows of cells, which ``cell`` and ``byte_cell`` make."""
    lines = "".join(f"<tr>{''.join(cells)}</tr>" for cells in rows)
    return f"<table>{lines}</table>"


def cell(
    text: str,
    *,
    tag: str = "td",
    align: str = "right",
    wrap: bool = False,
    colour: str = "",
    hint: str = "",
) -> str:
    """Return a cell.

    Args:
        text: Its text.
        tag: ``td``, or ``th`` for a header.
        align: The side at which the text is.
        wrap: Whether the text may take several lines.
        colour: The colour of a square before the text; empty for no square.
        hint: A text that the pointer shows.
    """
    square = f'<span style="color: {colour}">■</span> ' if colour else ""
    title = f' title="{escape(hint)}"' if hint else ""
    style = f"text-align: {align}{'' if wrap else '; white-space: nowrap'}"
    return f'<{tag} style="{style}"{title}>{square}{escape(text)}</{tag}>'


def byte_cell(size: int) -> str:
    """Return a cell of bytes, of which the pointer shows the exact number."""
    return cell(format_bytes(size), hint=f"{size:,} bytes")


def line_table(lines: Mapping[str, str]) -> str:
    """Return a table of texts with their labels. A text that is empty has no row."""
    return table(
        [cell(label, tag="th", align="left"), cell(text, align="left", wrap=True)]
        for label, text in lines.items()
        if text
    )


def peak_table(peaks: Mapping[str, tuple[Moment, int, int]], corner: str = "") -> str:
    """Return a table of peaks, a column each: device bytes, their categories, and bytes on host and disk.

    A category of which no peak has bytes has no row.

    Args:
        peaks: The instant of the device peak, the bytes of the host peak and those of the disk peak, by the
            name of the column. One that has no name has no header.
        corner: The text of the corner, left of the column names.
    """
    rows = {"device peak": ("", [peak.device for peak, *_ in peaks.values()])}
    for category in CATEGORIES:
        rows[category] = (COLOURS[category], [peak.by_category[category] for peak, *_ in peaks.values()])
    rows["host peak"] = (COLOURS["host"], [host for _, host, _ in peaks.values()])
    rows["disk peak"] = (COLOURS["disk"], [disk for *_, disk in peaks.values()])
    header = [[cell(name, tag="th") for name in (corner, *peaks)]] * any(peaks)
    cells = [
        [cell(label, tag="th", align="left", colour=colour), *map(byte_cell, sizes)]
        for label, (colour, sizes) in rows.items()
        if any(sizes)
    ]
    return table([*header, *cells])
