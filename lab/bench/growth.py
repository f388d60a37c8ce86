"""How a step grows: seconds and bytes over context, rung by rung, and over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median

from cluster.ranks import Cluster
from lab.bench.table import Row
from lab.formulas import estimate
from lab.models import config_of
from lab.rungs import RUNGS, recipe_for
from lab.units import MiB
from lab.verbs.run import run

Say = Callable[[str], None]

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
    series = {("context", rung): [(rung, 2, n) for n in contexts] for rung in RUNGS}
    series["ranks, tokens each", ""] = [("upipe", ranks, contexts[-1] // 2 * ranks) for ranks in RANKS]
    series["ranks, tokens in all", ""] = [("upipe", ranks, contexts[-1]) for ranks in RANKS]
    found: dict[Asked, Point] = {}
    for ranks in RANKS:
        with Cluster(ranks=ranks) as cluster:
            for asked in dict.fromkeys(a for all_of in series.values() for a in all_of):
                if asked[1] == ranks:
                    say(f"{asked[0]}, {asked[2]} tokens on {ranks} ranks")
                    found[asked] = _measured(asked, cluster, steps)
    return [row for (over, _), of in series.items() for row in _compared(over, [found[a] for a in of])]


Asked = tuple[str, int, int]
"""Rung, ranks, tokens."""

Point = tuple[str, int, int, float, int, int]
"""The same, with seconds, peak, and the closed form's peak in bytes."""


def _measured(asked: Asked, cluster: Cluster, steps: int) -> Point:
    rung, ranks, tokens = asked
    recipe = recipe_for(rung, MODEL, ranks, tokens)
    measured = run(MODEL, recipe, tokens=tokens, steps=steps + 1, cluster=cluster)
    formula = estimate(config_of(MODEL), recipe, tokens=tokens, ranks=ranks)
    return *asked, median(measured.seconds[1:]), measured.device_peak, formula.device_peak


def _compared(name: str, points: list[Point]) -> Iterator[Row]:
    before: Point | None = None
    for point in points:
        rung, ranks, tokens, seconds, peak, formula = point
        grown = before is not None and ranks == before[1] and tokens != before[2]
        yield {
            "over": name,
            "rung": rung,
            "ranks": ranks,
            "tokens": tokens,
            "seconds": seconds,
            "seconds, x": seconds / before[3] if before else None,
            "peak, MiB": peak / MiB,
            "peak, x": peak / before[4] if before else None,
            "bytes a token": (peak - before[4]) / (tokens - before[2]) if before and grown else None,
            "by formula": (formula - before[5]) / (tokens - before[2]) if before and grown else None,
        }
        before = point
