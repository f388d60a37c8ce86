"""What a step holds and costs, without running it: plans, the closed form, and the searches made of them.

Each name is imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lab.planning.closed_form import WIDTHS
    from lab.planning.costs import BACKWARD_FLOPS
    from lab.planning.fit import pareto_front
    from lab.planning.plan import plan_ladder

__all__ = ["BACKWARD_FLOPS", "WIDTHS", "pareto_front", "plan_ladder"]

_MODULES = {
    "BACKWARD_FLOPS": "costs",
    "WIDTHS": "closed_form",
    "pareto_front": "fit",
    "plan_ladder": "plan",
}


# A command that answers from the plan cache imports this package, and must not import torch.
def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"lab.planning.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'lab.planning' has no attribute {name!r}")
