"""What operators cost on a named device: floating-point operations, bytes moved, seconds.

The estimate is a sum over the operators of a step, one after the other on the device, each at the rate that
the table in ``hardware.py`` gives for its kind. Copies between device and host run at the same time, because
offload prefetches; so do all-to-alls that are waited for later (UPipe's overlap, a ring's steps). The device
waits for operators on tensors in host memory (clipping and Adam of an optimizer on the host), which run at
the rate of host memory, ``HOST_MEMORY``. A disk in place of host memory runs at the same time as all of it.
What it leaves out:
overlap of other collectives with computation, launches, imbalance between ranks.

Where the host memory of a machine is given, the bytes beyond what its ranks may pin
(``lab/techniques/host_memory.py``) are copied at the rate of pageable memory, ``PAGEABLE_RATE``. Where it is
not given, all are pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from lab.memory.observer import Observer
from lab.planning.hardware import PAGEABLE_RATE, Figure, Hardware
from lab.techniques.slices import repetitions
from lab.torch_private import process_group_of, storage_id

BACKWARD_FLOPS = 2.5
"""Of flash attention's backward, in forwards: five matrix products to two (arXiv 2307.08691)."""

PRODUCTS = {
    "aten.mm": 0, "aten.bmm": 0, "aten.mv": 0, "aten.dot": 0, "aten.vdot": 0, "aten._grouped_mm": 0,
    "aten.addmm": 1, "aten.baddbmm": 1, "aten.addbmm": 1, "aten.addmv": 1, "aten.addr": 1,
    "aten._addmm_activation": 1, "lab.grouped_product": 0, "lab.grouped_outer_product": 0,
}  # fmt: skip
"""The operators that are products of dense matrices or vectors, and which argument is the first factor.

The second factor follows it. An operator in place has the name with ``_`` at its end. In a grouped product,
each row of the first factor is multiplied by one matrix, or by one other row.
"""

OF_A_VECTOR = ("aten.mv", "aten.addmv", "aten.dot", "aten.vdot")
"""The products whose second factor is one vector, by which each row of the first is multiplied."""

ALL_TO_ALL, ARRIVAL = "c10d.alltoall_base_", "lab.arrival"
NOTHING = (
    "aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty", "aten.new_empty_strided",
    "aten._unsafe_view", "lab.empty_host", "profiler._record_function_enter_new",
    "profiler._record_function_exit",
)  # fmt: skip
"""Operators that touch no element, though they are no views."""

FLASH = "aten._scaled_dot_product_flash_attention"


HOST_MEMORY = Figure(
    614.4e9,
    "B/s",
    "assumed for every node: two sockets with 8 channels of DDR5-4800 each, as NVIDIA DGX H100 (Xeon 8480C)",
)
"""The rate of a node's memory, which its ranks share; ``HOST_MEMORY_SHARE`` of it is reached."""

HOST_MEMORY_SHARE = Figure(0.5, "1", "assumed: Adam also writes most of what it reads, which is counted once")


