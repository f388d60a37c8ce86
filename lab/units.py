"""Numbers of tokens and bytes as text, and as integers.

The units are binary, as in the papers: ``5M`` is 5 x 2**20 = 5,242,880 tokens. Only the tokens of a whole
training are decimal, as data sets are counted: ``10B`` is 10**10 tokens.
"""

import re
from collections.abc import Mapping
from fractions import Fraction
from math import floor, inf
from pathlib import Path

from lab.errors import LabError

Ki, Mi, Gi = 2**10, 2**20, 2**30
KiB, MiB, GiB, TiB, PiB = 2**10, 2**20, 2**30, 2**40, 2**50

_TOKENS = {"": 1, "K": Ki, "M": Mi}
_TOTALS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_BYTES = {"": 1, "B": 1, "KIB": KiB, "MIB": MiB, "GIB": GiB, "TIB": TiB, "PIB": PiB}
_DISK = _BYTES | {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_PRICE = re.compile(r"\d{1,18}(\.\d{1,18})?(e[+-]?\d{1,3})?", re.ASCII | re.IGNORECASE)
_NUMBER = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*([a-z]*)", re.ASCII | re.IGNORECASE)


def parse_tokens(text: str | int) -> int:
    """Return the number of tokens that a text such as ``"128K"`` or ``"5M"``, or an integer, means.

    Raises:
        LabError: It is not a positive whole number of tokens.
    """
    return _parse(text, _TOKENS, "a number of tokens", "8192, 128K or 5M")


def parse_total(text: str | int) -> int:
    """Return the tokens of a whole training that a text such as ``"10B"``, or an integer, means.

    The units are decimal, other than those of a context: 10B is 10^10 tokens.

    Raises:
        LabError: It is not a positive whole number of tokens.
    """
    return _parse(text, _TOTALS, "a total of tokens", "500M, 10B or 1T, which are decimal: 10B = 10^10")


def parse_price(value: str | float) -> float:
    """Return the price of a GPU hour that a number, or a text such as ``"2.5"``, means.

    Raises:
        LabError: It is not a finite number above 0.
    """
    # float() also takes the digits of other scripts, and underscores.
    amount = str(value).strip()
    price = float(amount) if _PRICE.fullmatch(amount) else 0.0
    if not 0 < price < inf:
        raise LabError(
            f"price={abbreviate(repr(value))}: give the money for one GPU hour, a number above 0 such as 2.5"
        )
    return price


def parse_bytes(text: str | int) -> int:
    """Return the number of bytes that a text such as ``"79.2GiB"`` or ``"2TiB"``, or an integer, means.

    A fraction of a byte is left out.

    Raises:
        LabError: It is not 1 byte or more; or it is a number without a unit, and not whole.
    """
    return _parse(text, _BYTES, "an amount of memory", "80GiB, 512MiB or a number of bytes")


def parse_disk(text: str | int) -> int:
    """Return the bytes of a disk that a text such as ``"4TB"``, or an integer, means.

    Disks are sold in decimal units: a TB is 10^12 bytes. A TiB is 2^40 bytes, as of memory.

    Raises:
        LabError: As of ``parse_bytes``.
    """
    return _parse(text, _DISK, "the size of a disk", "4TB, 500GB or 2TiB")


def parse_file_size(text: str | int) -> int:
    """Return the bytes of a file that a text such as ``"5GB"``, or an integer, means; units as of a disk.

    Raises:
        LabError: As of ``parse_bytes``.
    """
    return _parse(text, _DISK, "the size of a file", "5GB, 500MB or 2GiB")


def parse_rate(text: str | int) -> int:
    """Return the bytes per second that a text such as ``"3GB/s"``, or an integer, means.

    Raises:
        LabError: As of ``parse_bytes``, for a second.
    """
    amount = str(text).strip()
    unit = amount[-2:].lower() == "/s"
    if isinstance(text, str) and not unit and not amount.isdecimal():
        raise LabError(f"{abbreviate(repr(text))} is not a rate: write 3GB/s or 500MB/s")
    return _parse(amount[:-2] if unit else text, _DISK, "a rate", "3GB/s or 500MB/s")


def parse_path(value: str | Path, error: type[LabError] = LabError) -> Path:
    """Return the path that a text means, in which ``~`` stands for a home directory.

    Raises:
        LabError: It is empty, holds a NUL character, or names the home directory of no user. The error is of
            the class ``error``.
    """
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise error(f"{abbreviate(repr(value))} is not a path: give one such as runs/first")
    try:
        return Path(value).expanduser()
    except RuntimeError:
        raise error(f"{abbreviate(repr(str(value)))}: there is no such home directory") from None


def abbreviate(text: str, length: int = 200) -> str:
    """Return a text for a message: of one that is longer than ``length``, the beginning and its length."""
    return text if len(text) <= length else f"{text[: length // 2]}... ({len(text)} characters)"


LARGEST = 2**63 - 1
"""The largest size: torch counts in 64 bits."""


def check_counts(
    counts: Mapping[str, object], error: type[LabError] = LabError, *, or_none: bool = False
) -> None:
    """Refuse values that are not counts: whole numbers of 1 or more that fit into 64 bits.

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
            raise error(f"{name}={abbreviate(repr(count))}: it takes a whole number, {works}")
        if count is not None and count > LARGEST:
            raise error(f"{name}={abbreviate(str(count))}: it takes a whole number up to {LARGEST}")


def _parse(text: str | int, units: dict[str, int], what: str, examples: str) -> int:
    match = _NUMBER.fullmatch(str(text).strip())
    factor = units.get(match[2].upper()) if match else None
    value = Fraction(match[1]) * factor if match and factor else Fraction(0)
    if factor != 1 and (units is _BYTES or units is _DISK):
        value = Fraction(floor(value))  # 79.2GiB, as the lab prints it, is no whole number of bytes
    if not 1 <= value <= LARGEST or value.denominator != 1:
        raise LabError(f"{abbreviate(repr(text))} is not {what}: write {examples}")
    return int(value)


def format_tokens(tokens: int) -> str:
    """Return tokens as text, in the largest unit that divides them: ``5M`` for 5242880, ``1000`` for 1000."""
    for name, size in (("M", Mi), ("K", Ki)):
        if tokens and tokens % size == 0:
            return f"{tokens // size}{name}"
    return str(tokens)


def format_total(tokens: int) -> str:
    """Return a total of tokens as ``parse_total`` reads it, in the largest unit that divides it: ``10B``."""
    for name in ("T", "B", "M", "K"):
        if tokens and tokens % _TOTALS[name] == 0:
            return f"{tokens // _TOTALS[name]}{name}"
    return str(tokens)


def round_tokens(tokens: int) -> str:
    """Return tokens as text, from 1M on with two decimals: ``6.28M`` for 6585344, ``12K`` for 12288."""
    return f"{tokens / Mi:.2f}M" if tokens >= Mi else format_tokens(tokens)


def format_bytes(size: int | float) -> str:
    """Return bytes as text with three or four significant digits: ``15.0 GiB``, ``512 B``."""
    for name, factor in (("PiB", PiB), ("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if abs(size) >= factor:
            value = size / factor
            return f"{value:.2f} {name}" if abs(value) < 10 else f"{value:.1f} {name}"
    return f"{size:.0f} B"


def format_operator(name: str) -> str:
    """Return the name of an operator without its namespace and its device."""
    return name.removeprefix("aten.").replace(
        "_scaled_dot_product_flash_attention_for_cpu", "flash_attention"
    )


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


def format_share(size: int, limit: int | None) -> str:
    """Return the share of a limit that bytes take, as text: `` of 80.0 GiB (83%)``; empty without a limit.

    Of a limit of 0 bytes there is no share: `` of 0 B``.
    """
    if limit is None:
        return ""
    return f" of {format_bytes(limit)}" + (f" ({size / limit:.0%})" if limit else "")


def format_lines(title: str, lines: Mapping[str, str]) -> str:
    """Return a title, and below it each text next to its label. A text that is empty has no line."""
    return "\n".join([title, *(f"{label:<14}{text}" for label, text in lines.items() if text)])
