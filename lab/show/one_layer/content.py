"""The frames of a layer as plain values, for the player's script."""

from __future__ import annotations

from typing import Any

from lab.memory.categories import MEMORIES, OTHER
from lab.show.one_layer.frames import LayerFrames
from lab.show.one_layer.tracks import Box, Frame
from lab.show.one_layer.travels import arrivals, flights
from lab.show.palette import COLOURS
from lab.units import format_bytes

_DIGITS = 4


def player_content(layer: LayerFrames) -> dict[str, Any]:
    """Return what the player draws. Sizes and places are in units of A.

    Lanes that are the same rank's are sent once: ``lanes`` are indices into ``ranks``.
    """
    distinct = {id(lane.frames): lane for lane in layer.lanes}
    order = list(distinct)
    return {
        "title": layer.title,
        "note": layer.note,
        "unit": format_bytes(layer.unit),
        "unitBytes": layer.unit,
        "share": layer.share,
        "width": _rounded(layer.width),
        "shelves": layer.shelves,
        "hostWidth": _rounded(layer.host_width),
        "backward": layer.backward,
        "categories": [[name, COLOURS[name]] for name in MEMORIES],
        "captions": [
            [caption.phase, list(caption.stage or ()), caption.module, caption.text]
            for caption in layer.captions
        ],
        "lanes": [order.index(id(lane.frames)) for lane in layer.lanes],
        "ranks": [
            {
                "boxes": [_box(box, layer.unit) for box in lane.boxes],
                "frames": [_frame(frame, layer.unit) for frame in lane.frames],
            }
            for lane in distinct.values()
        ],
        "flights": {
            number: [
                [list(map(_rounded, flight.source)), list(map(_rounded, flight.target))] for flight in moving
            ]
            for number in range(len(layer))
            if (moving := list(flights(layer, number)))
        },
        "arrivals": {
            number: [list(place) for place in sorted(filled)]
            for number in range(len(layer))
            if (filled := arrivals(layer, number))
        },
    }


def _box(box: Box, unit: int) -> list[Any]:
    category = MEMORIES.index(box.category)
    place = box.slot.shelf, _rounded(box.slot.left)
    return [box.name, box.about, category, _rounded(box.bytes / unit), box.first, box.end, *place]


def _frame(frame: Frame, unit: int) -> dict[str, Any]:
    return {
        "boxes": list(frame.boxes),
        "small": [frame.small_count, _rounded(frame.small / unit)],
        "outside": _rounded(frame.outside / unit),
        "hostOutside": _rounded(frame.host_outside / unit),
        # What no tensor holds is not of a layer: on a GPU it can be more than all else.
        "held": [_rounded(size / unit) for size in frame.by_category[:OTHER]],
    }


def _rounded(value: float) -> float:
    return round(value, _DIGITS)
