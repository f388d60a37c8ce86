"""``losses.jsonl``: one line a step, cut to the checkpoint that training goes on from."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab.errors import CheckpointError


class LossFile:
    """The file of a folder of checkpoints, beginning with the lines of its first ``steps`` steps.

    Raises:
        CheckpointError: here and in each method, where it cannot be written.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        self._path = folder / "losses.jsonl"
        with self._refused():
            kept = list(_lines(self._path, steps))
            part = self._path.with_suffix(".jsonl.part")
            part.write_text("".join(kept), encoding="utf-8")
            part.replace(self._path)

    def add(self, line: dict[str, Any]) -> None:
        """Write one line, where another process can read it at once."""
        with self._refused(), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def settle(self) -> None:
        """Have all lines on disk, so that a checkpoint is never ahead of them."""
        with self._refused(), self._path.open("a", encoding="utf-8") as file:
            os.fsync(file.fileno())

    @contextmanager
    def _refused(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{self._path} could not be written: {error.strerror}") from error


def _lines(path: Path, steps: int) -> Iterator[str]:
    """The lines of the first ``steps`` steps; one cut short by a kill is of a later step."""
    if steps and path.exists():
        with path.open(encoding="utf-8") as file:
            for line in file:
                if line.endswith("\n") and json.loads(line)["step"] <= steps:
                    yield line
