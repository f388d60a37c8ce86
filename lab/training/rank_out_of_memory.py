"""Running out of memory: which rank, in what, and the cheapest rung of the ladder that would have fit."""

from __future__ import annotations

from dataclasses import replace

from cluster.errors import RankError
from lab.errors import LabError
from lab.memory.out_of_memory import OutOfMemory
from lab.planning.answers import shape_of
from lab.planning.plan import Plan, plan_job
from lab.recipe.jobs import Job, Machine
from lab.recipe.ladder import ladder
from lab.units import format_bytes


class RankOutOfMemory(LabError):
    """A rank ran out of memory. The text says which, in what operator and module, and what was held.

    Attributes: ``rank``, ``moment``, ``time`` (seconds since the epoch), ``partial``, the run up to then;
    ``rung`` and ``plan`` of the cheapest rung that fits, or the leanest where none does (None where the
    device itself refused).
    """

    def __init__(self, failed: RankError, error: OutOfMemory, job: Job) -> None:
        self.rank, self.moment, self.time, self.partial = (
            failed.rank,
            error.moment,
            failed.time,
            failed.partial,
        )
        self.rung: str | None = None
        self.plan: Plan | None = None
        if error.limit is not None:
            self.rung, self.plan = cheapest_rung(job, error.limit)
        super().__init__(f"rank {failed.rank}: {error}\n{_remedy(self.rung, self.plan)}")

    def _render_traceback_(self) -> list[str]:
        # Asked for by IPython: what matters is in the text, and the frames are the lab's own.
        return str(self).splitlines()


def cheapest_rung(job: Job, limit: int) -> tuple[str, Plan]:
    """Return the first rung of the ladder whose step holds at most ``limit`` bytes per device, and its plan.

    The rungs are planned in their order, up to the one that fits. Where none does, the answer is the leanest.
    """
    machine = Machine(workspace=False, device_memory=limit)
    shape = shape_of(job.model, job.dtype)
    plans: dict[str, Plan] = {}
    for rung, recipe in ladder(job.model, job.ranks, job.tokens, shape=shape).items():
        plans[rung] = plan_job(replace(job, recipe=recipe, recipe_name=rung), machine)
        if plans[rung].fits:
            return rung, plans[rung]
    return min(plans.items(), key=lambda item: item[1].device_peak)


def _remedy(rung: str | None, planned: Plan | None) -> str:
    if rung is None or planned is None:
        return "lab fit says which recipe fits a memory"
    peak = f"planned at {format_bytes(planned.device_peak)} per rank"
    if planned.fits:
        return f"the cheapest rung that fits: {rung!r}, {peak}"
    return f"no rung fits that, the leanest is {rung!r}, {peak}: more ranks, or fewer tokens, need less"
