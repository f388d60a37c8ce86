"""Gradients of a module's parameters inside another backward, without running their gradient hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from lab.torch_private import parameters_by_name


@contextmanager
def parameter_aliases(module: nn.Module) -> Iterator[list[Tensor]]:
    """Replace the trainable parameters of ``module`` by aliases, and restore them at the end of the block.

    An alias is a leaf of autograd that shares the parameter's memory. Gradients of the parameters themselves
    would run the parameters' gradient hooks, in which data parallel ranks sum gradients. Those hooks run
    later, on the gradients that the surrounding backward returns.

    Yields:
        The aliases, in the order of the parameters.
    """
    aliases: dict[nn.Parameter, Tensor] = {
        p: p.detach().requires_grad_() for p in module.parameters() if p.requires_grad
    }
    replacements = [
        (parameters_by_name(m), name, p)
        for m in module.modules()
        for name, p in parameters_by_name(m).items()
        if p in aliases
    ]
    for owner, name, parameter in replacements:
        owner[name] = aliases[parameter]  # type: ignore[assignment]
    try:
        yield list(aliases.values())
    finally:
        for owner, name, parameter in replacements:
            owner[name] = parameter
