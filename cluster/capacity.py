"""How many ranks this machine can hold, asked before any is launched."""

import os

import psutil

from cluster.errors import ClusterError

GIB = 2**30

# Resident memory of one engine and its nanny, in bytes: 357 MiB once torch, its process group and
# transformers' Llama are imported (Linux, torch 2.13 for CPUs, psutil's rss), and 42 MiB for the nanny.
RANK_MEMORY = 400 * 2**20


def visible_devices() -> list[str]:
    """Return the CUDA devices this process may use, each by the name CUDA_VISIBLE_DEVICES has for it."""
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = named.split(",") if named else [str(index) for index in range(count)]
    return names[:count]


def check_capacity(ranks: int) -> None:
    """Raise ClusterError unless this machine can hold `ranks`.

    With GPUs each rank needs a whole one, which torch can use; without, each needs RANK_MEMORY bytes
    of the memory that is available.
    """
    from cluster.devices import check_driver, check_whole

    names = visible_devices()
    devices = len(names)
    if devices:
        check_driver()
        check_whole(ranks, names)
    if devices and ranks > devices:
        raise ClusterError(
            f"ranks={ranks}: each rank needs a GPU and this process sees {devices}; "
            f"ranks={devices} would work, or more of them on the CPU with CUDA_VISIBLE_DEVICES set to nothing"
        )
    available = psutil.virtual_memory().available
    fitting = available // RANK_MEMORY
    if not devices and ranks > fitting:
        raise ClusterError(
            f"ranks={ranks}: they need about {ranks * RANK_MEMORY / GIB:.1f} GiB of memory and "
            f"{available / GIB:.1f} GiB are available; ranks={fitting} would work"
        )
