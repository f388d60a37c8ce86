"""The files of weights of a directory, and what the headers of safetensors say of their tensors."""

from __future__ import annotations

import json
import os
import re
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Literal

from safetensors import safe_open

from lab.errors import ModelError
from lab.units import MiB, abbreviate

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTERS = "adapter_config.json"
"""The file beside adapters of PEFT, which transformers adds to the model."""

SUFFIXES = {
    ".bin", ".ckpt", ".distcp", ".gguf", ".ggml", ".h5", ".hdf5", ".keras", ".mlmodel", ".msgpack", ".nemo",
    ".npy", ".npz", ".onnx", ".ot", ".pb", ".pdparams", ".pickle", ".pkl", ".pt", ".pth", ".safetensors",
    ".tar", ".tflite", ".tgz", ".zip",
}  # fmt: skip
"""The suffixes of files that hold weights, or may hold them."""

LARGE = 64 * MiB
"""A file of so many bytes may hold weights by any name that is not in OTHERS."""

OTHERS = (
    ".arrow", ".csv", ".json", ".jsonl", ".log", ".md", ".model", ".parquet", ".py", ".tsv", ".txt",
    ".uint16.bin", ".uint32.bin", "training_args.bin",
)  # fmt: skip
"""The ends of the names of files that hold none: texts, tables, tokens and settings."""


def weights_in(folder: Path) -> Literal["single", "index", "foreign", "none"]:
    """Return how a directory has its weights: in one safetensors file, in several with an index, or not.

    Files of other formats beside safetensors are no part of the weights. Alone they are foreign, also one
    folder deeper, as in the original/ of a published model.

    Raises:
        ModelError: The directory cannot be read.
    """
    if os.path.lexists(folder / SINGLE):
        return "single"
    if os.path.lexists(folder / INDEX):
        return "index"
    return "foreign" if _foreign(folder) else "none"


def check_weights(folder: Path) -> None:
    """Refuse a directory whose weights would not be seen.

    Raises:
        ModelError: It has foreign weights, or adapters of PEFT.
    """
    if (folder / ADAPTERS).is_file():
        raise ModelError(
            f"{folder} has adapters of PEFT ({ADAPTERS}), which the lab does not read: merge them into the "
            "weights by merge_and_unload(), and give a directory with these alone"
        )
    if weights_in(folder) != "foreign":
        return
    foreign = _foreign(folder)
    first = next((path for path in foreign if path.suffix.lower() == ".safetensors"), foreign[0])
    if first.suffix.lower() != ".safetensors":
        todo = "and the lab reads safetensors alone: save the weights in that format"
    elif first.parent != folder:
        todo = "and the lab reads those beside the config.json alone: give a directory that has both"
    elif re.search(r"-of-\d+\.", first.name):
        todo = f"and no {INDEX}: write or download that, too"
    else:
        todo = f"and the lab reads the weights in {SINGLE} alone: name them so"
    raise ModelError(
        f"{folder} has {first.relative_to(folder)}, which may hold weights, {todo}, or give a directory with "
        "config.json alone for random weights"
    )


def _foreign(folder: Path) -> list[Path]:
    try:
        inside = list(folder.iterdir())
        inside += [path for one in inside if one.is_dir() for path in one.iterdir()]
        return sorted(filter(_may_hold_weights, inside))
    except OSError as error:
        raise ModelError(
            f"{error.filename} cannot be read ({error.strerror}), and may hold weights: let this user read "
            "it, or give a directory with config.json alone for random weights"
        ) from error


def _may_hold_weights(path: Path) -> bool:
    name = path.name.lower()
    if name.endswith(".index.json"):
        return True
    if name.endswith(OTHERS):
        return False
    # A checkpoint of TensorFlow ends in .ckpt-1000.index.
    suffixes = {suffix.partition("-")[0] for suffix in Path(name).suffixes}
    return bool(suffixes & SUFFIXES) or (path.is_file() and path.stat().st_size >= LARGE)


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
        places = dict(json.loads(index.read_text(encoding="utf-8-sig"))["weight_map"])
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
