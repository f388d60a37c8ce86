"""Seconds and bytes of a step as the context grows, for each rung, and as ranks are added."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from cluster.ranks import Cluster
from lab.bench.table import Row, Say
from lab.planning.plan import plan_job
from lab.recipe.jobs import Job, Machine
from lab.recipe.ladder import RUNGS, resolve_recipe
from lab.training.run import run
from lab.units import MiB

MODEL = "tiny"
RANKS = (1, 2, 4)


def measure_growth(tokens: int, doublings: int, steps: int, say: Say) -> list[Row]:
    """Measure steps of ``tiny`` on CPU ranks, under the meter.

    First each rung of the ladder runs on two ranks, with a context that is doubled ``doublings`` times from
    ``tokens``. Then the top rung runs on 1, 2 and 4 ranks: with as many tokens per rank as the longest
    context has on two ranks, and with that context in all. Last, ``upipe`` and ``streamed`` run on two ranks
    with four times the longest context. The seconds are medians of ``steps`` after a first step.

    Returns:
        A row for each measurement. "x" is the ratio to the row before. "bytes per token" is the growth of the
        peak of a rank over the growth of the whole context; "planned" is the same of its plan.
    """
    contexts = [tokens << i for i in range(doublings + 1)]
    series = [("context", [Setting(rung, 2, n) for n in contexts]) for rung in RUNGS]
    each = [Setting(RUNGS[-1], ranks, contexts[-1] // 2 * ranks) for ranks in RANKS]
    in_all = [Setting(RUNGS[-1], ranks, contexts[-1]) for ranks in RANKS]
    rungs = [Setting(rung, 2, 4 * contexts[-1]) for rung in ("upipe", "streamed")]
    series += [("ranks, tokens each", each), ("ranks, tokens in all", in_all), ("rungs", rungs)]
    points: dict[Setting, Point] = {}
    for ranks in RANKS:
        with Cluster(ranks=ranks) as cluster:
            for setting in dict.fromkeys(setting for _, settings in series for setting in settings):
                if setting.ranks == ranks:
                    say(f"{setting.rung}, {setting.tokens} tokens on {ranks} ranks")
                    points[setting] = _measure(setting, cluster, steps)
    return [
        row
        for over, settings in series
        for row in compare_points(over, [points[setting] for setting in settings])
    ]


class Setting(NamedTuple):
    """A step to measure."""

    rung: str
    ranks: int
    tokens: int


@dataclass(frozen=True)
class Point:
    """A measured step: its seconds, the peak of a rank in bytes, and the planned peak."""

    setting: Setting
    seconds: float
    peak: int
    planned: int


def _measure(setting: Setting, cluster: Cluster, steps: int) -> Point:
    recipe = resolve_recipe(setting.rung, MODEL, setting.ranks, setting.tokens)
    result = run(MODEL, recipe, tokens=setting.tokens, steps=steps + 1, cluster=cluster)
    planned = plan_job(Job(MODEL, recipe, setting.tokens, setting.ranks), Machine(workspace=False))
    return Point(setting, median(result.seconds[1:]), result.device_peak, planned.timeline.device_peak)


def compare_points(over: str, points: Sequence[Point]) -> Iterator[Row]:
    """Yield a row for each point, compared with the one before; bytes per token for equal ranks."""
    for before, point in zip((None, *points), points, strict=False):
        row: dict[str, str | float | None] = {
            "over": over, **point.setting._asdict(), "seconds": point.seconds, "seconds, x": None,
            "peak, MiB": point.peak / MiB, "peak, x": None, "bytes per token": None, "planned": None,
        }  # fmt: skip
        if before is not None:
            more = point.setting.tokens - before.setting.tokens
            row |= {"seconds, x": point.seconds / before.seconds, "peak, x": point.peak / before.peak}
            if more and point.setting.ranks == before.setting.ranks:
                row["bytes per token"] = (point.peak - before.peak) / more
                row["planned"] = (point.planned - before.planned) / more
        yield row
