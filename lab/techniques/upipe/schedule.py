"""Which heads UPipe sends in which stage: integers only, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from lab.errors import RecipeError
from lab.techniques.exchange import check_degree


@dataclass(frozen=True)
class HeadRange:
    """A part of a stage in which all query heads attend to key/value heads that were sent together.

    Slot g is one key/value head on each rank: head g*C + r on rank r.

    Attributes:
        slots: the slots of this range.
        queries: which of the query heads of each slot it takes.
        opens: whether the slots are sent before this range.
        closes: whether no later range uses the slots.
    """

    slots: range
    queries: range
    opens: bool
    closes: bool


Stage = tuple[HeadRange, ...]
"""The query heads with which a rank attends at once: U/C of them."""


@dataclass(frozen=True)
class Schedule:
    """All stages of a layer: H ``heads``, K ``kv_heads``, C ``ranks``, U ``chunk``; n = U/C."""

    heads: int
    kv_heads: int
    ranks: int
    chunk: int
    stages: tuple[Stage, ...]

    @property
    def replicas(self) -> int:
        """On how many ranks each key/value head is: C/K where K < C."""
        return max(self.ranks // self.kv_heads, 1)

    @property
    def slots(self) -> int:
        """Key/value heads a rank sees in all."""
        return self.kv_heads * self.replicas // self.ranks

    @property
    def group(self) -> int:
        """Query heads to a slot on each rank: G, or H/C where K < C."""
        return self.heads // (self.ranks * self.slots)

    @property
    def heads_per_rank(self) -> int:
        """n, the query heads a rank attends with in each stage."""
        return self.chunk // self.ranks

    @property
    def slots_in_flight(self) -> int:
        """Slots held at once; C times as many key/value heads are in flight, the U_kv of the formulas."""
        return max(len(part.slots) for stage in self.stages for part in stage)

    def query_heads(self, stage: int, rank: int) -> list[int]:
        """The model's query heads that this rank attends with in this stage, in the order they are sent."""
        return [
            (slot * self.ranks + rank) * self.group + query
            for part in self.stages[stage]
            for slot in part.slots
            for query in part.queries
        ]

    def kv_heads_of(self, stage: int, rank: int) -> list[int]:
        """The model's key/value heads that they attend to, one for each slot of the stage."""
        return [
            (slot * self.ranks + rank) // self.replicas for part in self.stages[stage] for slot in part.slots
        ]

    def sends(self, stage: int) -> int:
        """How many times keys (and as often values) are sent in this stage."""
        return sum(part.opens for part in self.stages[stage])


@cache
def schedule(heads: int, kv_heads: int, ranks: int, chunk: int) -> Schedule:
    """The stages of a layer with H, K, C and U heads: H/U stages of U query heads.

    Walk a rank's query heads key/value head by key/value head and take the next n = U/C. So no key/value
    head is sent twice, and none is held longer than its query heads last. Where n is a multiple of the G
    query heads of a slot, a stage takes whole slots and is one range; where n divides G, a stage is one
    range of a part of a slot; where neither divides, a stage is cut into ranges at the slots' boundaries.

    Source: "Untied Ulysses" (arXiv 2602.21196), its schedule for GQA, which is this with U = C and K >= C.

    Raises:
        RecipeError: C does not go with the heads; C does not divide U; U does not divide H.
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
    group = heads // max(kv_heads, ranks)
    per_rank = chunk // ranks
    stages = tuple(
        tuple(_head_ranges(first, first + per_rank, group)) for first in range(0, heads // ranks, per_rank)
    )
    return Schedule(heads, kv_heads, ranks, chunk, stages)


def _head_ranges(first: int, end: int, group: int) -> list[HeadRange]:
    """Cut query heads ``first`` to ``end`` of a rank into ranges, at the ends of slots of ``group`` heads."""
    if (end - first) % group == 0:
        return [HeadRange(range(first // group, end // group), range(group), True, True)]
    ranges = []
    while first < end:
        slot, query = divmod(first, group)
        stop = min(query + end - first, group)
        ranges.append(HeadRange(range(slot, slot + 1), range(query, stop), query == 0, stop == group))
        first += stop - query
    return ranges
