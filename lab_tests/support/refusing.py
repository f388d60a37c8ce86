"""Torch modes and a hook that refuse whatever reaches them."""

from typing import Any

import torch
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


def enter_all() -> None:
    """Enter each kind of mode that `cluster.torch_state.reset` leaves."""
    torch.no_grad().__enter__()
    torch.set_autocast_enabled("cpu", True)
    torch.autograd.graph.saved_tensors_hooks(refuse_saved, refuse_saved).__enter__()
    RefusingDispatch().__enter__()
    RefusingFunction().__enter__()
