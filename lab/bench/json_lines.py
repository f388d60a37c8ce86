"""Files of results: one line of JSON for each row, written to the disk as soon as the row is measured."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from lab.errors import LabError

Note = Callable[[str], None]
"""Reports a defect of a file."""

_TEXTS = ("name", "machine", "versions", "torch", "failed")
"""The fields that tables read as text. Each may be absent or null."""

_FIGURES = ("time", "seconds", "step s", "device_peak", "reserved_peak", "plan_over_measured")
"""The fields that tables read as numbers. Each may be absent or null."""


def read_lines(path: Path, note: Note) -> list[dict[str, Any]]:
    """Return the rows of a file, one JSON object a line.

    A line that is not a JSON object, or in which a field has the wrong type, is left out and reported to
    ``note``.

    Raises:
        LabError: The file cannot be read.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise LabError(f"{path} cannot be read: {error.strerror}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        row = _row(line)
        wrong = _type_error(row or {})
        if row is None and line.strip():
            note(f"{path}:{number} is not a whole line of JSON: it is left out")
        elif wrong is not None:
            note(f"{path}:{number} is not a row of results, because its {wrong}: it is left out")
        elif row is not None:
            rows.append(row)
    return rows


@contextmanager
def append_lines(path: Path, note: Note) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Open a file for more rows, and yield the function that appends one.

    A row is on the disk when that function returns. If the last line of the file is incomplete, it is removed
    and reported to ``note``. The file is locked until the end of the ``with`` block, or of this process.

    Raises:
        LabError: The file cannot be written, or another process appends to it.
    """
    try:
        with path.open("a+b") as file:
            _lock(file)
            file.seek(0)
            whole, newline, last = file.read().rpartition(b"\n")
            if _row(last) is not None:
                file.write(b"\n")
            elif last:
                note(f"{path} ends within a line: that line is removed")
                file.truncate(len(whole + newline))

            def append(row: Mapping[str, Any]) -> None:
                file.write(json.dumps(dict(row)).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())

            yield append
    except OSError as error:
        raise LabError(f"{path} cannot be written: {error.strerror}") from error


def _lock(file: BinaryIO) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise LabError(
            f"another process writes {file.name} now: wait for its end, or give another folder or file"
        ) from error


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _type_error(row: Mapping[str, Any]) -> str | None:
    """Describe the first field of a row that has the wrong type; None if all are right."""
    for name in _TEXTS:
        if not isinstance(row.get(name), str | None):
            return f"{name!r} is not a text"
    for name in _FIGURES:
        value = row.get(name)
        # Also false for NaN. More than 10^18 bytes or seconds are no measurement. On a CPU, the profile of a
        # step has no events of a GPU, and so 0 seconds.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and (0 < value < 1e18 or (name, value) == ("step s", 0))):
            return f"{name!r} is not a number above 0"
    return None
