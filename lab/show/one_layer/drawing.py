"""One frame of a layer as a drawing: ranks with boxes, what moves between them, and the memory curve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from lab.memory.categories import CATEGORIES, OTHER
from lab.show.one_layer.frames import LayerFrames
from lab.show.one_layer.tracks import Box
from lab.show.one_layer.travels import Flight, Part, arrivals, flights
from lab.show.palette import CATEGORY_COLOURS, COLOURS, TEXT

GAP = 0.35
"""The space between two lanes, in shelves."""

MARGIN = 0.04
"""The space around a box, in shelves."""


def text_colour(colour: str) -> str:
    """Return black or white, whichever is readable on a colour."""
    red, green, blue = (int(colour[n : n + 2], 16) for n in (1, 3, 5))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "white"


class Plane:
    """The places of boxes in the units of the drawing: A to the right, shelves downward."""

    def __init__(self, layer: LayerFrames, lanes: Sequence[int]) -> None:
        self.layer, self.lanes = layer, lanes
        self.host_left = layer.width * 1.04 if layer.host_width else layer.width
        self.right = self.host_left + layer.host_width
        self.bottom = len(lanes) * (layer.shelves + GAP)

    def top(self, lane: int) -> float:
        """Return the upper edge of a lane."""
        return self.lanes.index(lane) * (self.layer.shelves + GAP)

    def place(self, part: Part) -> tuple[float, float, float]:
        """Return the left edge, the upper edge and the width of a part of a box."""
        box = self.layer.lanes[part.lane].boxes[part.box]
        size = box.bytes / self.layer.unit
        left = box.slot.left + part.start * size + (0.0 if box.category in CATEGORIES else self.host_left)
        return left, self.top(part.lane) + box.slot.shelf, part.length * size


def draw_lanes(axes: Axes, plane: Plane, frame: int, progress: float, inches: float) -> None:
    """Draw the boxes of a frame, and what moves at a fraction of its way.

    Args:
        axes: Where to draw.
        plane: The places.
        frame: The number of the frame.
        progress: How far the moving parts have come, from 0 to 1.
        inches: The width of the axes.
    """
    layer = plane.layer
    moving = [flight for flight in flights(layer, frame) if flight.target.lane in plane.lanes]
    axes.set_xlim(0, plane.right)
    axes.set_ylim(plane.bottom - GAP, 0)
    axes.axis("off")
    points = inches * 72 / plane.right
    arriving = arrivals(layer, frame) if progress < 1 else set()
    for number in plane.lanes:
        lane = layer.lanes[number]
        _draw_room(axes, plane, number)
        for index in lane.frames[frame].boxes:
            box = lane.boxes[index]
            left, top, width = plane.place(Part(number, index, 0.0, 1.0))
            new = box.first == frame and frame > 0
            _draw_box(axes, box, (left, top, width), points, empty=(number, index) in arriving, new=new)
    for flight in moving:
        if flight.source.lane in plane.lanes and 0 < progress < 1:
            _draw_flight(axes, plane, flight, progress)


def _draw_room(axes: Axes, plane: Plane, lane: int) -> None:
    layer, top = plane.layer, plane.top(lane)
    for left, width in ((0.0, layer.width), (plane.host_left, layer.host_width)):
        if width:
            axes.add_patch(
                Rectangle((left, top), width, layer.shelves, facecolor=TEXT, alpha=0.1, linewidth=0)
            )


def _draw_box(
    axes: Axes, box: Box, place: tuple[float, float, float], points: float, *, empty: bool, new: bool
) -> None:
    left, top, width = place
    colour = COLOURS[box.category]
    patch = Rectangle(
        (left + width * 0.004, top + MARGIN),
        width * 0.992,
        1 - 2 * MARGIN,
        facecolor="none" if empty else colour,
        edgecolor="black" if new else "white",
        linewidth=1.2 if new else 0.4,
        linestyle="--" if empty else "-",
    )
    axes.add_patch(patch)
    room = width * points
    size = 6.5
    lines = _fitting(box.name, room / (size * 0.56))
    if not empty and lines:
        axes.text(
            left + width / 2,
            top + 0.52,
            lines,
            linespacing=0.95,
            ha="center",
            va="center",
            fontsize=size,
            color=text_colour(colour),
        )


def _fitting(name: str, characters: float) -> str:
    """Return a name in one or two lines of so many characters; nothing if it does not fit."""
    for lines in (name, name.replace(" ", "\n", 1), "\n".join(name.rsplit(" ", 1))):
        if max(map(len, lines.split("\n"))) < characters:
            return lines
    return ""


def _draw_flight(axes: Axes, plane: Plane, flight: Flight, progress: float) -> None:
    (x, y, width), (to_x, to_y, to_width) = plane.place(flight.source), plane.place(flight.target)
    box = plane.layer.lanes[flight.target.lane].boxes[flight.target.box]
    left, top = x + (to_x - x) * progress, y + (to_y - y) * progress
    wide = width + (to_width - width) * progress
    axes.plot(
        [x + width / 2, to_x + to_width / 2], [y + 0.5, to_y + 0.5], color=TEXT, linewidth=0.5, alpha=0.7
    )
    axes.add_patch(
        Rectangle(
            (left, top + 0.2),
            wide,
            0.6,
            facecolor=COLOURS[box.category],
            edgecolor="black",
            linewidth=0.8,
            zorder=3,
        )
    )


def draw_legend(
    figure: Figure, layer: LayerFrames, loc: Literal["lower left", "outside lower left"], **style: Any
) -> None:
    """Write the categories of a layer's boxes side by side."""
    boxes = {box.category for lane in layer.lanes for box in lane.boxes}
    marks = {name: Patch(color=colour) for name, colour in COLOURS.items() if name in boxes}
    figure.legend(
        marks.values(), marks.keys(), loc=loc, ncols=len(marks), fontsize=7, handlelength=1, **style
    )


def draw_curve(axes: Axes, layer: LayerFrames, lane: int, frame: int | None) -> None:
    """Draw a rank's device bytes over the frames, by category, with a line at a frame."""
    # What no tensor holds is left out, as in the player.
    values = np.array([one.by_category[:OTHER] for one in layer.lanes[lane].frames]) / layer.unit
    numbers = np.arange(len(values) + 1)
    steps = np.vstack((values, values[-1:]))
    axes.stackplot(numbers, steps.T, colors=CATEGORY_COLOURS[:OTHER], step="post", linewidth=0)
    axes.set_xlim(0, len(values))
    axes.set_ylim(0, values.sum(axis=1).max() * 1.05)
    axes.axvline(layer.backward, color="black", linewidth=0.6, linestyle=":")
    if frame is not None:
        axes.axvline(frame + 0.5, color="black", linewidth=1.4)
    axes.set_xticks([])
    axes.tick_params(length=0, labelsize=6.5)
