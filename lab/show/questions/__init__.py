"""The questions at the end of each notebook, and what most people miss in its predictions.

Each choice of a question opens to say whether it is right, and why.

The choices are HTML that needs no kernel, so they also work in a stored notebook and in the book.
"""

from __future__ import annotations

import tomllib
from html import escape
from importlib.resources import files
from typing import Any

from IPython.display import HTML

from lab.errors import NotebookError


def missed(notebook: str, number: int = 1) -> str:
    """Return what most people miss in a prediction of a notebook, as a sentence.

    The sentence is not in the notebook, where it would be read before the prediction is made.

    Args:
        notebook: The name of the notebook.
        number: The number of the prediction in the notebook, from 1.

    Raises:
        NotebookError: The notebook has no questions, or no such prediction.
    """
    said: list[str] = read(notebook).get("missed", [])
    if not 1 <= number <= len(said):
        raise NotebookError(f"no prediction {number} in {notebook}, which has {len(said)}")
    return said[number - 1]


def read(notebook: str) -> dict[str, Any]:
    """Return what the file ``<notebook>.toml`` of this folder has.

    Each ``question`` has a ``text`` and several ``choice``. A choice has a ``text``, a sentence ``why`` it is
    right or wrong, and the right one ``right``. What is ``missed`` in each prediction is a sentence.

    Raises:
        NotebookError: The notebook has no questions.
    """
    folder = files(__package__)
    file = folder / f"{notebook}.toml"
    if not file.is_file():
        names = sorted(one.name for one in folder.iterdir() if one.name.endswith(".toml"))
        known = ", ".join(name.removesuffix(".toml") for name in names)
        raise NotebookError(f"no questions for {notebook!r}; these notebooks have some: {known}")
    return tomllib.loads(file.read_text(encoding="utf-8"))


def questions(notebook: str) -> HTML:
    """Return the questions of a notebook as HTML: a click on a choice says whether it is right, and why.

    Args:
        notebook: The name of the notebook, for instance ``02_ulysses``.

    Raises:
        NotebookError: The notebook has no questions.
    """
    asked = read(notebook)["question"]
    return HTML("".join(_html(number, one) for number, one in enumerate(asked, 1)))  # type: ignore[no-untyped-call]


def _html(number: int, question: dict[str, Any]) -> str:
    choices = "".join(
        f'<details style="margin: 2px 0 2px 1.5em"><summary>{escape(one["text"])}</summary>'
        f'<p style="margin: 2px 0 6px 1.2em">{"✓ Right." if one.get("right") else "✗ No."} '
        f"{escape(one['why'])}</p>"
        "</details>"
        for one in question["choice"]
    )
    return f'<p style="margin: 12px 0 4px 0"><b>{number}.</b> {escape(question["text"])}</p>{choices}'
