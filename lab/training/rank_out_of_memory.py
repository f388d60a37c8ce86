"""Running out of memory: which rank, in what, and the cheapest rung of the ladder that would have fit."""

from __future__ import annotations

from cluster.errors import RankError
from lab.errors import LabError
from lab.memory.out_of_memory import OutOfMemory
from lab.planning.closed_form import estimate_job
from lab.planning.plan import Plan, has_fp32_state, plan_job, shape_of
from lab.recipe.jobs import Job, Machine, make_job
from lab.recipe.ladder import RUNGS
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
    """The first rung of the ladder whose step holds at most ``limit`` bytes per device, and its plan.

    The closed form says which rungs may; the plan, exact for ranks on CPU, which does. Where none does, the
    leanest of those it says.
    """
    shape = shape_of(job.model, job.dtype)
    rungs = {
        rung: make_job(
            job.model,
            rung,
            tokens=job.tokens,
            ranks=job.ranks,
            rows=job.rows,
            accumulate=job.accumulate,
            lora=job.lora,
            dtype=job.dtype,
            shape=shape,
        )
        for rung in RUNGS
    }
    likely = {rung: estimate_job(shape, asked).device_peak for rung, asked in rungs.items()}
    leanest = min(likely, key=lambda rung: likely[rung])
    # The closed form knows fp32 parameters alone.
    estimated = has_fp32_state(job)
    tried = [rung for rung in RUNGS if not estimated or likely[rung] <= limit * MARGIN]
    machine = Machine(workspace=False, device_memory=limit)
    plans = {}
    for rung in tried or [leanest]:
        plans[rung] = plan_job(rungs[rung], machine)
        if plans[rung].fits:
            break
    return min(plans.items(), key=lambda item: item[1].device_peak)


MARGIN = 1.05
"""The closed form is within 5% of the plan."""


def _remedy(rung: str | None, planned: Plan | None) -> str:
    if rung is None or planned is None:
        return "lab fit says which recipe fits a memory"
    peak = f"planned at {format_bytes(planned.device_peak)} per rank"
    if planned.fits:
        return f"the cheapest rung that fits: {rung!r}, {peak}"
    return f"no rung fits that, the leanest is {rung!r}, {peak}: more ranks, or fewer tokens, need less"
