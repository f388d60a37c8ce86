"""Attention kernels by name: which of them run on a machine, and which one is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from lab.decoder import decoder_of
from lab.errors import RecipeError
from lab.techniques.attention.flash import FLASH, HALF_DTYPES
from lab.techniques.attention.kernel import Kernel
from lab.techniques.attention.kernel_calls import CUDNN, FLASH_2, FLASH_3, FLASH_4, MODULES
from lab.techniques.limits import max_head_dim

FASTEST_FIRST = ("flash-attn-4", "flash-attn-3", "cudnn", "flash-attn-2", "torch")
"""The kernels in the order in which "auto" tries them; it tries FlashAttention-4 on ``BLACKWELL`` alone.

FlashAttention-3 (arXiv 2407.08608), figures 5 and 6, has this order on an H100: FlashAttention-3, cuDNN,
FlashAttention-2. Torch's own kernel is an older release of FlashAttention-2. The paper of FlashAttention-4
has it before cuDNN on a B200, up to 1.3 times as fast.
"""

BLACKWELL = 10
"""The major compute capability of B200, B300 and GB200. GeForce cards of that name have 12."""


SHORT = 16384
"""The queries of a call from which "auto" takes cuDNN.

cuDNN builds a graph for each new shape, and torch keeps it: for documents of ever new lengths that is time
and memory at each step. On an H100 a graph took 0.11 s (``lab bench gpu``, "edges"), and at 64K tokens cuDNN
computed 534 TFLOP/s, torch's kernel 305 ("attention"). What a call saves grows with the square of the tokens.
From here on, the layers and stages of one step make up for a graph.
"""


def apply_kernel(model: nn.Module, *, kernel: Kernel) -> None:
    """Set the kernel of every attention in ``model``; exchanges around the kernel do not change.

    Saves:
        Seconds, if the kernel is faster. Parameters, activations and gradients stay the same.
    Costs:
        The memory that the kernel allocates inside.
    Source:
        The kernel's own: see ``FASTEST_FIRST``.
    Composes with:
        Everything. ``apply_ring`` replaces the kernel by a ring, and takes the kernel as an argument.

    Raises:
        ModelError: See ``decoder_of``.
    """
    for module in decoder_of(model).attentions:
        module.lab_kernel = kernel  # type: ignore[assignment]


# ---- the choice of a kernel --------------------------------------------------------------------------------


@dataclass(frozen=True)
class KernelSupport:
    """The properties of a machine on which the choice of a kernel depends.

    Attributes:
        capability: The compute capability of the GPU, (9, 0) for Hopper; None for a CPU.
        cudnn: Whether torch has cuDNN.
        missing: For kernels whose module in ``MODULES`` cannot be imported, the error, by the kernel's name.
    """

    capability: tuple[int, int] | None
    cudnn: bool
    missing: dict[str, str]


def kernel_support(device: torch.device) -> KernelSupport:
    """Return what this machine supports on ``device``. On CUDA, this imports the packages of ``MODULES``."""
    if device.type != "cuda":
        return KernelSupport(None, False, {})
    missing = {}
    for name, module in MODULES.items():
        try:
            import_module(module)
        # A package that was built for another torch raises errors of many classes.
        except Exception as error:
            missing[name] = " ".join(str(error).split())
    return KernelSupport(
        torch.cuda.get_device_capability(device), torch.backends.cudnn.is_available(), missing
    )


def missing_requirement(
    name: str, support: KernelSupport, head_dim: int, dtype: torch.dtype = torch.bfloat16
) -> str | None:
    """Return why a kernel cannot compute attention with this D and dtype; None if it can.

    Args:
        name: One of ``FASTEST_FIRST``.
        support: What the machine supports.
        head_dim: D.
        dtype: The dtype of q, k and v.
    """
    if name == "torch":
        return None
    if support.capability is None:
        return "it needs an NVIDIA GPU"
    generation = support.capability[0]
    if name == "flash-attn-3" and generation != 9:
        return "it needs a Hopper GPU (compute capability 9.0)"
    if name in ("cudnn", "flash-attn-4") and generation < 9:
        return "it needs a Hopper GPU or a later one (compute capability 9.0)"
    if name == "flash-attn-2" and generation < 8:
        return "it needs an Ampere GPU or a later one (compute capability 8.0)"
    if name == "cudnn" and not support.cudnn:
        return "this torch has no cuDNN"
    if name in support.missing:
        return f"{MODULES[name]} cannot be imported ({support.missing[name]})"
    if dtype not in HALF_DTYPES:
        return f"it takes bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    limit = max_head_dim(name)
    return f"it takes a head_dim of at most {limit}, not {head_dim}" if head_dim > limit else None


def choose_kernel(
    name: str, support: KernelSupport, head_dim: int, dtype: torch.dtype = torch.bfloat16
) -> str:
    """Return the name of the kernel to use: ``name`` itself, or for "auto" the fastest that can run.

    Args:
        name: One of ``FASTEST_FIRST``, or "auto".
        support: What the machine supports.
        head_dim: D.
        dtype: The dtype of q, k and v.

    Raises:
        RecipeError: The kernel cannot run; the message has the reason and the kernels that can.
    """
    reasons = {kernel: missing_requirement(kernel, support, head_dim, dtype) for kernel in FASTEST_FIRST}
    available = [kernel for kernel, reason in reasons.items() if reason is None]
    if name == "auto":
        blackwell = support.capability is not None and support.capability[0] == BLACKWELL
        return next(kernel for kernel in available if kernel != "flash-attn-4" or blackwell)
    if name not in available:
        raise RecipeError(f"kernel={name!r}: {reasons[name]}; these work here: auto, {', '.join(available)}")
    return name


def kernel_for(name: str, device: torch.device, head_dim: int, dtype: torch.dtype) -> Kernel:
    """Return the kernel to use on ``device``, see ``choose_kernel``.

    Where "auto" chooses cuDNN, calls of fewer than ``SHORT`` queries go to torch's kernel.

    Raises:
        RecipeError: See ``choose_kernel``.
    """
    chosen = choose_kernel(name, kernel_support(device), head_dim, dtype)
    kernel = KERNELS[chosen]
    return _by_length(KERNELS["torch"], kernel) if (name, chosen) == ("auto", "cudnn") else kernel


def _by_length(short: Kernel, long: Kernel) -> Kernel:
    """Return a kernel that calls ``short`` for fewer than ``SHORT`` queries, and ``long`` for others."""

    def of(q: Tensor) -> Kernel:
        return short if q.shape[2] < SHORT else long

    def forward(q: Tensor, *keys: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
        return of(q).forward(q, *keys, **settings)

    def backward(
        grad_out: Tensor, q: Tensor, *rest: Tensor, **settings: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        return of(q).backward(grad_out, q, *rest, **settings)

    return Kernel(forward, backward)


KERNELS = {
    "torch": FLASH,
    "cudnn": CUDNN,
    "flash-attn-2": FLASH_2,
    "flash-attn-3": FLASH_3,
    "flash-attn-4": FLASH_4,
}
"""All kernels by name. Each has the arguments and results of ``flash_forward`` and ``flash_backward``."""
