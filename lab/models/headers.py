"""The headers of the safetensors files of a directory: which tensors there are, and of which dtype."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path, PurePosixPath

from safetensors import safe_open

from lab.errors import ModelError
from lab.units import abbreviate

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def has_weights(folder: Path) -> bool:
    """Return whether a folder has weights by the names of the Hugging Face layout."""
    return (folder / SINGLE).is_file() or (folder / INDEX).is_file()


def files_of(folder: Path) -> dict[Path, list[str]]:
    """Return the files of the weights, and for each the names of the tensors that an index places there.

    A single file has no index, so its list is empty. The written names of an index stay in the folder; the
    files may be links to other places, as they are in the cache of the Hugging Face hub.

    Raises:
        ModelError: There is neither a single file nor an index; or the index is none, or leads elsewhere.
    """
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file():
        return {single: []}
    if not index.is_file():
        raise ModelError(f"{folder} has safetensors files, but neither {SINGLE} nor {INDEX}: name them so")
    try:
        places = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise ModelError(
            f"{index} is no index of weights ({type(error).__name__}): write it again"
        ) from error
    files: dict[Path, list[str]] = {}
    for name, place in places.items():
        path = PurePosixPath(place) if isinstance(place, str) else None
        if path is None or path.is_absolute() or ".." in path.parts or not path.name:
            raise ModelError(
                f"{index} places {abbreviate(repr(name))} in {abbreviate(repr(place))}: give the name of a "
                "file in the folder of the index"
            )
        files.setdefault(folder / path, []).append(name)
    return files


def dtypes_in(path: Path) -> dict[str, str]:
    """Return the dtype of each tensor in a file, as safetensors names it ("BF16"), by the tensor's name.

    Raises:
        OSError, SafetensorError: The file cannot be read.
    """
    of_file = path.stat()
    return _dtypes_in(path, (of_file.st_mtime_ns, of_file.st_size))


@lru_cache(maxsize=1024)
def _dtypes_in(path: Path, _version: tuple[int, int]) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
