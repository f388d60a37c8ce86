"""The rates of copies between device and host, alone and during matrix products, and the cost of pinning."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from lab.units import GiB

COPIES = 4
"""How many copies run during the products, one after the other."""


def measure_copies(where: str, gib: float) -> dict[str, Any]:
    """Measure the pinning of host memory, copies of ``gib`` GiB each way, and products during copies.

    On CPU no memory is pinned, copies and products run one after the other, and copies are from host to host.
    """
    cuda = where == "cuda"
    x = torch.ones(int(gib * GiB) // 2, dtype=torch.bfloat16, device=where)
    pinned = torch.empty(0)

    def pin() -> None:
        nonlocal pinned
        pinned = torch.empty_like(x, device="cpu", pin_memory=cuda)

    pinning = _seconds(pin, cuda)
    away = _seconds(lambda: pinned.copy_(x, non_blocking=True), cuda)
    back = _seconds(lambda: x.copy_(pinned, non_blocking=True), cuda)
    plain = torch.zeros_like(x, device="cpu")
    pageable_away = _seconds(lambda: plain.copy_(x, non_blocking=True), cuda)
    pageable_back = _seconds(lambda: x.copy_(plain, non_blocking=True), cuda)
    side = 8192 if cuda else 256
    a = torch.randn(side, side, device=where, dtype=torch.bfloat16 if cuda else torch.float32)

    def products() -> None:
        for _ in range(200):
            a @ a

    def both() -> None:
        if cuda:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                copies()
        else:
            copies()
        products()

    def copies() -> None:
        for _ in range(COPIES):
            pinned.copy_(x, non_blocking=True)

    products()
    alone, beside = _seconds(products, cuda), _seconds(both, cuda)
    rates = {
        "to host GB/s": away,
        "from host GB/s": back,
        "to pageable GB/s": pageable_away,
        "from pageable GB/s": pageable_back,
    }
    return {
        "pin s/GiB": pinning / gib,
        **{name: x.nbytes / seconds / 1e9 for name, seconds in rates.items()},
        "products s": alone,
        "products with copies beside s": beside,
        "copies alone s": COPIES * away,
    }


def _seconds(work: Callable[[], object], cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start