@dataclass(frozen=True)
class Costs:
    """One rank's: ``flops``; ``link_bytes`` sent to other ranks; ``host_bytes`` copied to and from the host.

    ``device_seconds`` is the time of computation and of waiting for collectives, ``link_seconds`` the share
    of the latter, ``host_seconds`` that of copies. ``tile_writes`` and ``tile_reads`` are the bytes among
    ``host_bytes`` that are written to, and read from, the tiles of streamed layers. ``disk_seconds`` is the
    time that a disk takes for those, where the tiles are on one; see ``with_disk``.
    """

    flops: int = 0
    link_bytes: int = 0
    host_bytes: int = 0
    device_seconds: float = 0.0
    host_seconds: float = 0.0
    link_seconds: float = 0.0
    tile_writes: int = 0
    tile_reads: int = 0
    disk_seconds: float = 0.0

    def __add__(self, other: Costs) -> Costs:
        return Costs(
            self.flops + other.flops,
            self.link_bytes + other.link_bytes,
            self.host_bytes + other.host_bytes,
            self.device_seconds + other.device_seconds,
            self.host_seconds + other.host_seconds,
            self.link_seconds + other.link_seconds,
            self.tile_writes + other.tile_writes,
            self.tile_reads + other.tile_reads,
            self.disk_seconds + other.disk_seconds,
        )

    def __mul__(self, factor: int) -> Costs:
        return Costs(
            self.flops * factor,
            self.link_bytes * factor,
            self.host_bytes * factor,
            self.device_seconds * factor,
            self.host_seconds * factor,
            self.link_seconds * factor,
            self.tile_writes * factor,
            self.tile_reads * factor,
            self.disk_seconds * factor,
        )

    @property
    def seconds(self) -> float:
        """Of the whole: copies and the disk hide behind computation, or computation behind one of them."""
        return max(self.device_seconds, self.host_seconds, self.disk_seconds)

    def with_disk(self, hardware: Hardware, rate: int | None, ranks: int) -> Costs:
        """Return these costs with the tiles of streamed layers on a disk.

        All bytes that are written and read are counted, one after the other. The page cache may keep some of
        them away from the disk, so the time is at most this.

        Args:
            hardware: Has the rates of the disk.
            rate: Bytes per second of the disk, both ways, in place of those.
            ranks: The ranks that share the disk.
        """
        write, read = (rate or figure.value for figure in (hardware.disk_write, hardware.disk_read))
        return replace(self, disk_seconds=ranks * (self.tile_writes / write + self.tile_reads / read))

    def with_pageable(self, share: float) -> Costs:
        """Return these costs with copies of memory that is not pinned at ``PAGEABLE_RATE``.

        The tiles of streamed layers on a disk are not pinned; see ``with_disk``. That the host waits for a
        copy to such memory is not counted.

        Args:
            share: Of the other bytes that are copied, the share whose host memory is not pinned.
        """
        if not self.host_bytes:
            return self
        on_disk = (self.tile_writes + self.tile_reads) if self.disk_seconds else 0
        pageable = on_disk + share * (self.host_bytes - on_disk)
        pinned_seconds = self.host_seconds * (1 - pageable / self.host_bytes)
        return replace(self, host_seconds=pinned_seconds + pageable / PAGEABLE_RATE.value)


