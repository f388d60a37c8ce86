"""Notebook 05: the backward of an MLP that runs in tiles."""

from __future__ import annotations

from typing import Any

import torch

from lab.jupyter.stubs.small_mlp import Task
from lab.jupyter.stubs.stub import Stub, Wrong, checks_in
from lab.memory.measurement import measure

TOKENS, TILE, HIDDEN, INNER = 62, 5, 6, 64
"""The tile does not divide the tokens, and the inner width is large, so that a tile's tensors can be seen."""

TASK = Task((1, TOKENS, HIDDEN), INNER, (TILE,), "backward must send each tile of dy through the MLP")


def check_output(tiled: Any) -> None:
    """The output is the MLP's."""
    mlp, x = TASK.inputs()
    if not torch.allclose(tiled.apply(mlp, TILE, x), mlp(x), rtol=1e-9):
        raise Wrong("the output differs from mlp(x): forward was right as it was given")


def check_input_gradient(tiled: Any) -> None:
    """The gradient of x is that of the MLP, also in the last tile, which is shorter."""
    try:
        found, expected = TASK.gradients(tiled)["x"], TASK.gradients()["x"]
    except TypeError as error:
        if "NoneType" not in str(error):
            raise
        # torch.cat or copy_ of a gradient that does not exist.
        raise Wrong(
            "a tile of x has no gradient, because a slice of x is no leaf: run the MLP on "
            "part.detach().requires_grad_()"
        ) from None
    assert expected is not None
    if found is None:
        raise Wrong("x has no gradient: backward must return it in the third place")
    if torch.allclose(found, 2 * expected, rtol=1e-9):
        raise Wrong("the gradient of x is twice the right one: run the MLP on part.detach().requires_grad_()")
    wrong = (~torch.isclose(found, expected, rtol=1e-9)).any(-1)[0].nonzero().flatten().tolist()
    if wrong:
        raise Wrong(f"the gradient of x is wrong for {len(wrong)} tokens, the first of which is {wrong[0]}")


def check_parameter_gradients(tiled: Any) -> None:
    """The gradients of the weights are the sums over all tiles."""
    TASK.check_gradients(tiled)


check_added, check_row = TASK.check_added, TASK.check_row


def check_recomputed(tiled: Any) -> None:
    """Backward runs the MLP once for each tile."""
    mlp, x = TASK.inputs()
    out = tiled.apply(mlp, TILE, x)
    mlp.forwards = 0
    out.backward(torch.ones_like(out))
    tiles = -(-TOKENS // TILE)
    if mlp.forwards != tiles:
        raise Wrong(f"backward ran the MLP {mlp.forwards} times; {TOKENS} tokens are {tiles} tiles of {TILE}")


def check_memory(tiled: Any) -> None:
    """The inner tensors exist for one tile at a time."""
    mlp, x = TASK.inputs()
    whole = measure(mlp, x).device_peak
    tiles = measure(lambda x: tiled.apply(mlp, TILE, x), x).device_peak
    if tiles > 0.6 * whole:
        raise Wrong(
            f"the peak is {tiles:,} bytes, and {whole:,} without tiles: free the graph of a tile before the "
            "next one runs (its backward, not one backward for all)"
        )


STUB = Stub("TiledMLP", checks_in(globals()))
