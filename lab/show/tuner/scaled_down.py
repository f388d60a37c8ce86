"""Scaling a step down to this machine, for Run: the tiny model, few ranks, and knobs in proportion."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lab.models import shape_of
from lab.show.tuner.choices import choices, is_legal
from lab.show.tuner.state import TILES, State
from lab.show.tuner.text import LABELS, value_text

TOKENS = 2048
"""The longest context that Run trains with; it takes a few seconds on two cores."""

UNSCALED = ("checkpoint", "offload", "mlp_tile", "stream", "segment")
"""The knobs that make a combination legal or not; the tiles among them are scaled afterwards."""

MOST_TILES = 8
"""The most tiles of a rank's tokens. Each tile is a pass through the modules, which has a fixed cost."""


@dataclass(frozen=True)
class ScaledState:
    """A small state, and a text for each value that differs from the original state."""

    state: State
    changes: tuple[str, ...]


def scale_down(state: State, ranks: int) -> ScaledState:
    """Return a state that ``ranks`` ranks of this machine can train.

    A tile keeps its share of a rank's tokens, and a head chunk its share of the heads, if that is legal. The
    plan of the result is that of CPU ranks, without the workspace of CUDA.

    Raises:
        RecipeError: The state is illegal.
    """
    fields = state.recipe.to_json()
    small = replace(
        state.with_value("model", "tiny"),
        ranks=ranks,
        tokens=min(state.tokens, TOKENS),
        workspace=False,
        by_hand={name: fields[name] for name in UNSCALED},
    )
    degree = fields["ulysses"] * fields["ring"]
    local = max(1, small.tokens // (small.base["ulysses"] * small.base["ring"]))
    before = max(1, state.tokens // degree)
    by_hand: dict[str, Any] = dict(small.by_hand)
    for name in (*TILES, "stream"):
        tile = fields[name]
        by_hand[name] = tile and max(1, -(-local // MOST_TILES), tile * local // before)
    by_hand["head_chunk"] = _head_chunk(state, small, fields["head_chunk"])
    small = replace(small, by_hand=by_hand)
    return ScaledState(small, tuple(_changes(state, small)))


def _head_chunk(state: State, small: State, chunk: int | None) -> int | None:
    if chunk is None:
        return None
    heads = shape_of("tiny").H
    proportional = chunk * heads / state.shape.H
    options = choices(small, "head_chunk")
    works = [n for n in options if n and is_legal(small.with_value("head_chunk", n))]
    return min(works, key=lambda n: abs(n - proportional), default=None)


def _changes(state: State, small: State) -> list[str]:
    before, after = (
        {"model": one.model, "ranks": one.ranks, "tokens": one.tokens, **one.fields} for one in (state, small)
    )
    return [
        f"{LABELS.get(name, name)} {value_text(name, value)} → {value_text(name, after[name])}"
        for name, value in before.items()
        if value != after[name]
    ]
