"""Notebook 03: activation checkpointing as an autograd function."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lab.jupyter.stubs.small_mlp import SmallMLP, check_in_a_row, check_sums, gradients
from lab.jupyter.stubs.stub import Stub, Wrong
from lab.memory.meter import Meter

TOKENS, HIDDEN, INNER = 6, 5, 11


def check_output(checkpointed: Any) -> None:
    """The output is the layer's."""
    layer, x = _inputs()
    if not torch.equal(checkpointed.apply(layer, x), layer(x)):
        raise Wrong("the output differs from layer(x)")


def check_input_gradient(checkpointed: Any) -> None:
    """The gradient of x is that of the layer."""
    expected, found = _gradients(None)["x"], _gradients(checkpointed)["x"]
    _compare("x", found, expected)


def check_parameter_gradients(checkpointed: Any) -> None:
    """The gradients of the layer's parameters are those of the layer, once each."""
    found = _gradients(checkpointed)
    for name, expected in _gradients(None).items():
        _compare(name, found[name], expected)


def check_added(checkpointed: Any) -> None:
    """A second backward adds to the gradients of the first, and dy stays as it was."""
    layer, x = _inputs()
    check_sums(partial(checkpointed.apply, layer), layer, x)


def check_row(checkpointed: Any) -> None:
    """Three layers in a row have the right gradients."""
    check_in_a_row(lambda layer: partial(checkpointed.apply, layer), _inputs()[1], INNER)


def check_kept(checkpointed: Any) -> None:
    """Between forward and backward only x is kept."""
    layer, x = _inputs()
    meter = Meter()
    with meter.measure(nn.ParameterList([*layer.parameters(), x])), meter.phase("forward"):
        out = checkpointed.apply(layer, x)
    kept = meter.timeline().end_of("forward").device - sum(p.nbytes for p in (*layer.parameters(), x))
    if kept != out.nbytes:
        raise Wrong(
            f"{kept - out.nbytes} bytes are kept in addition to x and the output: save x, and nothing else"
        )


def check_recomputed(checkpointed: Any) -> None:
    """The layer runs once in forward and once in backward."""
    layer, x = _inputs()
    out = checkpointed.apply(layer, x)
    forward, layer.forwards = layer.forwards, 0
    out.backward(torch.ones_like(out))
    if (forward, layer.forwards) != (1, 1):
        raise Wrong(f"the layer ran {forward} times in forward and {layer.forwards} times in backward")


def _inputs() -> tuple[SmallMLP, nn.Parameter]:
    layer = SmallMLP(HIDDEN, INNER)
    return layer, nn.Parameter(torch.randn(TOKENS, HIDDEN, dtype=torch.float64))


def _gradients(checkpointed: Any) -> dict[str, Tensor | None]:
    layer, x = _inputs()
    return gradients(layer if checkpointed is None else partial(checkpointed.apply, layer), layer, x)


def _compare(name: str, found: Tensor | None, expected: Tensor | None) -> None:
    assert expected is not None
    if found is None:
        raise Wrong(f"{name} has no gradient: backward must send dy through the graph of the second forward")
    if not torch.allclose(found, expected, rtol=1e-9, atol=0):
        ratio = float(found.norm() / expected.norm())
        raise Wrong(f"the gradient of {name} is wrong; its norm is {ratio:.3g} times the right one")


STUB = Stub(
    "Checkpointed",
    (
        check_output,
        check_input_gradient,
        check_parameter_gradients,
        check_added,
        check_row,
        check_kept,
        check_recomputed,
    ),
)
