"""Sums over tiles of the gradients of parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lab.techniques.precision import accumulation_dtype


class GradientSums:
    """The sums over tiles of the gradients of parameters, in the wider of fp32 and the parameter's dtype.

    Autograd itself sums the gradients of a parameter of a wide dtype, in place and as soon as it has the
    gradient of one parameter. So of each tile after the first, one parameter's gradient exists at a time, and
    no other memory is needed than that of the gradients. The gradients of a narrower dtype are added to wide
    sums at the end of each tile.

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
        """Differentiate a tile: return the gradients of ``inputs``, and add those of the parameters.

        A parameter that the tile did not use, such as that of a disabled adapter, gets nothing.

        Args:
            outputs: The outputs of the tile.
            output_grads: Their gradients.
            inputs: Leaves, on which the outputs depend.
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
        """Return the gradients in the dtypes of the parameters, and drop the sums one by one.

        That of a parameter that no tile used is None.
        """
        rounded: list[Tensor | None] = []
        for parameter in self._parameters:
            wide = self._wide.pop(0)
            rounded.append(parameter.grad if wide is None else wide.to(parameter.dtype))
            parameter.grad = None
        return rounded
