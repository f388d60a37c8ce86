"""The passes of a streamed layer: its stages and its tail forward, and its backward.

Letters: b rows, s tokens of one rank, E hidden size, H query heads, D head_dim. dx, dy, dq, dk and dv are the
gradients of the layer's input x and output y, and of q, k and v.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lab.decoder import Layer
from lab.techniques.host_tiles import HostTiles
from lab.techniques.host_transfer import HostTensor
from lab.techniques.parameter_aliases import parameter_aliases
from lab.techniques.precision import accumulation_dtype
from lab.techniques.streaming.tensors import HostTensors, StreamedLayer
from lab.techniques.upipe.passes import BackwardStages, forward_stages
from lab.techniques.upipe.settings import Inputs, inputs_of

Tables = tuple[Tensor, Tensor]
"""The cosines and the sines of the positions of a layer's input, [b, s, D] or [1, s, D] each."""


@torch.no_grad()
def _inputs(layer: StreamedLayer, tables: Tables) -> Inputs[Tensor]:
    """Return the inputs of the stages; the output projection is a part of the tail."""
    return inputs_of(layer.parts, tables, "stream")


def run_stages(layer: StreamedLayer, x: Tensor | HostTiles, tables: Tables) -> HostTensors:
    """Compute the outputs of all heads and the LSEs, and send them to the host.

    Args:
        layer: The layer.
        x: Its input, [b, s, E], on the device or on the host.
        tables: Those of the positions of x.
    """
    tensors, to_host = HostTensors(layer, x), layer.copiers.to_host
    lses = forward_stages(layer, tensors, _inputs(layer, tables))
    tensors.lses = [HostTensor(to_host, lse) for lse in lses]
    to_host.wait_until_sent()
    return tensors


def run_tail(tensors: HostTensors, y: Tensor | HostTiles) -> None:
    """Compute a layer's output from its input and the outputs of its heads, into ``y`` [b, s, E]."""
    for start, x, heads in tensors.output_tiles():
        tile = tensors.layer.parts.tail(x, heads)
        if isinstance(y, HostTiles):
            y.write(start, tile)
        else:
            y.narrow(1, start, tile.shape[1]).copy_(tile)
    if isinstance(y, HostTiles):
        y.wait_until_written()


def layer_backward(
    tensors: HostTensors, tables: Tables, dy: Tensor, *, x_needed: bool
) -> list[Tensor | None]:
    """Run the backward of a layer.

    Args:
        tensors: The layer's input, the outputs of its heads and the LSEs, on the host.
        tables: Those of the positions of its input.
        dy: The gradient of the layer's output, [b, s, E]. It is overwritten with dx.
        x_needed: Whether dx is needed.

    Returns:
        The gradient of each trained parameter of the layer, in order; None where the layer did not use it.
        The sum over tiles is in the wider of fp32 and the parameter's dtype, and rounded once; that of the
        norm that the head and the tail of a parallel block share, once in each.
    """
    layer = tensors.layer
    sinks, of_head_modules = layer.parts.sinks, (m.parameters() for m in layer.parts.head_modules)
    sinks_needed = sinks is not None and sinks.requires_grad
    head_needed = x_needed or sinks_needed or any(p.requires_grad for ps in of_head_modules for p in ps)
    gradients = _tail_backward(tensors, dy, x_needed=x_needed, heads_needed=head_needed)
    if head_needed:
        inputs = _inputs(layer, tables)
        lses = (lse.get() for lse in tensors.lses)
        stages = BackwardStages(layer, tensors, inputs, lses, sinks_needed=sinks_needed)
        stages.run()
        of_head = _head_backward(tensors, tables, dy, x_needed=x_needed)
        gradients = [_sum(both) for both in zip(gradients, of_head, strict=True)]
        if sinks is not None and stages.sink_grads is not None:
            trained = [p is sinks for p in layer.parts.module.parameters() if p.requires_grad]
            gradients[trained.index(True)] = stages.sink_grads.to(sinks.dtype)
    return gradients


def _sum(of_parts: tuple[Tensor | None, ...]) -> Tensor | None:
    """Return the gradient of a parameter that the tail uses, or the head, or both in a parallel block."""
    used = [gradient for gradient in of_parts if gradient is not None]
    return sum(used[1:], used[0]) if used else None


