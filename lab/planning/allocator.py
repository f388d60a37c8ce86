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

COMPUTE, ALL_GATHER, REDUCE, ALL_REDUCE = "compute", "all-gather", "reduce", "all-reduce"
"""The streams that allocate: the others of a step only copy."""
_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.addmm_")


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment. Its neighbours are the parts before and after it."""

    address: int
    size: int
    allocated: bool = False
    before: Block | None = None
    after: Block | None = None


class Pool:
    """The blocks of one stream, either for small tensors or for large ones.

    Args:
        small: Whether its tensors are small.
        expandable: Whether it has one segment, in which the device maps page after page.
    """

    def __init__(self, small: bool, expandable: bool) -> None:
        self.small, self.expandable = small, expandable
        self.page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self.blocks: dict[int, Block] = {}
        """The free blocks by address."""
        self.free: list[tuple[int, int]] = []
        """Their sizes and addresses, in order: the smallest that fits is the best."""
        self.reserved = 0
        # What is not mapped yet: no tensor takes it. Of segments that are not expandable, the next address.
        self._unmapped = Block(0, 0, allocated=True)

    def take(self, size: int) -> Block | None:
        """Return the best free block, without what is split off; None if no block fits (get_free_block)."""
        place = bisect_left(self.free, (size, 0))
        if place == len(self.free):
            return None
        best = self.blocks[self.free[place][1]]
        # A block that can grow counts as large as it can grow, so a larger one that cannot is better.
        if best.after is self._unmapped and place + 1 < len(self.free):
            best = self.blocks[self.free[place + 1][1]]
        return self._split(self._pick(best), size)

    def grow(self, size: int) -> Block:
        """Return a block of new memory (alloc_block, try_allocate_expandable_block)."""
        unmapped = self._unmapped
        if not self.expandable:
            block = Block(unmapped.address, 0)
            more = self.page if size < BIG else round_up(size, SMALL_SEGMENT)
        else:
            last = unmapped.before
            if last is not None and not last.allocated:
                block = self._pick(last)
            else:
                block = Block(unmapped.address, 0, before=last, after=unmapped)
                unmapped.before = block
                if last is not None:
                    last.after = block
            more = round_up(size - block.size, self.page)
        block.size += more
        unmapped.address += more
        self.reserved += more
        return self._split(block, size)

    def release(self, block: Block) -> None:
        """Take a tensor's block back, and merge it with free neighbours (free_block, try_merge_blocks)."""
        block.allocated = False
        for other in (block.before, block.after):
            if other is None or other.allocated:
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
        self._put(block)

    def _split(self, block: Block, size: int) -> Block:
        """Mark a block as allocated. What remains of it stays free, if it is large enough (should_split)."""
        remaining = block.size - size
        if remaining >= BLOCK if self.small or self.expandable else remaining > SMALL:
            rest = Block(block.address + size, remaining, before=block, after=block.after)
            if rest.after is not None:
                rest.after.before = rest
            block.after, block.size = rest, size
            self._put(rest)
        block.allocated = True
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


class Allocator:
    """All pools of a device.

    Args:
        expandable: Whether segments are expandable (``expandable_segments:True``).

    Attributes:
        allocated: The bytes that are allocated. They are those of blocks: a remainder that is not split off
            counts.
        allocated_peak: The most bytes that were allocated at once.
    """

    def __init__(self, expandable: bool) -> None:
        self.expandable = expandable
        self.pools: dict[tuple[str, bool], Pool] = {}
        self.allocated = self.allocated_peak = 0

    @property
    def reserved(self) -> int:
        """The bytes that the device has given. None are given back, because no limit is followed."""
        return sum(pool.reserved for pool in self.pools.values())

    def free(self, pool: Pool, block: Block) -> None:
        """Free a tensor that ``allocate`` returned."""
        self.allocated -= block.size
        pool.release(block)

    def allocate(self, nbytes: int, stream: str = COMPUTE) -> tuple[Pool, Block]:
        """Allocate a tensor (malloc)."""
        size = rounded(max(nbytes, 1))
        key = stream, size <= SMALL
        if key not in self.pools:
            self.pools[key] = Pool(key[1], self.expandable)
        pool = self.pools[key]
        block = pool.take(size) or pool.grow(size)
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


def simulate(timeline: Timeline, *, expandable: bool = True) -> Allocator:
    """Follow the storages of a timeline through the allocator, and return it as it is after the last row.

    At each row, what was freed before its operator is freed. Then its results are allocated, and then what
    its kernel takes inside, as one block. What the timeline holds at its first row was allocated in order.
    The device has enough memory: the allocator never gives back what is cached.

    Args:
        timeline: That of a plan with ``workspace``.
        expandable: Whether segments are expandable.
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
    allocator, sizes = Allocator(expandable), storages.size.tolist()
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
