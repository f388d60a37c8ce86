"""The versions of what ran: a figure is kept with them, and with its device's name."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import torch


def versions() -> str:
    """Name the versions of torch (and its CUDA), cuDNN, transformers and the kernels that are installed."""
    found = [f"torch {torch.__version__}"]
    if torch.backends.cudnn.is_available():
        found.append(f"cuDNN {torch.backends.cudnn.version()}")
    for package in ("transformers", "flash-attn", "flash-attn-3", "liger-kernel"):
        with suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return ", ".join(found)
