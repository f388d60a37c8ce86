"""Marks for tests of which the short run has a sample, and the long tests of a day."""

from collections.abc import Iterable, Sequence
from datetime import date
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def mostly_long(values: Iterable[Any], *short: int) -> list[Any]:
    """Return the values for ``parametrize``; those at other places than ``short`` are for the long run.

    A value with several arguments is a tuple of them.
    """
    marked = []
    for place, value in enumerate(values):
        arguments = value if isinstance(value, tuple) else (value,)
        marked.append(value if place in short else pytest.param(*arguments, marks=pytest.mark.long))
    return marked


def third_of_day(tests: Sequence[T], day: date) -> Sequence[T]:
    """Return a third of the tests; each test is in that of one day in three."""
    return tests[day.toordinal() % 3 :: 3]