class CostCounter(Observer):
    """Sums the costs of the operators that run inside it, as if on ``hardware``.

    Groups of ranks that lie within a node of ``ranks_per_node`` talk over its links, others over the network.
    """

    def __init__(self, hardware: Hardware, ranks_per_node: int) -> None:
        super().__init__()
        self.hardware, self.ranks_per_node = hardware, ranks_per_node
        self.total = Costs()
        self.on_host: Callable[[tuple[Any, ...]], bool] = lambda _: False
        """Returns whether an operator with these arguments runs on the host; a meter knows."""
        self.is_tile: Callable[[torch.Tensor], bool] = lambda _: False
        """Returns whether a tensor lies in the tiles of a streamed layer; a meter knows."""
        # Links carry one collective at a time: when they are free, and when what is under way will be there,
        # by the memory that it arrives in.
        self._links_free = 0.0
        self._arrivals: dict[int, float] = {}

    def now(self) -> float:
        """Seconds since the beginning, on the device: the clock of a plan's timeline."""
        return self.total.device_seconds

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator and add what it costs."""
        result = func(*args, **kwargs)
        name = str(func.overloadpacket)
        if name == ARRIVAL:
            self.total += self._waiting_until(self._arrivals.pop(_memory(args[0])))
        elif not func.is_view and name not in NOTHING:
            cost = self._costs(name, args, result) * repetitions()
            if name == ALL_TO_ALL and args[5:6] != (False,):
                # Waited for later: the default, and defaults are left out of ``args``.
                self._links_free = max(self.now(), self._links_free) + cost.link_seconds
                self._arrivals[_memory(args[0])] = self._links_free
                cost = replace(cost, device_seconds=0.0, link_seconds=0.0)
            elif cost.link_seconds:
                cost += self._waiting_until(self._links_free)
            self.total += cost
        return result

    def _waiting_until(self, then: float) -> Costs:
        seconds = max(then - self.now(), 0.0)
        return Costs(device_seconds=seconds, link_seconds=seconds)

    def _costs(self, name: str, args: tuple[Any, ...], result: Any) -> Costs:
        hardware = self.hardware
        if name.startswith(("c10d.", "_c10d_functional.")):
            return self._collective(name, args, result)
        if name in ("lab.to_host", "lab.to_host_whole", "lab.write_host", "lab.from_host"):
            moved: int = args[name == "lab.from_host"].nbytes
            return Costs(
                host_bytes=moved,
                host_seconds=moved / _reached(hardware.host_link, hardware.host_link_share),
                tile_writes=moved if name == "lab.write_host" else 0,
                tile_reads=moved if name == "lab.from_host" and self.is_tile(args[0][0]) else 0,
            )
        if name.startswith(FLASH):
            flops = _attention_flops(args, backward=name.endswith("backward"))
            rate = hardware.attention_backward if name.endswith("backward") else hardware.attention_forward
            return Costs(flops, device_seconds=flops / rate.value)
        touched = sum(x.nbytes for x in _tensors((*args, result)))
        if self.on_host(args):
            ranks = min(dist.get_world_size(), self.ranks_per_node) if dist.is_initialized() else 1
            return Costs(device_seconds=touched * ranks / _reached(HOST_MEMORY, HOST_MEMORY_SHARE))
        seconds = touched / _reached(hardware.memory_rate, hardware.memory_share)
        product = name if name in PRODUCTS else name.removesuffix("_")
        if product in PRODUCTS:
            left, right = args[PRODUCTS[product] :][:2]
            flops = 2 * left.numel() * (1 if product in OF_A_VECTOR else right.shape[-1])
            # Tensor cores take fp32 as tf32, at half the rate of bf16.
            rate_here = _reached(hardware.matmul, hardware.matmul_share) * 2 / max(left.itemsize, 2)
            return Costs(flops, device_seconds=max(flops / rate_here, seconds))
        return Costs(device_seconds=seconds)

    def _collective(self, name: str, args: tuple[Any, ...], result: Any) -> Costs:
        """What a rank sends: its share of an all-gather to all others, its input's shares in the rest."""
        group = next((g for g in map(process_group_of, args) if g is not None), None)
        if group is None:
            return Costs()
        ranks, me = dist.get_process_group_ranks(group), dist.get_rank(group)
        whole = max((x.nbytes for x in _tensors((*args, result))), default=0)
        # An all-reduce is a reduce-scatter and an all-gather.
        sizes = [whole // len(ranks) * (2 if "allreduce" in name.replace("_", "") else 1)] * len(ranks)
        if "alltoall" in name and args[4]:  # a step round a ring goes to one of them
            sizes = [elements * args[1].itemsize for elements in args[4]]
        sizes[me] = 0
        hardware, here = self.hardware, ranks[me] // self.ranks_per_node
        link = _reached(hardware.link, hardware.link_share)
        network = _reached(hardware.network, hardware.network_share)
        near = [rank // self.ranks_per_node == here for rank in ranks]
        sent, away = sum(sizes), sum(size for size, at_home in zip(sizes, near, strict=True) if not at_home)
        if "alltoall" not in name and away:
            # What goes round in rings, one through each adapter, passes a border with all of them at once.
            seconds = sent / min(link, network * sum(near))
        else:
            seconds = max((sent - away) / link, away / network)
        return Costs(link_bytes=sent, device_seconds=seconds, link_seconds=seconds)


def _reached(peak: Figure, share: Figure) -> float:
    return peak.value * share.value


def _memory(x: torch.Tensor) -> int:
    return storage_id(x.untyped_storage())


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _attention_flops(args: tuple[Any, ...], *, backward: bool) -> int:
    """Two matrix products of queries and keys in forward, half of each behind a causal mask."""
    q, k = args[1:3] if backward else args[0:2]
    dropout = 6 if backward else 3
    causal = len(args) > dropout + 1 and args[dropout + 1]
    flops: int = 4 * q.numel() * k.shape[2] // (2 if causal else 1)
    return int(BACKWARD_FLOPS * flops) if backward else flops
