"""Timelines that have ended, and answers about them: who holds the bytes, and what would free some."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lab.errors import LabError, ResultError
from lab.memory.categories import OTHER
from lab.memory.holders import Holder, Holders, Memory
from lab.memory.timeline import Timeline
from lab.planning.freeing import Freed, cheapest_changes
from lab.planning.plan import plan_job
from lab.planning.shrinking import with_job
from lab.recipe.jobs import Disk, Job, Machine
from lab.show.panels import Over, row_positions
from lab.units import format_operator, format_seconds

_ITEMS = 150
"""How many tensors an answer names; the rest is one item."""


@dataclass(frozen=True, eq=False)
class Recorded:
    """What a widget shows when nothing runs any more.

    Attributes:
        title: One line that names the run or the plan.
        timelines: The timelines by the names of their panels.
        job: The job that they are of; None where it is not known, and no knob is named then.
        over: The horizontal axis.
        planned: The timeline of a plan to draw over them; None for no plan.
        highest: The axis of bytes reaches at least so high.
        ranks: Whether the timelines are those of the ranks of one job, whose bytes can be added up.
    """

    title: str
    timelines: Mapping[str, Timeline]
    job: Job | None
    over: Over = "seconds"
    planned: Timeline | None = None
    highest: int = 0
    ranks: bool = False

    def answer(
        self, asked: Mapping[str, Any], tell: Callable[[dict[str, Any]], object] | None = None
    ) -> dict[str, Any]:
        """Answer a question of the page; what is wrong with it is an answer too.

        Args:
            asked: ``{"row": 5, "rank": 0, "memory": "device", "all": False}`` asks for the tensors that rank
                0, or with ``all`` every rank, holds at row 5 of its timeline; ``{"free": "4 GiB"}`` for the
                knobs that free so much.
            tell: Called with an answer that is not the last, as plans end.
        """
        try:
            return self._freeing(str(asked["free"]), tell) if "free" in asked else self._holders(asked)
        except LabError as error:
            return {"kind": "error", "of": "free" if "free" in asked else "row", "text": str(error)}

    def _freeing(self, size: str, tell: Callable[[dict[str, Any]], object] | None) -> dict[str, Any]:
        if self.job is None:
            raise ResultError("the job of this timeline is not known, and so the knobs are not")
        timelines = self.timelines.values()
        machine = Machine(
            workspace=any(one.device[:, OTHER].any() for one in timelines),
            disk=Disk() if any(one.disk_peak for one in timelines) else None,
        )

        def watch(freed: Freed) -> None:
            if tell is not None:
                tell({"kind": "freed", "text": f"searching … {freed.summary}", "knobs": []})

        freed = cheapest_changes(self.job, size, lambda job: plan_job(job, machine), watch)
        return {"kind": "freed", "text": freed.text, "knobs": list(freed.changes) if freed.enough else []}

    def _holders(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        names, timelines = list(self.timelines), list(self.timelines.values())
        rank, row, memory = asked["rank"], asked["row"], asked["memory"]
        every = bool(asked.get("all")) and self.ranks and len(timelines) > 1
        if not 0 <= rank < len(timelines) or not 0 <= row < len(timelines[rank]):
            raise ResultError(f"rank {rank}, row {row}: there is no such instant in this timeline")
        positions, moment = row_positions(timelines[rank], self.over), timelines[rank].moment(row)
        at = float(positions[row])
        place = row - int(np.searchsorted(positions, at))
        rows = [self._row_at(one, at, place) for one in timelines]
        asked_of = range(len(timelines)) if every else [rank]
        found = [self._held(timelines[number], rows[number], memory) for number in asked_of]
        items = tuple(item for one in found for item in one.items)
        holders = Holders(moment, memory, items, sum(one.total for one in found)).grouped()
        module = f" in {moment.module}" if moment.module else ""
        return {
            "kind": "holders",
            "rank": rank,
            "row": row,
            "memory": memory,
            "all": every,
            "position": at,
            "name": "all ranks" if every else names[rank],
            "when": f"step {moment.step + 1} · {format_seconds(moment.seconds)} · {moment.phase}: "
            f"{format_operator(moment.op)}{module}",
            "total": holders.total,
            "items": _items(holders),
            "ranks": [
                {"rank": number, "name": names[number], "row": rows[number], "total": one.total}
                for number, one in zip(asked_of, found, strict=True)
            ],
        }

    def _row_at(self, timeline: Timeline, at: float, place: int) -> int:
        """Return the row at or before a position on the axis; the first if all are behind it.

        Of several at this position, as those of operators that take no time, it is the one at ``place``.
        """
        positions = row_positions(timeline, self.over)
        first, end = (int(np.searchsorted(positions, at, side=side)) for side in ("left", "right"))
        return max(min(first + place, end - 1), 0)

    def _held(self, timeline: Timeline, row: int, memory: Memory) -> Holders:
        held = timeline.holders_at(row, memory)
        return held if self.job is None else with_job(held, timeline, self.job)


def _items(holders: Holders) -> list[dict[str, Any]]:
    """Return the tensors for the page, the largest first; those behind the first 150 as one."""
    shown, rest = holders.items[:_ITEMS], holders.items[_ITEMS:]
    items = [_item(one) for one in shown]
    if rest:
        size, count = sum(one.bytes for one in rest), sum(one.count for one in rest)
        items.append(_unnamed("", size, count, "the other tensors"))
    if holders.unheld:
        other = "other" if holders.memory == "device" else holders.memory
        items.append(_unnamed(other, holders.unheld, 1, "held by no tensor"))
    return items


def _item(one: Holder) -> dict[str, Any]:
    names = ("bytes", "units", "count", "category", "tensor", "place", "made", "freed", "knob")
    texts = {"op": format_operator(one.op), "phase": f"{one.phase}, step {one.step + 1}"}
    return {name: getattr(one, name) for name in names} | texts


def _unnamed(category: str, size: int, count: int, text: str) -> dict[str, Any]:
    """Return bytes without a tensor of their own, in the form of a tensor."""
    blank = dict.fromkeys(("tensor", "op", "phase", "knob"), "") | dict.fromkeys(("units", "made", "freed"))
    return blank | {"bytes": size, "count": count, "category": category, "place": text}
