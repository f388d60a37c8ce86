"""Fields for the reader's guesses, of a number or of which is which, and their comparison with what is so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from math import isfinite
from typing import Any

import ipywidgets
from IPython.display import Markdown


class _FieldRow:
    """Fields in a row, which goes on below in a narrow window.

    Attributes:
        what: The label of the fields.
    """

    def __init__(self, what: str, unit: str, *fields: ipywidgets.DOMWidget) -> None:
        self.what, self._unit = what, unit
        self._box = ipywidgets.Box(
            [ipywidgets.HTML(f"<b>{escape(what)}</b>{escape(unit)}"), *fields],
            layout={"display": "flex", "flex_flow": "row wrap", "align_items": "center", "grid_gap": "0 1em"},
        )

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        # A stored notebook without a kernel shows this text in place of the field.
        bundle: dict[str, Any] = self._box._repr_mimebundle_(**kwargs)
        return {**bundle, "text/plain": f"Your prediction: {self.what}{self._unit}"}


class Guess(_FieldRow):
    """A field for a number, displayed in a notebook. It says that the number was noted, after Enter."""

    def __init__(self, what: str, unit: str) -> None:
        self.unit = unit
        self._number: float | None = None
        self._field = ipywidgets.Text(
            placeholder="a number, then Enter", continuous_update=False, layout={"width": "12em"}
        )
        self._note = ipywidgets.HTML()
        super().__init__(what, f" [{unit}]", self._field, self._note)
        self._field.observe(lambda _: self._read(), names="value")

    @property
    def value(self) -> float | None:
        """The reader's number in ``unit``; None if there is none."""
        return self._number

    @value.setter
    def value(self, number: float) -> None:
        self._field.value = f"{number:g}"

    def compare(self, number: float, *, how: str = "measured", missed: str = "") -> Markdown:
        """Return the guess, the right number, and their ratio.

        Args:
            number: The right number, in ``unit``.
            how: Where it is from: "measured", "planned" or "computed".
            missed: What most people miss, as a sentence.
        """
        result = f"{how} **{number:.4g} {self.unit}**"
        if self.value is None:
            line = f"{self.what}: {result} (no prediction was made)"
        else:
            ratio = f", ratio {self.value / number:.2f}" if number else ""
            line = f"{self.what}: predicted {self.value:.4g} {self.unit}, {result}{ratio}"
        return _markdown(f"{line}\n\n*What most people miss:* {missed}" if missed else line)

    def _read(self) -> None:
        text = self._field.value.strip().replace(",", ".")
        try:
            self._number = float(text) if text else None
            if self._number is not None and not isfinite(self._number):
                raise ValueError
        except ValueError:
            self._number = None
            self._note.value = f"{escape(text[:20])!r} is not a number: 84 or 84.5 would work"
            return
        self._note.value = "" if self._number is None else f"noted: {self._number:g} {escape(self.unit)} ✓"


class Matches(_FieldRow):
    """A field for each of some letters, in which the reader chooses one of some names."""

    def __init__(self, what: str, letters: Iterable[str], names: Iterable[str]) -> None:
        choices = [("choose …", None), *((name, name) for name in names)]
        self._fields = {
            letter: ipywidgets.Dropdown(
                options=choices,
                description=letter,
                layout={"width": "16em"},
                style={"description_width": "2em"},
            )
            for letter in letters
        }
        super().__init__(what, "", *self._fields.values())

    def choose(self, letter: str, name: str) -> None:
        """Choose a name for a letter, as the reader does in its field."""
        self._fields[letter].value = name

    def compare(self, right: Mapping[str, str]) -> Markdown:
        """Return what was chosen for each letter, and what is right.

        Args:
            right: The right name of each letter.
        """
        lines, hits = [], 0
        for letter, field in self._fields.items():
            name = right[letter]
            if field.value == name:
                said, hits = "right,", hits + 1
            else:
                said = "nothing was chosen, and" if field.value is None else f"you chose *{field.value}*, and"
            lines.append(f"- {letter}: {said} it is **{name}**")
        return _markdown("\n".join([f"{self.what}: {hits} of {len(lines)} right", "", *lines]))


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


def match(what: str, letters: Iterable[str], names: Iterable[str]) -> Matches:
    """Ask the reader which letter stands for which name: ``which = match("which hook", "ABC", hooks)``.

    A notebook displays a field for each letter. ``which.compare({"A": ..., "B": ...})`` says what is right.

    Args:
        what: The label of the fields.
        letters: The letters.
        names: The names to choose among.
    """
    return Matches(what, letters, names)
