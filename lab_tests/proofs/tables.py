"""The tables of knobs and of what is not supported, made from their rows."""

import re
from pathlib import Path

from lab.recipe.recipe import KNOBS
from lab.techniques.unsupported import UNSUPPORTED

README = Path(__file__).parents[2] / "README.md"
TECHNIQUES = README.parent / "lab" / "techniques" / "README.md"
NOT_SUPPORTED = "| not supported | use instead |\n| --- | --- |\n"
HEAD = "| knob | values | what it sets |\n| --- | --- | --- |\n"


def with_knobs(text: str) -> str:
    """Return a text whose table of knobs is that of the rows."""
    table = HEAD + "".join(f"| `{knob.name}` | {knob.values} | {knob.sets} |\n" for knob in KNOBS)
    changed, tables = re.subn(re.escape(HEAD) + r"(\|.*\n)*", lambda _: table, text)
    assert tables == 1
    return changed


def with_unsupported(text: str) -> str:
    """Return a text whose table of what is not supported is that of the rows."""
    table = NOT_SUPPORTED + "".join(f"| {row.name} | {row.instead} |\n" for row in UNSUPPORTED)
    changed, tables = re.subn(re.escape(NOT_SUPPORTED) + r"(\|.*\n)*", lambda _: table, text)
    assert tables == 1
    return changed


def write_tables() -> None:
    """Write the tables into the README, and into that of the techniques."""
    README.write_text(with_knobs(README.read_text()))
    TECHNIQUES.write_text(with_unsupported(TECHNIQUES.read_text()))
