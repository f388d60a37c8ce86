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
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

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
        kind: "plans", "answers" or "shapes", the name of a folder.
        facts: Plain values, everything that the result depends on. The sources of the lab and the versions
            of torch and transformers are added.
        make: Makes the result.
        encode: Makes plain values of a result.
        decode: Makes the result of them; it raises ValueError, KeyError or TypeError if they are none.
    """
    text = json.dumps([facts, _versions()], sort_keys=True, default=str)
    directory = folder(kind)
    if directory is None:
        return make()
    path = directory / f"{hashlib.sha256(text.encode()).hexdigest()}.json.gz"
    try:
        result = decode(json.loads(gzip.decompress(path.read_bytes())))
        path.touch()
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError):
        result = make()
        _write(path, encode(result))
    return result


def folder(kind: str) -> Path | None:
    """Where files of a kind are kept, in the user's cache; None if the lab runs uninstalled."""
    try:
        from platformdirs import user_cache_path
    except ModuleNotFoundError:
        return None
    return user_cache_path("longcontext-lab") / kind


def model_identity(model: str) -> list[object]:
    """Return what a plan depends on: the model's name, or its path, its config and the state of its files."""
    path = Path(model)
    directory = path.parent if path.name == "config.json" else path
    config = directory / "config.json"
    # A Path raises where a name is too long for a file.
    if not os.path.isfile(config):
        return [model]
    # The headers of the weights, and notes beside them, decide whether the model is planned at all.
    files = [
        # A link may lead nowhere, as in a download that was cut off.
        [file.name, [file.stat().st_size, file.stat().st_mtime_ns] if file.exists() else None]
        for file in sorted(directory.iterdir())
    ]
    return [str(directory.absolute()), config.read_bytes().hex(), files]


def _write(path: Path, document: dict[str, Any]) -> None:
    """Write the document, whole or not at all; a disk that refuses it costs the next call its seconds."""
    part = path.with_name(f"{uuid4()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(gzip.compress(json.dumps(document).encode(), compresslevel=1))
        part.replace(path)
        files = sorted(path.parent.glob("*.json.gz"), key=os.path.getmtime)
        for old in files[:-KEPT]:
            old.unlink(missing_ok=True)
    except OSError:
        with suppress(OSError):
            part.unlink()


@cache
def sources_hash() -> str:
    """Return the SHA-256 of the lab's own sources, in hexadecimal digits."""
    sources = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        sources.update(path.read_bytes())
    return sources.hexdigest()


@cache
def _versions() -> dict[str, str]:
    return {"lab": sources_hash(), **{name: version(name) for name in ("torch", "transformers")}}
