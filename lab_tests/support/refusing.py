"""Torch modes and a hook that refuse whatever reaches them."""

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class RefusingDispatch(TorchDispatchMode):
    """Refuses every operator."""

    def __torch_dispatch__(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("an operator reached the mode")


class RefusingFunction(TorchFunctionMode):
    """Refuses every function."""

    def __torch_function__(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("a function reached the mode")


def refuse_saved(_: Tensor) -> Tensor:
    """Refuses every tensor that is saved for backward."""
    raise AssertionError("a saved tensor reached the hook")
