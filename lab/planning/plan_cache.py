"""Plans and answers that were made before, on disk, each under everything that it depends on.

This module imports neither torch nor transformers, so that a saved answer is read at once.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from cluster.errors import ClusterError
from cluster.folders import cache_folder, write_whole

KEPT = 500
"""Files of a kind that stay, those used last; a plan takes a few hundred KiB."""

T = TypeVar("T")


def cached(
    kind: str,
    facts: dict[str, Any],
    make: Callable[[], T],
    *,
    encode: Callable[[T], dict[str, Any]],
    decode: Callable[[dict[str, Any]], T],
) -> T:
    """Return what ``make`` returned for the same facts before, or returns now.

    A file that cannot be read is made anew. What ``make`` raises is not kept.

    Args:
        kind: "answers" or "shapes", the name of a folder.
        facts: Plain values, everything that the result depends on. The sources of the lab and the versions
            of torch and transformers are added.
        make: Makes the result.
        encode: Makes plain values of a result.
        decode: Makes the result of them; it raises ValueError, KeyError or TypeError if they are none.
    """
    path = folder(kind) / f"{key_of(facts)}.json.gz"
    try:
        result = decode(json.loads(gzip.decompress(path.read_bytes())))
        path.touch()
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError):
        result = make()
        write(path, gzip.compress(json.dumps(encode(result)).encode(), compresslevel=1))
    return result


def key_of(facts: dict[str, Any]) -> str:
    """Return a name for facts, the sources of the lab, and the versions of torch and transformers."""
    return digest({"facts": facts, "versions": _versions()})


def digest(facts: dict[str, Any]) -> str:
    """Return a name for facts: the SHA-256 of their JSON, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def folder(kind: str) -> Path:
    """Return where files of a kind are kept, in the user's cache. Without a place, nothing is kept."""
    try:
        return cache_folder() / kind
    except (OSError, ClusterError):
        return Path(os.devnull) / kind


def model_identity(model: str | Path) -> list[object]:
    """Return what a plan depends on: the model's name, or its path, its config and the state of its files.

    A text that names a preset is no directory, also where there is one of this name.
    """
    path = Path(model)
    directory = path.parent if path.name == "config.json" else path
    config = directory / "config.json"
    # A Path raises where a name is too long for a file.
    if not os.path.isfile(config):
        return [str(model)]
    # The headers of the weights, and notes beside them, decide whether the model is planned at all.
    files = [
        # A link may lead nowhere, as in a download that was cut off.
        [file.name, [file.stat().st_size, file.stat().st_mtime_ns] if file.exists() else None]
        for file in sorted(directory.iterdir())
    ]
    as_given = [type(model) is str, str(model)]
    return [as_given, str(directory.absolute()), config.read_bytes().hex(), files]


def write(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all; a disk that refuses it costs the next call its seconds."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)
        files = sorted(path.parent.glob(f"*{path.suffix}"), key=os.path.getmtime)
        for old in files[:-KEPT]:
            old.unlink(missing_ok=True)


@cache
def sources_hash(*parts: str) -> str:
    """Return the SHA-256 of the lab's own sources, in hexadecimal digits.

    Args:
        parts: Folders and files of the lab; all of it, with the table of hardware, if none is given.
    """
    sources, lab = hashlib.sha256(), Path(__file__).parents[1]
    for part in parts or (".", "planning/hardware.toml"):
        files = sorted((lab / part).rglob("*.py")) if (lab / part).is_dir() else [lab / part]
        for file in files:
            sources.update(file.read_bytes())
    return sources.hexdigest()


@cache
def _versions() -> dict[str, str]:
    releases = {"lab": sources_hash()}
    for name in ("torch", "transformers", "peft"):
        with suppress(PackageNotFoundError):
            # Without the name of the build, +cpu or +cu130: a plan on fake tensors does not depend on it.
            releases[name] = version(name).partition("+")[0]
    return releases
