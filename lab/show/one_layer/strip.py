"""The frames of a layer that say the most, one below the other: the picture where there is no browser."""

from __future__ import annotations

from lab.memory.categories import CATEGORIES
from lab.show.one_layer.drawing import Plane, draw_lanes, draw_legend
from lab.show.one_layer.frames import LayerFrames
from lab.show.picture import WIDTH, Picture, draw_header, styled_figure
from lab.units import format_bytes

FRAMES = 7
"""The most frames of a strip."""


def strip(layer: LayerFrames) -> Picture:
    """Draw the frames of one rank that say the most: where bytes move, and where the layer holds the most."""
    chosen = key_frames(layer)
    with styled_figure(0.6 + len(chosen) * (0.3 + 0.26 * layer.shelves)) as figure:
        grid = figure.subplots(len(chosen), 1, squeeze=False).flatten()
        plane = Plane(layer, [0])
        for axes, number in zip(grid, chosen, strict=True):
            draw_lanes(axes, plane, number, 1.0, WIDTH * 0.98)
            axes.set_title(f"{number + 1}. {caption_text(layer, number)}", loc="left", pad=3, fontsize=7.5)
        draw_header(figure, f"{layer.title} · A = {format_bytes(layer.unit)}")
        draw_legend(figure, layer, "outside lower left")
    said = "; ".join(f"{number + 1}: {caption_text(layer, number)}" for number in chosen)
    return Picture(figure, f"{layer.title}, {len(layer)} frames: {said}.")


def caption_text(layer: LayerFrames, number: int) -> str:
    """Return what is said of a frame, in a line."""
    caption = layer.captions[number]
    stage = f"stage {caption.stage[0]} of {caption.stage[1]}" if caption.stage else ""
    return " · ".join(filter(None, (caption.phase, caption.module, stage, caption.text)))


def key_frames(layer: LayerFrames) -> list[int]:
    """Return the numbers of the frames that say the most, in order."""
    lane = layer.lanes[0]
    held = [
        sum(lane.boxes[n].bytes for n in frame.boxes if lane.boxes[n].category in CATEGORIES)
        for frame in lane.frames
    ]
    chosen = [
        max(range(layer.backward), key=held.__getitem__),
        max(range(layer.backward, len(layer)), key=held.__getitem__),
    ]
    kinds = set()
    for number, frame in enumerate(lane.frames):
        kind = frame.travel.kind if frame.travel else None
        if kind is not None and kind not in kinds and number not in chosen:
            kinds.add(kind)
            chosen.append(number)
    return sorted(chosen[:FRAMES])
