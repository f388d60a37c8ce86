"""Files that only their owner may read: connection files and keys, and the directory they lie in."""

import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cluster.errors import ClusterError

PREFIX = "cluster-"

# The connection files and some minutes of logs, in bytes.
LOG_ROOM = 16 * 2**20


def new_directory(folder: str | None) -> Path:
    """Return a new directory in `folder` (the system's temporary one for None), its owner's alone.

    Raises ClusterError where none can be made, or the disk has not LOG_ROOM bytes for logs.
    """
    place = folder or tempfile.gettempdir()
    try:
        free = shutil.disk_usage(place).free
        if free < LOG_ROOM:
            raise ClusterError(
                f"{place} has {free // 2**20} MiB free and a cluster's logs need {LOG_ROOM // 2**20}; "
                "TMPDIR set to another disk would work"
            )
        return Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
    except OSError as error:
        raise ClusterError(f"no directory for logs can be made in {place}: {error.strerror}") from None


def check_private(path: str | Path) -> None:
    """Raise ClusterError if others than the owner can read the file at `path`, or replace it."""
    folder, file = mode(Path(path).parent), mode(path)
    if file & 0o077 or folder & 0o077:
        raise ClusterError(
            f"{path} can be read by others (mode {file:04o}, its folder {folder:04o}); "
            "a file system that keeps modes 0600 and 0700 would work"
        )


def mode(path: str | Path) -> int:
    """Return the permission bits of the file at `path`."""
    return stat.S_IMODE(Path(path).stat().st_mode)


def readable_by_others(paths: list[Path]) -> Iterator[Path]:
    """Yield those of `paths` that others than the owner can read, through every folder on the way."""
    for path in paths:
        try:
            open_to_all = mode(path) & 0o044 and all(mode(parent) & 0o011 for parent in path.parents)
        except OSError:
            continue
        if open_to_all:
            yield path


def connection_files() -> list[Path]:
    """Return the connection files of this machine's clusters and of ipyparallel's own profiles."""
    folders = [*Path(tempfile.gettempdir()).glob(f"{PREFIX}*"), *Path.home().glob(f"{PREFIX}*")]
    folders += Path.home().glob(".ipython/profile_*")
    return [file for folder in folders for file in folder.glob("security/*.json")]


def private_keys() -> list[Path]:
    """Return the private keys in ssh's own folder."""
    return [key.with_suffix("") for key in Path.home().glob(".ssh/*.pub") if key.with_suffix("").exists()]
