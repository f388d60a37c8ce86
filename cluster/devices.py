"""What is wrong with this machine's GPUs, said in a line before anything is made on them."""

import os
import time
import warnings

import torch

from cluster.errors import ClusterError
from cluster.host import ask_gpus

GIB = 2**30

# Of a device's memory: what others may hold before it is refused. A desktop takes some percent.
TAKEN_SHARE = 0.1
# This process's CUDA context, which the device counts and torch does not: under 1 GiB on all GPUs so far.
CONTEXT = GIB
# Until the driver has freed the memory of a process that was killed.
FREE_SECONDS = 10.0
POLL_SECONDS = 0.5


def check_driver() -> None:
    """Raise ClusterError where there are GPUs and torch cannot use them, as with a driver that is too old."""
    count = torch.cuda.device_count()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of what the error says
        if not count or torch.cuda.is_available():
            return
        try:
            torch.cuda.init()
            said = "it does not say why"
        except (RuntimeError, AssertionError) as error:
            said = str(error).splitlines()[0].split(". ")[0]
    raise ClusterError(
        f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, cannot use the {count} "
        f"GPU{'s' * (count > 1)} here: {said}; a newer driver would work, or the CPU with "
        "CUDA_VISIBLE_DEVICES set to nothing"
    )


def check_whole(ranks: int, devices: list[str]) -> None:
    """Raise ClusterError where several ranks are to share out GPUs of which some are cut into MIG slices.

    `devices` are the visible ones, by the names that CUDA_VISIBLE_DEVICES has for them.
    """
    slices = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name[:4] == "MIG-"]
    for index, uuid, mode in ask_gpus("index", "uuid", "mig.mode.current"):
        if mode == "Enabled" and any(name == index or uuid.startswith(name) for name in devices):
            slices.append(f"GPU {index}")
    if ranks > 1 and slices:
        raise ClusterError(
            f"ranks={ranks}: {slices[0]} is a MIG slice or cut into such, and NCCL joins whole GPUs only; "
            "ranks=1 would work, or MIG switched off (nvidia-smi -mig 0)"
        )


def check_free(wait: float = 0.0) -> None:
    """Raise ClusterError where other processes fill the current CUDA device, also after `wait` seconds."""
    deadline = time.monotonic() + wait
    while True:
        free, total = torch.cuda.mem_get_info()
        taken = total - free - torch.cuda.memory_reserved()
        if taken <= TAKEN_SHARE * total + CONTEXT:
            return
        if time.monotonic() >= deadline:
            break
        time.sleep(POLL_SECONDS)
    raise ClusterError(
        f"{torch.cuda.get_device_name()}: {taken / GIB:.1f} of its {total / GIB:.1f} GiB are taken by other "
        "processes; end them (nvidia-smi lists them), or choose another GPU with CUDA_VISIBLE_DEVICES"
    )
