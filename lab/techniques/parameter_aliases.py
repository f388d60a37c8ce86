"""Differentiating by a module's parameters inside a backward, without waking their hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def standing_in(module: nn.Module) -> Iterator[list[Tensor]]:
    """Let leaves that share the trainable parameters' memory stand in their place; yield them in order.

    Differentiating by the parameters themselves would run their gradient hooks (data parallel ranks sum
    there) every time, on top of the once that autograd runs them on what backward returns.
    """
    stand_ins: dict[nn.Parameter, Tensor] = {
        p: p.detach().requires_grad_() for p in module.parameters() if p.requires_grad
    }
    slots = [
        (m._parameters, name, p)
        for m in module.modules()
        for name, p in m._parameters.items()
        if p in stand_ins
    ]
    for owner, name, parameter in slots:
        owner[name] = stand_ins[parameter]  # type: ignore[assignment]
    try:
        yield list(stand_ins.values())
    finally:
        for owner, name, parameter in slots:
            owner[name] = parameter
