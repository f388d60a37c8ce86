"""Knobs and one picture: sliders that draw again when one is moved."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import ipywidgets

from lab.errors import LabError
from lab.show.picture import Picture


class Explorer:
    """A slider a knob, and the picture of the values they stand at; what is refused says so below it."""

    def __init__(
        self,
        draw: Callable[[Mapping[str, Any]], Picture],
        knobs: Mapping[str, Sequence[Any]],
        start: Mapping[str, Any],
    ) -> None:
        self._draw = draw
        self._knobs = {name: list(values) for name, values in knobs.items()}
        for name, at in start.items():
            if at not in self._knobs.get(name, ()):
                raise LabError(
                    f"start {name}={at!r}: a slider begins at one of its values, of {', '.join(knobs)}"
                )
        # By place, for None may be among the values, and to a selection it means that nothing is chosen.
        self.sliders = {
            name: ipywidgets.SelectionSlider(
                options=[(str(value), place) for place, value in enumerate(values)],
                value=values.index(start[name]) if name in start else len(values) - 1,
                description=name,
                continuous_update=False,
                style={"description_width": "initial"},
            )
            for name, values in self._knobs.items()
        }
        self._picture = draw(self.values)
        self._image = ipywidgets.Image(layout={"max_width": "100%", "width": "900px"})
        self._refusal = ipywidgets.HTML()
        for slider in self.sliders.values():
            slider.observe(self._moved, "value")
        self._show()

    @property
    def values(self) -> dict[str, Any]:
        """Where the knobs stand, by name."""
        return {name: self._knobs[name][slider.index] for name, slider in self.sliders.items()}

    @property
    def refused(self) -> str:
        """Why there is no picture of where the knobs stand; empty where there is one."""
        return str(self._refusal.value)

    def _moved(self, _: Any) -> None:
        try:
            self._picture, refusal = self._draw(self.values), ""
        except LabError as error:
            # The picture before stays, so that the reader sees from where the step was one too many.
            refusal = escape(str(error))
        self._refusal.value = refusal
        self._show()

    def _show(self) -> None:
        self._image.value = self._picture.png

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        # Where no front end runs widgets, the stored notebook shows the picture that stood there last.
        box = ipywidgets.VBox([ipywidgets.HBox([*self.sliders.values()]), self._refusal, self._image])
        bundle: dict[str, Any] = box._repr_mimebundle_(**kwargs)
        return {
            **bundle,
            "image/png": b64encode(self._picture.png).decode(),
            "text/plain": repr(self._picture),
        }


def explore(
    draw: Callable[..., Picture],
    name: str | None = None,
    values: Sequence[Any] = (),
    *,
    start: Mapping[str, Any] | None = None,
    **knobs: Sequence[Any],
) -> Explorer:
    """Show ``draw(value)`` under a slider over ``values``, or ``draw(knob=value, ...)`` under several.

    ``explore(draw, "tokens", [256, 512])``, or ``explore(draw, mlp_tile=[64, 128], loss_tile=[32, 64])``. A
    slider begins at its last value unless ``start`` names another. ``draw`` may take a while (it may
    measure): it is called when a slider comes to rest. A LabError that it raises then, a value that does not
    go with the others, is shown in the picture's place below the sliders.

    Raises:
        LabError: neither ``name`` nor knobs, or both; a start that is none of the knob's values.
    """
    if (name is None) == (not knobs):
        raise LabError("explore takes a name and its values, or knobs by keyword: tokens=[256, 512]")
    if name is not None:
        return Explorer(lambda at: draw(at[name]), {name: values}, start or {})
    return Explorer(lambda at: draw(**at), knobs, start or {})
