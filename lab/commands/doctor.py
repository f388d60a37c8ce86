"""What this machine has, what the lab would use of it, and what is missing."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import psutil
import torch

from cluster.devices import check_driver, first_line
from cluster.errors import ClusterError
from cluster.profiles import PROFILES
from lab.commands.gpu_findings import findings
from lab.techniques.attention.kernels import FASTEST_FIRST, choose_kernel, kernel_support, missing_requirement
from lab.units import format_bytes

_PACKAGES = (
    "torch", "transformers", "deepspeed", "ipyparallel", "jupyterlab", "ipywidgets", "anywidget",
    "papermill", "matplotlib",
)  # fmt: skip
HEAD_DIM = 128
"""Of Llama, Mistral, Qwen2 and Qwen3 in most sizes."""

_OPTIONAL = {
    "flash-attn": "another attention kernel is used instead",
    "liger-kernel": "loss_kernel='liger' wants it, and nothing else does",
}


def report() -> str:
    """The findings as text, a line each."""
    return "\n".join(f"{what:<14} {finding}" for what, finding in _findings())


def _findings() -> Iterator[tuple[str, str]]:
    memory = psutil.virtual_memory()
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield "cores", f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()}"
    yield "memory", f"{format_bytes(memory.total)}, {format_bytes(memory.available)} available"
    gpus = torch.cuda.device_count()
    refused = _refused()
    if refused is not None:
        yield "gpu", refused
        gpus = 0
    for index in range(gpus):
        yield f"gpu {index}", _gpu(index)
    yield from findings(gpus) if gpus else ()
    if not gpus and refused is None:
        yield "gpu", "none: ranks run on the CPU"
    yield "ranks", "one a GPU, joined by nccl" if gpus else "CPU processes, joined by gloo"
    yield from _attention(torch.device("cuda" if gpus else "cpu"))
    for package in _PACKAGES:
        yield package, _version(package) or "MISSING: pip install longcontext-lab"
    for package, instead in _OPTIONAL.items():
        yield package, _version(package) or f"not installed (optional, for GPUs): {instead}"
    for profile in PROFILES.values():
        if profile.program:
            found = shutil.which(profile.program)
            yield f"profile {profile.name}", found or f"not installed (optional): Debian's {profile.package}"
    if _version("jupyterlab"):
        from lab.jupyter.security import openings

        yield from (("OPEN", opening) for opening in openings())
    compiler = shutil.which("c++") or shutil.which("g++")
    yield "compiler", compiler or "MISSING: DeepSpeed's own Ulysses builds its communication op with one"


def _gpu(index: int) -> str:
    """The name and memory of a GPU; or CUDA's reason, where it is full or another process holds it alone."""
    try:
        name = torch.cuda.get_device_properties(index).name
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:
        return f"cannot be used: {first_line(error)}; nvidia-smi lists the processes that use it"
    return f"{name}, {format_bytes(total)}, {format_bytes(free)} free"


def _refused() -> str | None:
    """Why torch cannot use the GPUs that are here."""
    try:
        check_driver()
    except ClusterError as error:
        return str(error)
    return None


def _attention(device: torch.device) -> Iterator[tuple[str, str]]:
    """What kernel="auto" means here, for the head_dim of most models, and what each other kernel lacks."""
    try:
        machine = kernel_support(device)
    except RuntimeError as error:
        yield "attention", f"the fastest kernel is not known: {first_line(error)}"
        return
    yield "attention", f"kernel={choose_kernel('auto', machine, HEAD_DIM)!r} is the fastest here"
    for name in FASTEST_FIRST:
        yield f"  {name}", missing_requirement(name, machine, HEAD_DIM) or "there"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
