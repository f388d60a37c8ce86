"""Parameters without memory are allocated, and read from safetensors one shard at a time."""

from __future__ import annotations

import json
from pathlib import Path
from zlib import crc32

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from lab.errors import ModelError
from lab.models.first_values import shard_of
from lab.models.lora import is_adapter, plain_name
from lab.torch_private import offloaded_parameters, reset_shards

COMPARED_ELEMENTS = 2**22
"""How many elements of two tied tensors are compared at once."""


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


class WeightFiles:
    """The safetensors files of a directory in the Hugging Face layout.

    Raises:
        ModelError: The directory has neither ``model.safetensors`` nor an index of several files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
        self._files: dict[str, Path] = {}
        if single.is_file():
            with safe_open(single, framework="pt") as file:
                self._files = dict.fromkeys(file.keys(), single)
        elif index.is_file():
            places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            self._files = {name: folder / place for name, place in places.items()}
        else:
            raise ModelError(
                f"{folder} has safetensors files, but neither {single.name} nor {index.name}: name them so"
            )

    def load(self, model: PreTrainedModel) -> None:
        """Read the values of every parameter but adapters' from the files; of a sharded one, only this rank's
        rows.

        Raises:
            ModelError: A parameter is in no file, or has another shape there; or two tied parameters have
                different values there.
        """
        for path, names in self._by_file(model).items():
            with safe_open(path, framework="pt") as file, torch.no_grad():
                for name_in_file, name in names:
                    parameter = model.get_parameter(name)
                    self._check_shape(file.get_slice(name_in_file).get_shape(), name, parameter)
                    local, first = shard_of(parameter)
                    if local.numel():
                        local.copy_(file.get_slice(name_in_file)[first : first + len(local)])

    def digest(self, model: PreTrainedModel) -> str:
        """Return a checksum of every parameter's shape and first row, as text.

        Raises:
            ModelError: See ``load``.
        """
        total = 0
        for path, names in self._by_file(model).items():
            with safe_open(path, framework="pt") as file:
                for name_in_file, name in names:
                    part = file.get_slice(name_in_file)
                    self._check_shape(part.get_shape(), name, model.get_parameter(name))
                    row = part[:1] if len(part.get_shape()) > 1 else part[:]
                    total = crc32(f"{name} {part.get_shape()} {part.get_dtype()}".encode(), total)
                    total = crc32(row.contiguous().view(torch.uint8).numpy(), total)
        return f"files {total}"

    def _by_file(self, model: nn.Module) -> dict[Path, list[tuple[str, str]]]:
        """Return, for each file, pairs of a parameter's name in the file and its name in the model.

        A tied parameter has several names. The files may contain any of them, or all. They have nothing of
        adapters.
        """
        tied: dict[nn.Parameter, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if not is_adapter(name):
                tied.setdefault(parameter, []).append(name)
        files: dict[Path, list[tuple[str, str]]] = {}
        missing = []
        for parameter, names in tied.items():
            # The names in files of a model without a head lack the prefix "model.".
            own = map(plain_name, names)
            names_in_file = [name if name in self._files else name.removeprefix("model.") for name in own]
            names_in_file = [name for name in names_in_file if name in self._files]
            if names_in_file:
                files.setdefault(self._files[names_in_file[0]], []).append((names_in_file[0], names[0]))
                for other in names_in_file[1:]:
                    self._check_equal(names_in_file[0], other, parameter)
            else:
                missing.append(plain_name(names[0]))
        if missing:
            raise ModelError(f"the weights in {self.folder} lack {', '.join(sorted(missing)[:3])}")
        return files

    def _check_equal(self, first: str, second: str, parameter: nn.Parameter) -> None:
        """Compare two tensors of the files that are one parameter of the model, in blocks of rows."""
        with (
            safe_open(self._files[first], framework="pt") as one,
            safe_open(self._files[second], framework="pt") as other,
        ):
            parts = one.get_slice(first), other.get_slice(second)
            for name, part in zip((first, second), parts, strict=True):
                self._check_shape(part.get_shape(), name, parameter)
            rows = max(1, COMPARED_ELEMENTS * len(parameter) // parameter.numel())
            for start in range(0, len(parameter), rows):
                pair = [part[start : start + rows].to(parameter.dtype) for part in parts]
                if not torch.equal(*pair):
                    raise ModelError(
                        f"the config of {self.folder} ties {second} to {first}, and its files hold different "
                        f"values for the two; set tie_word_embeddings to false in its config.json"
                    )

    def _check_shape(self, shape: list[int], name: str, parameter: nn.Parameter) -> None:
        if shape != list(parameter.shape):
            raise ModelError(
                f"the weights in {self.folder} cannot be loaded: {name} has shape {shape} there, and "
                f"{list(parameter.shape)} by the config; give the config that belongs to the weights"
            )
