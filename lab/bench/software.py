"""What a figure was measured on: the device, and the versions of what ran."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import torch

from cluster.host import ask_gpus
from lab.planning.plan_cache import sources_hash

DIGITS = 12
"""Of the hash of the lab's sources, so many are printed."""


def measured_on(device: str) -> str:
    """Name a "cuda" or "cpu" device, with ``versions``."""
    return f"{torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}, {versions()}"


def versions() -> str:
    """Name the versions of torch (and its CUDA), cuDNN, transformers, the kernels, the driver and the lab.

    The lab's version is the first digits of the hash of its sources.
    """
    found = [f"torch {torch.__version__}"]
    if torch.backends.cudnn.is_available():
        found.append(f"cuDNN {torch.backends.cudnn.version()}")
    for package in ("transformers", "flash-attn", "flash-attn-3", "liger-kernel"):
        with suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    drivers = {row[0] for row in ask_gpus("driver_version")}
    found += [f"driver {name}" for name in sorted(drivers)]
    return ", ".join([*found, f"lab {sources_hash()[:DIGITS]}"])
