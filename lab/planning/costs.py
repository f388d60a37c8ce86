"""What operators cost on a named device: floating-point operations, bytes moved, seconds.

A plan records the work of each operator (``work_counter.py``), and ``price`` turns it into seconds. The
estimate is a sum over the operators of a step, one after the other on the device, each at the rate that
the hardware table gives for its kind. Copies between device and host run at the same time, because
offload prefetches, and computation takes longer beside them (``Hardware.copy_slowdown``). All-to-alls that
are waited for later (UPipe's overlap, a ring's steps) run at the same time too. The device
waits for operators on tensors in host memory (clipping and Adam of an optimizer on the host), which run at
the rate of host memory, ``HOST_MEMORY``. A disk in place of host memory runs at the same time as all of it.
What it leaves out:
overlap of other collectives with computation, launches, imbalance between ranks.

Where the host memory of a machine is given, the bytes beyond what its ranks may pin
(``lab/techniques/host_memory.py``) are copied at the rate of pageable memory. Where it is not given, all are
pinned.

This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lab.memory.storages import Integers
from lab.planning.hardware import Figure, Hardware

BACKWARD_FLOPS = 2.5
"""Of flash attention's backward, in forwards: five matrix products to two (arXiv 2307.08691)."""

HOST_MEMORY = Figure(
    614.4e9,
    "B/s",
    "assumed for every node: two sockets with 8 channels of DDR5-4800 each, as NVIDIA DGX H100 (Xeon 8480C)",
)
"""The rate of a node's memory, which its ranks share; ``HOST_MEMORY_SHARE`` of it is reached."""

HOST_MEMORY_SHARE = Figure(0.5, "1", "assumed: Adam also writes most of what it reads, which is counted once")


class WorkKind(IntEnum):
    """What an entry of work is, and so at which rate it is done."""

    MEMORY = 0
    """Bytes of the device's memory that are read and written."""
    PRODUCT = 1
    """A matrix product: operations, and bytes as of MEMORY; the longer of the two times counts."""
    ATTENTION_FORWARD = 2
    ATTENTION_BACKWARD = 3
    ON_HOST = 4
    """Bytes of host memory that an operator on the host reads and writes."""
    COPY = 5
    """Bytes between device and host."""
    TILE_WRITE = 6
    TILE_READ = 7
    """Copies to and from the tiles of streamed layers."""
    COLLECTIVE = 8
    """Bytes that are sent to other ranks, and waited for."""
    START = 9
    """The same of an all-to-all that is waited for later."""
    ARRIVAL = 10
    """The wait for such an all-to-all."""


class Peers(NamedTuple):
    """The ranks of a group, this rank, those of them that it sends to, and whether by an all-to-all."""

    ranks: tuple[int, ...]
    me: int
    to: tuple[int, ...]
    exchange: bool


@dataclass(frozen=True, eq=False)
class Work:
    """The work of a step: w entries, in order. It depends on no device.

    Attributes:
        kind: Of ``WorkKind`` [w].
        flops: Floating-point operations [w].
        nbytes: Bytes, see ``WorkKind`` [w].
        other: Of a product, the bytes of an element of its first factor. Of a collective, an index into
            ``peers``. Of an arrival, how many all-to-alls were started until now since that one [w].
        peers: The groups of the collectives.
    """

    kind: Integers
    flops: npt.NDArray[np.float64]
    nbytes: npt.NDArray[np.float64]
    other: Integers
    peers: tuple[Peers, ...]

    def __len__(self) -> int:
        return len(self.kind)

    @classmethod
    def of(cls, entries: Iterable[tuple[int, float, int, int]], peers: tuple[Peers, ...]) -> Work:
        """Return the work of these entries of kind, operations, bytes and the other number."""
        kind, flops, nbytes, other = np.array([*entries], dtype=np.float64).reshape(-1, 4).T
        return cls(kind.astype(np.int64), flops, nbytes, other.astype(np.int64), peers)

    def take(self, index: npt.NDArray[np.int64] | slice) -> Work:
        """Return the entries at these indices."""
        return Work(self.kind[index], self.flops[index], self.nbytes[index], self.other[index], self.peers)


@dataclass(frozen=True)
class Costs:
    """One rank's: ``flops``; ``link_bytes`` sent to other ranks; ``host_bytes`` copied to and from the host.

    ``device_seconds`` is the time of computation and of waiting for collectives, ``link_seconds`` the share
    of the latter. ``host_seconds`` is the time of copies, and ``slowed_seconds`` the time by which
    computation takes longer beside them. ``tile_writes`` and ``tile_reads`` are the bytes among
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
    slowed_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Of the whole: copies and the disk hide behind computation, or computation behind one of them."""
        return max(self.device_seconds + self.slowed_seconds, self.host_seconds, self.disk_seconds)

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

    def with_pageable(self, hardware: Hardware, share: float) -> Costs:
        """Return these costs with copies of memory that is not pinned at its rate.

        The tiles of streamed layers on a disk are not pinned; see ``with_disk``. That the host waits for a
        copy to such memory is not counted.

        Args:
            hardware: Has the rate.
            share: Of the other bytes that are copied, the share whose host memory is not pinned.
        """
        if not self.host_bytes:
            return self
        on_disk = (self.tile_writes + self.tile_reads) if self.disk_seconds else 0
        pageable = on_disk + share * (self.host_bytes - on_disk)
        pinned_seconds = self.host_seconds * (1 - pageable / self.host_bytes)
        return replace(self, host_seconds=pinned_seconds + pageable / hardware.pageable_rate.value)