def _tail_backward(
    tensors: HostTensors, dy: Tensor, *, x_needed: bool, heads_needed: bool
) -> list[Tensor | None]:
    """Differentiate the tail tile by tile; write the gradient of x over dy, and those of the heads' outputs
    to the host.
    """
    if heads_needed:
        tensors.allocate_output_grads()
    layer = tensors.layer
    with parameter_aliases(layer.parts.module) as parameters:
        sums = _Sums(parameters)
        for start, x, heads in tensors.output_tiles():
            grad = dy.narrow(1, start, x.shape[1])
            dx, dheads = _differentiate_tail(layer.parts, x, heads, grad, sums, x_needed, heads_needed)
            if dx is not None:
                grad.copy_(dx)
            if dheads is not None:
                tensors.write_output_grads(start, dheads)
            del dx, dheads
    layer.copiers.to_host.wait_until_sent()
    return sums.round()


def _differentiate_tail(
    parts: Layer, x: Tensor, heads: Tensor, grad: Tensor, sums: _Sums, x_needed: bool, heads_needed: bool
) -> tuple[Tensor | None, Tensor | None]:
    x, heads = x.detach().requires_grad_(x_needed), heads.requires_grad_(heads_needed)
    with torch.enable_grad():
        y = parts.tail(x, heads)
    if not y.requires_grad:
        return None, None
    grads = sums.differentiate([y], [grad], [tensor for tensor in (x, heads) if tensor.requires_grad])
    dx = grads.pop(0) if x_needed else None
    return dx, grads.pop(0) if heads_needed else None


def _head_backward(
    tensors: HostTensors, tables: Tables, dy: Tensor, *, x_needed: bool
) -> list[Tensor | None]:
    """Differentiate the head tile by tile, and add the gradient of x to dy."""
    parts = tensors.layer.parts
    with parameter_aliases(parts.module) as parameters:
        sums = _Sums(parameters)
        for start, x, head_grads in tensors.gradient_tiles(tables):
            dx = _differentiate_head(parts, x, head_grads, sums, x_needed)
            if dx is not None:
                dy.narrow(1, start, x.shape[1]).add_(dx)
            del dx
    return sums.round()


def _differentiate_head(
    parts: Layer, x: Tensor, head_grads: tuple[Tensor, ...], sums: _Sums, x_needed: bool
) -> Tensor | None:
    x = x.detach().requires_grad_(x_needed)
    with torch.enable_grad():
        outputs = parts.head(x)
    # A frozen projection of an input that needs no gradient has none.
    pairs = [(out, grad) for out, grad in zip(outputs, head_grads, strict=True) if out.requires_grad]
    outs, out_grads = zip(*pairs, strict=True)
    grads = sums.differentiate(outs, out_grads, [x] if x_needed else [])
    return grads[0] if x_needed else None


class _Sums:
    """The sums over tiles of the gradients of parameters, in the wider of fp32 and the parameter's dtype."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = list(parameters)
        self._totals: list[Tensor | None] = [None] * len(self._parameters)

    def differentiate(
        self, outputs: Sequence[Tensor], output_grads: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Return the gradients of ``inputs`` from a tile, and add those of the parameters to the sums.

        Nothing is added for a parameter that the tile did not use.
        """
        leaves = [*inputs, *self._parameters]
        grads = list(torch.autograd.grad(outputs, leaves, output_grads, allow_unused=True))
        of_inputs: list[Tensor | None] = [grads.pop(0) for _ in inputs]
        for i, (parameter, grad) in enumerate(zip(self._parameters, grads, strict=True)):
            if grad is not None:
                total = self._totals[i]
                if total is None:
                    total = torch.zeros_like(parameter, dtype=accumulation_dtype(parameter.dtype))
                    self._totals[i] = total
                total.add_(grad)
        return of_inputs

    def round(self) -> list[Tensor | None]:
        """Return the gradients in the dtypes of the parameters, and drop the sums one by one."""
        rounded: list[Tensor | None] = []
        for parameter in self._parameters:
            total = self._totals.pop(0)
            rounded.append(None if total is None else total.to(parameter.dtype))
        return rounded
