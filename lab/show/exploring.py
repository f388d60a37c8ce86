"""A picture with sliders: it is drawn again when a slider is moved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import ipywidgets

from lab.errors import LabError
from lab.show.picture import Picture

_STALE = "lab-stale"
"""The class of a picture that is not of the current values."""


class Explorer:
    """Sliders, and the picture for their values, or the error if there is no picture for them."""

    def __init__(
        self,
        draw: Callable[[Mapping[str, Any]], Picture],
        knobs: Mapping[str, Sequence[Any]],
        start: Mapping[str, Any],
    ) -> None:
        self._draw = draw
        self._knobs = {name: list(values) for name, values in knobs.items()}
        for name, value in start.items():
            if value not in self._knobs.get(name, ()):
                raise LabError(
                    f"start {name}={value!r}: a slider begins at one of its values, of {', '.join(knobs)}"
                )
        # The options are positions in the list of values: None may be a value, and a slider takes None for
        # no selection.
        self.sliders = {
            name: ipywidgets.SelectionSlider(
                options=[(str(value), position) for position, value in enumerate(values)],
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
            slider.observe(self._draw_again, "value")
        self._show()

    @property
    def values(self) -> dict[str, Any]:
        """The value of each slider, by name."""
        return {name: self._knobs[name][slider.index] for name, slider in self.sliders.items()}

    def _draw_again(self, _: Any) -> None:
        try:
            self._picture, refusal = self._draw(self.values), ""
        except LabError as error:
            # The last picture stays, so that the reader sees which values still worked.
            refusal = f"{escape(str(error))}<br>(The picture is that of the last values that worked.)"
            self._image.add_class(_STALE)
        else:
            self._image.remove_class(_STALE)
        self._refusal.value = refusal
        self._show()

    def _show(self) -> None:
        self._image.value = self._picture.png

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        # A stored notebook without a kernel shows the last picture.
        # In a narrow window, the sliders are in several rows.
        sliders = ipywidgets.Box(
            [*self.sliders.values()], layout={"display": "flex", "flex_flow": "row wrap"}
        )
        style = ipywidgets.HTML(f"<style>.{_STALE} {{opacity: 0.25}}</style>", layout={"display": "none"})
        box = ipywidgets.VBox([style, sliders, self._refusal, self._image])
        bundle: dict[str, Any] = box._repr_mimebundle_(**kwargs)
        return {**bundle, **self._picture.stored}


def explore(
    draw: Callable[..., Picture],
    name: str | None = None,
    values: Sequence[Any] = (),
    *,
    start: Mapping[str, Any] | None = None,
    **knobs: Sequence[Any],
) -> Explorer:
    """Show ``draw(value)`` with a slider over ``values``, or ``draw(knob=value, ...)`` with several sliders.

    ``explore(draw, "tokens", [256, 512])``, or ``explore(draw, mlp_tile=[64, 128], loss_tile=[32, 64])``.

    Args:
        draw: Makes the picture. It may take a while: it is called when a slider is released. If it raises a
            LabError, because a value does not go with the others, the error is shown below the sliders.
        name: The label of a single slider.
        values: The values of a single slider.
        start: The value at which a slider begins, by name; the last of its values unless given.
        knobs: The values of several sliders, by the keyword of ``draw``.

    Raises:
        LabError: There is neither ``name`` nor a knob, or both; or a start is not one of the slider's values.
    """
    if (name is None) == (not knobs):
        raise LabError("explore takes a name and its values, or knobs by keyword: tokens=[256, 512]")
    if name is not None:
        return Explorer(lambda by_name: draw(by_name[name]), {name: values}, start or {})
    return Explorer(lambda by_name: draw(**by_name), knobs, start or {})
