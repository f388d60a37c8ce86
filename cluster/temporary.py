"""Temporary folders of one process. A lock shows other processes whether it still runs."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "lab-process-"
LOCK = ".lock"

# A folder that is younger may not be locked yet.
LOCKED_SECONDS = 60.0


def places() -> list[str]:
    """Return the folders in which a temporary folder may be made, the usual one first."""
    return [tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp"]


@contextmanager
def temporary_folder(place: str | None = None) -> Iterator[Path]:
    """Make a folder that only this user can read, and remove it at the end of a `with` block.

    `remove_left` removes the folder of a process that was killed.

    Args:
        place: Where to make it. None stands for the system's folder for temporary files.

    Raises:
        OSError: It cannot be made.
    """
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=place, ignore_cleanup_errors=True) as name:
        descriptor = os.open(f"{name}/{LOCK}", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            with suppress(OSError):  # a file system without locks: `remove_left` does not get one either
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield Path(name)
        finally:
            os.close(descriptor)


def remove_left() -> list[Path]:
    """Remove the folders that this user's processes have left, and return their paths."""
    removed = []
    for folder in {path for place in filter(None, places()) for path in Path(place).glob(f"{PREFIX}*")}:
        with suppress(OSError):
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                status = os.fstat(descriptor)
                if status.st_uid == os.getuid() and time.time() - status.st_mtime > LOCKED_SECONDS:
                    shutil.rmtree(folder)
                    removed.append(folder)
            finally:
                os.close(descriptor)
    return removed
