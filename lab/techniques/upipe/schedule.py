"""The schedule of UPipe: the heads of each stage, as integers that are equal on every rank.

Letters: H query heads, K key/value heads, G = H/K, C ranks in the Ulysses group, U query heads of a stage,
summed over these ranks, n = U/C query heads of one rank in a stage. A slot is one of the key/value heads that
a rank attends to. Slot g of rank r is key/value head g*C + r; if K < C, slot 0 is head r*K/C, rounded down.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from lab.errors import RecipeError
from lab.techniques.ulysses_degrees import check_degree


@dataclass(frozen=True)
class HeadRange:
    """A part of a stage, for which one set of slots is in memory.

    Attributes:
        slots: The slots of this range.
        queries: The query heads of this range, numbered within each slot.
        opens: Whether the slots are sent before this range. If not, an earlier range has sent them.
        closes: Whether this range is the last one that uses the slots.
    """

    slots: range
    queries: range
    opens: bool
    closes: bool


Stage = tuple[HeadRange, ...]
"""The head ranges of one stage. Together they have the n query heads with which a rank attends at a time."""


@dataclass(frozen=True)
class Schedule:
    """All stages of a layer.

    Attributes:
        heads: H, the query heads of the layer.
        kv_heads: K, the key/value heads of the layer.
        ranks: C, the ranks of the Ulysses group.
        chunk: U, the query heads of a stage, summed over the ranks.
        stages: The H/U stages.
    """

    heads: int
    kv_heads: int
    ranks: int
    chunk: int
    stages: tuple[Stage, ...]

    @property
    def replicas(self) -> int:
        """The number of ranks that have the same key/value head: C/K if K < C, else 1."""
        return max(self.ranks // self.kv_heads, 1)

    @property
    def slots(self) -> int:
        """The number of slots of a rank, over all stages."""
        return self.kv_heads * self.replicas // self.ranks

    @property
    def queries_per_slot(self) -> int:
        """The number of query heads of a rank that attend to the same slot: G, or H/C if K < C."""
        return self.heads // (self.ranks * self.slots)

    @property
    def heads_per_rank(self) -> int:
        """n, the number of query heads of a rank in each stage."""
        return self.chunk // self.ranks

    @property
    def slots_in_flight(self) -> int:
        """The number of slots that are in memory at a time.

        U_kv in the formulas of ``apply_upipe`` is C times this number.
        """
        return max(len(part.slots) for stage in self.stages for part in stage)

    def query_heads(self, stage: int, rank: int) -> list[int]:
        """Return the query heads of this rank in this stage, as numbers of the model, in sending order."""
        return [
            (slot * self.ranks + rank) * self.queries_per_slot + query
            for part in self.stages[stage]
            for slot in part.slots
            for query in part.queries
        ]

    def kv_heads_of(self, stage: int, rank: int) -> list[int]:
        """Return the key/value head of each slot of this rank in this stage, as numbers of the model."""
        return [
            (slot * self.ranks + rank) // self.replicas for part in self.stages[stage] for slot in part.slots
        ]

    def sends(self, stage: int) -> int:
        """Return how many times keys and values are sent in this stage."""
        return sum(part.opens for part in self.stages[stage])


@cache
def schedule(heads: int, kv_heads: int, ranks: int, chunk: int) -> Schedule:
    """Divide the heads of a layer into H/U stages of U query heads.

    The query heads of a rank are ordered by slot, and each stage takes the next n = U/C of them. Each
    key/value head is therefore sent once, and is in memory only while its query heads attend. Let G be the
    query heads of a slot. If G divides n, a stage takes whole slots and is one range. If n divides G, a stage
    takes a part of one slot and is one range. In the other cases, a stage has a range for each slot.

    Args:
        heads: H, the query heads of the layer.
        kv_heads: K, the key/value heads of the layer.
        ranks: C, the ranks of the Ulysses group.
        chunk: U, the query heads of a stage, summed over the ranks.

    Source:
        Untied Ulysses (arXiv 2602.21196), its schedule for GQA, which this is for U = C and K >= C.

    Raises:
        RecipeError: The heads do not allow C; C does not divide U; or U does not divide H.
    """
    check_degree(heads, kv_heads, ranks)
    if chunk < 1 or chunk % ranks or heads % chunk:
        works = ", ".join(str(u) for u in range(ranks, heads + 1, ranks) if heads % u == 0)
        rule = (
            f"the Ulysses degree {ranks} does not divide it"
            if chunk < 1 or chunk % ranks
            else f"it does not divide the {heads} query heads"
        )
        raise RecipeError(f"head_chunk={chunk}: {rule}; these work: {works}")
    per_slot = heads // max(kv_heads, ranks)
    per_rank = chunk // ranks
    stages = tuple(
        tuple(_head_ranges(first, first + per_rank, per_slot)) for first in range(0, heads // ranks, per_rank)
    )
    return Schedule(heads, kv_heads, ranks, chunk, stages)


def _head_ranges(first: int, end: int, per_slot: int) -> list[HeadRange]:
    """Divide the query heads ``first`` to ``end`` of a rank into head ranges."""
    if (end - first) % per_slot == 0:
        return [HeadRange(range(first // per_slot, end // per_slot), range(per_slot), True, True)]
    ranges = []
    while first < end:
        slot, query = divmod(first, per_slot)
        stop = min(query + end - first, per_slot)
        ranges.append(HeadRange(range(slot, slot + 1), range(query, stop), query == 0, stop == per_slot))
        first += stop - query
    return ranges
