"""Files that only their owner may read: connection files, keys, and the directory of a cluster."""

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cluster.errors import ClusterError

PREFIX = "cluster-"

# The size of the connection files and of some minutes of logs, in bytes.
LOG_BYTES = 16 * 2**20


def new_directory(folder: str | None) -> Path:
    """Make a new directory that only its owner can read.

    Args:
        folder: Where to make it. None stands for the system's folder for temporary files.

    Raises:
        ClusterError: It cannot be made, or the disk has less than LOG_BYTES bytes free.
    """
    parent = folder or tempfile.gettempdir()
    try:
        free = shutil.disk_usage(parent).free
        if free < LOG_BYTES:
            raise ClusterError(
                f"{parent} has {free // 2**20} MiB free and a cluster's logs need {LOG_BYTES // 2**20}; "
                "TMPDIR set to another disk would work"
            )
        return Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    except OSError as error:
        raise ClusterError(f"no directory for logs can be made in {parent}: {error.strerror}") from None


def make_again(directory: Path) -> None:
    """Make the directory of a cluster again, if a cleaner of old temporary files has removed it.

    Raises:
        ClusterError: It cannot be made, or another user has made it.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_cluster_directory(directory):
            raise ClusterError(f"{directory} is not a directory of this user any more: stop the cluster")
        (directory / "log").mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ClusterError(f"{directory} is gone and cannot be made: {error.strerror}") from None


def check_private(path: str | Path) -> None:
    """Check that only its owner can read the file at `path`, or replace it.

    Raises:
        ClusterError: Other users can read the file or its folder.
    """
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
    """Yield those of `paths` that other users can read, because every folder above them lets them through."""
    for path in paths:
        try:
            readable = mode(path) & 0o044 and all(mode(parent) & 0o011 for parent in path.parents)
        except OSError:
            continue
        if readable:
            yield path


def is_cluster_directory(path: Path) -> bool:
    """Return whether a path is a directory of this user, not a link, whose name is that of a cluster's."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return path.name.startswith(PREFIX) and stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def connection_files() -> list[Path]:
    """Return the connection files of this machine's clusters and of ipyparallel's own profiles."""
    folders = [*Path(tempfile.gettempdir()).glob(f"{PREFIX}*"), *Path.home().glob(f"{PREFIX}*")]
    profiles = Path.home().glob(".ipython/profile_*")
    return [
        file
        for folder in (*filter(is_cluster_directory, folders), *profiles)
        for file in folder.glob("security/*.json")
    ]


def private_keys() -> list[Path]:
    """Return the private keys in the folder of ssh."""
    return [key.with_suffix("") for key in Path.home().glob(".ssh/*.pub") if key.with_suffix("").exists()]
