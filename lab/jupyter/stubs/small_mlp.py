"""A small MLP whose gradients are compared, for the stubs that differentiate a module themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lab.jupyter.stubs.stub import Wrong

Run = Callable[[Tensor], Tensor]
"""What maps x to the module's output, by the module itself or by a reader's code."""


class SmallMLP(nn.Module):
    """An MLP in fp64 that keeps much more than its input, and counts its forwards.

    Args:
        hidden: E, the size of its input and of its output.
        inner: I, its inner width.
        seed: The seed of its weights.
    """

    def __init__(self, hidden: int, inner: int, seed: int = 5) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(hidden, inner), nn.Linear(inner, hidden)
        self.forwards = 0
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """[..., E] -> [..., E]."""
        self.forwards += 1
        out: Tensor = self.down(torch.nn.functional.silu(self.up(x)))
        return out


@dataclass(frozen=True)
class Task:
    """What a reader's autograd function is checked with: the sizes of an MLP, and of its input.

    The function's ``apply`` takes a module, the settings, and x.

    Attributes:
        shape: The shape of x, [..., E].
        inner: I, the inner width of the MLP.
        settings: What ``apply`` takes between the module and x.
        hint: What backward must do so that each parameter has a gradient.
    """

    shape: tuple[int, ...]
    inner: int
    settings: tuple[int, ...]
    hint: str

    def inputs(self) -> tuple[SmallMLP, nn.Parameter]:
        """Return an MLP and its input, the same at each call."""
        mlp = SmallMLP(self.shape[-1], self.inner)
        return mlp, nn.Parameter(torch.randn(self.shape, dtype=torch.float64))

    def run(self, function: Any, mlp: SmallMLP) -> Run:
        """Return what runs an MLP by the reader's function."""
        return partial(function.apply, mlp, *self.settings)

    def gradients(self, function: Any = None) -> dict[str, Tensor | None]:
        """Return the gradients of x and of the parameters; without a function, those of the MLP itself."""
        mlp, x = self.inputs()
        out = (mlp if function is None else self.run(function, mlp))(x)
        out.backward(torch.linspace(1, 2, out.numel(), dtype=out.dtype).view_as(out))
        return {"x": x.grad, **{name: p.grad for name, p in mlp.named_parameters()}}

    def check_gradients(self, function: Any, *names: str) -> None:
        """Check the gradients of these names; without names, of x and of all parameters.

        Raises:
            Wrong: A gradient is missing or another one.
        """
        found, right = self.gradients(function), self.gradients()
        for name in names or right:
            got, expected = found[name], right[name]
            assert expected is not None
            if got is None:
                raise Wrong(f"{name} has no gradient: {self.hint}")
            if not torch.allclose(got, expected, rtol=1e-9, atol=0):
                ratio = float(got.norm() / expected.norm())
                raise Wrong(f"the gradient of {name} is wrong; its norm is {ratio:.3g} times the right one")

    def check_added(self, function: Any) -> None:
        """A second backward adds to the gradients of the first, and dy stays as it was.

        Raises:
            Wrong: The gradient of a parameter is another one, or dy is.
        """
        mlp, x = self.inputs()
        once, run = deepcopy(mlp), self.run(function, mlp)
        once(x.detach()).sum().backward()
        for _ in range(2):
            out = run(x)
            dy = torch.ones_like(out)
            out.backward(dy)
            if not bool((dy == 1).all()):
                raise Wrong("backward has changed dy, which belongs to its caller")
        for name in _differing(mlp, once, 2):
            raise Wrong(f"after two backwards the gradient of {name} is not the sum of both")

    def check_row(self, function: Any) -> None:
        """Three modules in a row have the right gradients.

        Each has the output of the one before as its input. So the input of the later ones is no leaf, and all
        forwards have run before the first backward.

        Raises:
            Wrong: A gradient is missing or another one.
        """
        row = [SmallMLP(self.shape[-1], self.inner, seed) for seed in range(3)]
        x = self.inputs()[1]
        right, right_x = deepcopy(row), deepcopy(x)
        _backward(right, right_x)
        try:
            _backward([self.run(function, mlp) for mlp in row], x)
        except RuntimeError as error:
            if "second time" not in str(error):
                raise
            raise Wrong(
                "backward of a layer went on into the layer before: its second forward must run on a "
                "detached x"
            ) from None
        if x.grad is None:
            raise Wrong(
                "nothing reached the first layer: backward must return the gradient of x in the place of x"
            )
        for number, pair in enumerate(zip(row, right, strict=True)):
            for name in _differing(*pair, 1):
                raise Wrong(
                    f"the gradient of {name} of layer {number} of 3 is wrong: what forward keeps belongs on "
                    "ctx, since several forwards run before the first backward"
                )
        if right_x.grad is None or not torch.allclose(x.grad, right_x.grad, rtol=1e-9):
            raise Wrong("the gradient of x of the first layer is wrong")


def _differing(found: nn.Module, right: nn.Module, times: int) -> Iterable[str]:
    """Yield the names of the parameters whose gradients are not so many times the right ones."""
    for name, parameter in found.named_parameters():
        want = right.get_parameter(name).grad
        assert want is not None
        if parameter.grad is None or not torch.allclose(parameter.grad, times * want, rtol=1e-9):
            yield name


def _backward(row: Iterable[Run], x: Tensor) -> None:
    for run in row:
        x = run(x)
    x.sum().backward()
