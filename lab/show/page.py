"""The scripts and styles of widgets, read from files."""

from pathlib import Path


def join_files(*names: str) -> str:
    """Return the text of several files in ``lab/show`` as one: a widget has one script and one style."""
    return "\n".join((Path(__file__).parent / name).read_text(encoding="utf-8") for name in names)
