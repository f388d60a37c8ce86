"""Differentiating by a module's parameters inside a backward, without running their gradient hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from lab.torch_private import parameters_by_name


@contextmanager
def parameter_aliases(module: nn.Module) -> Iterator[list[Tensor]]:
    """Replace the trainable parameters by leaves that share their memory; yield the leaves in order.

    Differentiating by the parameters themselves would run their gradient hooks each time, and data parallel
    ranks sum gradients in such hooks. Autograd runs the hooks once more on what backward returns.
    """
    aliases: dict[nn.Parameter, Tensor] = {
        p: p.detach().requires_grad_() for p in module.parameters() if p.requires_grad
    }
    slots = [
        (parameters_by_name(m), name, p)
        for m in module.modules()
        for name, p in parameters_by_name(m).items()
        if p in aliases
    ]
    for owner, name, parameter in slots:
        owner[name] = aliases[parameter]  # type: ignore[assignment]
    try:
        yield list(aliases.values())
    finally:
        for owner, name, parameter in slots:
            owner[name] = parameter
