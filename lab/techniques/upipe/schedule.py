"""Which heads UPipe sends in which stage: integers only, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass

from lab.errors import RecipeError
from lab.techniques.exchange import check_degree


@dataclass(frozen=True)
class Run:
    """A part of a stage in which all query heads attend to key/value heads that were sent together.

    Slot g is one key/value head on each rank, g*C + r on rank r. ``slots`` are the run's, ``queries`` which
    of the query heads of each of them; ``opens`` says that the slots are sent before it, ``closes`` that
    nothing after it wants them.
    """

    slots: range
    queries: range
    opens: bool
    closes: bool


Stage = tuple[Run, ...]
"""What a rank attends with at once, U/C query heads."""


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
        return max(len(run.slots) for stage in self.stages for run in stage)

    def query_heads(self, stage: int, rank: int) -> list[int]:
        """The model's query heads that this rank attends with in this stage, in the order they are sent."""
        return [
            (slot * self.ranks + rank) * self.group + query
            for run in self.stages[stage]
            for slot in run.slots
            for query in run.queries
        ]

    def kv_heads_of(self, stage: int, rank: int) -> list[int]:
        """The model's key/value heads that they attend to, one for each slot of the stage."""
        return [
            (slot * self.ranks + rank) // self.replicas for run in self.stages[stage] for slot in run.slots
        ]

    def sends(self, stage: int) -> int:
        """How many times keys (and as often values) are sent in this stage."""
        return sum(run.opens for run in self.stages[stage])


def schedule(heads: int, kv_heads: int, ranks: int, chunk: int) -> Schedule:
    """The stages of a layer with H, K, C and U heads: H/U stages of U query heads.

    Walk a rank's query heads key/value head by key/value head and take the next n = U/C. So no key/value
    head is sent twice, and none is held longer than its query heads last. Where n is a multiple of the G
    query heads of a slot, a stage takes whole slots and is one run; where n divides G, a stage is one run of
    a part of a slot; where neither divides, a stage is cut into runs at the slots' boundaries.

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
        tuple(_runs(first, first + per_rank, group)) for first in range(0, heads // ranks, per_rank)
    )
    return Schedule(heads, kv_heads, ranks, chunk, stages)


def _runs(first: int, end: int, group: int) -> list[Run]:
    """Query heads ``first`` to ``end`` of a rank's walk, cut where slots of ``group`` end."""
    if (end - first) % group == 0:
        return [Run(range(first // group, end // group), range(group), True, True)]
    runs = []
    while first < end:
        slot, query = divmod(first, group)
        stop = min(query + end - first, group)
        runs.append(Run(range(slot, slot + 1), range(query, stop), query == 0, stop == group))
        first += stop - query
    return runs
