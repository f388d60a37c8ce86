"""How much of the time of copies between device and host is hidden behind kernels, in one training step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from lab.errors import LabError
from lab.recipe.jobs import Job, TrainSettings
from lab.rehearsing.rehearse import DeviceType
from lab.step.on_ranks import make_rank_state
from lab.step.one_rank import one_rank
from lab.step.training_step import NoMeter

DIRECTIONS = {"to host": "Memcpy DtoH", "from host": "Memcpy HtoD"}
"""How the profiler names the copies of each direction."""

Span = tuple[float, float]
"""When something began and ended, in microseconds."""


def measure_hidden_copies(job: Job, where: DeviceType) -> dict[str, Any]:
    """Profile the second training step of one rank of a job, with simulated peers.

    Returns:
        The seconds of the step and those in which a kernel ran; for each direction the number of copies,
        their seconds, and "hidden", the share of these seconds in which a kernel ran. A CPU has no copies in
        the background, so its figures are zeros, and "hidden" is None.

    Raises:
        LabError: The profiler saw no kernel or no copy on a GPU.
    """
    with one_rank(job.recipe, job.ranks, "loopback", where) as mesh:
        state = make_rank_state(job, TrainSettings(steps=2), mesh)
        # Host memory is pinned and kernels are loaded in the first step.
        float(state.train_step(0, NoMeter()))
        activity = ProfilerActivity.CUDA if where == "cuda" else ProfilerActivity.CPU
        with profile(activities=[activity]) as profiler:
            float(state.train_step(1, NoMeter()))
            if where == "cuda":
                torch.cuda.synchronize()
        state.close()
    events = [
        (event.name, (event.time_range.start, event.time_range.end))
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]
    figures = hidden_share(events)
    if where == "cuda" and not (figures["kernel s"] and figures["copies to host"]):
        raise LabError(
            f"the profiler saw {len(events)} events of the GPU, and no kernel or no copy to the host: check "
            "that CUPTI may be used here"
        )
    return figures


def hidden_share(events: Iterable[tuple[str, Span]]) -> dict[str, Any]:
    """Return the figures of ``measure_hidden_copies`` from the name and the span of each event of a GPU."""
    kernels: list[Span] = []
    copies: dict[str, list[Span]] = {direction: [] for direction in DIRECTIONS}
    for name, span in events:
        direction = next((way for way, prefix in DIRECTIONS.items() if name.startswith(prefix)), None)
        if direction is not None:
            copies[direction].append(span)
        elif not name.startswith(("Memcpy", "Memset")):
            kernels.append(span)
    busy = _union(kernels)
    spans = [*kernels, *(span for part in copies.values() for span in part)]
    figures: dict[str, Any] = {
        "step s": (max(end for _, end in spans) - min(start for start, _ in spans)) / 1e6 if spans else 0.0,
        "kernel s": _length(busy) / 1e6,
    }
    for direction, part in copies.items():
        seconds = _length(part)
        figures |= {
            f"copies {direction}": len(part),
            f"{direction} s": seconds / 1e6,
            f"{direction} hidden": _common(part, busy) / seconds if seconds else None,
        }
    return figures


def _union(spans: Sequence[Span]) -> list[Span]:
    """Return spans in order, without overlap, that cover what ``spans`` cover."""
    union: list[Span] = []
    for start, end in sorted(spans):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((start, end))
    return union


def _length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


def _common(spans: Sequence[Span], union: Sequence[Span]) -> float:
    """Return the length of the part of each span that lies in ``union``, summed over the spans."""
    total, first = 0.0, 0
    for start, end in sorted(spans):
        while first < len(union) and union[first][1] <= start:
            first += 1
        at = first
        while at < len(union) and union[at][0] < end:
            total += min(end, union[at][1]) - max(start, union[at][0])
            at += 1
    return total
