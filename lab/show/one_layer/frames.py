"""One layer's step as frames: which tensors are held, which move, and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lab.memory.timeline import Timeline
from lab.planning.shrinking import hidden_state_bytes
from lab.recipe.jobs import Job
from lab.show.one_layer.captions import Caption, captions_of
from lab.show.one_layer.tracks import Lane, Track, View, find_room
from lab.show.one_layer.windows import window_of

if TYPE_CHECKING:
    from lab.planning.plan import Plan
    from lab.rehearsing.rehearsal import Rehearsal
    from lab.training.records import Run

MOST_FRAMES = 160
"""The most frames of one layer: where there are more, more tensors are too small to have a box."""

_SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 1.0, 2.0)
"""The parts of A below which a tensor has no box: the first that gives few enough frames."""


@dataclass(frozen=True)
class LayerFrames:
    """The frames of one layer's forward and backward.

    Attributes:
        job: What was planned or run.
        layer: The number of the layer.
        note: What a reader must know of the ranks.
        unit: A, the bytes of one hidden state of the rank: b x s x E elements.
        share: Tensors of less than this many A have no box.
        lanes: The ranks.
        captions: What is said of each frame.
        backward: The first frame of backward.
        width: A shelf of the device's boxes, in A.
        shelves: How many shelves there are.
        host_width: The width of the host's boxes, in A; 0 if there are none.
    """

    job: Job
    layer: int
    note: str
    unit: int
    share: float
    lanes: tuple[Lane, ...]
    captions: tuple[Caption, ...]
    backward: int
    width: float
    shelves: int
    host_width: float

    def __len__(self) -> int:
        return len(self.captions)

    @property
    def title(self) -> str:
        """What was planned or run, and the layer."""
        return f"{self.job.title} · layer {self.layer}"


def layer_frames(result: Plan | Rehearsal | Run, layer: int | None, ranks: int) -> LayerFrames:
    """Return the frames of one layer of a plan, a rehearsal or a run.

    Args:
        result: What has the timelines.
        layer: The number of the layer; None for the one in the middle.
        ranks: The most ranks that are shown.

    Raises:
        ResultError: There is no such layer, or no tensors were recorded.
    """
    job = result.job
    timelines: Sequence[Timeline] = getattr(result, "timelines", None) or (result.timeline,)  # type: ignore[union-attr]
    of_one_rank = len(timelines) == 1
    window = window_of(timelines[0], layer)
    unit = hidden_state_bytes(timelines[0], job)
    views = [View(window_of(timeline, window.layer), job) for timeline in timelines[:ranks]]
    few = (share for share in _SHARES if len(views[0].event_rows(share * unit)) <= MOST_FRAMES)
    share = next(few, _SHARES[-1])
    rows = views[0].event_rows(share * unit)
    tracks = [Track(view, view.like(views[0], rows), share * unit) for view in views]
    shelves, width, host_width = find_room(tracks, unit)
    lanes = []
    for rank, track in enumerate(tracks):
        slots = track.slots(unit, shelves, width, host_width)
        boxes = (replace(box, slot=slot) for box, slot in zip(track.boxes, slots, strict=True))
        lanes.append(Lane(rank, tuple(boxes), tuple(track.frames())))
    shown = min(ranks, job.ranks) if of_one_rank else len(views)
    if of_one_rank:
        # The others hold the same, or what is left of an uneven division.
        lanes = [replace(lanes[0], rank=rank) for rank in range(shown)]
    note = f"{shown} of {job.ranks} ranks" if shown < job.ranks else ""
    if of_one_rank and job.ranks > 1:
        note = ", ".join(filter(None, (note, "the step of one rank, drawn for all")))
    return LayerFrames(
        job=job,
        layer=window.layer,
        note=note,
        unit=unit,
        share=share,
        lanes=tuple(lanes),
        captions=tuple(captions_of(tracks[0], lanes[0].frames)),
        backward=sum(row in window.forward for row in rows),
        width=width,
        shelves=shelves,
        host_width=host_width,
    )
