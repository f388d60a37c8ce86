"""One knob and one picture: a slider that draws again when it is moved."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets

from lab.show.picture import Picture


class Explorer:
    """A slider over given values and the picture of the value it stands at."""

    def __init__(self, draw: Callable[[Any], Picture], name: str, values: Sequence[Any]) -> None:
        self._draw = draw
        self._picture = draw(values[-1])
        self._image = ipywidgets.Image(layout={"max_width": "100%", "width": "900px"})
        self.slider = ipywidgets.SelectionSlider(
            options=values, value=values[-1], description=name, continuous_update=False
        )
        self.slider.observe(self._moved, "value")
        self._show()

    def _moved(self, change: dict[str, Any]) -> None:
        self._picture = self._draw(change["new"])
        self._show()

    def _show(self) -> None:
        self._image.value = self._picture.png

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        # Where no front end runs widgets, the stored notebook shows the picture that stood there last.
        bundle: dict[str, Any] = ipywidgets.VBox([self.slider, self._image])._repr_mimebundle_(**kwargs)
        return {
            **bundle,
            "image/png": b64encode(self._picture.png).decode(),
            "text/plain": repr(self._picture),
        }


def explore(draw: Callable[[Any], Picture], name: str, values: Sequence[Any]) -> Explorer:
    """Show ``draw(value)`` under a slider over ``values``; it begins at the last one.

    ``draw`` may take a while (it may measure): it is called when the slider comes to rest.
    """
    return Explorer(draw, name, values)
