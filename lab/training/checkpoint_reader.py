"""Reading a checkpoint whose folder nobody vouches for: its files are data, and none of them runs code.

Torch stores tensors in files that ``torch.load`` reads with ``weights_only=True``. It says where each lies in
a pickle, ``.metadata``, and a pickle may run code. The lab writes the same into ``tensors.json``, and reads
that alone; ``.metadata`` is there for torch's own tools.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load

from lab.errors import CheckpointError
from lab.torch_private import storage_info
from lab.units import abbreviate

FILE = "tensors.json"

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}
"""The dtypes of parameters and of Adam's state, by name."""

Entry = dict[str, Any]


def first_cause(error: CheckpointException) -> str:
    """Return what the first rank that failed says, and its number, on one line."""
    rank, (cause, _) = min(error.failures.items())
    message = str(cause).partition("\n")[0].rstrip(".") or type(cause).__name__
    return f"{message} (rank {rank})"


def write_index(folder: Path, metadata: Metadata) -> None:
    """Write what the tensors of a checkpoint are, and where they lie, into ``folder``.

    Raises:
        OSError: The file cannot be written.
    """
    entries: dict[str, Entry] = {}
    for name, stored in metadata.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        dtype = str(stored.properties.dtype).removeprefix("torch.")
        entries[name] = {"dtype": dtype, "size": list(stored.size), "chunks": []}
        for chunk in stored.chunks:
            where = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            entries[name]["chunks"].append(
                {
                    "offsets": list(chunk.offsets),
                    "sizes": list(chunk.sizes),
                    "file": where.relative_path,
                    "at": where.offset,
                    "length": where.length,
                }
            )
    (folder / FILE).write_text(json.dumps(entries), encoding="utf-8")


class CheckpointReader(FileSystemReader):
    """Torch's own reader, but for ``.metadata``, which it does not open."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint)
        self.checkpoint = checkpoint
        self._metadata: Metadata | None = None

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the metadata of all ranks; the index is read once.

        Raises:
            CheckpointError: The index is damaged; or it has a tensor whose chunks are not exactly the tensor,
                or a chunk that is not in a file of the folder.
        """
        path = self.checkpoint / FILE
        if self._metadata is None:
            try:
                entries = json.loads(path.read_text(encoding="utf-8"))
                self._metadata = _metadata(entries, self.checkpoint)
            except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
                raise CheckpointError(f"{path} is damaged: {_reason(error)}") from error
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self._metadata

    def load_into(self, what: str, state: dict[str, Any], group: dist.ProcessGroup | None) -> None:
        """Read into the tensors of ``state``, with the ranks of a group; in one process if there is none.

        Args:
            what: What has the tensors, for the message.
            state: The tensors.
            group: The ranks, each of which calls this.

        Raises:
            CheckpointError: As ``read_metadata``; or the checkpoint lacks a tensor, or has another shape.
        """
        # Torch would answer a file that is refused with a traceback in the log, and with another reason.
        self.read_metadata()
        try:
            with warnings.catch_warnings():
                # torch warns that it loads in one process; that is intended.
                warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
                load(state, storage_reader=self, process_group=group, no_dist=group is None)
        except CheckpointException as error:
            said = f"{self.checkpoint} cannot be read into this {what}: {first_cause(error)}"
            raise CheckpointError(said) from error

    def dtype(self) -> torch.dtype:
        """Return the dtype of the parameters.

        Raises:
            CheckpointError: As ``read_metadata``; or the parameters have several dtypes.
        """
        dtypes = {value.properties.dtype for value in self._tensors().values()}
        if len(dtypes) != 1:
            raise CheckpointError(
                f"{self.checkpoint / FILE} is damaged: its parameters have {len(dtypes)} dtypes, not one"
            )
        return dtypes.pop()

    def _tensors(self) -> dict[str, TensorStorageMetadata]:
        """The parameters of the model, by name."""
        stored = self.read_metadata().state_dict_metadata
        return {
            name: value
            for name, value in stored.items()
            if name.startswith("model.") and isinstance(value, TensorStorageMetadata)
        }

    def check_dtypes(self, weights: Mapping[str, Tensor]) -> None:
        """Refuse a model whose parameters have other dtypes: reading would round them without a word.

        Raises:
            CheckpointError: As ``read_metadata``; or the first parameter whose dtype differs.
        """
        stored = self._tensors()
        for name, weight in weights.items():
            there = stored.get(f"model.{name}")
            if there is not None and there.properties.dtype != weight.dtype:
                own, here = (str(d).removeprefix("torch.") for d in (there.properties.dtype, weight.dtype))
                raise CheckpointError(
                    f"{self.checkpoint} has parameters of {own}, and the model of {here}: give "
                    f"dtype={own!r}, or --dtype {own}"
                )

    def check_sizes(self, weights: Mapping[str, Tensor]) -> None:
        """Refuse a model whose parameters are not those of the checkpoint.

        Raises:
            CheckpointError: As ``read_metadata``; or the first parameter that differs.
        """
        stored = self._tensors()
        there = {name: tuple(value.size) for name, value in stored.items()}
        here = {f"model.{name}": tuple(weight.shape) for name, weight in weights.items()}
        for name in sorted(there.keys() | here.keys()):
            if there.get(name) != here.get(name):
                raise CheckpointError(
                    f"{self.checkpoint} is damaged: {abbreviate(name)} is {there.get(name, 'missing')}, and "
                    f"{here.get(name, 'missing')} in a model of its config"
                )


