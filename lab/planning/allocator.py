"""A model of CUDA's caching allocator: the bytes that a step reserves, and not only those that it allocates.

The allocator keeps what is freed and gives it to later tensors. A tensor that fits into no free block makes
it ask the device for more, so it reserves more than is ever allocated at once. This file follows the storages
of a timeline, in their order, by the rules of PyTorch's ``c10/cuda/CUDACachingAllocator.cpp``. The functions
that are named below are those of that file, with the default settings of ``PYTORCH_CUDA_ALLOC_CONF``.

Each stream has free blocks of its own (``streams_of``), those of small and of large tensors apart. What is
not in a timeline is not followed: scratch before the first step, temporaries inside kernels that the
workspace model does not have, and buffers of NCCL.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lab.memory.categories import HOST, OTHER
from lab.memory.timeline import Timeline
from lab.planning.cuda_workspace import BLOCK as BLOCK_FIGURE
from lab.planning.cuda_workspace import CUBLAS_HANDLES, CUBLAS_WORKSPACE
from lab.units import MiB

BLOCK = int(BLOCK_FIGURE.value)
SMALL = MiB
"""The largest tensor of a small pool, and without expandable segments the largest remainder that is not split
off a block of a large pool (kSmallSize)."""
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MiB, 20 * MiB
"""Segments of tensors up to SMALL, and below BIG; the pages of expandable segments (kSmallBuffer,
kLargeBuffer)."""
BIG = 10 * MiB
"""From this size on, a tensor has a segment of its own size, rounded up to 2 MiB (kMinLargeAlloc)."""
ADDRESSES = 2**50
"""The address space of an expandable segment, which is never filled."""

COMPUTE, ALL_GATHER, REDUCE = "compute", "all-gather", "reduce"
"""The streams that allocate: the others of a step only copy."""
_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.addmm_")


class OutOfReserved(MemoryError):
    """The limit does not hold a block, even after all cached segments were freed."""


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment. Its neighbours are the parts before and after it."""

    address: int
    size: int
    mapped: bool = True
    allocated: bool = False
    before: Block | None = None
    after: Block | None = None


