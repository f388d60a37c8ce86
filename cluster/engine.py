"""The process that becomes one rank, on any host and from any launcher.

`python -m cluster.engine START ARGS...` reads START, which is the JSON of a `cluster.placement.Start`. It
sets the environment variables for this host, and runs ipyparallel's engine with ARGS and the rank as its id.
Nothing of the connection stays on the disk of this host.
"""

import gc
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from cluster import stacks
from cluster.environment import rank_environment, share_of_cores
from cluster.errors import ClusterError
from cluster.host import near_cores, own_cores
from cluster.network import address_towards
from cluster.placement import Placement, Start, launcher_placement
from cluster.temporary import temporary_folder
from cluster.watchdog import end_after, wait_for_input_end, wait_for_owner, wait_for_port

CONNECTION_VARIABLE = "IPP_CONNECTION_INFO"


def main() -> None:
    """Become the rank that the command line describes."""
    stacks.listen()
    # What is imported stays. To search it for garbage takes a fifth of the time of the imports.
    gc.disable()
    start = Start.from_json(sys.argv[1])
    if start.stdin:
        os.environ[CONNECTION_VARIABLE] = sys.stdin.readline()
    address, port = registration()
    temporary = ExitStack()
    directory, clean_up = temporary.enter_context(temporary_folder()), temporary.close
    # The engine replaces this handler once it is registered.
    signal.signal(signal.SIGTERM, lambda *_: (clean_up(), os._exit(128 + signal.SIGTERM)))
    if start.stdin:
        end_after(wait_for_input_end, clean_up)
    if start.owner is None:
        end_after(lambda: wait_for_port(address, port), clean_up)
    else:
        end_after(partial(wait_for_owner, *start.owner), clean_up)
    try:
        placement = start.placement or launcher_placement(os.environ)
        set_environment(start, placement, address)
    except ClusterError as error:
        clean_up()
        sys.exit(f"{error}")
    run_engine(placement.rank, start.folder, directory, sys.argv[2:], clean_up)


def registration() -> tuple[str, int]:
    """Return the address and the port at which the controller registers engines.

    Raises:
        SystemExit: The environment does not have the connection to the controller.
    """
    text = os.environ.get(CONNECTION_VARIABLE, "")
    if not text.strip():
        sys.exit(f"the connection to the controller could not be found: {CONNECTION_VARIABLE} is not set")
    info = json.loads(text)
    return info["interface"].partition("://")[2], int(info["registration"])


def set_environment(start: Start, placement: Placement, controller: str) -> None:
    """Set the environment variables of this process, and bind it to its cores where `start` asks for it.

    Args:
        start: What the process was started with.
        placement: The rank that it becomes.
        controller: The address of the controller.

    Raises:
        ClusterError: No network leads to the controller, or the host has too few devices.
    """
    cores = [own_cores()] * placement.local_ranks
    # Set before torch is imported below, because torch reads it then. torch is needed to see the devices.
    os.environ["OMP_NUM_THREADS"] = str(share_of_cores(placement, cores))
    from cluster.capacity import visible_devices

    devices = visible_devices()
    if start.numa:
        cores = near_cores(devices, placement.local_ranks)
        for task in os.listdir("/proc/self/task"):
            # The memory follows: Linux takes a page from the NUMA node of the core that first writes to it.
            os.sched_setaffinity(int(task), cores[placement.local_rank])
    own = address_towards(controller)
    if own is None:
        raise ClusterError(f"no network leads from this host to the controller at {controller}")
    for variable in rank_environment(placement, devices, cores, own):
        os.environ[variable.name] = variable.value
    os.environ.update(start.variables)


def run_engine(
    rank: int, folder: str, directory: Path, arguments: list[str], clean_up: Callable[[], None]
) -> None:
    """Run ipyparallel's engine until it is ended.

    Args:
        rank: The id of the engine.
        folder: The folder in which modules are looked for first.
        directory: The engine's directory.
        arguments: Further arguments of the engine.
        clean_up: Removes the directory.
    """
    from ipyparallel.engine.app import IPEngine

    class RankEngine(IPEngine):  # type: ignore[misc]
        """An engine that removes its directory once it is registered."""

        async def complete_registration(self, *args: Any) -> None:
            await super().complete_registration(*args)
            clean_up()

        def start_nanny(self, control_url: str) -> Any:
            # Its program must not import a file of the current folder in place of Python's own.
            with patch.dict(os.environ, PYTHONSAFEPATH="1"):
                return super().start_nanny(control_url)

    # From here on a rank finds what the notebook finds.
    sys.path[:] = dict.fromkeys([folder, os.getcwd(), *sys.path])
    gc.enable()
    RankEngine.launch_instance([*arguments, f"--IPEngine.id={rank}", f"--profile-dir={directory}"])


if __name__ == "__main__":
    main()
