"""The settings of LoRA adapters: their rank, their scale, and the projections. Nothing here imports torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from lab.errors import ModelError
from lab.shape import Shape
from lab.units import abbreviate, check_counts

LARGEST_RANK = 2**16
"""The largest rank of an adapter. No projection of a published model has more rows or columns."""

_OF_EXPERTS = ("down_proj", "experts", "gate_proj", "gate_up_proj", "up_proj", "w1", "w2", "w3")
"""What models, files and PEFT call the experts and their matrices."""


@dataclass(frozen=True)
class Lora:
    """LoRA adapters of rank r: a projection with weight W computes with W + alpha/r * B @ A.

    A is [r, in] and B is [out, r]. They are trained, and all other parameters of the model are frozen.
    Source: LoRA (arXiv 2106.09685), section 4.1.

    Attributes:
        r: The rank of the adapters.
        alpha: The numerator of their scale alpha/r; None stands for r, a scale of 1.
        targets: The projections of a decoder layer that have an adapter; None stands for all of them.
        dtype: The dtype of the adapters in a model in bfloat16, "bfloat16" or "float32"; None stands for that
            of PEFT, which is fp32 there. Adapters in bfloat16 have their gradients and AdamW's state in it.

    Raises:
        ModelError: A rank that is not a number from 1 to ``LARGEST_RANK``; an alpha that is not a finite
            number above 0; targets that are not a tuple of at least one name; another dtype.
    """

    r: int
    alpha: float | None = None
    targets: tuple[str, ...] | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        check_counts({"lora: r": self.r}, ModelError)
        if self.r > LARGEST_RANK:
            raise ModelError(f"lora: r={self.r}: give a rank from 1 to {LARGEST_RANK}")
        if self.alpha is not None and not (type(self.alpha) in (int, float) and 0 < self.alpha < math.inf):
            raise ModelError(
                f"lora: alpha={self.alpha!r}: give a finite number above 0, for instance {self.r}"
            )
        if self.targets is not None and not (isinstance(self.targets, tuple) and self.targets):
            raise ModelError(
                f"lora: targets={self.targets!r}: give a tuple of names, such as ('q_proj', 'v_proj')"
            )
        if self.dtype not in (None, "bfloat16", "float32"):
            raise ModelError(
                f"lora: dtype={abbreviate(repr(self.dtype))}: give bfloat16 or float32, or leave it out for "
                "the one of PEFT"
            )

    @property
    def scale(self) -> float:
        """The number by which B @ A is multiplied."""
        return 1.0 if self.alpha is None else self.alpha / self.r

    def __str__(self) -> str:
        """Return the text that ``parse_lora`` reads."""
        alpha = "" if self.alpha is None else f",alpha={self.alpha:g}"
        targets = "" if self.targets is None else f",targets={'+'.join(self.targets)}"
        dtype = "" if self.dtype is None else f",dtype={self.dtype}"
        return f"r={self.r}{alpha}{targets}{dtype}"

    def targets_in(self, shape: Shape) -> tuple[str, ...]:
        """Return the projections that have an adapter, in the order of the layer.

        Raises:
            ModelError: A target is no projection of the model's layers.
        """
        for name in self.targets or ():
            if shape.experts and name in _OF_EXPERTS:
                raise ModelError(
                    f"lora: {name} is a matrix of the experts, which have no adapters in the lab: give "
                    f"targets among {', '.join(shape.projections)}"
                )
            if name not in shape.projections:
                raise ModelError(
                    f"lora: no projection {abbreviate(repr(name))} in the layers of this model: targets are "
                    f"among {', '.join(shape.projections)}"
                )
        return tuple(name for name in shape.projections if self.targets is None or name in self.targets)

    def to_json(self) -> dict[str, Any]:
        """Return plain values by field name."""
        return asdict(self)


def parse_lora(given: Lora | str | None) -> Lora | None:
    """Read adapters as they are written: ``r=16``, or ``r=16,alpha=32,targets=q_proj+v_proj``.

    ``dtype=bfloat16`` may follow.

    Raises:
        ModelError: Another text; see also ``Lora``.
    """
    if given is None or isinstance(given, Lora):
        return given
    if not isinstance(given, str):
        raise ModelError(f"lora={abbreviate(repr(given))}: give a text such as 'r=16', or a Lora")
    fields: dict[str, Any] = {}
    for setting in given.split(","):
        name, _, value = (part.strip() for part in setting.partition("="))
        if name not in _READERS or name in fields or not value:
            raise ModelError(_refusal(given))
        try:
            fields[name] = _READERS[name](value)
        except ValueError:
            raise ModelError(_refusal(given)) from None
    if "r" not in fields:
        raise ModelError(_refusal(given))
    return Lora(**fields)


def _refusal(given: str) -> str:
    return (
        f"lora={abbreviate(repr(given))} names no adapters: write r=16, or "
        "r=16,alpha=32,targets=q_proj+v_proj"
    )


def _whole(text: str) -> int:
    # int() also takes the digits of other scripts, and any number of them.
    if not (text.isascii() and text.isdecimal() and len(text) <= 19):
        raise ValueError
    return int(text)


def _number(text: str) -> float:
    if not text.isascii() or len(text) > 40:
        raise ValueError
    return int(text) if text.isdecimal() else float(text)


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text.split("+")))


_READERS: dict[str, Callable[[str], Any]] = {"r": _whole, "alpha": _number, "targets": _names, "dtype": str}


def check_takes_adapters(model: object, lora: Lora | None) -> None:
    """Refuse adapters for a callable, which may add them to the model that it returns.

    Raises:
        ModelError: There are adapters, and the model is a callable.
    """
    if lora is not None and callable(model):
        raise ModelError(
            f"lora='{lora}' for a callable: let it add the adapters to the model that it returns, by peft's "
            "inject_adapter_in_model, and leave lora out"
        )


def plain_name(name: str) -> str:
    """Return the name that a parameter has in the model without adapters."""
    return name.replace(".base_layer.", ".")


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name
