"""Published figures, one row for each number, with the recipe of this lab that corresponds to it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal, TypeAlias

from lab.recipe.ladder import TILE
from lab.units import Ki

Value: TypeAlias = float | Literal["OOM"] | None
"""A number; "OOM" if it did not fit; None if it was not reported."""

NODE = 8
"""The GPUs of a node in the papers, and the largest Ulysses degree of their runs on several nodes."""


@dataclass(frozen=True)
class Published:
    """A published number.

    Attributes:
        what: What was measured: "throughput", "longest context", "model state", "step", ...
        value: The number, in ``unit``. Tokens are whole, and binary unless the paper counts in thousands.
        unit: The unit of the number.
        model: The model.
        ranks: The number of GPUs.
        method: The name of the method in the paper.
        tokens: The context; None if the context itself is the number.
        source: The paper and its table or figure.
        rung: The recipe of the ladder that corresponds to the method; None if this lab has none.
        knobs: The fields set on that recipe.
        differs: How the recipe differs from the method, or why there is none.
    """

    what: str
    value: Value
    unit: str
    model: str
    ranks: int
    method: str
    tokens: int | None
    source: str
    rung: str | None
    knobs: dict[str, Any]
    differs: str

    @property
    def number(self) -> float | None:
        """The value if it is a number, else None."""
        return None if isinstance(self.value, str) else self.value

    def ratio(self, ours: float | None) -> float | None:
        """Return ``ours`` divided by the published number; None if one of them is missing."""
        return ours / self.number if ours is not None and self.number else None


def rows(**properties: str | int) -> list[Published]:
    """Return the published numbers with these values of attributes, in the order of their tables.

    Numbers that were not reported are included.
    """
    return [row for row in _all() if all(getattr(row, name) == value for name, value in properties.items())]


@cache
def _all() -> tuple[Published, ...]:
    tables = json.loads(files("lab.bench").joinpath("paper_figures.json").read_text())
    return tuple(row for table in tables for row in _rows(table))


def _rows(table: dict[str, Any]) -> Iterator[Published]:
    """Yield the rows of a table, which has columns (what, unit, tokens), and for each method their values."""
    for method, values in table["values"].items():
        for (what, unit, at), value in zip(table["columns"], values, strict=True):
            rung, knobs, differs = _ours(what, method, table["ranks"])
            yield Published(
                what=what,
                value=_tokens(value, table) if unit == "tokens" else value,
                unit=unit,
                model=table["model"],
                ranks=table["ranks"],
                method=method,
                # "longest" stands for the context in the first column of this method.
                tokens=_tokens(values[0] if at == "longest" else at, table),
                source=table["source"],
                rung=rung,
                knobs=knobs,
                differs=differs,
            )


def _tokens(text: str | None, table: dict[str, Any]) -> int | None:
    """Return the tokens of a context such as "3.7M". ALST's configurations say what it counts: 1_100_000."""
    kilo = table.get("kilo", Ki)
    return None if text is None else round(float(text[:-1]) * {"K": kilo, "M": kilo**2}[text[-1]])


# ---- the recipes of this lab -------------------------------------------------------------------------------

_NO_OPTIMIZER_OFFLOAD = "published with optimizer offload, which this row does not use"

_EXCHANGE_NOT_STATED = "a sanity check: the guide does not state how keys and values travel; here in a ring"

_RUNGS = {
    "plain": "plain",
    "fsdp": "fsdp",
    "ulysses + checkpoint": "checkpoint",
    "ulysses + checkpoint + offload": "offload",
    "checkpointing and offload": "offload",
    "alst": "tiling",
    "usp": "tiling",
    "ring": "tiling",
    "upipe": "upipe",
}
"""The rung of each method. "ulysses" is missing, because it names two."""

_MISSING = {
    "native_pytorch": "not implemented here: torch's own ring, with all-gathers or all-to-alls",
    "fpdt": "not implemented here: FPDT, sequence chunks whose keys and values wait on the host",
}

_ALST_PARTS: dict[str, dict[str, Any]] = {
    "tiled loss": {"loss_tile": TILE},
    "ulysses": {"ulysses": NODE},
    "tiled mlp": {"mlp_tile": TILE},
    "offload": {"offload": "inputs"},
}
"""The knobs that a part of ALST's ablation sets on the rung "checkpoint". Tiles have the ladder's size."""


def _ours(what: str, method: str, ranks: int) -> tuple[str | None, dict[str, Any], str]:
    """Return ``rung``, ``knobs`` and ``differs`` of a method."""
    if method in _MISSING:
        return None, {}, _MISSING[method]
    if method == "baseline" or method.startswith("tiled loss"):
        knobs = {"ulysses": 1, "ring": 1}
        for part in method.split(" + ") if method != "baseline" else ():
            knobs |= _ALST_PARTS[part]
        return "checkpoint", knobs, _NO_OPTIMIZER_OFFLOAD
    if method == "trl":
        return "offload", {"ulysses": 1, "ring": ranks, "loss_tile": TILE}, _EXCHANGE_NOT_STATED
    if method == "ulysses":
        # In the figure of memory, "ulysses" is the technique alone; in the other tables it is all of ALST.
        rung = "tiling" if what in ("throughput", "longest context") else "ulysses"
    else:
        rung = _RUNGS[method]
    if method == "alst" and what == "longest context":
        return rung, {"ulysses": ranks, "norm_tile": None}, _NO_OPTIMIZER_OFFLOAD
    if method == "ring":
        return rung, {"ulysses": 1, "ring": ranks}, ""
    return rung, {"ulysses": NODE, "ring": ranks // NODE} if ranks > NODE else {}, ""
