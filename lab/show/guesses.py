"""A field for the reader's guess, and its comparison with the measured number."""

from __future__ import annotations

from typing import Any

import ipywidgets
from IPython.display import Markdown


class Guess:
    """A field for a number, displayed in a notebook."""

    def __init__(self, what: str, unit: str) -> None:
        self.what, self.unit = what, unit
        self._field = ipywidgets.FloatText(
            description=f"{what} [{unit}]", style={"description_width": "initial"}
        )

    @property
    def value(self) -> float | None:
        """The reader's number in ``unit``; None if the field is empty."""
        return float(self._field.value) or None

    @value.setter
    def value(self, number: float) -> None:
        self._field.value = number

    def compare(self, measured: float) -> Markdown:
        """Return a line with the guess, the measured number, and their ratio."""
        result = f"measured **{measured:.4g} {self.unit}**"
        if self.value is None:
            return _markdown(f"{self.what}: {result} (no prediction was made)")
        ratio = self.value / measured
        return _markdown(f"{self.what}: predicted {self.value:.4g} {self.unit}, {result}, ratio {ratio:.2f}")

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        # A stored notebook without a kernel shows this text in place of the field.
        bundle: dict[str, Any] = self._field._repr_mimebundle_(**kwargs)
        return {**bundle, "text/plain": f"Your prediction: {self.what}, in {self.unit}"}


def _markdown(text: str) -> Markdown:
    return Markdown(text)  # type: ignore[no-untyped-call]


def guess(what: str, *, unit: str) -> Guess:
    """Ask the reader for a number before it is measured: ``peak = guess("peak", unit="MiB")``.

    A notebook displays the result as a field. After the measurement, ``peak.compare(number)`` compares the
    two.

    Args:
        what: The label of the field.
        unit: The unit of the number.
    """
    return Guess(what, unit)
