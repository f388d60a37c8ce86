"""Notebook 05: the backward of an MLP that runs in tiles."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from lab.jupyter.stubs.small_mlp import SmallMLP, check_in_a_row, check_sums, gradients
from lab.jupyter.stubs.stub import Stub, Wrong
from lab.memory.measurement import measure

TOKENS, TILE, HIDDEN, INNER = 62, 5, 6, 64
"""The tile does not divide the tokens, and the inner width is large, so that a tile's tensors can be seen."""


def check_output(tiled: Any) -> None:
    """The output is the MLP's."""
    mlp, x = _inputs()
    if not torch.allclose(tiled.apply(mlp, TILE, x), mlp(x), rtol=1e-9):
        raise Wrong("the output differs from mlp(x): forward was right as it was given")


def check_input_gradient(tiled: Any) -> None:
    """The gradient of x is that of the MLP, also in the last tile, which is shorter."""
    try:
        found, expected = _gradients(tiled)["x"], _gradients(None)["x"]
    except TypeError as error:
        if "NoneType" not in str(error):
            raise
        # torch.cat or copy_ of a gradient that does not exist.
        raise Wrong(
            "a tile of x has no gradient, because a slice of x is no leaf: run the MLP on "
            "part.detach().requires_grad_()"
        ) from None
    if found is None:
        raise Wrong("x has no gradient: backward must return it in the third place")
    if torch.allclose(found, 2 * expected, rtol=1e-9):
        raise Wrong("the gradient of x is twice the right one: run the MLP on part.detach().requires_grad_()")
    wrong = (~torch.isclose(found, expected, rtol=1e-9)).any(-1)[0].nonzero().flatten().tolist()
    if wrong:
        raise Wrong(f"the gradient of x is wrong for {len(wrong)} tokens, the first of which is {wrong[0]}")


def check_parameter_gradients(tiled: Any) -> None:
    """The gradients of the weights are the sums over all tiles."""
    found = _gradients(tiled)
    for name, expected in _gradients(None).items():
        got = found[name]
        if got is None:
            raise Wrong(f"{name} has no gradient: backward must send each tile of dy through the MLP")
        if not torch.allclose(got, expected, rtol=1e-9):
            ratio = float(got.norm() / expected.norm())
            raise Wrong(f"the gradient of {name} is wrong; its norm is {ratio:.3g} times the right one")


def check_added(tiled: Any) -> None:
    """A second backward adds to the gradients of the first, and dy stays as it was."""
    mlp, x = _inputs()
    check_sums(partial(tiled.apply, mlp, TILE), mlp, x)


def check_row(tiled: Any) -> None:
    """Three MLPs in a row have the right gradients."""
    check_in_a_row(lambda mlp: partial(tiled.apply, mlp, TILE), _inputs()[1], INNER)


def check_recomputed(tiled: Any) -> None:
    """Backward runs the MLP once for each tile."""
    mlp, x = _inputs()
    out = tiled.apply(mlp, TILE, x)
    mlp.forwards = 0
    out.backward(torch.ones_like(out))
    tiles = -(-TOKENS // TILE)
    if mlp.forwards != tiles:
        raise Wrong(f"backward ran the MLP {mlp.forwards} times; {TOKENS} tokens are {tiles} tiles of {TILE}")


def check_memory(tiled: Any) -> None:
    """The inner tensors exist for one tile at a time."""
    mlp, x = _inputs()
    whole = measure(mlp, x).device_peak
    tiles = measure(lambda x: tiled.apply(mlp, TILE, x), x).device_peak
    if tiles > 0.6 * whole:
        raise Wrong(
            f"the peak is {tiles:,} bytes, and {whole:,} without tiles: free the graph of a tile before the "
            "next one runs (its backward, not one backward for all)"
        )


def _inputs() -> tuple[SmallMLP, nn.Parameter]:
    mlp = SmallMLP(HIDDEN, INNER)
    return mlp, nn.Parameter(torch.randn(1, TOKENS, HIDDEN, dtype=torch.float64))


def _gradients(tiled: Any) -> dict[str, Any]:
    mlp, x = _inputs()
    return gradients(mlp if tiled is None else partial(tiled.apply, mlp, TILE), mlp, x)


STUB = Stub(
    "TiledMLP",
    (
        check_output,
        check_input_gradient,
        check_parameter_gradients,
        check_added,
        check_row,
        check_recomputed,
        check_memory,
    ),
)
