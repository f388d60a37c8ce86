"""Notebook 03: activation checkpointing as an autograd function."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lab.jupyter.stubs.small_mlp import Task
from lab.jupyter.stubs.stub import Stub, Wrong, checks_in
from lab.memory.meter import Meter

TASK = Task((6, 5), 11, (), "backward must send dy through the graph of the second forward")


def check_output(checkpointed: Any) -> None:
    """The output is the layer's."""
    layer, x = TASK.inputs()
    if not torch.equal(checkpointed.apply(layer, x), layer(x)):
        raise Wrong("the output differs from layer(x)")


def check_input_gradient(checkpointed: Any) -> None:
    """The gradient of x is that of the layer."""
    TASK.check_gradients(checkpointed, "x")


def check_parameter_gradients(checkpointed: Any) -> None:
    """The gradients of the layer's parameters are those of the layer, once each."""
    TASK.check_gradients(checkpointed)


check_added, check_row = TASK.check_added, TASK.check_row


def check_kept(checkpointed: Any) -> None:
    """Between forward and backward only x is kept."""
    layer, x = TASK.inputs()
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
    layer, x = TASK.inputs()
    out = checkpointed.apply(layer, x)
    forward, layer.forwards = layer.forwards, 0
    out.backward(torch.ones_like(out))
    if (forward, layer.forwards) != (1, 1):
        raise Wrong(f"the layer ran {forward} times in forward and {layer.forwards} times in backward")


STUB = Stub("Checkpointed", checks_in(globals()))
