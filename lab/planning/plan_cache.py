"""Plans that were made before, on disk, each under everything that it depends on."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

from lab.memory.timeline import Timeline
from lab.planning.costs import Costs

KEPT = 500
"""Plans kept, the latest used: a few hundred KiB each."""

Step = tuple[Timeline, Costs]


def remembered(question: dict[str, Any], make: Callable[[], Step]) -> Step:
    """What ``make`` gave to this question before, or gives now; a file that cannot be read is made anew.

    The question is plain values. The sources of the lab and the versions of torch and transformers are part
    of it.
    """
    text = json.dumps([question, _versions()], sort_keys=True, default=str)
    kept_in = folder()
    if kept_in is None:
        return make()
    path = kept_in / f"{hashlib.sha256(text.encode()).hexdigest()}.json.gz"
    try:
        document = json.loads(gzip.decompress(path.read_bytes()))
        path.touch()
        return Timeline.from_json(document["timeline"]), Costs(**document["costs"])
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError):
        step = make()
    _write(path, {"timeline": step[0].to_json(), "costs": asdict(step[1])})
    return step


def folder() -> Path | None:
    """Where plans are kept: the user's cache directory; None on a machine that runs the lab uninstalled."""
    try:
        from platformdirs import user_cache_path
    except ModuleNotFoundError:
        return None
    return user_cache_path("longcontext-lab") / "plans"


def _write(path: Path, document: dict[str, Any]) -> None:
    """Keep the document, whole or not at all; a disk that refuses it costs the next plan its seconds."""
    part = path.with_name(f"{uuid4()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(gzip.compress(json.dumps(document).encode(), compresslevel=1))
        part.replace(path)
        kept = sorted(path.parent.glob("*.json.gz"), key=os.path.getmtime)
        for old in kept[:-KEPT]:
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
