"""How many ranks fit on this machine. It is checked before a rank is launched."""

import os

import psutil

from cluster.errors import ClusterError

GIB = 2**30

# The resident memory of one engine and its nanny, in bytes. The engine takes 357 MiB once torch, its process
# group and transformers' Llama are imported (Linux, torch 2.13 for CPUs, psutil's rss). The nanny takes 42
# MiB.
RANK_MEMORY = 400 * 2**20


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
    needs RANK_MEMORY bytes of the available memory.

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
    available = psutil.virtual_memory().available
    capacity = available // RANK_MEMORY
    if not devices and ranks > capacity:
        raise ClusterError(
            f"ranks={ranks}: they need about {ranks * RANK_MEMORY / GIB:.1f} GiB of memory and "
            f"{available / GIB:.1f} GiB are available; ranks={capacity} would work"
        )
