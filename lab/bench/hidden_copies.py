"""How much of the time of copies between device and host is hidden behind kernels, in one training step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.profiler import ProfilerActivity, profile

from lab.errors import LabError
from lab.recipe.jobs import Job, TrainSettings
from lab.rehearsing.rehearse import DeviceType
from lab.step.on_ranks import make_rank_state
from lab.step.one_rank import one_rank
from lab.step.training_step import NoMeter
from lab.units import GiB

DIRECTIONS = {"to host": "Memcpy DtoH", "from host": "Memcpy HtoD"}
"""How the profiler names the copies of each direction."""

CLASSES = {
    "attention s": ("attention", "flash", "fmha", "sdpa"),
    "products s": ("cutlass", "gemm", "nvjet"),
}
"""Parts of the names of kernels, by class; a kernel is of the first class that has a part of its name."""

Event = Mapping[str, Any]
"""An event of a trace: ``cat``, the category; ``ts`` and ``dur``, its start and length in microseconds."""

Span = tuple[float, float]
"""When something began and ended, in microseconds."""


def measure_hidden_copies(job: Job, where: DeviceType) -> dict[str, Any]:
    """Profile the second training step of one rank of a job, with simulated peers.

    Returns:
        The seconds of the step and those in which a kernel ran; the seconds of kernels by class; for each
        direction the number of copies, their GiB, their seconds, and "hidden", the share of these seconds in
        which a kernel ran. A CPU has no copies in the background, so its figures are zeros, and "hidden" is
        None.

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
    with TemporaryDirectory() as folder:
        # The events that the profiler returns have no bytes.
        profiler.export_chrome_trace(trace := f"{folder}/trace.json")
        # Names of kernels may have characters that JSON does not.
        events = json.loads(Path(trace).read_text(errors="replace"), strict=False)["traceEvents"]
    figures = hidden_share(events)
    if where == "cuda" and not (figures["kernel s"] and figures["copies to host"]):
        raise LabError(
            f"the profiler saw {len(events)} events, and no kernel of the GPU or no copy to the host: check "
            "that CUPTI may be used here"
        )
    return figures


def hidden_share(events: Iterable[Event]) -> dict[str, Any]:
    """Return the figures of ``measure_hidden_copies`` from the events of a trace."""
    kernels: list[Span] = []
    copies: dict[str, list[Span]] = {direction: [] for direction in DIRECTIONS}
    nbytes = dict.fromkeys(DIRECTIONS, 0)
    classes = dict.fromkeys([*CLASSES, "other kernels s"], 0.0)
    for event in events:
        category, name = event.get("cat"), event["name"]
        if category == "kernel":
            kernels.append(_span(event))
            found = (each for each, parts in CLASSES.items() if any(part in name.lower() for part in parts))
            classes[next(found, "other kernels s")] += event["dur"] / 1e6
        direction = next((way for way, prefix in DIRECTIONS.items() if name.startswith(prefix)), None)
        if category == "gpu_memcpy" and direction is not None:
            copies[direction].append(_span(event))
            nbytes[direction] += event["args"]["bytes"]
    # Between two instants, at each of which an event begins or ends, the events that run are the same.
    instants = np.unique([time for part in (kernels, *copies.values()) for span in part for time in span])
    lengths = np.diff(instants)
    busy = _running(kernels, instants) > 0
    figures: dict[str, Any] = {"step s": lengths.sum() / 1e6, "kernel s": lengths @ busy / 1e6, **classes}
    for direction, part in copies.items():
        at_once = _running(part, instants)
        total = lengths @ at_once
        figures |= {
            f"copies {direction}": len(part),
            f"{direction} GiB": nbytes[direction] / GiB,
            f"{direction} s": total / 1e6,
            f"{direction} hidden": lengths @ (at_once * busy) / total if total else None,
        }
    return figures


def _span(event: Event) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _running(spans: Sequence[Span], instants: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return how many of the spans run after each instant but the last."""
    starts, ends = np.sort(np.reshape(spans, (-1, 2)), axis=0).T
    at = instants[:-1]
    return np.searchsorted(starts, at, side="right") - np.searchsorted(ends, at, side="right")
