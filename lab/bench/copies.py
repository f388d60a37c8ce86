"""The rates of copies between device and host, alone and during matrix products, and the cost of pinning."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
from torch import Tensor

from cluster.limits import memory
from lab.bench.timing import rounds, seconds
from lab.rehearsing.rehearse import DeviceType
from lab.units import GiB

COPIES = 4
"""How many copies run during the products, one after the other."""

REPEATS = 2

PRODUCTS = 200

SIDES = {"cuda": 8192, "cpu": 256}
"""The rows and columns of the square matrices that are multiplied."""


def measure_copies(where: DeviceType, gib: float) -> dict[str, Any]:
    """Measure the pinning of host memory, copies of ``gib`` GiB each way, and products during copies.

    The rate of the device's own memory counts what a copy reads and what it writes.

    On CPU no memory is pinned, copies and products run one after the other, and copies are from host to host.
    """
    cuda = where == "cuda"
    x = torch.ones(int(gib * GiB) // 2, dtype=torch.bfloat16, device=where)
    pinned = torch.empty(0)

    def pin() -> None:
        nonlocal pinned
        pinned = torch.empty_like(x, device="cpu", pin_memory=cuda)

    pinning = seconds(pin)
    pageable = torch.zeros_like(x, device="cpu")
    to_host = copy_rate(pinned, x)
    side = SIDES[where]
    a = torch.randn(side, side, device=where, dtype=torch.bfloat16 if cuda else torch.float32)

    def products() -> None:
        for _ in range(PRODUCTS):
            a @ a

    def both() -> None:
        # On CPU there is no other stream, and its context is empty.
        with torch.cuda.stream(torch.cuda.Stream() if cuda else None):
            for _ in range(COPIES):
                pinned.copy_(x, non_blocking=True)
        products()

    products()
    alone, beside = map(median, zip(*rounds(3, products, both), strict=True))
    total = torch.cuda.get_device_properties(0).total_memory if cuda else memory().total
    return {
        "memory GiB": total / GiB,
        "memory GB/s": 2 * copy_rate(torch.empty_like(x), x) / 1e9,
        "pin s/GiB": pinning / gib,
        "to host GB/s": to_host / 1e9,
        "from host GB/s": copy_rate(x, pinned) / 1e9,
        "to pageable GB/s": copy_rate(pageable, x) / 1e9,
        "from pageable GB/s": copy_rate(x, pageable) / 1e9,
        "products s": alone,
        "products with copies beside s": beside,
        "copies alone s": COPIES * x.nbytes / to_host,
    }


def copy_rate(target: Tensor, source: Tensor) -> float:
    """Return the bytes per second of the fastest of some copies, after a first one."""
    times = rounds(1 + REPEATS, lambda: target.copy_(source, non_blocking=True))
    return source.nbytes / min(min(times[1:]))
