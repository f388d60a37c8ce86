"""Numbers of tokens and bytes as text, and as integers.

The units are binary, as in the papers: ``5M`` is 5 x 2**20 = 5,242,880 tokens.
"""

import re
from collections.abc import Mapping
from fractions import Fraction

from lab.errors import LabError

Ki, Mi, Gi = 2**10, 2**20, 2**30
KiB, MiB, GiB, TiB, PiB = 2**10, 2**20, 2**30, 2**40, 2**50

_TOKENS = {"": 1, "K": Ki, "M": Mi}
_BYTES = {"": 1, "B": 1, "KIB": KiB, "MIB": MiB, "GIB": GiB, "TIB": TiB}
_NUMBER = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*([a-z]*)", re.IGNORECASE)


def parse_tokens(text: str | int) -> int:
    """Return the number of tokens that a text such as ``"128K"`` or ``"5M"``, or an integer, means.

    Raises:
        LabError: It is not a positive whole number of tokens.
    """
    return _parse(text, _TOKENS, "a number of tokens", "8192, 128K or 5M")


def parse_bytes(text: str | int) -> int:
    """Return the number of bytes that a text such as ``"80GiB"`` or ``"2TiB"``, or an integer, means.

    Raises:
        LabError: It is not a positive whole number of bytes.
    """
    return _parse(text, _BYTES, "an amount of memory", "80GiB, 512MiB or a number of bytes")


def check_counts(
    counts: Mapping[str, object], error: type[LabError] = LabError, *, or_none: bool = False
) -> None:
    """Refuse values that are not counts: whole numbers of 1 or more.

    Args:
        counts: The values by their names, which the message contains.
        error: The class of the error.
        or_none: Whether None is allowed too.

    Raises:
        LabError: A value is no count. The error is of the class ``error``.
    """
    for name, count in counts.items():
        if (type(count) is not int or count < 1) and not (or_none and count is None):
            works = "1 or more, or None" if or_none else "1 or more"
            raise error(f"{name}={count!r}: it takes a whole number, {works}")


def _parse(text: str | int, units: dict[str, int], what: str, examples: str) -> int:
    match = _NUMBER.fullmatch(str(text).strip())
    factor = units.get(match[2].upper()) if match else None
    value = Fraction(match[1]) * factor if match and factor else Fraction(0)
    if value < 1 or value.denominator != 1:
        raise LabError(f"{text!r} is not {what}: write {examples}")
    return int(value)


def format_tokens(tokens: int) -> str:
    """Return tokens as text, in the largest unit that divides them: ``5M`` for 5242880, ``1000`` for 1000."""
    for name, size in (("M", Mi), ("K", Ki)):
        if tokens and tokens % size == 0:
            return f"{tokens // size}{name}"
    return str(tokens)


def format_bytes(size: int | float) -> str:
    """Return bytes as text with three or four significant digits: ``15.0 GiB``, ``512 B``."""
    for name, factor in (("PiB", PiB), ("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if abs(size) >= factor:
            value = size / factor
            return f"{value:.2f} {name}" if abs(value) < 10 else f"{value:.1f} {name}"
    return f"{size:.0f} B"


def format_seconds(seconds: float) -> str:
    """Return seconds as text with three digits, or as hours and minutes: ``250 ms``, ``1 h 52 min``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 600:
        return f"{seconds:.3g} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
