"""The memory of any differentiable function: its forward and backward as a timeline."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lab.memory.meter import Meter
from lab.memory.timeline import Timeline


def measure(function: Callable[..., Tensor], *inputs: Tensor) -> Timeline:
    """Run ``function(*inputs)`` and its backward, and return the bytes over time.

    The inputs count as *parameters*, from the start. Backward starts from a gradient of ones, of the output's
    shape. The gradients that the inputs have before are ignored.
    """
    parameters = nn.ParameterList([nn.Parameter(x.detach()) for x in inputs])
    meter = Meter()
    with meter.measure(parameters):
        with meter.phase("forward"):
            out = function(*parameters)
        with meter.phase("backward"):
            out.backward(torch.ones_like(out))
    return meter.timeline()
