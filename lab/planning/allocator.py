"""A model of CUDA's caching allocator: the bytes that a step reserves, and not only those that it allocates.

The allocator keeps what is freed and gives it to later tensors. A tensor that fits into no free block makes
it ask the device for more, so it reserves more than is ever allocated at once. When the device is full, it
releases what is cached, and asks again: a retry. This file follows the storages of a timeline, in their
order, by the rules of PyTorch's ``c10/cuda/CUDACachingAllocator.cpp``. The functions that are named below are
those of that file, with the default settings of ``PYTORCH_CUDA_ALLOC_CONF``.

Each stream has free blocks of its own (``streams_of``), those of small and of large tensors apart. What is
not in a timeline is not followed: scratch before the first step, temporaries inside kernels that the
workspace model does not have, and buffers of NCCL.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from lab.memory.categories import HOST, OTHER
from lab.memory.timeline import Timeline
from lab.planning.cuda_workspace import BLOCK as BLOCK_FIGURE
from lab.planning.cuda_workspace import CUBLAS_HANDLES, CUBLAS_WORKSPACE, outside_workspace, round_up, rounded
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
"""The address space of an expandable segment, and a limit that is never reached."""

COMPUTE, ALL_GATHER, REDUCE, ALL_REDUCE = "compute", "all-gather", "reduce", "all-reduce"
"""The streams that allocate: the others of a step only copy."""
_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.addmm_")


class SimulatedOutOfMemory(MemoryError):
    """The device does not hold a tensor, even after all that is cached was released."""


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment. Its neighbours are the parts before and after it."""

    address: int
    size: int
    mapped: bool = True
    allocated: bool = False
    before: Block | None = None
    after: Block | None = None

    @property
    def expandable_size(self) -> int:
        """Its bytes, and those that it can grow by."""
        return self.size + (self.after.size if self.after is not None and not self.after.mapped else 0)


class Pool:
    """The blocks of one stream in segments of fixed sizes, either for small tensors or for large ones.

    Args:
        small: Whether its tensors are small.
    """

    def __init__(self, small: bool) -> None:
        self.small, self.page = small, SMALL_SEGMENT if small else LARGE_SEGMENT
        self.blocks: dict[int, Block] = {}
        """The free blocks by address."""
        self.free: list[tuple[int, int]] = []
        """Their sizes and addresses, in order: the smallest that fits is the best."""
        self.reserved = 0
        self.min_remaining = BLOCK if small else SMALL + 1
        """The smallest remainder that is split off (should_split)."""
        self._end = 0  # the address of the next segment

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
            if larger.expandable_size >= best.expandable_size:
                break
            best = larger
        return self._split(self._pick(best), size)

    def grow(self, size: int, left: int) -> Block | None:
        """Return a block of new memory (alloc_block).

        Args:
            size: Its bytes.
            left: The bytes that the device has left. If it needs more, None is returned.
        """
        more = self.page if size < BIG else round_up(size, SMALL_SEGMENT)
        if more > left:
            return None
        block = Block(self._end, more)
        self._end += more
        self.reserved += more
        return self._split(block, size)

    def release(self, block: Block) -> None:
        """Take a tensor's block back (free_block)."""
        block.allocated = False
        self._put(self._merged(block))

    def release_cached(self) -> None:
        """Release whole free segments to the device (release_blocks)."""
        for block in [*self.blocks.values()]:
            if block.before is None and block.after is None:
                self.reserved -= self._pick(block).size

    def _split(self, block: Block, size: int) -> Block:
        """Mark a block as allocated. What remains of it stays free, if it is large enough."""
        if block.size - size >= self.min_remaining:
            self._put(self._cut(block, size))
        block.allocated = True
        return block

    def _cut(self, block: Block, size: int) -> Block:
        """Shorten a block, and return the rest of it."""
        rest = Block(block.address + size, block.size - size, block.mapped, before=block, after=block.after)
        if rest.after is not None:
            rest.after.before = rest
        block.after, block.size = rest, size
        return rest

    def _merged(self, block: Block) -> Block:
        """Return a block with its free neighbours that are mapped as it is (try_merge_blocks)."""
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
        """Remember a free block."""
        self.blocks[block.address] = block
        insort(self.free, (block.size, block.address))

    def _pick(self, block: Block) -> Block:
        """Forget a free block, and return it."""
        del self.blocks[block.address]
        del self.free[bisect_left(self.free, (block.size, block.address))]
        return block


class ExpandablePool(Pool):
    """The blocks of one stream in one segment, in which the device maps page after page."""

    def __init__(self, small: bool) -> None:
        super().__init__(small)
        self.min_remaining = BLOCK
        self.unmapped = [Block(0, ADDRESSES, mapped=False)]
        """The blocks that are not mapped, by address."""

    def grow(self, size: int, left: int) -> Block | None:
        """Return a block of new pages, and of adjacent free blocks (try_allocate_expandable_block)."""
        # The lowest address at which free and unmapped blocks follow each other for long enough.
        for unmapped in self.unmapped:
            before = unmapped.before
            block = unmapped if before is None or before.allocated else before
            part: Block | None = block
            available = more = 0
            while available < size and part is not None and not part.allocated:
                pages = 0 if part.mapped else min(round_up(size - available, self.page), part.size)
                available, more = available + (pages or part.size), more + pages
                part = part.after
            if available >= size:
                break
        if more > left:
            return None
        if not block.mapped:
            block = self._map(block, size)
        while block.size < size:
            assert block.after is not None
            block = self._map(block.after, size - block.size)
        return self._split(self._pick(block), size)

    def release_cached(self) -> None:
        """Release whole free pages to the device (unmap_block)."""
        for block in [*self.blocks.values()]:
            start, end = block.address, block.address + block.size
            first, last = round_up(start, self.page), end // self.page * self.page
            if first >= last:
                continue
            self._pick(block)
            if start < first:
                block = self._cut(free := block, first - start)
                self._put(free)
            if last < end:
                self._put(self._cut(block, last - first))
            block.mapped = False
            self.reserved -= block.size
            self._put(self._merged(block))

    def _map(self, unmapped: Block, size: int) -> Block:
        """Map the first pages of a block, and return them with their free neighbours (map_block)."""
        self._pick(unmapped)
        if round_up(size, self.page) < unmapped.size:
            self._put(self._cut(unmapped, round_up(size, self.page)))
        unmapped.mapped = True
        self.reserved += unmapped.size
        block = self._merged(unmapped)
        self._put(block)
        return block

    def _put(self, block: Block) -> None:
        if block.mapped:
            super()._put(block)
        else:
            insort(self.unmapped, block, key=lambda block: block.address)

    def _pick(self, block: Block) -> Block:
        if block.mapped:
            return super()._pick(block)
        self.unmapped.remove(block)
        return block


