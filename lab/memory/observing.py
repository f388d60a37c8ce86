"""What sees every operator that runs inside it: the meter and the planner's costs are two such."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lab.torch_private import DispatchMode, is_wrapper


class Observer(DispatchMode):
    """Hands every operator to ``observe``, the subclass's, which runs it and returns its result."""

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func(*args, **kwargs)`` and return what it does, having noted what there is to note."""
        raise NotImplementedError

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Let a wrapper (DTensor, an unfinished collective) unwrap itself; hand on every other operator."""
        if any(map(is_wrapper, types)):
            return NotImplemented
        return self.observe(func, args, kwargs or {})
