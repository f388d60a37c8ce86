"""``losses.jsonl``: one line a step, cut to the checkpoint that training goes on from."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from lab.errors import CheckpointError


class LossFile:
    """The file in a folder of checkpoints. What a full disk does not take waits here for the next try.

    The rank that writes it holds a lock on it until ``close``, or until its process ends. Without the lock,
    two trainings in one folder would remove each other's checkpoints.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "losses.jsonl"
        self._length = 0
        self._waiting = b""
        self._lock: int | None = None

    def lock(self) -> None:
        """Make the file where there is none, and lock it.

        Raises:
            CheckpointError: another training has locked it, or it cannot be written.
        """
        try:
            self._lock = _open(self._path)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise CheckpointError(
                f"another training writes into {self._path.parent}: give another folder, or wait for its end"
            ) from error
        except OSError as error:
            self.close()
            raise CheckpointError(f"{self._path} cannot be written: {error.strerror}") from error

    def close(self) -> None:
        """Give the lock back, if this process holds it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def cut(self, steps: int) -> None:
        """Keep the lines of the first ``steps`` steps; one cut short by a kill is of a later step.

        Raises:
            CheckpointError: the file cannot be read and written; or it has lines, and not those that end with
                this step.
        """
        try:
            with os.fdopen(_open(self._path), "rb") as file:
                lines = file.read().splitlines(keepends=True)
            *whole, last = lines or [b"{"]
            if last.endswith(b"\n"):
                whole.append(last)
            elif not last.startswith(b"{"):
                raise ValueError("its last line is none that a training writes")
            kept = list(takewhile(lambda line: json.loads(line)["step"] <= steps, whole))
            found = [json.loads(line)["step"] for line in kept]
            if steps and whole and (not kept or found != list(range(steps + 1 - len(kept), steps + 1))):
                raise ValueError(
                    f"its steps do not lead to {steps}; put back the file of this training, or move it away"
                )
            self._length = sum(map(len, kept))
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
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
        with os.fdopen(_open(self._path), "r+b") as file:
            # Whatever lies behind the last whole line came of a kill or a full disk.
            file.truncate(self._length)
            file.seek(self._length)
            file.write(self._waiting)
            file.flush()
            if on_disk:
                os.fsync(file.fileno())
        self._length += len(self._waiting)
        self._waiting = b""


def _open(path: Path) -> int:
    """Open a file for reading and writing; make it where there is none.

    Raises:
        OSError: It cannot be opened, is a link, whose target would be changed, or is no regular file.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is no file")
    return handle