class Allocator:
    """All pools of a device.

    Args:
        expandable: Whether segments are expandable (``expandable_segments:True``).
        limit: The most bytes that it may reserve.

    Attributes:
        allocated: The bytes that are allocated. They are those of blocks: a remainder that is not split off
            counts.
        allocated_peak: The most bytes that were allocated at once.
        retries: How many times what is cached was released, and the device asked again (num_alloc_retries).
    """

    def __init__(self, expandable: bool, limit: int = ADDRESSES) -> None:
        self.expandable, self.limit = expandable, limit
        self.pools: dict[tuple[str, bool], Pool] = {}
        self.allocated = self.allocated_peak = self.retries = 0

    @property
    def reserved(self) -> int:
        """The bytes reserved from the device. Without a limit, none are released."""
        return sum(pool.reserved for pool in self.pools.values())

    def free(self, pool: Pool, block: Block) -> None:
        """Free a tensor that ``allocate`` returned."""
        self.allocated -= block.size
        pool.release(block)

    def allocate(self, nbytes: int, stream: str = COMPUTE) -> tuple[Pool, Block]:
        """Allocate a tensor. If the limit leaves too little, what is cached is released first (malloc).

        Raises:
            SimulatedOutOfMemory: The limit does not hold it.
        """
        size = rounded(max(nbytes, 1))
        key = stream, size <= SMALL
        if key not in self.pools:
            self.pools[key] = (ExpandablePool if self.expandable else Pool)(key[1])
        pool = self.pools[key]
        block = pool.take(size) or pool.grow(size, self.limit - self.reserved)
        if block is None:
            self.retries += 1
            for each in self.pools.values():
                each.release_cached()
            block = pool.grow(size, self.limit - self.reserved)
        if block is None:
            raise SimulatedOutOfMemory(f"{size} bytes more than {self.reserved} of {self.limit}")
        self.allocated += block.size
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        return pool, block


# A plan is asked several times, and for several memories.
@lru_cache(maxsize=16)
def reserved_bytes(timeline: Timeline, ranks: int, *, expandable: bool) -> int:
    """Return the device bytes that the allocator reserves for a step, and those that others take.

    Args:
        timeline: As for ``simulate``, like ``expandable``.
        ranks: The ranks of the process group.
        expandable: Whether segments are expandable.
    """
    return simulate(timeline, expandable=expandable).reserved + outside_workspace(ranks)


def count_retries(timeline: Timeline, ranks: int, memory: int, *, expandable: bool) -> int | None:
    """Return how many times a device's allocator releases its cache and asks again; None if it runs out.

    Args:
        timeline: As for ``simulate``, like ``expandable``.
        ranks: The ranks of the process group.
        memory: The bytes of the device.
        expandable: Whether segments are expandable.
    """
    try:
        return simulate(timeline, expandable=expandable, limit=memory - outside_workspace(ranks)).retries
    except SimulatedOutOfMemory:
        return None


def simulate(timeline: Timeline, *, expandable: bool = True, limit: int = ADDRESSES) -> Allocator:
    """Follow the storages of a timeline through the allocator, and return it as it is after the last row.

    At each row, what was freed before its operator is freed. Then its results are allocated, and then what
    its kernel takes inside, as one block. What the timeline holds at its first row was allocated in order.

    Args:
        timeline: That of a plan with ``workspace``.
        expandable: Whether segments are expandable.
        limit: The most bytes that may be reserved: those of the device without CUDA's context and NCCL.

    Raises:
        SimulatedOutOfMemory: The limit does not hold a tensor.
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
    for row in range(len(timeline)):
        for entry in freed[row]:
            allocator.free(*held.pop(entry))
        for entry in made[row]:
            held[entry] = allocator.allocate(sizes[entry], streams.get(entry, COMPUTE))
        if row in handles:
            allocator.allocate(int(CUBLAS_WORKSPACE.value))
        if inside[row]:
            allocator.free(*allocator.allocate(inside[row]))
    return allocator


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
    only one of its shards; and the reduced gradients in another dtype, which have a stream of their own where
    they are summed over replicas. All else is of the stream of
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
            if "aten.div" in names[made + 1 : row]:
                streams.update(dict.fromkeys(by_row[names.index("aten.div", made)], REDUCE))
            # A copy of other sizes than what is reduced is a shard that is gathered next.
            shape = storages.kinds[storages.kind[entry]].shape
            copies = by_row[row + 1] if names[row + 1 : row + 2] == ["aten._to_copy"] else []
            copies = [copy for copy in copies if storages.kinds[storages.kind[copy]].shape == shape]
            stream = ALL_REDUCE if names[row] == "c10d.allreduce_" else REDUCE
            streams.update(dict.fromkeys(copies, stream))
    return streams
