"""The ladder: named recipes for a model on so many ranks, each adding one technique to the one before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from lab import models
from lab.errors import RecipeError
from lab.recipe.recipe import Recipe, check_fields
from lab.shape import Shape
from lab.techniques.ulysses_degrees import degrees
from lab.techniques.unsupported import instead_of
from lab.units import Ki, check_counts

TILE = 16 * Ki
"""Tokens of a tile at long context: large enough to keep a GPU busy, and small compared with a million."""

ATTENTION_TILE = 256 * Ki
"""Tokens of a tile in attention's backward: a kernel keeps its rate with so many queries and keys."""

RUNGS = ("plain", "fsdp", "ulysses", "checkpoint", "offload", "tiling", "upipe", "streamed")

OTHER_RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "fast": ("upipe", {"offload": "attention"}),
    "long": ("streamed", {"segment": 4, "optimizer": "host"}),
}
"""The recipes that are no rungs: each has a rung, and the knobs that are added to it.

``fast`` holds more on the host and a little more on the device, and takes less time; so it is no step down in
memory. ``long`` is ``streamed`` with the optimizer on the host, where it holds fewer inputs, for more work.
"""

RECIPE_NAMES = (*RUNGS, *OTHER_RECIPES)
"""Every recipe that has a name."""


def ladder(
    model: models.ModelLike, ranks: int, tokens: int, *, shape: Shape | None = None, **knobs: Any
) -> dict[str, Recipe]:
    """The recipes ``RUNGS`` by name, for ``tokens`` tokens of context on ``ranks`` ranks.

    ulysses and ring are those of ``sequence_degrees``, head_chunk the Ulysses degree, each tile the smaller
    of 16384 and a quarter of the local tokens s, attention_tile that of 256K and a quarter of the tokens. All
    but ``tiny`` compute in bf16 from fp32 parameters: 16 bytes of state per parameter on every rung.
    ``knobs`` set by hand hold on every rung that has the technique, and what derives from them follows; on
    the rung ``streamed``, MLPs have no tile of their own. ``shape`` is the model's, for a caller that has it.

    Raises:
        LabError: ranks or tokens that are no count.
        RecipeError: a knob no recipe has, a degree that is no count, or knobs that a rung forbids.
    """
    return dict(_ladder(shape or models.shape_of(model), _compute_dtype(model), ranks, tokens, knobs))


