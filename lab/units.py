"""Bytes and tokens: the binary units of the papers, parsed and printed.

Tokens are counted as the papers count them: ``5M`` is 5 x 2**20 = 5,242,880 tokens.
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
    """Read a token count: ``8192``, ``"128K"``, ``"5M"`` (5 x 2**20).

    Raises:
        LabError: not a positive whole number of tokens.
    """
    return _parse(text, _TOKENS, "a number of tokens", "8192, 128K or 5M")


def parse_bytes(text: str | int) -> int:
    """Read an amount of memory: ``"80GiB"``, ``"2TiB"``, or a plain number of bytes.

    Raises:
        LabError: not a positive whole number of bytes.
    """
    return _parse(text, _BYTES, "an amount of memory", "80GiB, 512MiB or a number of bytes")


def check_counts(
    counts: Mapping[str, object], error: type[LabError] = LabError, *, or_none: bool = False
) -> None:
    """Refuse what is no count, by its name.

    Raises:
        LabError: the first that is not a whole number, 1 or more, or None where that is one of the values; as
            ``error``, where one is given.
    """
    for name, count in counts.items():
        if (type(count) is not int or count < 1) and not (or_none and count is None):
            works = "1 or more, or None" if or_none else "1 or more"
            raise error(f"{name}={count!r}: it takes a whole number, {works}")


def _parse(text: str | int, units: dict[str, int], what: str, examples: str) -> int:
    found = _NUMBER.fullmatch(str(text).strip())
    factor = units.get(found[2].upper()) if found else None
    value = Fraction(found[1]) * factor if found and factor else Fraction(0)
    if value < 1 or value.denominator != 1:
        raise LabError(f"{text!r} is not {what}: write {examples}")
    return int(value)


def format_tokens(tokens: int) -> str:
    """Print tokens in the largest unit that divides them: 5242880 -> ``5M``, 1000 -> ``1000``."""
    for name, size in (("M", Mi), ("K", Ki)):
        if tokens and tokens % size == 0:
            return f"{tokens // size}{name}"
    return str(tokens)


def format_bytes(size: int | float) -> str:
    """Print bytes to three or four significant digits in the unit that suits: ``15.0 GiB``, ``512 B``."""
    for name, factor in (("PiB", PiB), ("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if abs(size) >= factor:
            value = size / factor
            return f"{value:.2f} {name}" if abs(value) < 10 else f"{value:.1f} {name}"
    return f"{size:.0f} B"


def format_seconds(seconds: float) -> str:
    """Print seconds to three digits, or hours and minutes: ``250 ms``, ``4 s``, ``1 h 52 min``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 600:
        return f"{seconds:.3g} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
