"""What a run says while it goes on, and what it brings back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from lab.errors import ResultError
from lab.memory.holders import Holders, Memory, check_memory
from lab.memory.timeline import Timeline
from lab.planning.shrinking import with_job
from lab.recipe.jobs import Job, TrainSettings
from lab.units import format_bytes, format_lines


@dataclass(frozen=True, eq=False)
class Started:
    """The first message: a cluster is asked to run a job.

    Until the first ``Progress`` its ranks import what they need and make the model, which takes seconds.

    Attributes:
        stop: Ends the run, from any thread; ``lab.run`` returns what it measured.
        ranks: The number of ranks.
    """

    stop: Callable[[], None]
    ranks: int


@dataclass(frozen=True, eq=False)
class Ended:
    """The last message of a run that ended before its ranks had measured anything; ``how`` says why."""

    how: str


@dataclass(frozen=True, eq=False)
class Progress:
    """One message of a running rank: where it is, and the timeline's rows since its previous message.

    ``step`` counts from 0; ``loss`` and ``seconds`` are those of the step before it, if there was one.
    """

    rank: int
    ranks: int
    step: int
    steps: int
    loss: float | None
    timeline: Timeline
    seconds: float | None = None


@dataclass(frozen=True, eq=False)
class Run:
    """What a run brings back.

    ``losses`` and ``seconds`` have one entry per step (the loss is the global mean, the time rank 0's);
    ``timelines`` one a rank: the bytes that crossed the dispatcher. ``allocated`` are the most bytes that
    CUDA's allocator held on each rank, kernels' workspaces among them; it is empty on CPU, and where the run
    is not ``complete``. A run that was stopped or failed is not: it has what was measured. ``weights`` is
    that of ``Training``.
    """

    title: str
    job: Job
    settings: TrainSettings
    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    timelines: tuple[Timeline, ...]
    complete: bool = True
    allocated: tuple[int, ...] = ()
    weights: str = ""

    def __repr__(self) -> str:
        return format_lines(f"Run of {self.title}", self.description)

    @property
    def description(self) -> dict[str, str]:
        """What a terminal and a notebook show: texts by label."""
        metered = [timeline.device_peak for timeline in self.timelines]
        rank = metered.index(max(metered))
        highest = self.timelines[rank]
        others = f", the highest of {len(metered)} ranks" if len(metered) > 1 else ""
        return {
            "weights": self.weights,
            "losses": _ends([f"{loss:.4f}" for loss in self.losses]),
            "seconds": _ends([f"{seconds:.3g}" for seconds in self.seconds]),
            "device peak": f"{format_bytes(metered[rank])} on rank {rank}{others}",
            "at the peak": str(highest.peak) if len(highest) else "",
            "allocated": f"{format_bytes(max(self.allocated))} by CUDA's allocator" if self.allocated else "",
            "host peak": f"{format_bytes(self.host_peak)} per rank" if self.host_peak else "",
            "disk peak": f"{format_bytes(self.disk_peak)} per rank" if self.disk_peak else "",
        }

    @property
    def device_peak(self) -> int:
        """The most device bytes any rank held, by CUDA's allocator where it was asked, else by the meter."""
        return max(self.allocated or (timeline.device_peak for timeline in self.timelines))

    @property
    def host_peak(self) -> int:
        """The most host bytes any rank held."""
        return max(timeline.host_peak for timeline in self.timelines)

    @property
    def disk_peak(self) -> int:
        """The most bytes any rank held in a mapped file."""
        return max(timeline.disk_peak for timeline in self.timelines)

    def holders(
        self, at: float | str = "peak", *, rank: int | None = None, memory: Memory = "device"
    ) -> Holders:
        """Return every tensor that a rank holds at an instant, and the knob that would shrink it.

        Args:
            at: Seconds; or ``"peak"``, where this memory holds the most; or a phase's end, in the last step.
            rank: The rank; None for that which holds the most.
            memory: Which memory: the device's or the host's.

        Raises:
            ResultError: There is no such rank, instant or memory, or the run was stopped and recorded no
                tensors.
        """
        check_memory(memory)
        if rank is None:
            peaks = [getattr(timeline, f"{memory}_peak") for timeline in self.timelines]
            rank = peaks.index(max(peaks))
        if not 0 <= rank < len(self.timelines):
            raise ResultError(f"rank={rank}: this run has the ranks 0 to {len(self.timelines) - 1}")
        timeline = self.timelines[rank]
        return with_job(timeline.holders(at, memory=memory), timeline, self.job)


def _ends(texts: list[str]) -> str:
    """Return the texts in a line; of more than eight, the first two and the last two."""
    return " ".join(texts if len(texts) <= 8 else [*texts[:2], "...", *texts[-2:]])


Watch: TypeAlias = Callable[[Started | Progress | Run | Ended], None]
"""Called when a run starts, with each message of each rank while it goes on, and with the run at its end."""
