"""Measure any differentiable function: its forward and backward as a timeline."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lab.memory.meter import Meter
from lab.memory.timeline import Timeline


def measure(function: Callable[..., Tensor], *inputs: Tensor) -> Timeline:
    """Run ``function(*inputs)`` and its backward under the meter; return the bytes over time.

    The inputs are counted from the start, as *parameters*. The gradient that backward starts from is
    ones, of the output's shape. Gradients that the inputs held before are dropped.
    """
    held = nn.ParameterList([nn.Parameter(x.detach()) for x in inputs])
    meter = Meter()
    with meter.measure(held):
        with meter.phase("forward"):
            out = function(*held)
        with meter.phase("backward"):
            out.backward(torch.ones_like(out))
    return meter.timeline()
