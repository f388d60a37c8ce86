"""Where the lab keeps what outlives a process: plans and operators in a cache, clusters in a state folder."""

import os
import stat
import tempfile
from pathlib import Path

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
    """Set HOME where no home directory is known, as in a container that runs with the id of a nameless user.

    The lab, Jupyter, IPython and torch keep files there. It becomes a folder among the temporary files that
    this user alone can read. USER is set too, because torch asks for a name.

    Raises:
        ClusterError: Another user has made this folder.
    """
    try:
        Path.home()
    except RuntimeError:
        folder = Path(tempfile.gettempdir()) / f"{NAME}-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise ClusterError(
                f"{folder} is not a folder of this user alone: set HOME to one that is"
            ) from None
        os.environ["HOME"] = str(folder)
        os.environ.setdefault("USER", str(os.getuid()))