def _ladder(
    shape: Shape, compute_dtype: str | None, ranks: int, tokens: int, knobs: dict[str, Any]
) -> Iterator[tuple[str, Recipe]]:
    """Rung by rung: what a rung further up would refuse is no matter to those below it."""
    check_counts({"ranks": ranks, "tokens": tokens})
    check_fields(knobs)
    # What derives from the degrees is worked out before a recipe that checks them is made.
    check_counts({name: knobs[name] for name in ("ulysses", "ring") if name in knobs}, RecipeError)
    ulysses, ring = sequence_degrees(shape, ranks, knobs)
    tile = max(1, min(TILE, tokens // (ulysses * ring) // 4))
    loss_tile = None if knobs.get("loss_kernel") == "liger" else tile
    steps: dict[str, dict[str, Any]] = {
        "plain": {"compute_dtype": compute_dtype, "kernel": "auto", "loss_kernel": "lab"},
        "fsdp": {"fsdp": True, "replicas": 1, "optimizer": "device"},
        "ulysses": {"ulysses": ulysses, "ring": ring, "ring_exchange": "send", "ulysses_backend": "lab"},
        "checkpoint": {"checkpoint": True},
        "offload": {"offload": "inputs"},
        "tiling": {"mlp_tile": tile, "norm_tile": tile, "loss_tile": loss_tile, "compile": "none"},
        "upipe": {"head_chunk": ulysses, "overlap": False},
        "streamed": {"stream": tile, "segment": 1, "attention_tile": attention_tile(tokens, ring)},
    }
    # The tile of a streamed layer is also that of its MLP.
    whole_layer: dict[str, Any] = (
        {} if knobs.get("stream", tile) is None else {"mlp_tile": None, "compile": "none"}
    )
    recipe = Recipe()
    for name, added in steps.items():
        set_here = {**added, **{k: v for k, v in knobs.items() if k in added}}
        recipe = replace(recipe, **set_here, **(whole_layer if name == "streamed" else {}))
        yield name, recipe


def attention_tile(tokens: int, ring: int) -> int | None:
    """Return the tile of attention's backward in the recipes with streamed layers.

    A ring has none: it sums the gradients of its steps in fp32, and the sums of tiles would be additional
    bytes.
    """
    return max(1, min(ATTENTION_TILE, tokens // 4)) if ring == 1 else None


def sequence_degrees(shape: Shape, ranks: int, knobs: Mapping[str, Any]) -> tuple[int, int]:
    """Return the Ulysses degree and the ring degree of the ladder.

    ulysses is the largest degree that divides the ranks and the key/value heads, so that no key or value is
    sent to two ranks. ring takes the remaining ranks, so that all ranks share one sequence. A degree in
    ``knobs`` holds, and the other follows from it. DeepSpeed's exchange has no ring, and a model with sliding
    windows takes none that sends: with them, ulysses is the largest degree that divides the ranks and that
    the heads allow.

    For the ladder's recipes with UPipe a smaller ulysses can need less memory, because head_chunk follows it.
    ``lab.fit`` and ``lab.max_context`` compare the pairs.
    """
    sends = knobs.get("ring_exchange", "send") == "send"
    no_ring = knobs.get("ulysses_backend") == "deepspeed" or (shape.has_windows and sends)
    ring = knobs.get("ring", 1)
    legal = [c for c in degrees(shape.H, shape.K) if ranks % (c * ring) == 0]
    shared = [c for c in legal if no_ring or shape.K % c == 0]
    ulysses = knobs.get("ulysses", max(shared, default=1))
    if "ring" not in knobs and not no_ring:
        ring = ranks // ulysses if ranks % ulysses == 0 else 1
    return ulysses, ring


def check_name(name: str) -> None:
    """Refuse what is no recipe's name.

    Raises:
        RecipeError: the names that are.
    """
    if name not in RECIPE_NAMES:
        raise RecipeError(
            f"unknown recipe {name!r}: give one of {', '.join(RECIPE_NAMES)}, or a Recipe{instead_of(name)}"
        )


def recipe_by_name(
    name: str,
    model: models.ModelLike,
    ranks: int,
    tokens: int,
    *,
    shape: Shape | None = None,
    **knobs: Any,
) -> Recipe:
    """The recipe of ``RECIPE_NAMES``, unchecked, with ``knobs`` by hand where it has the technique.

    Raises:
        RecipeError: an unknown name or knob.
    """
    check_name(name)
    rungs = _ladder(shape or models.shape_of(model), _compute_dtype(model), ranks, tokens, knobs)
    rung, added = OTHER_RECIPES.get(name, (name, {}))
    recipe = next(recipe for one, recipe in rungs if one == rung)
    return replace(recipe, **{knob: knobs.get(knob, value) for knob, value in added.items()})


def _compute_dtype(model: models.ModelLike) -> str | None:
    return None if model == "tiny" else "bfloat16"


def resolve_recipe(
    recipe: str | Recipe,
    model: models.ModelLike,
    ranks: int,
    tokens: int,
    *,
    shape: Shape | None = None,
    **knobs: Any,
) -> Recipe:
    """The recipe itself, or that of ``RECIPE_NAMES``, with ``knobs`` set by hand; checked against the model.

    A knob set by hand is applied last, on whatever rung; a knob that derives from it follows. ``shape`` is
    the model's, for a caller that has it: where the model is a callable, looking it up makes a model.

    Raises:
        RecipeError: an unknown name or knob, or a recipe that the model or the ranks forbid.
    """
    shape = shape or models.shape_of(model)
    if isinstance(recipe, str):
        recipe = recipe_by_name(recipe, model, ranks, tokens, shape=shape, **knobs)
    if not isinstance(recipe, Recipe):
        raise RecipeError(f"recipe={recipe!r}: give one of {', '.join(RECIPE_NAMES)}, or a Recipe")
    check_fields(knobs)
    recipe = replace(recipe, **knobs)
    recipe.check(shape, ranks)
    return recipe
