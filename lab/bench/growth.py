"""How a step grows: seconds and bytes over context, rung by rung, and over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from cluster.ranks import Cluster
from lab.bench.table import Row, Say
from lab.models import config_of
from lab.planning.closed_form import estimate_job
from lab.recipe.jobs import Job
from lab.recipe.ladder import RUNGS, recipe_for
from lab.training.run import run
from lab.units import MiB

MODEL = "tiny"
RANKS = (1, 2, 4)


def measure_growth(tokens: int, doublings: int, steps: int, say: Say) -> list[Row]:
    """Steps of ``tiny`` on CPU ranks, under the meter: medians of ``steps`` after one more, peaks of a rank.

    First each rung of the ladder on two ranks, its context doubled ``doublings`` times from ``tokens``. Then
    the top rung on 1, 2 and 4 ranks, with as many tokens each as the longest of these has on two, and with
    that context in all. "x" is a row over the one before it; bytes a token are what a rank's peak grew by,
    over the tokens of the whole context that were added, beside the closed form's.
    """
    contexts = [tokens << i for i in range(doublings + 1)]
    series = [("context", [Asked(rung, 2, n) for n in contexts]) for rung in RUNGS]
    each = [Asked(RUNGS[-1], ranks, contexts[-1] // 2 * ranks) for ranks in RANKS]
    in_all = [Asked(RUNGS[-1], ranks, contexts[-1]) for ranks in RANKS]
    series += [("ranks, tokens each", each), ("ranks, tokens in all", in_all)]
    found: dict[Asked, Point] = {}
    for ranks in RANKS:
        with Cluster(ranks=ranks) as cluster:
            for asked in dict.fromkeys(one for _, of in series for one in of):
                if asked.ranks == ranks:
                    say(f"{asked.rung}, {asked.tokens} tokens on {ranks} ranks")
                    found[asked] = _measured(asked, cluster, steps)
    return [row for over, of in series for row in compared(over, [found[asked] for asked in of])]


class Asked(NamedTuple):
    """One step to be measured."""

    rung: str
    ranks: int
    tokens: int


@dataclass(frozen=True)
class Point:
    """What it took: seconds, a rank's peak in bytes, and the closed form's."""

    asked: Asked
    seconds: float
    peak: int
    formula: int


def _measured(asked: Asked, cluster: Cluster, steps: int) -> Point:
    recipe = recipe_for(asked.rung, MODEL, asked.ranks, asked.tokens)
    measured = run(MODEL, recipe, tokens=asked.tokens, steps=steps + 1, cluster=cluster)
    formula = estimate_job(config_of(MODEL), Job(MODEL, recipe, asked.tokens, asked.ranks))
    return Point(asked, median(measured.seconds[1:]), measured.device_peak, formula.device_peak)


def compared(over: str, points: Sequence[Point]) -> Iterator[Row]:
    """A row a point, each beside the one before it; bytes a token only where nothing but the context grew."""
    for before, point in zip((None, *points), points, strict=False):
        row: dict[str, str | float | None] = {
            "over": over, **point.asked._asdict(), "seconds": point.seconds, "seconds, x": None,
            "peak, MiB": point.peak / MiB, "peak, x": None, "bytes a token": None, "by formula": None,
        }  # fmt: skip
        if before is not None:
            more = point.asked.tokens - before.asked.tokens
            row |= {"seconds, x": point.seconds / before.seconds, "peak, x": point.peak / before.peak}
            if more and point.asked.ranks == before.asked.ranks:
                row["bytes a token"] = (point.peak - before.peak) / more
                row["by formula"] = (point.formula - before.formula) / more
        yield row
