"""A step made as small as this machine, for Run: the tiny model, its ranks, and knobs in proportion."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lab.models import config_of
from lab.show.tuner.choices import choices, legal
from lab.show.tuner.state import TILES, State
from lab.show.tuner.text import LABELS, written
from lab.units import format_tokens

TOKENS = 2048
"""The longest context that Run trains with: some seconds on two cores."""

TILES_AT_MOST = 8
"""Of one rank's tokens: each is a pass through the modules, and a pass has its price."""


@dataclass(frozen=True)
class Shrunk:
    """The small state, and what was changed to come to it, a phrase each."""

    state: State
    changes: tuple[str, ...]


def shrunk(state: State, ranks: int) -> Shrunk:
    """The state that ``ranks`` ranks of this machine can train.

    Tiles keep their share of a rank's tokens and a stage its share of the heads, as far as that is legal.
    The numbers it makes are those of CPU ranks, without what CUDA takes.

    Raises:
        RecipeError: the state itself is illegal.
    """
    fields = state.recipe.to_json()
    small = replace(
        state.moved("model", "tiny"),
        ranks=ranks,
        tokens=min(state.tokens, TOKENS),
        workspace=False,
        by_hand={"checkpoint": fields["checkpoint"], "offload": fields["offload"]},
    )
    degree = fields["ulysses"] * fields["ring"]
    local, before = _local(small), max(1, state.tokens // degree)
    by_hand: dict[str, Any] = dict(small.by_hand)
    for name in TILES:
        tile = fields[name]
        by_hand[name] = tile and max(1, -(-local // TILES_AT_MOST), tile * local // before)
    by_hand["head_chunk"] = _chunk(state, small, fields["head_chunk"])
    small = replace(small, by_hand=by_hand)
    return Shrunk(small, tuple(_changes(state, small)))


def _local(state: State) -> int:
    degree: int = state.base["ulysses"] * state.base["ring"]
    return max(1, state.tokens // degree)


def _chunk(state: State, small: State, chunk: int | None) -> int | None:
    if chunk is None:
        return None
    heads = config_of("tiny").num_attention_heads
    wanted = chunk * heads / state.config.num_attention_heads
    works = [n for n in choices(small, "head_chunk") if n and legal(small.moved("head_chunk", n))]
    return min(works, key=lambda n: abs(n - wanted), default=None)


def _changes(state: State, small: State) -> list[str]:
    before, after = state.fields, small.fields
    found = [f"model {state.model} → {small.model}"] if state.model != small.model else []
    if state.ranks != small.ranks:
        found.append(f"ranks {state.ranks} → {small.ranks}")
    if state.tokens != small.tokens:
        found.append(f"context {format_tokens(state.tokens)} → {format_tokens(small.tokens)}")
    for name in before:
        if before[name] != after[name]:
            label = LABELS.get(name, name)
            found.append(f"{label} {written(name, before[name])} → {written(name, after[name])}")
    return found
