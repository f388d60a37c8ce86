"""What the passes of a UPipe layer are computed from: settings that stay, and tensors.

Letters: b rows, s tokens of one rank, E hidden size, H query heads, K key/value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import torch.distributed as dist
from torch import Tensor

from lab.decoder import Layer
from lab.techniques.attention.documents import Documents
from lab.techniques.upipe.projections import HeadProjections
from lab.techniques.upipe.schedule import Schedule

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class LayerSettings:
    """The arguments of a layer's passes that are not tensors.

    Attributes:
        parts: The layer.
        schedule: The stages of its attention.
        group: The ranks of the Ulysses group. None is a group of one rank.
        overlap: Whether the inputs of a stage are sent during the stage before it.
        documents: The documents of the rows; None if each row is one.
    """

    parts: Layer
    schedule: Schedule
    group: dist.ProcessGroup | None
    overlap: bool
    documents: Documents | None = None

    @property
    def scale(self) -> float:
        """The number that multiplies the attention scores."""
        module: Any = self.parts.attention
        return module.scaling  # type: ignore[no-any-return]

    @property
    def head_dim(self) -> int:
        """D."""
        module: Any = self.parts.attention
        return module.head_dim  # type: ignore[no-any-return]

    @cached_property
    def heads(self) -> HeadProjections:
        """The projections of the heads of a stage."""
        return HeadProjections(self.schedule, self.head_dim)

    def tokens_at_once(self, tokens: int) -> int:
        """Return of how many tokens all heads are computed at once.

        In fp32, what a norm's backward holds of so many tokens is less than the heads of a stage.
        """
        return max(1, tokens * self.schedule.chunk // (8 * self.schedule.heads))


class Inputs(NamedTuple, Generic[T]):
    """The tensors, besides x, from which a layer is computed, in forward and again in backward.

    In their places may also be other values, such as whether their gradients are needed.

    Attributes:
        cos: Cosines of the positions, [b, s, D] or [1, s, D].
        sin: Sines of the positions, like ``cos``.
        wq: The weight of the query projection, [H*D, E].
        wk: The weight of the key projection, [K*D, E].
        wv: The weight of the value projection, [K*D, E].
        wo: The weight of the output projection, [E, H*D], or None where the stages do not use it.
        bq: The bias of the query projection, [H*D], or None.
        bk: The bias of the key projection, [K*D], or None.
        bv: The bias of the value projection, [K*D], or None.
        bo: The bias of the output projection, [E], or None.
        sinks: The sinks of all query heads, [H], or None.
    """

    cos: T
    sin: T
    wq: T
    wk: T
    wv: T
    wo: T | None
    bq: T | None
    bk: T | None
    bv: T | None
    bo: T | None
    sinks: T | None

    @classmethod
    def split_from(cls, values: Sequence[Any]) -> tuple[Inputs[Any], list[Any]]:
        """Return the inputs that flat arguments of autograd begin with, and the other arguments."""
        count = len(cls._fields)
        return cls(*values[:count]), [*values[count:]]


def inputs_of(
    parts: Layer,
    tables: tuple[Tensor, Tensor],
    technique: str,
    output: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Inputs[Tensor]:
    """Return the inputs of a layer.

    Args:
        parts: The layer.
        tables: The cosines and the sines of the positions.
        technique: Names the technique in errors, see ``effective_weight``.
        output: The weight and the bias of the output projection, if the stages use it.

    Raises:
        RecipeError: See ``effective_weight``.
    """
    (wq, bq), (wk, bk), (wv, bv) = parts.input_weights(technique)
    (wo, bo), (cos, sin) = output, tables
    return Inputs(cos, sin, wq, wk, wv, wo, bq, bk, bv, bo, parts.sinks)
