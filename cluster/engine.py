"""The process that becomes one rank, on whatever host, whoever launched it.

`python -m cluster.engine START ARGS...` reads START, the JSON of a cluster.places.Start, sets the environment
that fits this host, and runs ipyparallel's engine with ARGS and the id of its rank. Nothing that it was told
stays on this host's disk.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from cluster import stacks as whereabouts
from cluster.environment import rank_environment, share_of_cores
from cluster.errors import ClusterError
from cluster.host import near_cores, own_cores
from cluster.network import address_towards
from cluster.places import Place, Start, launched_place
from cluster.watchdog import end_after, wait_for_input_end, wait_for_owner, wait_for_port

CONNECTION_VARIABLE = "IPP_CONNECTION_INFO"


def main() -> None:
    """Become the rank that the command line tells."""
    whereabouts.listen()
    start = Start.from_json(sys.argv[1])
    if start.stdin:
        os.environ[CONNECTION_VARIABLE] = sys.stdin.readline()
    address, port = registration()
    directory = Path(tempfile.mkdtemp(prefix="rank-"))
    clean_up = partial(shutil.rmtree, directory, ignore_errors=True)
    # Until the engine, once it is registered, takes the signal over.
    signal.signal(signal.SIGTERM, lambda *_: (clean_up(), os._exit(128 + signal.SIGTERM)))
    if start.stdin:
        end_after(wait_for_input_end, clean_up)
    if start.owner is None:
        end_after(lambda: wait_for_port(address, port), clean_up)
    else:
        end_after(partial(wait_for_owner, *start.owner), clean_up)
    try:
        place = start.place or launched_place(os.environ)
        set_environment(start, place, address)
    except ClusterError as error:
        clean_up()
        sys.exit(f"{error}")
    run_engine(place.rank, directory, sys.argv[2:], clean_up)


def registration() -> tuple[str, int]:
    """Return the address and the port at which the controller takes engines; exits where none was told."""
    told = os.environ.get(CONNECTION_VARIABLE, "")
    if not told.strip():
        sys.exit(f"the connection to the controller, {CONNECTION_VARIABLE}, could not be found")
    info = json.loads(told)
    return info["interface"].partition("://")[2], int(info["registration"])


def set_environment(start: Start, place: Place, controller: str) -> None:
    """Set this process's variables, and bind it to its cores where that is asked for."""
    cores = [own_cores()] * place.local_ranks
    # Torch is needed to see the devices and reads this when it is imported.
    os.environ["OMP_NUM_THREADS"] = str(share_of_cores(place, cores))
    from cluster.capacity import visible_devices

    devices = visible_devices()
    if start.numa:
        cores = near_cores(devices, place.local_ranks)
        for task in os.listdir("/proc/self/task"):
            # Memory follows: Linux takes a page from the node of the core that first writes to it.
            os.sched_setaffinity(int(task), cores[place.local_rank])
    own = address_towards(controller)
    if own is None:
        raise ClusterError(f"no network leads from this host to the controller at {controller}")
    for variable in rank_environment(place, devices, cores, own, start.variables):
        os.environ[variable.name] = variable.value


def run_engine(rank: int, directory: Path, arguments: list[str], clean_up: Callable[[], None]) -> None:
    """Run ipyparallel's engine as `rank` until it is told to end."""
    from ipyparallel.engine.app import IPEngine

    class RankEngine(IPEngine):  # type: ignore[misc]
        """An engine that needs its directory to register, and then no more."""

        async def complete_registration(self, *args: Any) -> None:
            await super().complete_registration(*args)
            clean_up()

    RankEngine.launch_instance([*arguments, f"--IPEngine.id={rank}", f"--profile-dir={directory}"])


if __name__ == "__main__":
    main()
