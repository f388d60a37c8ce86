"""Where the lab keeps what outlives a process: plans and operators in a cache, clusters in a state folder.

And how it writes a file.
"""

import os
import pwd
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from cluster.errors import ClusterError

NAME = "longcontext-lab"


def cache_folder() -> Path:
    """Return the folder of what can be made again. It may not exist yet.

    Raises:
        ClusterError: See `ensure_home`.
    """
    ensure_home()
    try:
        from platformdirs import user_cache_path
    except ModuleNotFoundError:  # The lab runs uninstalled.
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / NAME
    return user_cache_path(NAME)


def state_folder() -> Path:
    """Return the folder of what must be known later. It may not exist yet.

    Raises:
        ClusterError: See `ensure_home`.
    """
    ensure_home()
    from platformdirs import user_state_path

    return user_state_path(NAME)


def ensure_home() -> None:
    """Set HOME for a user id without a name that has no folder, as a container may be run with.

    The lab, Jupyter, IPython and torch keep files there. It becomes a folder among the temporary files that
    this user alone can read. USER is set too, because torch asks for a name.

    Raises:
        ClusterError: This folder cannot be made, or others may read it.
    """
    with suppress(KeyError):
        pwd.getpwuid(os.getuid())
        return
    os.environ.setdefault("USER", str(os.getuid()))
    if os.access(os.environ.get("HOME", ""), os.W_OK):
        return
    folder = Path(tempfile.gettempdir()) / f"{NAME}-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise ClusterError(f"{folder} cannot be made: {error.strerror}; set HOME to a folder") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ClusterError(f"{folder} is not a folder of this user alone: set HOME to one that is")
    os.environ["HOME"] = str(folder)


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Write a file whole or not at all: to a temporary file in its folder, which is then renamed.

    A symbolic link is followed, and an existing file keeps its mode.

    Raises:
        OSError: The disk is full, or the file or its folder cannot be written.
    """
    path = Path(os.path.realpath(path))
    part = path.with_name(f".{uuid4()}.part")
    try:
        part.touch()
        with suppress(FileNotFoundError):
            os.close(os.open(path, os.O_WRONLY))  # a file that cannot be written is not replaced
            shutil.copymode(path, part)
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
