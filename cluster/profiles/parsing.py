"""The fields of a profile from texts of the form FIELD=VALUE, for the command line."""

import re
from collections.abc import Iterable
from typing import Any, get_args, get_type_hints

from cluster.errors import ClusterError
from cluster.profiles import find_profile


def parse_fields(name: str, texts: Iterable[str]) -> dict[str, Any]:
    """Return the values of fields, by the name of the field. `find_profile` checks the names.

    Args:
        name: The name of the profile. The defaults of its fields decide the types of the values.
        texts: The fields, as `FIELD=VALUE`.

    Raises:
        ClusterError: The profile is not known, or a text has another form.
    """
    profile = find_profile(name)
    hints = get_type_hints(type(profile))
    values: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise ClusterError(f"{text!r}: FIELD=VALUE is needed, such as numa=true")
        if not text.isprintable():
            raise ClusterError(f"{text!r}: a field of a profile is one line of printable characters")
        if key == "name":
            raise ClusterError(f"{text!r}: the name is the profile's own; set its other fields")
        default = getattr(profile, key, None)
        if isinstance(default, tuple):
            values[key] = tuple(value.split(","))
        elif isinstance(default, bool):
            values[key] = value.lower() in ("true", "1", "yes", "on")
        elif isinstance(default, dict):
            values[key] = dict(part.split(":", 1) for part in value.split(",") if ":" in part)
        else:
            values[key] = int(value) if re.fullmatch(r"[0-9]{1,18}", value) else value
            if int in get_args(hints.get(key)) and not (isinstance(values[key], int) and values[key]):
                raise ClusterError(f"{text!r}: {key} takes a whole number, 1 or more")
    return values
