"""The names and places of experts in files of weights.

In the files of the families in ``_NAMES``, each expert has matrices of its own, and a model has those of all
experts in one tensor. ``save_pretrained`` and ``from_pretrained`` of transformers convert in the same way.
The files of gpt-oss have the tensors of the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

_LAYER = re.compile(r"(?P<layer>.*\.layers\.\d+\.)mlp\.(?P<part>gate\.weight|experts\.\w+)")


@dataclass(frozen=True)
class _Names:
    """What files call the parts of a layer's MLP.

    Attributes:
        block: The MLP.
        matrices: The matrices of an expert that each tensor of the model consists of, one after the other.
    """

    block: str
    matrices: Mapping[str, tuple[str, ...]]


_NAMES = {
    "mixtral": _Names("block_sparse_moe", {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}),
    "qwen3_moe": _Names("mlp", {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}),
}


class Place(NamedTuple):
    """Which part of a parameter a tensor in a file is.

    Attributes:
        parameter: The name of the parameter.
        expert: The expert; None for the whole parameter.
        first: The first row of the expert's matrices.
        end: The first row after the last.
    """

    parameter: str
    expert: int | None = None
    first: int = 0
    end: int = 0

    def part_of(self, tensor: Tensor) -> Tensor:
        """Return this part of a whole parameter, as a view."""
        return tensor if self.expert is None else tensor[self.expert, self.first : self.end]

    def shape_in(self, shape: tuple[int, ...]) -> list[int]:
        """Return the shape of this part of a parameter of ``shape``."""
        return list(shape) if self.expert is None else [self.end - self.first, *shape[2:]]


def parts_in_files(family: str, name: str, shape: tuple[int, ...]) -> dict[str, Place]:
    """Return the tensors of a parameter in the files of ``save_pretrained``, by their names there.

    Args:
        family: The ``model_type``.
        name: The name of the parameter.
        shape: Its shape.
    """
    names, match = _NAMES.get(family), _LAYER.fullmatch(name)
    if names is None or match is None:
        return {name: Place(name)}
    block = f"{match['layer']}{names.block}."
    of_experts, _, tensor = match["part"].partition(".")
    if of_experts == "gate":
        return {f"{block}{match['part']}": Place(name)}
    matrices = names.matrices[tensor]
    rows = shape[1] // len(matrices)
    return {
        f"{block}experts.{expert}.{matrix}.weight": Place(name, expert, i * rows, (i + 1) * rows)
        for expert in range(shape[0])
        for i, matrix in enumerate(matrices)
    }
