"""What sees every operator that runs inside it: the meter and the planner's costs are two such."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Observer(TorchDispatchMode):
    """Hands every operator to ``observe``, the subclass's, which runs it and returns its result."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func(*args, **kwargs)`` and return what it does, having noted what there is to note."""
        raise NotImplementedError

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The wrapper that keeps torch.compile out would cost a fifth of the meter's time, at every operator.
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Let a wrapper (DTensor, an unfinished collective) unwrap itself; hand on every other operator."""
        if any(hasattr(t, "__tensor_flatten__") for t in types):
            return NotImplemented
        return self.observe(func, args, kwargs or {})
