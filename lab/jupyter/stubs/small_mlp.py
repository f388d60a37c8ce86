"""A small MLP whose gradients are compared, for the stubs that differentiate a module themselves."""

from __future__ import annotations

from collections.abc import Callable
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
    """

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        torch.manual_seed(5)
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
    """Check that a second backward adds to the gradients of the first.

    Raises:
        Wrong: The gradient of a parameter is another one.
    """
    once = deepcopy(mlp)
    once(x.detach()).sum().backward()
    for _ in range(2):
        run(x).sum().backward()
    for name, parameter in mlp.named_parameters():
        expected = once.get_parameter(name).grad
        if parameter.grad is None or expected is None or not torch.allclose(parameter.grad, 2 * expected):
            raise Wrong(f"after two backwards the gradient of {name} is not the sum of both")
