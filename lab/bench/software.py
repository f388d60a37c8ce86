"""What a figure was measured on: the device, and the versions of what ran."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import torch


def measured_on(device: str) -> str:
    """Name a "cuda" or "cpu" device, with ``versions``."""
    return f"{torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}, {versions()}"


def versions() -> str:
    """Name the versions of torch (and its CUDA), cuDNN, transformers and the kernels that are installed."""
    found = [f"torch {torch.__version__}"]
    if torch.backends.cudnn.is_available():
        found.append(f"cuDNN {torch.backends.cudnn.version()}")
    for package in ("transformers", "flash-attn", "flash-attn-3", "liger-kernel"):
        with suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return ", ".join(found)
