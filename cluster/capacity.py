"""How many ranks fit on this machine, or in its container. It is checked before a rank is launched."""

import math
import os

from cluster import limits
from cluster.errors import ClusterError
from cluster.network import LOOPBACK, address_towards

GIB = 2**30

# The bytes that a cluster takes in all its processes, and those of each rank, after a first step of `tiny`
# (Linux, torch 2.13 for CPUs, psutil's pss). The first is for the controller, the process that is forked, and
# what the owner imports; the second for a rank and its nanny. Forked ranks share imports, and take less.
CLUSTER_MEMORY = 350 * 2**20
RANK_MEMORY = 450 * 2**20

# What JupyterLab takes, and a kernel in addition to the owner of a cluster.
PERSON_MEMORY, PERSON_THREADS = 300 * 2**20, 35

# The files that the controller opens, and the threads of all processes after that step on two cores.
CLUSTER_FILES, RANK_FILES = 120, 6
CLUSTER_THREADS, RANK_THREADS = 8, 35


def visible_devices() -> list[str]:
    """Return the CUDA devices that this process may use, each by its name in CUDA_VISIBLE_DEVICES."""
    import torch

    count = torch.cuda.device_count()
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = (
        [name.strip() for name in variable.split(",")] if variable else [str(index) for index in range(count)]
    )
    return names[:count]


def check_capacity(ranks: int) -> None:
    """Check that the ranks fit on this machine.

    Where there are GPUs, each rank needs a whole GPU that torch can use. Where there are none, each rank
    needs RANK_MEMORY bytes of the memory that is available here.

    Args:
        ranks: The number of ranks.

    Raises:
        ClusterError: They do not fit.
    """
    from cluster.devices import check_driver, check_mig

    names = visible_devices()
    devices = len(names)
    if devices:
        check_driver()
        check_mig(ranks, names)
    if devices and ranks > devices:
        raise ClusterError(
            f"ranks={ranks}: each rank needs a GPU and this process sees {devices}; "
            f"ranks={devices} would work, or more ranks on the CPU with CUDA_VISIBLE_DEVICES set to an empty "
            "text"
        )
    total, available = limits.memory()
    needed, threads = needs(ranks)
    fitting = (available - CLUSTER_MEMORY) // RANK_MEMORY
    if not devices and ranks > fitting:
        raise ClusterError(
            f"ranks={ranks}: they need about {needed / GIB:.1f} GiB of memory, and {available / GIB:.1f} of "
            f"{total / GIB:.1f} GiB are available here; {_would_work(fitting)}"
        )
    free = limits.free_threads()
    if threads > free:
        fitting = ranks - math.ceil((threads - free) / RANK_THREADS)
        raise ClusterError(
            f"ranks={ranks}: they need about {threads} threads, and {free:.0f} can be started here (ulimit "
            f"-u, or the container's limit of processes); {_would_work(fitting)}"
        )


def needs(ranks: int) -> tuple[int, int]:
    """Return the bytes of memory and the threads of a cluster of so many ranks on the CPU."""
    # OpenMP starts a thread for each core, in all ranks together.
    return CLUSTER_MEMORY + ranks * RANK_MEMORY, CLUSTER_THREADS + limits.cores() + ranks * RANK_THREADS


def people(ranks: int) -> tuple[int, int]:
    """Return how many people fit here, and the bytes of memory that each needs.

    Each has JupyterLab, a kernel and so many ranks on the CPU.
    """
    memory, threads = needs(ranks)
    memory, threads = memory + PERSON_MEMORY, threads + PERSON_THREADS
    return int(max(0, min(limits.memory().available / memory, limits.free_threads() / threads))), memory


def check_controller(ranks: int) -> None:
    """Check that a controller can serve so many ranks from this machine, wherever they run.

    Raises:
        ClusterError: The loopback interface is down, or a process may open too few files.
    """
    if address_towards(LOOPBACK) is None:
        raise ClusterError(
            f"{LOOPBACK} cannot be reached: as root, `ip link set lo up` brings its interface up"
        )
    files, needed = limits.most_open_files(), CLUSTER_FILES + ranks * RANK_FILES
    if needed > files:
        raise ClusterError(
            f"ranks={ranks}: the controller opens about {needed} files, and {files} are allowed; `ulimit -n "
            f"{needed}` would work"
        )


def _would_work(ranks: float) -> str:
    return f"ranks={ranks:.0f} would work" if ranks >= 1 else "it is too little for one rank"
