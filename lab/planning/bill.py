"""The bill: the time and the money that a number of tokens takes, by the estimated seconds of a step.

This module imports neither torch nor transformers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lab.errors import LabError
from lab.recipe.jobs import Job, Machine
from lab.units import format_total, parse_price, parse_total

HOUR, DAY = 3600, 86400


@dataclass(frozen=True)
class Order:
    """What is to be trained in all, and at which price.

    Attributes:
        tokens: The tokens of all steps together.
        price: The money for one hour of one GPU, in any currency; None if it is not known.
    """

    tokens: int
    price: float | None = None

    def steps_of(self, job: Job) -> int:
        """Return the number of steps: all are whole, so the last one may take more tokens than are left.

        Raises:
            LabError: There are fewer tokens than a step has.
        """
        of_a_step = job.step_rows * job.tokens
        if self.tokens < of_a_step:
            raise LabError(
                f"tokens_total={format_total(self.tokens)} is less than a step has: {job.step_rows} rows x "
                f"{job.tokens} tokens = {of_a_step}; give at least as many"
            )
        return -(-self.tokens // of_a_step)


@dataclass(frozen=True)
class Bill:
    """The time and the money that an order takes; estimates, because the seconds of a step are one.

    Attributes:
        steps: The number of steps.
        days: Days from the first step to the last.
        node_hours: Hours of a node, times the nodes that have ranks.
        gpu_hours: Hours of a GPU, times the ranks.
        money: ``gpu_hours`` at the price; None without a price.
    """

    steps: int
    days: float
    node_hours: float
    gpu_hours: float
    money: float | None

    def to_json(self) -> dict[str, Any]:
        """Return plain values by field name."""
        return asdict(self)

    @property
    def days_text(self) -> str:
        """The days, with three digits or whole."""
        return _rounded(self.days)

    @property
    def money_text(self) -> str:
        """The money, whole from 100 on; a dash without a price."""
        if self.money is None:
            return "-"
        return f"{self.money:,.0f}" if self.money >= 100 else f"{self.money:.2f}"

    def text(self, order: Order) -> str:
        """Return all of it in one line."""
        money = "" if self.money is None else f", {self.money_text} at {order.price:g} for a GPU hour"
        return (
            f"{format_total(order.tokens)} tokens take {self.steps:,} steps, {self.days_text} days, "
            f"{_rounded(self.node_hours)} node hours{money} (estimate)"
        )


def make_order(tokens_total: int | str | None, price: float | str | None) -> Order | None:
    """Read an order; None if there is none.

    Raises:
        LabError: A text that is no number of tokens or no price; a price without tokens.
    """
    if tokens_total is None:
        if price is not None:
            raise LabError(
                f"price={price!r} without tokens_total: give the tokens to be trained too, such as 10B"
            )
        return None
    return Order(parse_total(tokens_total), None if price is None else parse_price(price))


def make_bill(order: Order, job: Job, machine: Machine, step_seconds: float) -> Bill:
    """Return what an order takes with steps of these seconds.

    Raises:
        LabError: See ``Order.steps_of``.
    """
    steps = order.steps_of(job)
    seconds = steps * step_seconds
    nodes = -(-job.ranks // machine.ranks_per_node)
    gpu_hours = seconds * job.ranks / HOUR
    return Bill(
        steps=steps,
        days=seconds / DAY,
        node_hours=seconds * nodes / HOUR,
        gpu_hours=gpu_hours,
        money=None if order.price is None else gpu_hours * order.price,
    )


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
