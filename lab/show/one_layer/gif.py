"""One layer, moving, as a GIF: for a page that runs no script."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from PIL import Image

from lab.errors import LabError
from lab.memory.categories import OTHER
from lab.memory.export import check_file, write_result
from lab.show.one_layer.drawing import Plane, draw_curve, draw_lanes, draw_legend
from lab.show.one_layer.frames import LayerFrames
from lab.show.one_layer.strip import caption_text
from lab.show.picture import styled_figure
from lab.units import format_bytes

RANKS = 4
"""How many ranks a GIF shows."""

_DPI = 90
_FRAME = 240
_TRAVEL = (0.1, 0.35, 0.6, 0.85)
_STEP = 140
"""Milliseconds of a frame, and of each step of a frame in which bytes move."""

_COLOURS = 48
"""Colours of a picture: those of the boxes, and greys for the edges of letters."""

_INK = "#222222"

_LEFT, _ACROSS = 0.1, 0.89
"""Where the lanes begin, and how wide they are, as parts of the picture's width."""

_ABOVE, _BELOW = 0.85, 1.2
"""The inches above the lanes and below them."""


def check_animation(path: Path) -> None:
    """Check that a path names a GIF file that can be written, before the work for the file is done.

    Raises:
        LabError: The name does not end in .gif, the folder does not exist, or the name is not that of a file.
    """
    if path.suffix.lower() != ".gif":
        raise LabError(
            f"{path} cannot be written: the animation is a GIF file, so give a name that ends in .gif"
        )
    check_file(path)


def write_gif(layer: LayerFrames, path: Path, watch: Callable[[int, int], None]) -> None:
    """Write the animation of one layer.

    Args:
        layer: The frames.
        path: The file, which is written whole or not at all.
        watch: Called with the number of each frame that was drawn, and how many there are.

    Raises:
        LabError: The file cannot be written.
    """
    pictures, durations = [], []
    for picture, duration in _pictures(layer, watch):
        pictures.append(picture)
        durations.append(duration)
    durations[-1] = 3000
    # One palette for all pictures: where two agree, the file holds nothing.
    palette = pictures[len(pictures) * 3 // 5].quantize(_COLOURS)
    flat = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures]
    file = BytesIO()
    flat[0].save(
        file, "GIF", save_all=True, append_images=flat[1:], duration=durations, loop=0, optimize=True
    )
    write_result(path, file.getvalue())


def _pictures(layer: LayerFrames, watch: Callable[[int, int], None]) -> Iterator[tuple[Image.Image, int]]:
    """Yield each picture, and for how many milliseconds it is shown."""
    for number in range(len(layer)):
        moves = any(lane.frames[number].travel for lane in layer.lanes)
        for progress in _TRAVEL if moves else (1.0,):
            yield _picture(layer, number, progress), _STEP if moves else _FRAME
        watch(number + 1, len(layer))


def _picture(layer: LayerFrames, number: int, progress: float) -> Image.Image:
    plane = Plane(layer, range(len(layer.lanes)))
    caption = layer.captions[number]
    where = caption_text(layer, number).removesuffix(caption.text).rstrip(" ·")
    # A whole number of pixels.
    height = round((_ABOVE + _BELOW + 0.22 * plane.bottom) * _DPI) / _DPI
    with styled_figure(height) as figure:
        figure.set_layout_engine("none")

        def axes(top: float, bottom: float) -> Axes:
            made: Axes = figure.add_axes((_LEFT, bottom / height, _ACROSS, 1 - (top + bottom) / height))
            return made

        def write(text: str, y: float, **style: Any) -> None:
            figure.text(0.01, 1 - y / height, text, va="center", color=_INK, **style)

        write(f"{layer.title} · A = {format_bytes(layer.unit)}", 0.15, fontsize=8)
        write(where, 0.37, fontsize=8)
        write(caption.text, 0.57, fontsize=9.5, weight="bold")
        lanes = axes(_ABOVE, _BELOW)
        draw_lanes(lanes, plane, number, progress, figure.get_figwidth() * _ACROSS)
        for index, lane in enumerate(layer.lanes):
            frame = lane.frames[number]
            held = (sum(frame.by_category[:OTHER]) - frame.outside) / layer.unit
            lanes.text(
                -0.01 * plane.right, plane.top(index) + 0.1, f"rank {lane.rank}\nlayer {held:.1f} A",
                ha="right", va="top", fontsize=7, color=_INK, linespacing=1.4,
            )  # fmt: skip
        if layer.host_width:
            lanes.text(plane.host_left, -0.15, "host", fontsize=7, color=_INK)
        curve = axes(height - _BELOW + 0.15, 0.3)
        draw_curve(curve, layer, 0, number)
        curve.set_ylabel("A", rotation=0, labelpad=8, color=_INK)
        style = {"handletextpad": 0.4, "columnspacing": 1.1, "labelcolor": _INK}
        draw_legend(figure, layer, "lower left", **style)
        # The letters have a white ground of their own: on a black page a transparent GIF has ragged ones.
        figure.set_facecolor("white")
        file = BytesIO()
        figure.savefig(file, format="rgba", dpi=_DPI)
        size = round(figure.get_figwidth() * _DPI), round(height * _DPI)
        return Image.frombytes("RGBA", size, file.getvalue()).convert("RGB")
