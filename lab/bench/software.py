"""The device and the software versions with which figures are measured."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import torch

from cluster.host import ask_gpus
from lab.bench.gpu_items import DIGITS
from lab.planning.plan_cache import sources_hash


def device_and_versions(device: str) -> str:
    """Return the name of a "cuda" or "cpu" device, and the ``versions``."""
    return f"{torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}, {versions()}"


def versions() -> str:
    """Return the versions of torch, cuDNN, transformers, the kernels, the driver and the lab as text.

    The version of the lab is the first digits of the hash of its sources.
    """
    names = [f"torch {torch.__version__}"]
    if torch.backends.cudnn.is_available():
        names.append(f"cuDNN {torch.backends.cudnn.version()}")
    for package in ("transformers", "flash-attn", "flash-attn-3", "flash-attn-4", "liger-kernel"):
        with suppress(PackageNotFoundError):
            names.append(f"{package} {version(package)}")
    drivers = {row[0] for row in ask_gpus("driver_version")}
    names += [f"driver {driver}" for driver in sorted(drivers)]
    return ", ".join([*names, f"lab {sources_hash()[:DIGITS]}"])
