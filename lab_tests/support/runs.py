"""Runs with invented rows, and a function that hands one to a watcher."""

from typing import Any

import numpy as np

from lab.memory.moment import Op
from lab.memory.timeline import TimelineBuilder
from lab.show.live.timeline import LiveTimeline
from lab.training.records import Progress, Run
from lab.units import MiB

OPERATORS = (Op("aten.mm", "5x7 7x11"), Op("aten.silu", "5x11"), Op("aten.add", "5x7 5x7"))
PEAK = 700 * MiB


def timeline_builder(
    rank: int = 0, *, steps: int = 2, rows: int = 60, host: int = 0, disk: int = 0, peak: int = PEAK
) -> TimelineBuilder:
    """A timeline of ``rows`` rows a phase whose ``peak`` is in the last step's backward, in ``layers.3``."""
    builder = TimelineBuilder()
    seconds = 0.01 * (rank + 1)
    for step in range(steps):
        for phase, level in (("forward", 200), ("backward", 300), ("optimizer", 90)):
            for row in range(rows):
                top = phase == "backward" and step == steps - 1 and row == 7
                held = [40 * MiB, 30 * MiB, 20 * MiB, level * MiB, 0, 0, 0, (rank + row) % 5 * MiB]
                if top:
                    held[3] += peak - sum(held)
                seconds += 0.013
                module = "layers.3" if top else f"layers.{row % 3}"
                builder.add(
                    seconds,
                    held,
                    host * row,
                    phase=phase,
                    module=module,
                    op=OPERATORS[0] if top else OPERATORS[row % 3],
                    step=step,
                    disk=disk * row,
                )
    return builder


def finished_run(ranks: int = 3, **how: Any) -> Run:
    timelines = tuple(timeline_builder(rank, **how).since() for rank in range(ranks))
    return Run("tiny · fsdp", None, None, (2.5, 2.25), (0.5, 0.25), timelines)  # type: ignore[arg-type]


def follow(watch: LiveTimeline, run: Run, pieces: int = 6) -> None:
    """Hands the run to ``watch`` rank by rank and piece by piece, then as a whole."""
    for piece in range(pieces):
        for rank, timeline in enumerate(run.timelines):
            rows = np.array_split(np.arange(len(timeline)), pieces)[piece]
            watch(Progress(rank, len(run.timelines), piece // 3, 2, None, timeline.rows(rows)))
    watch(run)
