"""The player: one layer's forward and backward as an animation in a notebook."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

from lab.show.live.widget import is_in_browser
from lab.show.one_layer.content import player_content
from lab.show.one_layer.frames import LayerFrames, layer_frames
from lab.show.one_layer.strip import strip
from lab.show.page import join_files
from lab.show.picture import Picture
from lab.units import check_counts

if TYPE_CHECKING:
    from lab.planning.plan import Plan
    from lab.rehearsing.rehearsal import Rehearsal
    from lab.training.records import Run

RANKS = 4
"""How many ranks are shown unless asked otherwise."""


class _Widget(anywidget.AnyWidget):
    """The canvas and its controls in the browser."""

    # A widget has one script, which is joined from several files.
    _esm = join_files("page.js", "one_layer/stage.js", "one_layer/player.js")
    _css = join_files("page.css", "one_layer/player.css")
    content = traitlets.Dict().tag(sync=True)


class LayerPlayer:
    """An animation of one layer, which a notebook displays; where there is no browser, its main frames.

    Attributes:
        frames: The frames as data.
    """

    def __init__(self, frames: LayerFrames) -> None:
        self.frames = frames

    @cached_property
    def picture(self) -> Picture:
        """The frames of one rank that say the most."""
        return strip(self.frames)

    def __repr__(self) -> str:
        return repr(self.picture)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        # A stored notebook without a kernel shows the picture.
        widget: dict[str, Any] = {}
        if is_in_browser():
            bundle = _Widget(content=player_content(self.frames))._repr_mimebundle_(**kwargs)
            widget = bundle[0] if bundle else {}
        return {**widget, **self.picture.stored}


def layer(result: Plan | Rehearsal | Run, *, layer: int | None = None, ranks: int = RANKS) -> LayerPlayer:
    """Show one layer's forward and backward: each tensor as a box that appears, travels and is freed.

    The width of a box is its bytes in units of A, the bytes of one hidden state of the rank (b x s x E
    elements). A box stays in its place while the tensor is held. Collectives move parts of boxes between the
    rows of ranks, and offload moves them between the device and the host.

    Args:
        result: A plan, a rehearsal or a run.
        layer: The number of the layer; by default the one in the middle.
        ranks: The most ranks that are shown, each in a row. A plan or a rehearsal is that of one
            rank, drawn for all.

    Raises:
        LabError: There is no such layer, or the run was stopped and recorded no tensors.
    """
    check_counts({"ranks": ranks})
    return LayerPlayer(layer_frames(result, layer, ranks))
