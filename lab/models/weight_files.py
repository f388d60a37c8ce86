"""Allocation of parameters, and safetensors files: a rank reads its shards, and writes file by file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias
from zlib import crc32

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from cluster.live import notify
from lab.errors import ModelError
from lab.models.expert_files import Place, parts_in_files
from lab.models.first_values import shard_of
from lab.models.headers import INDEX, dtypes_in, files_of
from lab.models.lora import is_adapter, plain_name
from lab.models.unread import TEXT_PREFIXES, unread_reason
from lab.torch_private import offloaded_parameters, reset_shards

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The dtypes of weights, by their names in safetensors."""

COMPARED_ELEMENTS = 2**22
"""How many elements are compared at once: of two tied tensors, or of one before and after a cast."""

MAX_FILE = 5 * 10**9
"""The most bytes of weights in a file, unless the caller says another number."""

ReadWeights: TypeAlias = Callable[[list[str]], Mapping[str, Tensor]]
"""A function that returns the weights of these names. The caller frees them before it asks for the next."""


def allocate(model: nn.Module, device: torch.device) -> None:
    """Allocate every parameter on ``device``, without values, and move the buffers there.

    A tied parameter stays tied. Of a sharded parameter only this rank's shard is allocated; it is on the host
    if FSDP keeps it there.
    """
    on_host = offloaded_parameters(model)
    replacements: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in replacements:
                place = torch.device("cpu") if parameter in on_host else device
                empty = torch.empty_like(parameter, device=place)
                replacements[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            setattr(module, name, replacements[parameter])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            reset_shards(module)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model's state dict, without copies; a tied tensor has its first name alone."""
    weights: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not any(tensor is seen for seen in weights.values()):
            weights[name] = tensor
    return weights


def write_weights(
    weights: Mapping[str, Tensor], family: str, folder: Path, read: ReadWeights, max_file: int
) -> None:
    """Write weights as safetensors: ``model.safetensors``, or several files and their index.

    It holds the tensors of one file at a time, and no copy of them. torch's ``HuggingFaceStorageWriter``
    would hold each file three times: its tensors, and its bytes twice. Experts are written as their family
    does it, see ``parts_in_files``.

    Args:
        weights: Shapes and dtypes by name; on the meta device too.
        family: The ``model_type``.
        folder: The folder.
        read: Returns the values, for one file at a time.
        max_file: The most bytes of tensors in a file. A tensor of more bytes has a file of its own.

    Raises:
        OSError, SafetensorError: A file cannot be written.
    """
    groups = list(_groups(weights, max_file))
    places: dict[str, str] = {}
    for number, names in enumerate(groups, 1):
        several = f"-{number:05}-of-{len(groups):05}" if len(groups) > 1 else ""
        file = f"model{several}.safetensors"
        parts = {
            name_in_file: place.part_of(tensor)
            for name, tensor in read(names).items()
            for name_in_file, place in parts_in_files(family, name, tensor.shape).items()
        }
        save_file(parts, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(parts, file)
        del parts
    if len(groups) > 1:
        totals = {
            "total_parameters": sum(weight.numel() for weight in weights.values()),
            "total_size": sum(weight.nbytes for weight in weights.values()),
        }
        index = json.dumps({"metadata": totals, "weight_map": places}, indent=2, sort_keys=True)
        (folder / INDEX).write_text(index + "\n", encoding="utf-8")


def _groups(weights: Mapping[str, Tensor], max_file: int) -> Iterator[list[str]]:
    """Yield the names of each file's tensors, in the order of the model."""
    names: list[str] = []
    size = 0
    for name, weight in weights.items():
        if names and size + weight.nbytes > max_file:
            yield names
            names, size = [], 0
        names.append(name)
        size += weight.nbytes
    yield names


@torch.no_grad()
def copy_part(parameter: Tensor, place: Place, part: Any) -> int:
    """Copy a tensor of a file into its place in a parameter; of a sharded one, this rank's rows alone.

    Args:
        parameter: The parameter.
        place: Which part of the parameter the tensor is.
        part: The tensor, or a slice of an open file, of which no other rows are read.

    Returns:
        How many values are 0 in the parameter's dtype, and are not 0 in the file.

    Raises:
        ModelError: A value that is finite in the file is not finite in the parameter's dtype.
    """
    local, first = shard_of(parameter)
    if place.expert is not None:
        if not first <= place.expert < first + len(local):
            return 0
        local, values = place._replace(expert=place.expert - first).part_of(local), part[:]
    elif local.numel():
        values = part[first : first + len(local)]
    else:
        return 0
    local.copy_(values)
    if values.dtype == local.dtype:
        return 0
    zeros = 0
    for block in values.flatten().split(COMPARED_ELEMENTS):
        cast = block.to(local.dtype)
        lost = block[block.isfinite() & ~cast.isfinite()]
        if len(lost):
            own = str(values.dtype).removeprefix("torch.")
            raise ModelError(
                f"{place.parameter} has {lost[0]:.4g}, which is not finite in {local.dtype}: give "
                f"dtype={own!r}, or --dtype {own}, which is that of the files"
            )
        zeros += int(((cast == 0) & (block != 0)).sum())
    return zeros


class WeightFiles:
    """The safetensors files of a directory in the Hugging Face layout.

    Args:
        folder: The directory.
        wrapper: The ``model_type`` of the wrapper to which the files belong; None if they belong to none. See
            ``lab.models.unread``.

    Raises:
        ModelError: See ``files_of``; or a tensor of the index is in no file, or one is in two files.
        OSError, SafetensorError: A file cannot be read.
    """

    def __init__(self, folder: Path, wrapper: str | None = None) -> None:
        self.folder = folder
        self._wrapper = wrapper
        self._dtypes: dict[str, str] = {}
        files = files_of(folder)
        self._files = {name: path for path, names in files.items() for name in names}
        for path in files:
            # transformers reads the tensors of a file that the index leaves out, too.
            for name, dtype in dtypes_in(path).items():
                other = self._files.setdefault(name, path)
                if other != path:
                    raise ModelError(
                        f"{name} is in {path}, and {INDEX} places it in {other.name}: keep one of the two"
                    )
                self._dtypes[name] = dtype
        for name, path in self._files.items():
            if name not in self._dtypes:
                raise ModelError(f"{path} lacks {name}, which {INDEX} places there: write both again")

    def load(self, model: PreTrainedModel) -> None:
        """Read the values of every parameter that is not an adapter's.

        Of a sharded parameter, only this rank's rows are read. What the cast to the model's dtype makes 0 is
        said on stderr.

        Raises:
            ModelError: A parameter is in no file, or has another shape there, or a dtype of which the lab
                trains no weights; a tensor of the files has no place in the model; two tied parameters have
                different values there; or see ``copy_part``.
        """
        zeros = 0
        for path, names in self._by_file(model).items():
            with safe_open(path, framework="pt") as file:
                for name_in_file, place in names:
                    parameter = model.get_parameter(place.parameter)
                    part = file.get_slice(name_in_file)
                    self._check_shape(part.get_shape(), name_in_file, place, parameter)
                    zeros += copy_part(parameter, place, part)
        if zeros:
            notify(f"values of the weights in {self.folder} that became 0 in {model.dtype}: {zeros:,}")

    def rounded_to(self, dtype: torch.dtype) -> list[str]:
        """Return the dtypes in the files, of weights that are read, whose values ``dtype`` rounds."""
        read = {found for name, found in self._dtypes.items() if unread_reason(name, self._wrapper) is None}
        return sorted(
            name for name in read & DTYPES.keys() if torch.promote_types(DTYPES[name], dtype) != dtype
        )

    def digest(self, model: PreTrainedModel) -> str:
        """Return a checksum, as text, of every tensor's name, shape, dtype and first row.

        The other rows are not read, so files that differ in these alone have the same checksum.

        Raises:
            ModelError: See ``load``.
        """
        total = 0
        for path, names in self._by_file(model).items():
            with safe_open(path, framework="pt") as file:
                for name_in_file, place in names:
                    part, parameter = file.get_slice(name_in_file), model.get_parameter(place.parameter)
                    self._check_shape(part.get_shape(), name_in_file, place, parameter)
                    row = part[:1] if len(part.get_shape()) > 1 else part[:]
                    total = crc32(f"{name_in_file} {part.get_shape()} {part.get_dtype()}".encode(), total)
                    total = crc32(row.contiguous().view(torch.uint8).numpy(), total)
        return f"files {total}"

    def _by_file(self, model: PreTrainedModel) -> dict[Path, list[tuple[str, Place]]]:
        """Return, for each file, the names of its tensors, and the part of a parameter that each of them is.

        A tied parameter has several names. The files may contain any of them, or all; if they contain
        several, the values are compared. Experts have a tensor each, or are in one tensor as in the model.
        Parameters of adapters are left out.

        Raises:
            ModelError: See ``load``.
        """
        tied: dict[nn.Parameter, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if not is_adapter(name):
                tied.setdefault(parameter, []).append(name)
        files: dict[Path, list[tuple[str, Place]]] = {}
        used: set[str] = set()
        missing = []
        for parameter, names in tied.items():
            # The names in files of a model without a head lack the prefix "model.".
            own = [plain_name(name) for name in names]
            names_in_file = [found for name in own if (found := self._name_in_file(name)) is not None]
            if names_in_file:
                place = Place(names[0])
                files.setdefault(self._files[names_in_file[0]], []).append((names_in_file[0], place))
                for other in names_in_file[1:]:
                    self._check_equal(names_in_file[0], other, parameter)
                used.update(names_in_file)
                continue
            parts = parts_in_files(model.config.model_type, own[0], parameter.shape)
            for name, place in parts.items():
                found = self._name_in_file(name)
                if found is None:
                    missing.append(name)
                else:
                    used.add(found)
                    place = place._replace(parameter=names[0])
                    files.setdefault(self._files[found], []).append((found, place))
        left = [
            name for name in self._files if name not in used and unread_reason(name, self._wrapper) is None
        ]
        if missing:
            raise ModelError(
                f"the weights in {self.folder} lack {_first(missing)}: give the config that belongs to them"
            )
        if left:
            raise ModelError(
                f"the weights in {self.folder} hold {_first(left)}, for which a {model.config.model_type} "
                "model with this config has no place: give the config that belongs to them, or files without "
                "them"
            )
        no_weights = [name for name in used if self._dtypes[name] not in DTYPES]
        if no_weights:
            raise ModelError(
                f"the weights in {self.folder} hold {_first(no_weights)} as {self._dtypes[min(no_weights)]}: "
                f"the lab trains weights of {', '.join(DTYPES)}; save them in one of these"
            )
        return files

    def _name_in_file(self, name: str) -> str | None:
        """Return the name of a tensor in the files; None if it is in none of them."""
        inner = name.removeprefix("model.")
        names = [name, inner]
        if self._wrapper is not None:
            names += [f"{prefix}{one}" for prefix in TEXT_PREFIXES for one in (name, inner)]
        return next((found for found in names if found in self._files), None)

    def _check_equal(self, first: str, second: str, parameter: nn.Parameter) -> None:
        """Compare two tensors of the files that are one parameter of the model, in blocks of rows."""
        with (
            safe_open(self._files[first], framework="pt") as one,
            safe_open(self._files[second], framework="pt") as other,
        ):
            parts = one.get_slice(first), other.get_slice(second)
            for name, part in zip((first, second), parts, strict=True):
                self._check_shape(part.get_shape(), name, Place(name), parameter)
            rows = max(1, COMPARED_ELEMENTS * len(parameter) // parameter.numel())
            for start in range(0, len(parameter), rows):
                pair = [part[start : start + rows].to(parameter.dtype) for part in parts]
                if not torch.equal(*pair):
                    raise ModelError(
                        f"the config of {self.folder} ties {second} to {first}, and its files hold different "
                        "values for the two; set tie_word_embeddings to false in its config.json"
                    )

    def _check_shape(self, shape: list[int], name: str, place: Place, parameter: nn.Parameter) -> None:
        expected = place.shape_in(parameter.shape)
        if shape != expected:
            raise ModelError(
                f"the weights in {self.folder} cannot be loaded: {name} has shape {shape} there, and "
                f"{expected} by the config; give the config that belongs to the weights"
            )


def _first(names: Iterable[str]) -> str:
    """Return the first three of some names, in order, and how many others there are."""
    ordered = sorted(names)
    others = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return ", ".join(ordered[:3]) + others
