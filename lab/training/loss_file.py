"""``losses.jsonl``: one line a step, cut to the checkpoint that training goes on from."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from lab.errors import CheckpointError


class LossFile:
    """The file in a folder of checkpoints. What a full disk does not take waits here for the next try."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "losses.jsonl"
        self._length = 0
        self._waiting = b""

    def cut(self, steps: int) -> None:
        """Keep the lines of the first ``steps`` steps; one cut short by a kill is of a later step.

        Raises:
            CheckpointError: the file cannot be read and written.
        """
        try:
            lines = self._path.read_bytes().splitlines(keepends=True) if self._path.exists() else []
            whole = [line for line in lines if line.endswith(b"\n")]
            self._length = len(b"".join(line for line in whole if json.loads(line)["step"] <= steps))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise CheckpointError(f"{self._path} is no file of losses: {error}") from error
        self.sync()

    def add(self, line: dict[str, Any]) -> None:
        """Write one line, where another process can read it at once."""
        self._waiting += json.dumps(line).encode() + b"\n"
        with suppress(OSError):
            self._write(on_disk=False)

    def sync(self) -> None:
        """Have all lines on disk, so that a checkpoint is never ahead of them.

        Raises:
            CheckpointError: they cannot be written.
        """
        try:
            self._write(on_disk=True)
        except OSError as error:
            raise CheckpointError(
                f"{self._path} could not be written: {error.strerror}; the checkpoints beside it stay"
            ) from error

    def _write(self, *, on_disk: bool) -> None:
        with os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            # Whatever lies behind the last whole line came of a kill or a full disk.
            file.truncate(self._length)
            file.seek(self._length)
            file.write(self._waiting)
            file.flush()
            if on_disk:
                os.fsync(file.fileno())
        self._length += len(self._waiting)
        self._waiting = b""
