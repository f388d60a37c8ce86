"""The files of weights of a directory, and what the headers of safetensors say of their tensors."""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Literal

from safetensors import safe_open

from lab.errors import ModelError
from lab.units import MiB, abbreviate

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


SUFFIXES = {
    ".bin", ".ckpt", ".gguf", ".ggml", ".h5", ".keras", ".mlmodel", ".msgpack", ".npy", ".npz", ".onnx",
    ".ot", ".pickle", ".pkl", ".pt", ".pth", ".safetensors", ".tflite",
}  # fmt: skip
"""The suffixes of files that hold weights, or may hold them."""

LARGE = 64 * MiB
"""A file of so many bytes may hold weights by any name that is not a text's or a token file's."""

OTHERS = (".csv", ".json", ".jsonl", ".md", ".py", ".txt", ".uint16.bin", ".uint32.bin")
"""The suffixes of files that hold none."""


def weights_in(folder: Path) -> Literal["single", "index", "foreign", "none"]:
    """Return how a directory has its weights: in one safetensors file, in several with an index, or not.

    Files of other formats beside safetensors are no part of the weights. Alone they are foreign.
    """
    if os.path.lexists(folder / SINGLE):
        return "single"
    if os.path.lexists(folder / INDEX):
        return "index"
    return "foreign" if any(map(_may_hold_weights, folder.iterdir())) else "none"


def foreign_weights(folder: Path) -> ModelError:
    """Return the refusal of a directory with foreign weights."""
    foreign = sorted(filter(_may_hold_weights, folder.iterdir()))
    if any(path.suffix.lower() == ".safetensors" for path in foreign):
        return ModelError(f"{folder} has safetensors files, but neither {SINGLE} nor {INDEX}: name them so")
    return ModelError(
        f"{folder} has {foreign[0].name}, which may hold weights, and the lab reads safetensors alone: "
        "save the weights in that format, or give a directory with config.json alone for random weights"
    )


def _may_hold_weights(path: Path) -> bool:
    name = path.name.lower()
    if name.endswith(".index.json"):
        return True
    if name.endswith(OTHERS):
        return False
    return bool({*Path(name).suffixes} & SUFFIXES) or (path.is_file() and path.stat().st_size >= LARGE)


def check_file(path: Path) -> None:
    """Refuse a path of weights that is no file.

    Raises:
        ModelError: It is a link to a file that is not there, a folder, a pipe, or nothing.
    """
    if path.is_file():
        return
    what = "a link to a file that is not there" if path.is_symlink() else "missing"
    if path.exists():
        what = "a folder" if path.is_dir() else "no regular file"
    raise ModelError(f"{path} is {what}: download or copy the weights again")


def files_of(folder: Path) -> dict[Path, list[str]]:
    """Return the files of the weights, and for each the names of the tensors that an index places there.

    There may be none. A single file has no index, so its list is empty. The written names of an index stay in
    the folder; the files may be links to other places, as they are in the cache of the Hugging Face hub.

    Raises:
        ModelError: The index is none (see ``check_file``, too), or leads elsewhere.
    """
    index = folder / INDEX
    if (layout := weights_in(folder)) != "index":
        return {folder / SINGLE: []} if layout == "single" else {}
    check_file(index)
    try:
        places = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise ModelError(
            f"{index} is no index of weights ({type(error).__name__}): write it again"
        ) from error
    files: dict[Path, list[str]] = {}
    for name, place in places.items():
        path = PurePosixPath(place) if isinstance(place, str) and "\0" not in place else None
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
        ModelError: See ``check_file``.
    """
    check_file(path)
    of_file = path.stat()
    return _dtypes_in(path, (of_file.st_mtime_ns, of_file.st_size))


@lru_cache(maxsize=1024)
def _dtypes_in(path: Path, _version: tuple[int, int]) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
