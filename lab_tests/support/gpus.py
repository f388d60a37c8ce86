"""Stand-ins for what torch and nvidia-smi answer on a machine with GPUs."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from cluster import devices
from lab.units import GiB

H100 = "NVIDIA H100 80GB HBM3"
TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver by "
    "downloading and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)


def patch_gpus(
    patch: pytest.MonkeyPatch,
    count: int,
    *,
    usable: bool = True,
    taken: int = 0,
    reserved: int = 0,
    rows: Sequence[Sequence[str]] = (),
) -> None:
    """Makes this a host of ``count`` GPUs of 80 GiB, of which ``taken`` bytes are in use.

    Args:
        patch: Undoes everything at the end of the test.
        count: GPUs that torch counts.
        usable: Whether CUDA is available; CUDA cannot be initialized in either case.
        taken: Bytes of a GPU that any process has.
        reserved: Bytes of a GPU that this process's allocator has.
        rows: What nvidia-smi answers to every query.
    """

    def init() -> None:
        raise RuntimeError(TOO_OLD)

    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    patch.setattr(torch.cuda, "device_count", lambda: count)
    patch.setattr(torch.cuda, "is_available", lambda: usable)
    patch.setattr(torch.cuda, "init", init)
    patch.setattr(torch.cuda, "mem_get_info", lambda: (80 * GiB - taken, 80 * GiB))
    patch.setattr(torch.cuda, "memory_reserved", lambda: reserved)
    patch.setattr(torch.cuda, "get_device_name", lambda *_: H100)
    patch.setattr(torch.cuda, "set_device", lambda _: None)
    patch.setattr(devices, "ask_gpus", lambda *_: [list(row) for row in rows])
    patch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("joined"))


class Card:
    """Stands in for torch.cuda: a GPU of 79 GiB on which 1 GiB is taken, and 0.25 GiB of that is torch's.

    Attributes:
        fractions: The fractions of the GPU that were set as this process's limit.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fractions: list[float] = []
        for name, answer in {
            "get_device_properties": lambda _: SimpleNamespace(total_memory=79 * GiB),
            "current_device": lambda: 0,
            "mem_get_info": lambda: (78 * GiB, 79 * GiB),
            "memory_reserved": lambda: GiB // 4,
            "set_per_process_memory_fraction": self.fractions.append,
        }.items():
            monkeypatch.setattr(torch.cuda, name, answer)
