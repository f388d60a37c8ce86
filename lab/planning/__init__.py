"""What a step holds and costs, without running it: plans, and the searches made of them."""

from typing import TYPE_CHECKING

from lab import load_on_first_use

if TYPE_CHECKING:
    from lab.planning.costs import BACKWARD_FLOPS
    from lab.planning.fit import pareto_front
    from lab.planning.max_context_table import longest_contexts
    from lab.planning.plan import plan_ladder
    from lab.shape import WIDTHS

__all__ = [
    "BACKWARD_FLOPS",
    "WIDTHS",
    "longest_contexts",
    "pareto_front",
    "plan_ladder",
]

__getattr__ = load_on_first_use(
    __name__,
    {
        "BACKWARD_FLOPS": "lab.planning.costs",
        "WIDTHS": "lab.shape",
        "longest_contexts": "lab.planning.max_context_table",
        "pareto_front": "lab.planning.fit",
        "plan_ladder": "lab.planning.plan",
    },
)
