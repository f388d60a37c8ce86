"""Predict first, then look: a field for the reader's number, and what became of it."""

from __future__ import annotations

from typing import Any

import ipywidgets
from IPython.display import Markdown


class Prediction:
    """A field for a number, as a notebook displays it; ``compare`` holds it against the measured one."""

    def __init__(self, what: str, unit: str) -> None:
        self.what, self.unit = what, unit
        self._field = ipywidgets.FloatText(
            description=f"{what} [{unit}]", style={"description_width": "initial"}
        )

    @property
    def value(self) -> float | None:
        """The reader's number in ``unit``; None as long as none was given."""
        return float(self._field.value) or None

    @value.setter
    def value(self, number: float) -> None:
        self._field.value = number

    def compare(self, measured: float) -> Markdown:
        """The reader's number beside the measured one, and their ratio."""
        found = f"measured **{measured:.4g} {self.unit}**"
        if self.value is None:
            return _said(f"{self.what}: {found} (no prediction was made)")
        ratio = self.value / measured
        return _said(f"{self.what}: predicted {self.value:.4g} {self.unit}, {found}, ratio {ratio:.2f}")

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        # Where no front end runs the widget, the stored notebook says in words what stands here.
        bundle: dict[str, Any] = self._field._repr_mimebundle_(**kwargs)
        return {**bundle, "text/plain": f"Your prediction: {self.what}, in {self.unit}"}


def _said(text: str) -> Markdown:
    return Markdown(text)  # type: ignore[no-untyped-call]


def predict(what: str, *, unit: str) -> Prediction:
    """Ask for a number before it is measured: ``guess = predict("peak", unit="MiB")``, shown as a field."""
    return Prediction(what, unit)