class Pool:
    """The blocks of one stream, either for small tensors or for large ones.

    Args:
        small: Whether its tensors are small.
        expandable: Whether it has one segment, in which the device maps page after page.
        base: The first address of its segments.
    """

    def __init__(self, small: bool, expandable: bool, base: int) -> None:
        self.small, self.expandable = small, expandable
        self.page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self.blocks: dict[int, Block] = {}
        """All blocks that are free, or not mapped, by address."""
        self.free: list[tuple[int, int]] = []
        """The sizes and addresses of free blocks, in order: the smallest that fits is the best."""
        self.unmapped: list[int] = []
        """The addresses of blocks that are not mapped, in order."""
        if expandable:
            self._put(Block(base, ADDRESSES, mapped=False))
        self.reserved = self.allocated = 0
        self._base = self._next_address = base

    def take(self, size: int) -> Block | None:
        """Return the best free block, without what is split off; None if no block fits (get_free_block)."""
        place = bisect_left(self.free, (size, 0))
        if place == len(self.free):
            return None
        # A block that can grow counts as large as it can grow, so a larger one that cannot is better.
        best = self.blocks[self.free[place][1]]
        while place + 1 < len(self.free):
            place += 1
            larger = self.blocks[self.free[place][1]]
            if _room(larger) >= _room(best):
                break
            best = larger
        return self._split(self._pick(best), size)

    def segment_size(self, size: int) -> int:
        """Return what the device is asked for (get_allocation_size); the limit is checked for that."""
        if size < BIG:
            return self.page
        return -(-size // SMALL_SEGMENT) * SMALL_SEGMENT

    def grow(self, size: int) -> Block:
        """Return a block of new memory (alloc_block, try_allocate_expandable_block)."""
        if not self.expandable:
            block = Block(self._next_address, self.segment_size(size))
            self._next_address += block.size
            self.reserved += block.size
            return self._split(block, size)
        # The lowest address at which free and unmapped blocks follow each other for long enough.
        block = next(
            start
            for start in (_start(self.blocks[address]) for address in self.unmapped)
            if _extent(start, size) >= size
        )
        if not block.mapped:
            block = self._map(block, min(block.size, size))
        while block.size < size:
            assert block.after is not None
            block = self._map(block.after, min(size - block.size, block.after.size))
        return self._split(self._pick(block), size)

    def release(self, block: Block) -> None:
        """Take a tensor's block back, and merge it with free neighbours (free_block)."""
        block.allocated = False
        self.allocated -= block.size
        self._put(self._merged(block))

    def release_cached(self) -> None:
        """Give the device back whole free segments, or whole free pages (release_cached_blocks)."""
        for _, address in list(self.free):
            block = self.blocks[address]
            if not self.expandable:
                if block.before is None and block.after is None:
                    self.reserved -= self._pick(block).size
                continue
            first = self._base + -(-(block.address - self._base) // self.page) * self.page
            end = self._base + (block.address + block.size - self._base) // self.page * self.page
            if first >= end:
                continue
            self._pick(block)
            if block.address < first:
                rest = self._cut(block, first - block.address)
                self._put(block)
                block = rest
            if block.size > end - first:
                self._put(self._cut(block, end - first))
            self.reserved -= block.size
            block.mapped = False
            self._put(self._merged(block))

    def _split(self, block: Block, size: int) -> Block:
        """Mark a block as allocated. What remains of it stays free, if it is large enough (should_split)."""
        remaining = block.size - size
        if remaining >= BLOCK if self.small or self.expandable else remaining > SMALL:
            self._put(self._cut(block, size))
        block.allocated = True
        self.allocated += block.size
        return block

    def _cut(self, block: Block, size: int) -> Block:
        """Shorten a block to ``size``, and return the rest of it."""
        rest = Block(block.address + size, block.size - size, block.mapped, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        return rest

    def _map(self, block: Block, size: int) -> Block:
        """Map whole pages of an unmapped block, and return it with its free neighbours (map_block)."""
        self._pick(block)
        size = -(-size // self.page) * self.page
        if size < block.size:
            self._put(self._cut(block, size))
        block.mapped = True
        self.reserved += block.size
        block = self._merged(block)
        self._put(block)
        return block

    def _merged(self, block: Block) -> Block:
        """Return a block with the free neighbours that are mapped as it is (try_merge_blocks)."""
        for other in (block.before, block.after):
            if other is None or other.allocated or other.mapped != block.mapped:
                continue
            self._pick(other)
            block.size += other.size
            if other is block.before:
                block.address, block.before = other.address, other.before
                if block.before is not None:
                    block.before.after = block
            else:
                block.after = other.after
                if block.after is not None:
                    block.after.before = block
        return block

    def _put(self, block: Block) -> None:
        """Remember a block that is free or not mapped."""
        self.blocks[block.address] = block
        if block.mapped:
            insort(self.free, (block.size, block.address))
        else:
            insort(self.unmapped, block.address)

    def _pick(self, block: Block) -> Block:
        """Forget such a block, and return it."""
        del self.blocks[block.address]
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            self.unmapped.remove(block.address)
        return block


def _room(block: Block) -> int:
    after = block.after
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _start(unmapped: Block) -> Block:
    before = unmapped.before
    return before if before is not None and not before.allocated else unmapped


def _extent(block: Block | None, size: int) -> int:
    found = 0
    while found < size and block is not None and not block.allocated:
        found, block = found + block.size, block.after
    return found


class Allocator:
    """All pools of a device.

    Args:
        expandable: Whether segments are expandable (``expandable_segments:True``).
        limit: The most bytes that may be reserved; None for no limit.
    """

    def __init__(self, expandable: bool, limit: int | None = None) -> None:
        self.expandable, self.limit = expandable, limit
        self.pools: dict[tuple[str, bool], Pool] = {}
        self.allocated = self.reserved_peak = self.allocated_peak = self.retries = 0

    @property
    def reserved(self) -> int:
        """The bytes that the device has given."""
        return sum(pool.reserved for pool in self.pools.values())

    def free(self, pool: Pool, block: Block) -> None:
        """Free a tensor that ``allocate`` returned."""
        self.allocated -= block.size
        pool.release(block)

    def allocate(self, nbytes: int, stream: str = COMPUTE) -> tuple[Pool, Block]:
        """Allocate a tensor. Near the limit, all that is cached is given back first (malloc).

        Raises:
            OutOfReserved: The limit does not hold it.
        """
        size = max(-(-nbytes // BLOCK), 1) * BLOCK
        key = stream, size <= SMALL
        if key not in self.pools:
            self.pools[key] = Pool(key[1], self.expandable, len(self.pools) * 2 * ADDRESSES)
        pool = self.pools[key]
        block = pool.take(size)
        if block is None:
            if self._exceeds(pool.segment_size(size)):
                self.retries += 1
                for each in self.pools.values():
                    each.release_cached()
                if self._exceeds(pool.segment_size(size)):
                    raise OutOfReserved(f"{size} bytes more than {self.reserved} of {self.limit}")
            block = pool.grow(size)
            self.reserved_peak = max(self.reserved_peak, self.reserved)
        self.allocated += block.size
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        return pool, block

    def _exceeds(self, more: int) -> bool:
        return self.limit is not None and self.reserved + more > self.limit


@dataclass(frozen=True)
class PoolState:
    """What a pool holds.

    Attributes:
        stream: The stream that allocates from it.
        small: Whether it is the pool of small tensors.
        reserved: Its bytes.
        allocated: Those of them that tensors hold.
        largest_free: The largest free block.
    """

    stream: str
    small: bool
    reserved: int
    allocated: int
    largest_free: int


@dataclass(frozen=True)
class AllocatorState:
    """The allocator at the moment at which it reserved the most bytes.

    Attributes:
        reserved_peak: The most bytes that are reserved at once (``torch.cuda.max_memory_reserved``).
        allocated_peak: The most bytes that are allocated at once. They are those of blocks: a remainder that
            is not split off counts.
        retries: How often everything that was cached was given back, because of the limit.
        fits: Whether the limit held every tensor. If not, the peaks are those until then.
        row: The row of the timeline at which ``reserved_peak`` was reached, or which did not fit.
        pools: The pools at that row. Bytes that are reserved and not allocated are free, in pieces of at most
            ``largest_free``.
    """

    reserved_peak: int
    allocated_peak: int
    retries: int
    fits: bool
    row: int
    pools: tuple[PoolState, ...]


def simulate(timeline: Timeline, *, expandable: bool = True, limit: int | None = None) -> AllocatorState:
    """Follow the storages of a timeline through the allocator.

    At each row, what was freed before its operator is freed. Then its results are allocated, and then what
    its kernel takes inside, as one block. What the timeline holds at its first row was allocated in order.

    Args:
        timeline: That of a plan with ``workspace``.
        expandable: Whether segments are expandable.
        limit: The most bytes that the allocator may reserve: a device's without what lies outside torch.
    """
    storages = timeline.storages
    streams = streams_of(timeline)
    freed, made = defaultdict(list), defaultdict(list)
    for entry in np.flatnonzero(storages.category < HOST).tolist():
        made[int(storages.first[entry])].append(entry)
        freed[int(storages.end[entry])].append(entry)
    other = timeline.device[:, OTHER]
    inside = (other - other.min(initial=np.iinfo(np.int64).max)).tolist()
    handles = dict(zip(_first_products(timeline), range(int(CUBLAS_HANDLES.value)), strict=False))
    allocator, sizes = Allocator(expandable, limit), storages.size.tolist()
    held: dict[int, tuple[Pool, Block]] = {}
    pools: tuple[PoolState, ...] = ()
    row, peak_row, fits = 0, 0, True
    try:
        for row in range(len(timeline)):
            before = allocator.reserved_peak
            for entry in freed[row]:
                allocator.free(*held.pop(entry))
            for entry in made[row]:
                held[entry] = allocator.allocate(sizes[entry], streams.get(entry, COMPUTE))
            if row in handles:
                allocator.allocate(int(CUBLAS_WORKSPACE.value))
            if inside[row]:
                allocator.free(*allocator.allocate(inside[row]))
            if allocator.reserved_peak > before:
                peak_row, pools = row, tuple(_states(allocator))
    except OutOfReserved:
        fits, peak_row, pools = False, row, tuple(_states(allocator))
    peaks = allocator.reserved_peak, allocator.allocated_peak
    return AllocatorState(*peaks, allocator.retries, fits, peak_row, pools)


def _states(allocator: Allocator) -> Iterator[PoolState]:
    for (stream, small), pool in allocator.pools.items():
        largest = pool.free[-1][0] if pool.free else 0
        yield PoolState(stream, small, pool.reserved, pool.allocated, largest)


def _first_products(timeline: Timeline) -> Iterator[int]:
    """Yield the rows at which cuBLAS makes a workspace: the first product of each thread.

    Autograd has a thread of its own. It runs backward, and in forward the gradients of a loss in tiles, whose
    products are outside of all modules.
    """
    product = np.array([op.name in _PRODUCTS for op in timeline.ops], dtype=bool)[timeline.op]
    backward = np.array([phase == "backward" for phase in timeline.phases], dtype=bool)[timeline.phase]
    backward |= np.array([module == "" for module in timeline.modules], dtype=bool)[timeline.module]
    for rows in (np.flatnonzero(product & ~backward), np.flatnonzero(product & backward)):
        yield from rows[:1].tolist()


def streams_of(timeline: Timeline) -> dict[int, str]:
    """Return the streams of the entries that another stream than that of computation allocates.

    FSDP2 (``foreach_all_gather`` and ``foreach_reduce`` of torch/distributed/fsdp/_fully_shard) allocates the
    buffer of an all-gather, and the copies of the shards that go into it, in one stream. In another it
    allocates what it reduces gradients to; the copy of the gradients that is divided, where a rank is the
    only one of its shards; and the reduced gradients in another dtype. All else is of the stream of
    computation: the whole parameters, the input of a reduce-scatter, and what is copied from the host.
    """
    storages, streams = timeline.storages, {}
    names = [timeline.ops[op].name for op in timeline.op.tolist()]
    by_row = defaultdict(list)
    for entry, row in enumerate(storages.first.tolist()):
        by_row[row].append(entry)
    for entry, row, written in storages.moves.tolist():
        made = int(storages.first[entry])
        if not written or storages.kinds[storages.kind[entry]].op != "aten.empty":
            continue
        if names[row] == "c10d._allgather_base_":
            streams[entry] = ALL_GATHER
            while made > 1 and names[made - 1] in ("aten.empty", "aten._to_copy", "lab.from_host"):
                made -= 1
                # What is freed after the collective was made for it.
                inputs = (other for other in by_row[made] if storages.end[other] <= row + 1)
                streams.update(dict.fromkeys(inputs, ALL_GATHER))
        elif names[row] in ("c10d._reduce_scatter_base_", "c10d.allreduce_"):
            streams[entry] = REDUCE
            for later in range(made + 1, min(row + 2, len(names))):
                if names[later] in ("aten.div", "aten._to_copy"):
                    streams.update(dict.fromkeys(by_row[later], REDUCE))
    return streams
