"""The scripts and styles of widgets."""

from pathlib import Path


def joined(*names: str) -> str:
    """The texts of scripts or styles in ``lab/show``, as the one that a widget takes."""
    return "\n".join((Path(__file__).parent / name).read_text() for name in names)