def price(
    work: Work, hardware: Hardware, ranks: int, ranks_per_node: int
) -> tuple[Costs, npt.NDArray[np.float64]]:
    """Return what work costs on a device, and the seconds from the beginning to the end of each entry.

    Groups of ranks that lie within a node talk over its links, others over the network.

    Args:
        work: The work of a rank.
        hardware: The rates.
        ranks: All ranks.
        ranks_per_node: The ranks of a node.

    Returns:
        The costs; and the seconds before the first entry, which are 0, and after each [w + 1].
    """
    memory = work.nbytes / _reached(hardware.memory_rate, hardware.memory_share)
    # Tensor cores take fp32 as tf32, at half the rate of bf16.
    matmul = work.flops * np.maximum(work.other, 2) / (2 * _reached(hardware.matmul, hardware.matmul_share))
    linked = np.isin(work.kind, (WorkKind.COLLECTIVE, WorkKind.START))
    on_link = np.zeros(len(work))
    for number, peers in enumerate(work.peers):
        ours = linked & (work.other == number)
        on_link[ours] = _link_seconds(work.nbytes[ours], peers, hardware, ranks_per_node)
    node = min(ranks, ranks_per_node)
    copies = np.isin(work.kind, (WorkKind.COPY, WorkKind.TILE_WRITE, WorkKind.TILE_READ))
    by_kind = {
        WorkKind.MEMORY: memory,
        WorkKind.PRODUCT: np.maximum(matmul, memory),
        WorkKind.ATTENTION_FORWARD: work.flops / hardware.attention_forward.value,
        WorkKind.ATTENTION_BACKWARD: work.flops / hardware.attention_backward.value,
        WorkKind.ON_HOST: work.nbytes * node / _reached(HOST_MEMORY, HOST_MEMORY_SHARE),
    }
    seconds = np.select([work.kind == kind for kind in by_kind], [*by_kind.values()], 0.0)
    until, waited = _with_links(work, seconds, on_link)
    moved = float(work.nbytes[copies].sum())
    copying = moved / _reached(hardware.host_link, hardware.host_link_share)
    costs = Costs(
        flops=round(work.flops.sum()),
        link_bytes=round(work.nbytes[linked].sum()),
        host_bytes=round(moved),
        device_seconds=float(until[-1]),
        host_seconds=copying,
        link_seconds=waited,
        tile_writes=round(work.nbytes[work.kind == WorkKind.TILE_WRITE].sum()),
        tile_reads=round(work.nbytes[work.kind == WorkKind.TILE_READ].sum()),
        slowed_seconds=hardware.copy_slowdown.value * copying,
    )
    return costs, until


def _with_links(
    work: Work, seconds: npt.NDArray[np.float64], on_link: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], float]:
    """Return the seconds until the end of each entry, with waits for the links, and all of these waits.

    Links carry one collective at a time.
    """
    waits = np.zeros(len(work))
    until = np.concatenate(([0.0], seconds.cumsum()))
    waited, free = 0.0, 0.0
    arrivals: list[float] = []
    events = np.flatnonzero(work.kind >= WorkKind.COLLECTIVE).tolist()
    for event, kind, other, busy in zip(
        events, work.kind[events].tolist(), work.other[events].tolist(), on_link[events].tolist(), strict=True
    ):
        now = float(until[event]) + waited
        if kind == WorkKind.START:
            free = max(now, free) + busy
            arrivals.append(free)
            continue
        if kind == WorkKind.ARRIVAL:
            wait = max(arrivals[len(arrivals) - other] - now, 0.0)
        else:
            wait = busy + max(free - now, 0.0)
        waits[event] = wait
        waited += wait
    return until + np.concatenate(([0.0], waits.cumsum())), waited


def _link_seconds(
    sent: npt.NDArray[np.float64], peers: Peers, hardware: Hardware, ranks_per_node: int
) -> npt.NDArray[np.float64]:
    """Return the seconds of collectives that send these bytes each."""
    link = _reached(hardware.link, hardware.link_share)
    network = _reached(hardware.network, hardware.network_share)
    here = peers.me // ranks_per_node
    near = sum(rank // ranks_per_node == here for rank in peers.ranks)
    away = sum(rank // ranks_per_node != here for rank in peers.to)
    if not peers.exchange and away:
        # What goes round in rings, one through each adapter, passes a border with all of them at once.
        return sent / min(link, network * near)
    if not peers.to:
        return sent
    share = away / len(peers.to)
    return np.maximum(sent * (1 - share) / link, sent * share / network)


def _reached(peak: Figure, share: Figure) -> float:
    return peak.value * share.value
