"""A profile's fields as texts, as a command line has them."""

from collections.abc import Iterable
from typing import Any

from cluster.errors import ClusterError
from cluster.profiles import find_profile


def parse_fields(name: str, texts: Iterable[str]) -> dict[str, Any]:
    """Return the values of `FIELD=VALUE` texts for the profile called `name`.

    Raises ClusterError for what is no such text; the fields themselves are checked where they are used.
    """
    profile = find_profile(name)
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise ClusterError(f"{text!r}: FIELD=VALUE is needed")
        default = getattr(profile, key, None)
        if isinstance(default, tuple):
            found[key] = tuple(value.split(","))
        elif isinstance(default, bool):
            found[key] = value.lower() in ("true", "1", "yes", "on")
        elif isinstance(default, dict):
            found[key] = dict(part.split(":", 1) for part in value.split(",") if ":" in part)
        else:
            found[key] = int(value) if value.isdigit() else value
    return found
