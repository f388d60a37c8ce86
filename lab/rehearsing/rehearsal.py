"""What a rehearsal brings back: one measured step of one rank of N, with its plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lab.errors import LabError
from lab.memory.holders import Holders, Memory
from lab.memory.moment import Moment
from lab.memory.timeline import Timeline
from lab.planning.cuda_workspace import outside_workspace
from lab.planning.plan import Plan
from lab.planning.shrinking import with_job
from lab.recipe.jobs import Job
from lab.units import format_bytes, format_lines, format_seconds, format_share


@dataclass(frozen=True, eq=False)
class Measured:
    """What the steps of one rank gave.

    ``reserved_peak`` is the bytes that torch's caching allocator holds, and ``outside_torch`` those that
    others hold (CUDA's context, libraries); ``alloc_retries`` is how often the allocator had to give its
    cache back to get more, and ``reserved_by_pool`` what it holds at the end of the step, by stream and pool.
    The four are None on CPU, where there is no such allocator. ``seconds`` are by
    phase, medians over the ``timed_steps``; where those are 0, of the step under the meter, and they include
    the pinning of host memory, the first call of each kernel, and the meter's own time. The peers' work on
    links is not in them: ``link_bytes`` is what would leave the rank in a step.
    """

    timeline: Timeline
    device_peak: int
    reserved_peak: int | None
    alloc_retries: int | None
    outside_torch: int | None
    reserved_by_pool: Mapping[str, int] | None
    seconds: dict[str, float]
    timed_steps: int
    loss: float
    link_bytes: int

    @property
    def host_peak(self) -> int:
        """The most host bytes the rank held at once."""
        return self.timeline.host_peak

    @property
    def disk_peak(self) -> int:
        """The most bytes the rank held at once in a mapped file."""
        return self.timeline.disk_peak

    @property
    def step_seconds(self) -> float:
        """Of the step that was measured."""
        return sum(self.seconds.values())


@dataclass(frozen=True, eq=False)
class Rehearsal(Measured):
    """One training step, measured as one rank of many, of the model's first ``layers`` layers.

    ``plan`` is of the same layers, ``whole`` of all ``of_layers``. ``device_memory`` is what the device was
    taken to have, in bytes, and ``device_memory_asked`` what was asked for: more where that is the whole of
    this GPU. Both are None without a limit. ``weights`` is that of ``Training``.
    """

    layers: int
    of_layers: int
    machine: str
    device_memory: int | None
    device_memory_asked: int | None
    plan: Plan
    whole: Plan
    weights: str = ""

    def __repr__(self) -> str:
        return format_lines(f"Rehearsal of {self.job.title}", self.description)

    @property
    def description(self) -> dict[str, str]:
        """What a terminal and a notebook show: texts by label."""
        limit = format_share(self.device_peak, self.device_memory)
        planned = format_bytes(self._planned(self.plan))
        whole = (
            f"to {self.of_layers} layers by the ratio of their plan to these layers': "
            f"{format_bytes(self.whole_device_peak)} per rank, {format_seconds(self.whole_seconds)} per step"
        )
        memory, asked, allocator = "", self.device_memory_asked, ""
        if self.device_memory is not None and asked is not None:
            less_text = f", all that the GPU has: {format_bytes(asked)} were asked for"
            memory = format_bytes(self.device_memory) + (less_text if self.device_memory < asked else "")
        if self.reserved_peak is not None and self.outside_torch is not None:
            allocator = (
                f"{format_bytes(self.reserved_peak)} (retries: {self.alloc_retries}), "
                f"{format_bytes(self.outside_torch)} outside torch"
            )
        first = "" if self.timed_steps else ", the first one, with pinning and the meter"
        return {
            "recipe": self.job.recipe.summary,
            "state": self.plan.state,
            "weights": self.weights,
            "measured": f"as one rank of {self.job.ranks} on {self.machine}, "
            f"{self.layers} of {self.of_layers} layers",
            "device memory": memory,
            "device peak": f"{format_bytes(self.device_peak)}{limit}, planned {planned}",
            "planned": f"{self.plan_over_measured:.4f} of the measured peak",
            "reserved": allocator,
            "at the peak": str(self.timeline.peak),
            "host peak": f"{format_bytes(self.host_peak)}, planned {format_bytes(self.plan.host_peak)}"
            if self.host_peak
            else "",
            "disk peak": f"{format_bytes(self.disk_peak)}, planned {format_bytes(self.plan.disk_peak)}"
            if self.disk_peak
            else "",
            "step": f"{format_seconds(self.step_seconds)}{first}: "
            + ", ".join(f"{phase} {format_seconds(seconds)}" for phase, seconds in self.seconds.items()),
            "extrapolated": whole if self.layers < self.of_layers else "",
            "a rank sends": f"{format_bytes(self.link_bytes)}, and would wait "
            f"{format_seconds(self.plan.costs.link_seconds)} for the links of {self.plan.device}",
            "tokens": f"{self.tokens_per_second:.4g} per second and rank if links were free, "
            f"{self.tokens_per_second_with_links:.4g} with their time added",
        }

    @property
    def job(self) -> Job:
        """The job of the whole model."""
        return self.whole.job

    @property
    def plan_over_measured(self) -> float:
        """The planned device peak of these layers over the measured one."""
        return self._planned(self.plan) / self.device_peak

    @property
    def whole_seconds(self) -> float:
        """Of the step of all layers: the measured one, by the ratio of the two plans' without links."""
        return self.step_seconds * seconds_alone(self.whole) / seconds_alone(self.plan)

    @property
    def whole_device_peak(self) -> int:
        """Of the step of all layers: the measured one, by the ratio of the two plans' peaks."""
        return round(self._planned(self.whole) / self.plan_over_measured)

    @property
    def tokens_per_second(self) -> float:
        """Of all layers, a rank's share, if links were free."""
        return self.job.step_rows * self.job.tokens / self.job.ranks / self.whole_seconds

    @property
    def tokens_per_second_with_links(self) -> float:
        """The same with the time added in which the plan waits for the links, by the hardware table."""
        seconds = self.whole_seconds + self.whole.costs.link_seconds
        return self.job.step_rows * self.job.tokens / self.job.ranks / seconds

    def holders(self, at: float | str = "peak", *, memory: Memory = "device") -> Holders:
        """Return every tensor that is held at an instant, as ``Plan.holders`` does.

        On CUDA the bytes that no tensor holds are what the allocator holds besides the tensors.

        Raises:
            ResultError: There is no such instant or memory.
        """
        return with_job(self.timeline.holders(at, memory=memory), self.timeline, self.job)

    def _planned(self, plan: Plan) -> int:
        """Of the peak of a planned step what was measured too: on CUDA not what is outside torch."""
        outside = 0 if self.outside_torch is None else outside_workspace(self.job.ranks)
        return plan.timeline.device_peak - outside

    def to_json(self) -> dict[str, Any]:
        """The answers as plain values, without the timeline."""
        peak = self.timeline.peak
        return {
            "recipe": self.job.recipe.to_json(),
            "state": self.plan.state,
            "weights": self.weights,
            "tokens": self.job.tokens,
            "ranks": self.job.ranks,
            "layers": self.layers,
            "of_layers": self.of_layers,
            "machine": self.machine,
            "device_memory": self.device_memory,
            "device_memory_asked": self.device_memory_asked,
            "device_peak": self.device_peak,
            "reserved_peak": self.reserved_peak,
            "alloc_retries": self.alloc_retries,
            "outside_torch": self.outside_torch,
            "reserved_by_pool": self.reserved_by_pool,
            "host_peak": self.host_peak,
            "disk_peak": self.disk_peak,
            "planned_device_peak": self.plan.device_peak,
            "planned_host_peak": self.plan.host_peak,
            "plan_over_measured": self.plan_over_measured,
            "peak": {"op": peak.op, "shapes": peak.shapes, "module": peak.module, "phase": peak.phase},
            "seconds": self.step_seconds,
            "seconds_by_phase": self.seconds,
            "timed_steps": self.timed_steps,
            "loss": self.loss,
            "link_bytes": self.link_bytes,
            "link_seconds": self.plan.costs.link_seconds,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_with_links": self.tokens_per_second_with_links,
            "whole_device_peak": self.whole_device_peak,
            "whole_seconds": self.whole_seconds,
        }


class RehearsalOutOfMemory(LabError):
    """The step does not fit: how far it got, and what it needs by its plan. The process can go on.

    ``moment`` is the instant, ``plan`` that of the step.
    """

    def __init__(self, message: str, moment: Moment, plan: Plan) -> None:
        self.moment, self.plan = moment, plan
        super().__init__(
            f"{message}\nthe whole step needs {format_bytes(plan.device_peak)} by its plan: fewer tokens, "
            "more ranks or fewer layers need less"
        )

    def _render_traceback_(self) -> list[str]:
        # Asked for by IPython: what matters is in the text, and the frames are the lab's own.
        return str(self).splitlines()


class RehearsalTooLarge(LabError):
    """A step on CPU that the memory of this machine does not hold."""


def seconds_alone(plan: Plan) -> float:
    """Planned seconds of a rank that waits for no other: computation beside copies, or these, or the disk."""
    costs = plan.costs
    return replace(costs, device_seconds=costs.device_seconds - costs.link_seconds).seconds
