"""Sums over tiles of the gradients of parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lab.techniques.precision import accumulation_dtype


class GradientSums:
    """The sums over tiles of the gradients of parameters, in the wider of fp32 and the parameter's dtype.

    A parameter in fp32 or wider has its sum in ``grad``, to which autograd adds the gradient from a tile as
    soon as it is computed. So from the second tile on, one parameter's gradient from a tile exists at a time,
    next to the sums. The gradients of a parameter in a narrower dtype are added to a wide sum at the end of
    each tile.

    Args:
        parameters: Leaves of autograd that nothing else differentiates, such as the aliases that
            ``parameter_aliases`` makes.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = list(parameters)
        self._wide: list[Tensor | None] = [None] * len(self._parameters)

    def differentiate(
        self, outputs: Sequence[Tensor], output_grads: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return the gradients of ``inputs`` from a tile, and add those of the parameters to the sums.

        Nothing is added for a parameter that the tile did not use, such as that of a disabled adapter.

        Args:
            outputs: The outputs of the tile.
            output_grads: Their gradients.
            inputs: Leaves of autograd on which the outputs depend.
        """
        torch.autograd.backward(outputs, output_grads, inputs=[*inputs, *self._parameters])
        self._widen()
        gradients = [tensor.grad for tensor in inputs]
        for tensor in inputs:
            tensor.grad = None
        return [gradient for gradient in gradients if gradient is not None]

    def _widen(self) -> None:
        for i, parameter in enumerate(self._parameters):
            dtype = accumulation_dtype(parameter.dtype)
            if parameter.grad is None or parameter.dtype == dtype:
                continue
            wide = self._wide[i]
            if wide is None:
                wide = self._wide[i] = torch.zeros_like(parameter, dtype=dtype)
            wide.add_(parameter.grad)
            parameter.grad = None

    def multiply(self, factor: Tensor) -> None:
        """Multiply the sums by a scalar, before they are rounded."""
        for parameter, wide in zip(self._parameters, self._wide, strict=True):
            total = parameter.grad if wide is None else wide
            if total is not None:
                total.mul_(factor)

    def round(self) -> list[Tensor | None]:
        """Return the sums in the dtypes of the parameters; None for a parameter that no tile used.

        Each wide sum is freed when it is rounded, so this is called once.
        """
        rounded: list[Tensor | None] = []
        for parameter in self._parameters:
            wide = self._wide.pop(0)
            rounded.append(parameter.grad if wide is None else wide.to(parameter.dtype))
            parameter.grad = None
        return rounded
