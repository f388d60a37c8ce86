"""Checks of this machine's GPUs, made before torch uses them."""

import os
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist

from cluster.errors import ClusterError
from cluster.host import ask_gpus, is_device

GIB = 2**30

# The share of a device's memory that other processes may use. A desktop uses some percent.
OTHERS_SHARE = 0.1
# The memory of this process's CUDA context, which torch does not count. It was under 1 GiB on every GPU so
# far.
CONTEXT = GIB
# How long the driver may take to free the memory of a process that was killed.
FREE_SECONDS = 10.0
POLL_SECONDS = 0.5


def check_driver() -> None:
    """Check that torch can use the GPUs of this machine, if it has any.

    Raises:
        ClusterError: torch cannot use them, for example because the driver is too old.
    """
    count = torch.cuda.device_count()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the error has the same text
        if not count or torch.cuda.is_available():
            return
        try:
            torch.cuda.init()
            reason = "torch gives no reason"
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0].split(". ")[0]
    raise ClusterError(
        f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, cannot use the {count} "
        f"GPU{'s' * (count > 1)} here: {reason}; a newer driver would work, or the CPU with "
        "CUDA_VISIBLE_DEVICES set to an empty text"
    )


def check_mig(ranks: int, devices: list[str]) -> None:
    """Check that several ranks use whole GPUs. NCCL cannot join MIG slices.

    Args:
        ranks: The number of ranks.
        devices: The visible devices, by their names in CUDA_VISIBLE_DEVICES.

    Raises:
        ClusterError: There are several ranks, and a device is a MIG slice or is divided into slices.
    """
    variable = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    slices = [name.strip() for name in variable.split(",") if name.strip().startswith("MIG-")]
    for index, uuid, mode in ask_gpus("index", "uuid", "mig.mode.current"):
        if mode == "Enabled" and any(is_device(name, index, uuid) for name in devices):
            slices.append(f"GPU {index}")
    if ranks > 1 and slices:
        raise ClusterError(
            f"ranks={ranks}: {slices[0]} is a MIG slice or is divided into slices, and NCCL joins whole GPUs "
            "only; ranks=1 would work, or MIG switched off by nvidia-smi -mig 0"
        )


def check_free(wait: float = 0.0, device: torch.device | None = None) -> None:
    """Check that the current CUDA device can be used, and that other processes do not fill it.

    Args:
        wait: How long to wait for the others to free their memory, in seconds.
        device: The device to make the current one first. None keeps the current device.

    Raises:
        ClusterError: CUDA refuses the device, for example because another process holds it in exclusive mode,
            or other processes use more than a tenth of its memory.
    """
    deadline = time.monotonic() + wait
    while True:
        problem = _find_problem(device)
        if problem is None:
            return
        if time.monotonic() >= deadline:
            raise ClusterError(problem)
        time.sleep(POLL_SECONDS)


def join_group(local_rank: int = 0, **options: Any) -> str:
    """Join the default process group: gloo for CPUs, and NCCL as well where there are GPUs.

    Args:
        local_rank: The number of this process's device among those that it sees.
        **options: Further arguments of `init_process_group`.

    Returns:
        The type of the device that this rank works on, `cuda` or `cpu`.

    Raises:
        ClusterError: torch cannot use the GPU, or other processes fill it.
    """
    check_driver()
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", **options)
        return "cpu"
    device = torch.device("cuda", local_rank)
    check_free(FREE_SECONDS, device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, **options)
    return device.type


def _find_problem(device: torch.device | None) -> str | None:
    """Return why the current device cannot be used, in one line, or None."""
    try:
        if device is not None:
            torch.cuda.set_device(device)
        free, total = torch.cuda.mem_get_info()
    except RuntimeError as error:
        return (
            f"{device or 'the GPU'} cannot be used: {first_line(error)}; end the processes that use it "
            "(nvidia-smi lists them), or choose another GPU with CUDA_VISIBLE_DEVICES"
        )
    used = total - free - torch.cuda.memory_reserved()
    if used <= OTHERS_SHARE * total + CONTEXT:
        return None
    return (
        f"{torch.cuda.get_device_name()}: other processes use {used / GIB:.1f} of its {total / GIB:.1f} "
        "GiB; end them (nvidia-smi lists them), or choose another GPU with CUDA_VISIBLE_DEVICES"
    )


def first_line(error: Exception) -> str:
    """Return the first line of the text of `error`, or its type where it has no text."""
    return str(error).partition("\n")[0] or type(error).__name__
