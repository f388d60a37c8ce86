"""UPipe's head schedule: which query heads attend to which key/value heads, by stage and rank."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from lab.show.palette import SERIES_COLOURS, TEXT
from lab.show.picture import WIDTH, Picture, draw_header, styled_figure
from lab.show.scales import table_axes
from lab.techniques.upipe.schedule import Schedule
from lab.techniques.upipe.schedule import schedule as stages_of

RIGHT, WRONG, KEYS = SERIES_COLOURS[2], SERIES_COLOURS[3], SERIES_COLOURS[1]

_SIDE_BY_SIDE = 16
"""The most query heads of a stage for which both panels fit side by side."""


@dataclass(frozen=True)
class Pair:
    """A query head and the key/value head that it attends to.

    Attributes:
        query: The number of the query head.
        kv: The number of the key/value head.
        sent: Whether this stage sends the key/value head; otherwise an earlier stage has sent it.
    """

    query: int
    kv: int
    sent: bool


def pairs(plan: Schedule, stage: int, rank: int) -> list[Pair]:
    """Return the pairs of heads of a rank in a stage, in the order in which the heads are sent."""
    kv = [
        (head, run.opens)
        for run, heads in zip(plan.stages[stage], _by_run(plan, stage, rank), strict=True)
        for head in heads
        for _ in run.queries
    ]
    queries = plan.query_heads(stage, rank)
    return [Pair(query, head, sent) for query, (head, sent) in zip(queries, kv, strict=True)]


def in_model_order(plan: Schedule, stage: int, rank: int) -> list[Pair]:
    """Pair the same key/value heads with the query heads in the model's order.

    Stage t gets the query heads t*U to (t+1)*U, with U heads in a stage. This is the mistake that UPipe must
    avoid. The outputs are returned to the places of the scheduled query heads, so the result is that of a
    model with another order of query heads.
    """
    first = stage * plan.chunk + rank * plan.heads_per_rank
    return [Pair(first + n, pair.kv, pair.sent) for n, pair in enumerate(pairs(plan, stage, rank))]


def schedule(heads: int, kv_heads: int, ranks: int, head_chunk: int) -> Picture:
    """Draw the stages of a UPipe layer, and a second panel with the pairs of ``in_model_order``.

    Each row is a stage and each column is a rank. A cell has the numbers of the rank's query heads, and below
    them the key/value heads that they attend to: filled if this stage sends them, outlined if an earlier
    stage has sent them. A query head that attends to the keys of another head is magenta.

    Args:
        heads: The query heads H of the model.
        kv_heads: The key/value heads K of the model.
        ranks: The Ulysses degree C.
        head_chunk: The query heads U of a stage, summed over the ranks.

    Raises:
        RecipeError: The heads do not allow this U or C; the message names those that work.
    """
    plan = stages_of(heads, kv_heads, ranks, head_chunk)
    tables = [
        [[pairing(plan, stage, rank) for rank in range(ranks)] for stage in range(len(plan.stages))]
        for pairing in (pairs, in_model_order)
    ]
    wrong = sum(not _is_right(plan, pair) for stage in tables[1] for cell in stage for pair in cell)
    side_by_side = head_chunk <= _SIDE_BY_SIDE
    rows = len(plan.stages) * (1 if side_by_side else 2)
    count = f"{len(plan.stages)} stage{'s' * (len(plan.stages) > 1)}"
    title = f"H={heads}, K={kv_heads}, C={ranks}, U={head_chunk}: {count}"
    with styled_figure(0.95 + 0.36 * rows + (0 if side_by_side else 0.5)) as figure:
        grid = figure.subplots(*((1, 2) if side_by_side else (2, 1)), squeeze=False).flatten()
        names = "the schedule: each query head with its own keys", _verdict(wrong, heads)
        for axes, table, name in zip(grid, tables, names, strict=True):
            _draw(axes, plan, table, WIDTH * (0.46 if side_by_side else 0.95))
            axes.set_title(name, loc="left", pad=16)
        marks = {
            "query head": Patch(color=RIGHT),
            "with another's keys": Patch(color=WRONG),
            "K, V sent": Patch(color=KEYS),
            "K, V of an earlier stage": Patch(facecolor="none", edgecolor=TEXT),
        }
        draw_header(figure, title, marks)
    sends = [stage for stage in range(len(plan.stages)) if plan.sends(stage)]
    text = (
        f"keys and values are sent in stages {', '.join(map(str, sends))}; in model order {wrong} of {heads}"
    )
    return Picture(figure, f"Head schedule, {title}; {text} query heads meet another's keys.")


def _verdict(wrong: int, heads: int) -> str:
    if not wrong:
        return "model order: here it is the same"
    return f"model order: {wrong} of {heads} meet another's keys"


def _is_right(plan: Schedule, pair: Pair) -> bool:
    return pair.query * plan.kv_heads // plan.heads == pair.kv


def _by_run(plan: Schedule, stage: int, rank: int) -> list[list[int]]:
    """Return the key/value heads of a stage on a rank, for each range of heads of the stage."""
    heads = iter(plan.kv_heads_of(stage, rank))
    return [[next(heads) for _ in run.slots] for run in plan.stages[stage]]


def _draw(axes: Axes, plan: Schedule, table: list[list[list[Pair]]], width: float) -> None:
    """Draw a panel of ``width`` inches: stages downward, ranks to the right. Each cell is one unit wide."""
    head_width = 0.94 / plan.heads_per_rank
    size = min(7.5, width / plan.ranks * head_width * 72 / 1.9)
    for stage, ranks in enumerate(table):
        for rank, cell in enumerate(ranks):
            for n, pair in enumerate(cell):
                colour = RIGHT if _is_right(plan, pair) else WRONG
                left = rank + 0.03 + n * head_width
                box = Rectangle((left, stage + 0.06), head_width * 0.95, 0.47, color=colour, linewidth=0)
                axes.add_patch(box)
                if size >= 4:
                    middle = left + head_width * 0.475, stage + 0.305
                    axes.text(
                        *middle, str(pair.query), ha="center", va="center", color="white", fontsize=size
                    )
            _draw_keys(axes, stage, rank, cell, head_width, width / plan.ranks)
    stages = [f"{stage}" for stage in range(len(table))]
    table_axes(axes, [f"rank {rank}" for rank in range(plan.ranks)], stages, (0.5, 0.45))
    axes.set_ylabel("stage")
    axes.tick_params(pad=1)


def _draw_keys(
    axes: Axes, stage: int, rank: int, cell: list[Pair], head_width: float, cell_inches: float
) -> None:
    """Draw a box below the query heads for each key/value head, as wide as the query heads that use it."""
    starts = [n for n, pair in enumerate(cell) if not n or pair.kv != cell[n - 1].kv]
    for first, end in zip(starts, [*starts[1:], len(cell)], strict=True):
        pair, left = cell[first], rank + 0.03 + first * head_width
        width = (end - first) * head_width - head_width * 0.05
        # A head that is not sent has an outline. A paler green would be the darker one on a dark page.
        fill, edge = (KEYS, KEYS) if pair.sent else ("none", TEXT)
        band = Rectangle((left, stage + 0.57), width, 0.3, facecolor=fill, edgecolor=edge, linewidth=0.8)
        axes.add_patch(band)
        long = f"kv {pair.kv}"
        name = long if width * cell_inches * 72 > 6 * len(long) * 0.6 else str(pair.kv)
        axes.text(
            left + width / 2, stage + 0.725, name, ha="center", va="center", fontsize=6,
            color="white" if pair.sent else TEXT,
        )  # fmt: skip
