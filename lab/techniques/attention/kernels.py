"""Attention kernels by name: what each lacks on a machine, and which is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

import torch
from torch import nn

from lab.decoder import decoder_of
from lab.errors import RecipeError
from lab.techniques.attention.flash import FLASH, HALF, Kernel
from lab.techniques.attention.kernel_calls import CUDNN, FLASH_2, FLASH_3, MODULES

FASTEST_FIRST = ("flash-attn-3", "cudnn", "flash-attn-2", "torch")
"""The order in which "auto" looks. FlashAttention-3 (arXiv 2407.08608), figures 5 and 6, on an H100: itself,
then cuDNN, then FlashAttention-2, which is what torch has built in, of an older release.
"""


def apply_kernel(model: nn.Module, *, kernel: Kernel) -> None:
    """Let every attention of ``model`` run ``kernel``, under whatever exchange is applied around it.

    Saves and costs: what the kernel does; parameters, activations and gradients are the same. Composes with
    everything; ``apply_ring`` sends the keys of a ring through it, where it is given it too.

    Raises:
        ModelError: see ``decoder_of``.
    """
    for module in decoder_of(model).attentions:
        module.lab_kernel = kernel  # type: ignore[assignment]


# ---- which there are, and which is chosen ------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """What a choice depends on.

    Attributes:
        capability: of the GPU, (9, 0) for Hopper; None for a CPU.
        cudnn: torch has it.
        missing: why a module of ``MODULES`` cannot be imported, by the kernel's name.
    """

    capability: tuple[int, int] | None
    cudnn: bool
    missing: dict[str, str]


def machine_of(device: torch.device) -> Machine:
    """What is there for ``device``; packages are imported to know, and only where they could be used."""
    if device.type != "cuda":
        return Machine(None, False, {})
    missing = {}
    for name, module in MODULES.items():
        try:
            import_module(module)
        # Built for another torch, it fails in the linker, and says so in many ways.
        except Exception as error:
            missing[name] = " ".join(str(error).split())
    return Machine(torch.cuda.get_device_capability(device), torch.backends.cudnn.is_available(), missing)


def lacks(name: str, machine: Machine, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """What keeps a kernel from running attention with this D on this machine; None if nothing does."""
    if name == "torch":
        return None
    if machine.capability is None:
        return "it needs an NVIDIA GPU"
    generation = machine.capability[0]
    if name == "flash-attn-3" and generation != 9:
        return "it needs a Hopper GPU (compute capability 9.0)"
    if name == "cudnn" and generation < 9:
        return "it needs a Hopper GPU or a later one (compute capability 9.0)"
    if name == "flash-attn-2" and generation < 8:
        return "it needs an Ampere GPU or a later one (compute capability 8.0)"
    if name == "cudnn" and not machine.cudnn:
        return "this torch has no cuDNN"
    if name in machine.missing:
        return f"{MODULES[name]} cannot be imported ({machine.missing[name]})"
    if dtype not in HALF:
        return f"it takes bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    most = 128 if name == "cudnn" else 256
    return f"it takes a head_dim of at most {most}, not {head_dim}" if head_dim > most else None


def chosen(name: str, machine: Machine, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> str:
    """The kernel's name itself if it is there, or for "auto" the fastest that is.

    Raises:
        RecipeError: one asked for by name that is not there: what it lacks, and which are there.
    """
    missing = {known: lacks(known, machine, head_dim, dtype) for known in FASTEST_FIRST}
    there = [known for known, what in missing.items() if what is None]
    if name == "auto":
        return there[0]
    if name not in there:
        raise RecipeError(f"kernel={name!r}: {missing[name]}; these are there: auto, {', '.join(there)}")
    return name


def kernel_for(name: str, device: torch.device, head_dim: int, dtype: torch.dtype) -> Kernel:
    """The kernel of this name, or the fastest for "auto", for attention with this D in ``dtype``.

    Raises:
        RecipeError: see ``chosen``.
    """
    return KERNELS[chosen(name, machine_of(device), head_dim, dtype)]


KERNELS = {"torch": FLASH, "cudnn": CUDNN, "flash-attn-2": FLASH_2, "flash-attn-3": FLASH_3}
"""All by name. Each takes and gives what ``flash_forward`` and ``flash_backward`` do."""
