"""A small MLP whose gradients are compared, for the stubs that differentiate a module themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy

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


def gradients(run: Run, mlp: SmallMLP, x: nn.Parameter) -> dict[str, Tensor | None]:
    """Return the gradients of x and of the parameters, after one forward and one backward."""
    out = run(x)
    out.backward(torch.linspace(1, 2, out.numel(), dtype=out.dtype).view_as(out))
    return {"x": x.grad, **{name: p.grad for name, p in mlp.named_parameters()}}


def check_sums(run: Run, mlp: SmallMLP, x: nn.Parameter) -> None:
    """Check that a second backward adds to the gradients of the first, and that dy does not change.

    Raises:
        Wrong: The gradient of a parameter is another one, or dy is.
    """
    once = deepcopy(mlp)
    once(x.detach()).sum().backward()
    for _ in range(2):
        out = run(x)
        dy = torch.ones_like(out)
        out.backward(dy)
        if not bool((dy == 1).all()):
            raise Wrong("backward has changed dy, which belongs to its caller")
    for name, parameter in mlp.named_parameters():
        expected = once.get_parameter(name).grad
        if parameter.grad is None or expected is None or not torch.allclose(parameter.grad, 2 * expected):
            raise Wrong(f"after two backwards the gradient of {name} is not the sum of both")


def check_in_a_row(run_of: Callable[[SmallMLP], Run], x: nn.Parameter, inner: int) -> None:
    """Check the gradients of three modules of which each has the output of the one before as its input.

    So the input of the later ones is no leaf, and all forwards have run before the first backward.

    Args:
        run_of: Returns what runs a module by the reader's code.
        x: The input of the first module.
        inner: The inner width of each module.

    Raises:
        Wrong: A gradient is missing or another one.
    """
    row = [SmallMLP(x.shape[-1], inner, seed) for seed in range(3)]
    right, right_x = deepcopy(row), deepcopy(x)
    _backward(right, right_x)
    try:
        _backward([run_of(mlp) for mlp in row], x)
    except RuntimeError as error:
        if "second time" not in str(error):
            raise
        raise Wrong(
            "backward of a layer went on into the layer before: its second forward must run on a detached x"
        ) from None
    if x.grad is None:
        raise Wrong(
            "nothing reached the first layer: backward must return the gradient of x in the place of x"
        )
    for number, (found, expected) in enumerate(zip(row, right, strict=True)):
        for name, parameter in found.named_parameters():
            want = expected.get_parameter(name).grad
            if parameter.grad is None or want is None or not torch.allclose(parameter.grad, want, rtol=1e-9):
                raise Wrong(
                    f"the gradient of {name} of layer {number} of 3 is wrong: what forward keeps belongs on "
                    "ctx, since several forwards run before the first backward"
                )
    if right_x.grad is None or not torch.allclose(x.grad, right_x.grad, rtol=1e-9):
        raise Wrong("the gradient of x of the first layer is wrong")


def _backward(row: Iterable[Run], x: Tensor) -> None:
    for run in row:
        x = run(x)
    x.sum().backward()
