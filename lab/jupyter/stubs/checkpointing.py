"""Notebook 03: activation checkpointing as an autograd function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lab.jupyter.stubs.stub import Stub, Wrong
from lab.memory.meter import Meter

TOKENS, HIDDEN, INNER = 6, 5, 11


class Layer(nn.Module):
    """A small layer that keeps much more than its input, and counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)
        self.forwards = 0
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """[s, E] -> [s, E]."""
        self.forwards += 1
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


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
    """A second backward adds to the gradients of the first."""
    layer, x = _inputs()
    for _ in range(2):
        out = checkpointed.apply(layer, x)
        out.backward(torch.ones_like(out))
    once, y = _inputs()
    once(y).sum().backward()
    for name, parameter in layer.named_parameters():
        expected = once.get_parameter(name).grad
        if parameter.grad is None or expected is None or not torch.allclose(parameter.grad, 2 * expected):
            raise Wrong(f"after two backwards the gradient of {name} is not the sum of both")


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


def _inputs() -> tuple[Layer, nn.Parameter]:
    layer = Layer()
    return layer, nn.Parameter(torch.randn(TOKENS, HIDDEN, dtype=torch.float64))


def _gradients(checkpointed: Any) -> dict[str, Tensor | None]:
    layer, x = _inputs()
    out = layer(x) if checkpointed is None else checkpointed.apply(layer, x)
    out.backward(torch.linspace(1, 2, out.numel(), dtype=out.dtype).view_as(out))
    return {"x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}


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
        check_kept,
        check_recomputed,
    ),
)