def _metadata(entries: Mapping[str, Entry], folder: Path) -> Metadata:
    """Make torch's records of the entries.

    Raises:
        ValueError: An entry that is wrong, with its name. Other errors of Python: an entry of another form.
    """
    records: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    for name, entry in entries.items():
        size = _counts(entry["size"], name)
        chunks = []
        for chunk in entry["chunks"]:
            offsets, sizes = _counts(chunk["offsets"], name), _counts(chunk["sizes"], name)
            chunks.append(ChunkStorageMetadata(offsets, sizes))
            file = chunk["file"]
            (at, length) = _counts([chunk["at"], chunk["length"]], name)
            if not isinstance(file, str) or Path(file).name != file or not (folder / file).is_file():
                raise ValueError(f"{name} is in {str(file)[:80]!r}, which is no file in its folder")
            if at + length > (folder / file).stat().st_size:
                raise ValueError(f"{name} lies behind the end of {file}")
            places[MetadataIndex(name, offsets)] = storage_info(file, at, length)
        if not _covered(size, chunks):
            raise ValueError(f"the chunks of {name} are not the whole tensor")
        properties = TensorProperties(DTYPES[entry["dtype"]])
        records[name] = TensorStorageMetadata(properties, size, chunks)
    return Metadata(records, storage_data=places)


def _counts(values: Iterable[object], name: str) -> torch.Size:
    counts = [value for value in values if type(value) is int and 0 <= value < 2**63]
    if len(counts) != len(list(values)):
        raise ValueError(f"{name} has {str(values)[:80]}, which are no counts")
    return torch.Size(counts)


def _covered(size: torch.Size, chunks: Iterable[ChunkStorageMetadata]) -> bool:
    """Whether the chunks are a tensor of this size, divided along dimension 0 alone, as FSDP divides it."""
    parts = sorted((tuple(c.offsets), tuple(c.sizes)) for c in chunks if math.prod(c.sizes))
    row = 0
    for offsets, sizes in parts:
        if offsets[:1] != (row,)[: len(size)] or any(offsets[1:]) or sizes[1:] != tuple(size[1:]):
            return False
        row += sizes[0] if sizes else 1
    return len(size) == len(parts[0][1]) and row == (size[0] if size else 1) if parts else not math.prod(size)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return str(error).partition("\n")[0] or type(error).__name__
