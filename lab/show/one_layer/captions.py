"""What is said of each frame of a layer: its phase, the stage of UPipe, and what happens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lab.memory.moment import Moment
from lab.show.one_layer.names import Moving, is_attention
from lab.show.one_layer.tracks import Frame, Track, Travel, View


@dataclass(frozen=True)
class Caption:
    """What is said of a frame.

    Attributes:
        phase: Forward or backward.
        stage: The stage of UPipe, counted from 1, and how many there are; None outside of them.
        text: What happens.
        module: The module that runs, without the layer.
    """

    phase: str
    stage: tuple[int, int] | None
    text: str
    module: str


def captions_of(track: Track, frames: Sequence[Frame]) -> Iterator[Caption]:
    """Yield what is said of each frame of a rank."""
    view, window = track.view, track.view.window
    previous: set[int] = set()
    returns = _returns(view)
    for frame, stage in zip(frames, _stages(view, track.rows), strict=True):
        moment, held = view.timeline.moment(frame.row), set(frame.boxes)
        if frame.travel is not None:
            ahead = _is_ahead(frame.travel, track, frame.row)
            text = _travels(frame.travel, track, back=frame.row in returns, ahead=ahead)
        elif frame.row in (window.forward.start, window.backward.start):
            text = f"{moment.phase} of the layer begins"
        else:
            text = _changes(moment, track, held - previous, previous - held)
        module = moment.module.partition(f"layers.{window.layer}")[2].lstrip(".")
        yield Caption(moment.phase, stage, text, module or "the layer")
        previous = held


def _stages(view: View, rows: list[int]) -> list[tuple[int, int] | None]:
    """The stage of UPipe at each row, and how many there are."""
    if view.job.recipe.head_chunk is None:
        return [None] * len(rows)
    kernels: dict[str, list[int]] = {"forward": [], "recomputed": [], "backward": []}
    for row in view.window.rows:
        name = view.window.operator(row)
        if is_attention(name):
            again = "recomputed" if row in view.window.backward else "forward"
            kernels["backward" if "backward" in name else again].append(row)
    spans = []
    for run in kernels.values():
        # A stage ends with the exchange that follows its kernel.
        ends = [min((r for r in view.moves if r > row), default=row) for row in run]
        starts = [_attention_starts(view, run[0]), *(end + 1 for end in ends[:-1])] if run else []
        spans += [
            (start, end, number, len(run))
            for number, (start, end) in enumerate(zip(starts, ends, strict=True), 1)
        ]
    found = ([(n, of) for start, end, n, of in spans if start <= row <= end] for row in rows)
    return [stages[-1] if stages else None for stages in found]


def _attention_starts(view: View, row: int) -> int:
    """The first of the rows before this one that are in attention."""
    timeline = view.timeline
    while row - 1 in view.window and "attn" in timeline.modules[timeline.module[row - 1]]:
        row -= 1
    return row


def _changes(moment: Moment, track: Track, new: set[int], freed: set[int]) -> str:
    """Say which boxes appear and which are freed."""
    op = moment.operator.rpartition(".")[2].strip("_")
    again = " again" if any(track.boxes[n].category == "recomputed activations" for n in new) else ""
    made = _listed([track.boxes[n].name for n in sorted(new)])
    parts = []
    if is_attention(op):
        gives = "the gradients of q, k and v" if "backward" in op else "attention"
        parts.append(f"{op} computes {made or gives}{again}")
    elif made == "parameters":
        parts.append("the parameters are copied out of what was gathered")
    elif new:
        allocated = "empty" in op or "zeros" in op
        parts.append(f"{made} allocated{again}" if allocated else f"{op} computes {made}{again}")
    if freed:
        parts.append(f"{_listed([track.boxes[n].name for n in sorted(freed)])} freed")
    return "; ".join(parts) or f"{moment.phase} of the layer ends"


def _is_ahead(travel: Travel, track: Track, row: int) -> bool:
    """Return whether the parameters that are gathered are those of the layer that comes next."""
    backward = track.view.window.backward
    return row in backward and any(track.groups[box].end > backward.stop for box in travel.targets[:1])


def _returns(view: View) -> set[int]:
    """The exchanges that send heads back: the first after a forward kernel, all after a backward one."""
    found, waiting, after_backward = set(), False, False
    upipe = view.job.recipe.head_chunk is not None
    for row in view.window.rows:
        name = view.window.operator(row)
        if is_attention(name):
            waiting, after_backward = True, "backward" in name
        elif "alltoall" in name and waiting:
            found.add(row)
            waiting = after_backward and not upipe
    return found


def _travels(travel: Travel, track: Track, *, back: bool, ahead: bool) -> str:
    """Say what moves."""
    name = track.boxes[(travel.sources or travel.targets)[0]].name
    match travel.kind:
        case Moving.ALL_TO_ALL:
            got = "all heads of its own tokens" if back else "all tokens of its own heads"
            return f"all-to-all{' back' if back else ''}: every rank gets {got}"
        case Moving.RING:
            return "ring: every rank sends keys and values to the next"
        case Moving.GATHER:
            return "all-gather: every rank gets the keys and values of all tokens"
        case Moving.SCATTER:
            return "reduce-scatter: the gradients of keys and values are summed, every rank keeps its tokens'"
        case Moving.ALL_GATHER:
            which = "the next layer, ahead of time" if ahead else "the layer"
            return f"all-gather: every rank gets all parameters of {which}"
        case Moving.REDUCE_SCATTER:
            return "reduce-scatter: the gradients of all ranks are summed, every rank keeps its shard"
        case Moving.ALL_REDUCE:
            return f"all-reduce: {name} is summed over the ranks"
        case Moving.TO_HOST:
            return f"{name} is copied to host memory"
        case Moving.FROM_HOST:
            loaded = (travel.targets or travel.sources)[0]
            return f"{track.boxes[loaded].name} comes back from host memory"


def _listed(names: list[str]) -> str:
    if not names:
        return ""
    counts = {name: names.count(name) for name in names}
    texts = [name if count == 1 else f"{count} x {name}" for name, count in counts.items()]
    if len(texts) > 3:
        return f"{', '.join(texts[:2])} and {len(texts) - 2} more"
    return " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))
