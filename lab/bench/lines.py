"""Results as lines of JSON: each is on the disk once it is measured, and one that was cut off is dropped."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab.errors import LabError

Note = Callable[[str], None]
"""Is told what was found wrong with a file."""


def read_lines(path: Path, note: Note) -> list[dict[str, Any]]:
    """Return the rows of a file, one JSON object a line; what is not one is left out, and noted.

    Raises:
        LabError: the file cannot be read.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise LabError(f"{path} cannot be read: {error.strerror}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        row = _row(line)
        if row is not None:
            rows.append(row)
        elif line.strip():
            note(f"{path}:{number} is not a whole line of JSON: it is left out")
    return rows


@contextmanager
def appending(path: Path, note: Note) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Open a file for more rows; yields what appends one, which is on the disk when it returns.

    If the last line was cut off, it is removed, and noted: the next row would be joined to it.

    Raises:
        LabError: the file cannot be written.
    """
    try:
        with path.open("a+b") as file:
            file.seek(0)
            whole, newline, last = file.read().rpartition(b"\n")
            if _row(last) is not None:
                file.write(b"\n")
            elif last:
                note(f"{path} ends within a line: that line is dropped")
                file.truncate(len(whole + newline))

            def append(row: Mapping[str, Any]) -> None:
                file.write(json.dumps(dict(row)).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())

            yield append
    except OSError as error:
        raise LabError(f"{path} cannot be written: {error.strerror}") from error


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
