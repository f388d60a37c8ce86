"""Published figures, one row a number, and what in this lab stands for each; only to compare with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal, TypeAlias

from lab.recipe.ladder import TILE
from lab.units import Ki, parse_tokens

Value: TypeAlias = float | Literal["OOM"] | None
"""A number; "OOM", it did not fit; None, it was not reported."""

NODE = 8
"""GPUs of a published node, and the largest Ulysses degree of the runs that span two."""


@dataclass(frozen=True)
class Published:
    """One published number.

    Attributes:
        what: "throughput", "longest context", "model state", "step", ...
        value: in ``unit``; see ``Value``. Tokens are whole and binary, as the papers count them.
        method: the name it was published under; ``tokens`` the context it was taken at, None where the
            context is itself the number.
        rung, knobs: a recipe of the ladder, and what is set on it by hand; None where this lab has none.
        differs: what keeps ours from being the same; where ``rung`` is None, why there is none.
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
        """The value, where it is a number."""
        return None if isinstance(self.value, str) else self.value

    def ratio(self, ours: float | None) -> float | None:
        """Ours as a share of the published number; None where one of them is none."""
        return ours / self.number if ours is not None and self.number else None


def rows(
    *, what: str | None = None, model: str | None = None, ranks: int | None = None, method: str | None = None
) -> list[Published]:
    """The published numbers, those not reported among them, in the order of their tables; all, or some."""
    wanted = {"what": what, "model": model, "ranks": ranks, "method": method}
    return [
        row
        for row in _all()
        if all(value is None or getattr(row, name) == value for name, value in wanted.items())
    ]


@cache
def _all() -> tuple[Published, ...]:
    tables = json.loads(files("lab.bench").joinpath("published.json").read_text())
    return tuple(row for table in tables for row in _rows(table))


def _rows(table: dict[str, Any]) -> Iterator[Published]:
    """A table has columns, each (what, unit, tokens), and a list of values a method, one a column."""
    for method, values in table["values"].items():
        for (what, unit, at), value in zip(table["columns"], values, strict=True):
            rung, knobs, differs = _ours(what, method, table["ranks"])
            yield Published(
                what=what,
                value=_tokens(value) if unit == "tokens" else value,
                unit=unit,
                model=table["model"],
                ranks=table["ranks"],
                method=method,
                # "longest": taken at the context that this method's first column tells.
                tokens=_tokens(values[0] if at == "longest" else at),
                source=table["source"],
                rung=rung,
                knobs=knobs,
                differs=differs,
            )


def _tokens(text: str | None) -> int | None:
    """The contexts of the papers; where a fraction of 1M is none of tokens ("3.7M"), whole Ki below it."""
    if text is None or "." not in text:
        return None if text is None else parse_tokens(text)
    return int(float(text.removesuffix("M")) * Ki) * Ki


# ---- what stands for it here -------------------------------------------------------------------------------

_NO_OPTIMIZER_OFFLOAD = "published with optimizer offload, which this lab does not have"

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
"""Rungs by published name; "ulysses" is not among them, for it names two."""

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
"""What a part of ALST's ablation sets on the rung "checkpoint"; tiles are of the ladder's size."""


def _ours(what: str, method: str, ranks: int) -> tuple[str | None, dict[str, Any], str]:
    """Rung, knobs, and what differs."""
    if method in _MISSING:
        return None, {}, _MISSING[method]
    if method == "baseline" or method.startswith("tiled loss"):
        knobs = {"ulysses": 1}
        for part in method.split(" + ") if method != "baseline" else ():
            knobs |= _ALST_PARTS[part]
        return "checkpoint", knobs, _NO_OPTIMIZER_OFFLOAD
    if method == "ulysses":
        # In the figure of the memory it is the technique; everywhere else the whole stack that ALST is.
        rung = "tiling" if what in ("throughput", "longest context") else "ulysses"
    else:
        rung = _RUNGS[method]
    if method == "alst" and what == "longest context":
        return rung, {"ulysses": ranks, "norm_tile": None}, _NO_OPTIMIZER_OFFLOAD
    if method == "ring":
        return rung, {"ulysses": 1, "ring": ranks}, ""
    return rung, {"ulysses": NODE, "ring": ranks // NODE} if ranks > NODE else {}, ""
