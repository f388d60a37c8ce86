"""The base of the classes that see every operator that runs, such as the meter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch

from lab.torch_private import DispatchMode, is_wrapper

_DEVICE = torch.ops.prim.device.default
"""What torch's C++ runs to read the device of a fake tensor; half of the operators of a plan are this one. It
is not observed: the tensors of a run have no such operator."""


@cache
def name_of(func: Any) -> str:
    """Return the name of an operator without its overload, ``"aten.mm"``."""
    return str(func.overloadpacket)


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among an operator's arguments or results, those in lists and tuples too."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from tensors_in(value)


class Observer(DispatchMode):
    """A context manager that passes every operator that runs inside it to ``observe``."""

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func(*args, **kwargs)`` and return its result. Subclasses add what they record."""
        raise NotImplementedError

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Pass an operator on to ``observe``.

        A wrapper, such as a DTensor, is first replaced by the tensors in it; their operators are passed on.
        """
        if func is _DEVICE:
            # The attribute is read without the dispatcher.
            return args[0].device
        if any(map(is_wrapper, types)):
            return NotImplemented
        return self.observe(func, args, kwargs or {})
