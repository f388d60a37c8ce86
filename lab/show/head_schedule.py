"""UPipe's head schedule, stage by stage: which query heads meet which key/value heads on which rank."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from lab.show.palette import SERIES_COLOURS, TEXT
from lab.show.picture import WIDTH, Picture, drawing, head
from lab.techniques.upipe.schedule import Schedule
from lab.techniques.upipe.schedule import schedule as stages_of

RIGHT, WRONG, KEYS = SERIES_COLOURS[0], SERIES_COLOURS[1], SERIES_COLOURS[2]

_SIDE_BY_SIDE = 16
"""Query heads of a stage up to which both pairings fit side by side."""


@dataclass(frozen=True)
class Pair:
    """A query head and the key/value head it attends to; ``sent``: whether this stage sends that head."""

    query: int
    kv: int
    sent: bool


def pairs(plan: Schedule, stage: int, rank: int) -> list[Pair]:
    """What a rank attends with in a stage, in the order of sending."""
    kv = [
        (head, run.opens)
        for run, heads in zip(plan.stages[stage], _by_run(plan, stage, rank), strict=True)
        for head in heads
        for _ in run.queries
    ]
    queries = plan.query_heads(stage, rank)
    return [Pair(query, head, sent) for query, (head, sent) in zip(queries, kv, strict=True)]


def in_model_order(plan: Schedule, stage: int, rank: int) -> list[Pair]:
    """Pair the same keys with query heads in the model's order: stage t gets the heads t*U to (t+1)*U.

    This is the well-known mistake. The output is put back as if the query heads had been reordered, so the
    result is that of another model, whose query heads stand in another order.
    """
    first = stage * plan.chunk + rank * plan.heads_per_rank
    return [Pair(first + place, pair.kv, pair.sent) for place, pair in enumerate(pairs(plan, stage, rank))]


def schedule(heads: int, kv_heads: int, ranks: int, head_chunk: int) -> Picture:
    """Draw the stages of a UPipe layer for H, K, C and U heads, and the pairing that goes wrong beside them.

    Each row is a stage and each column a rank. A cell has the numbers of the rank's query heads, and below
    them the key/value heads that they attend to: filled where this stage sends them, outlined where an
    earlier stage has sent them. A query head that meets another head's keys is orange.

    Raises:
        RecipeError: a U or a C that the heads do not allow; the message holds those that work.
    """
    plan = stages_of(heads, kv_heads, ranks, head_chunk)
    drawn = [
        [[make(plan, stage, rank) for rank in range(ranks)] for stage in range(len(plan.stages))]
        for make in (pairs, in_model_order)
    ]
    wrong = sum(not _belongs(plan, pair) for stage in drawn[1] for of_rank in stage for pair in of_rank)
    beside = head_chunk <= _SIDE_BY_SIDE
    rows = len(plan.stages) * (1 if beside else 2)
    count = f"{len(plan.stages)} stage{'s' * (len(plan.stages) > 1)}"
    title = f"H={heads}, K={kv_heads}, C={ranks}, U={head_chunk}: {count}"
    with drawing(0.95 + 0.36 * rows + (0 if beside else 0.5)) as figure:
        grid = figure.subplots(*((1, 2) if beside else (2, 1)), squeeze=False).flatten()
        names = "gathered: each query head with its own keys", _verdict(wrong, heads)
        for axes, table, name in zip(grid, drawn, names, strict=True):
            _draw(axes, plan, table, WIDTH * (0.46 if beside else 0.95))
            axes.set_title(name, loc="left", pad=16)
        marks = {
            "query head": Patch(color=RIGHT),
            "with another's keys": Patch(color=WRONG),
            "K, V sent": Patch(color=KEYS),
            "K, V of an earlier stage": Patch(facecolor="none", edgecolor=TEXT),
        }
        head(figure, title, list(marks.values()), list(marks))
    sends = [stage for stage in range(len(plan.stages)) if plan.sends(stage)]
    said = (
        f"keys and values are sent in stages {', '.join(map(str, sends))}; in model order {wrong} of {heads}"
    )
    return Picture(figure, f"Head schedule, {title}; {said} query heads meet another's keys.")


def _verdict(wrong: int, heads: int) -> str:
    if not wrong:
        return "model order: here it is the same"
    return f"model order: {wrong} of {heads} meet another's keys"


def _belongs(plan: Schedule, pair: Pair) -> bool:
    return pair.query * plan.kv_heads // plan.heads == pair.kv


def _by_run(plan: Schedule, stage: int, rank: int) -> list[list[int]]:
    """The key/value heads of a stage on a rank, run by run."""
    heads = iter(plan.kv_heads_of(stage, rank))
    return [[next(heads) for _ in run.slots] for run in plan.stages[stage]]


def _draw(axes: Axes, plan: Schedule, table: list[list[list[Pair]]], width: float) -> None:
    """One panel: stages downward, ranks to the right, a unit each; ``width`` in inches."""
    one = 0.94 / plan.heads_per_rank
    size = min(7.5, width / plan.ranks * one * 72 / 1.9)
    for stage, ranks in enumerate(table):
        for rank, found in enumerate(ranks):
            for place, pair in enumerate(found):
                colour = RIGHT if _belongs(plan, pair) else WRONG
                left = rank + 0.03 + place * one
                axes.add_patch(Rectangle((left, stage + 0.06), one * 0.95, 0.47, color=colour, linewidth=0))
                if size >= 4:
                    middle = left + one * 0.475, stage + 0.305
                    axes.text(
                        *middle, str(pair.query), ha="center", va="center", color="white", fontsize=size
                    )
            _draw_keys(axes, stage, rank, found, one, width / plan.ranks)
    axes.set_xlim(0, plan.ranks)
    axes.set_ylim(len(table), 0)
    axes.set_xticks([rank + 0.5 for rank in range(plan.ranks)], [f"rank {r}" for r in range(plan.ranks)])
    axes.set_yticks([stage + 0.45 for stage in range(len(table))], [f"{t}" for t in range(len(table))])
    axes.set_ylabel("stage")
    axes.xaxis.tick_top()
    axes.tick_params(length=0, pad=1)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _draw_keys(axes: Axes, stage: int, rank: int, found: list[Pair], one: float, cell: float) -> None:
    """The band below the queries: one piece for each key/value head, as wide as the queries that meet it."""
    starts = [place for place, pair in enumerate(found) if not place or pair.kv != found[place - 1].kv]
    for first, end in zip(starts, [*starts[1:], len(found)], strict=True):
        pair, left, width = found[first], rank + 0.03 + first * one, (end - first) * one - one * 0.05
        # An outline and not a paler green: on a dark page the paler one would be the darker one.
        fill, edge = (KEYS, KEYS) if pair.sent else ("none", TEXT)
        band = Rectangle((left, stage + 0.57), width, 0.3, facecolor=fill, edgecolor=edge, linewidth=0.8)
        axes.add_patch(band)
        long = f"kv {pair.kv}"
        name = long if width * cell * 72 > 6 * len(long) * 0.6 else str(pair.kv)
        axes.text(
            left + width / 2, stage + 0.725, name, ha="center", va="center", fontsize=6,
            color="white" if pair.sent else TEXT,
        )  # fmt: skip
