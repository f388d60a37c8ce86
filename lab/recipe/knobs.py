"""The row of a knob, which stands at its field of ``Recipe``: its values, its rung, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from lab.errors import RecipeError
from lab.techniques.unsupported import instead_of
from lab.units import abbreviate, check_counts

Backend = Literal["lab", "deepspeed"]
RingExchange = Literal["send", "gather"]
Offload = Literal["none", "inputs", "attention"]
Compiled = Literal["none", "norms", "tiles"]
LossKernel = Literal["lab", "liger"]
Optimizer = Literal["device", "host"]
KernelName = Literal["auto", "torch", "cudnn", "flash-attn-2", "flash-attn-3", "flash-attn-4"]


@dataclass(frozen=True)
class Knob:
    """One field of a recipe, as data.

    Attributes:
        rung: the rung of the ladder that introduces it.
        neutral: the value that changes nothing, which is the field's default.
        choices: all values that it takes; for a count, those that it takes in addition to counts.
        count: whether it takes integers from 1 on.
        values: its values in words, with the rule between them and the model.
        sets: what it sets, in words.
        name: the field of ``Recipe``.
        searched: whether ``lab.fit`` tries its values.
        turned: whether the tuner has a control for it.
        label: its name next to the control.
        cost: what less of it, or more, costs; in a line at the control.
        tried: settings that the tests combine with those of other knobs, each with the knobs that it needs.
    """

    rung: str
    neutral: Any
    values: str
    sets: str
    name: str = ""
    choices: tuple[Any, ...] = ()
    count: bool = False
    searched: bool = False
    turned: bool = False
    label: str = ""
    cost: str = ""
    tried: tuple[dict[str, Any], ...] = ()

    def check(self, value: object) -> None:
        """Check a single value; rules between two knobs are in ``Recipe``.

        Raises:
            RecipeError: the knob does not take it; the message names the values that it takes.
        """
        # 1 == True, but a knob that says 1 where a yes or no is wanted means something else.
        if any(value is choice or (isinstance(choice, str) and value == choice) for choice in self.choices):
            return
        if self.count:
            check_counts({self.name: value}, RecipeError, or_none=None in self.choices)
            return
        allowed = " or ".join(repr(choice) for choice in self.choices)
        given = abbreviate(repr(value))
        raise RecipeError(f"{self.name}={given}: it takes {allowed}{instead_of(value)}")


YES_OR_NO: dict[str, Any] = {"choices": (True, False), "neutral": False, "values": "`true`, `false`"}
COUNT: dict[str, Any] = {"count": True, "neutral": 1, "searched": True}
COUNT_OR_NONE: dict[str, Any] = COUNT | {"choices": (None,), "neutral": None}
TILE = COUNT_OR_NONE | {"rung": "tiling", "values": "`none`, a number of tokens", "turned": True}
STREAMED_TILE = TILE | {"rung": "streamed", "turned": False}


def named(choices: tuple[Any, ...]) -> dict[str, Any]:
    """Return the fields of a knob that takes these choices, of which the first one changes nothing."""
    return {
        "choices": choices,
        "neutral": choices[0],
        "values": ", ".join("`none`" if choice is None else f"`{choice}`" for choice in choices),
    }


def knob(**row: Any) -> Any:
    """Return a field of ``Recipe`` with its row, and with the row's neutral value as its default."""
    return field(default=row["neutral"], metadata={"knob": Knob(**row)})
