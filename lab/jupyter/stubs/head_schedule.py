"""Notebook 06: which query head and which key/value head a rank has in a stage of UPipe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

from lab.jupyter.stubs.stub import Stub, Wrong, checks_in

Heads = Callable[[int, int, int, int, int], tuple[int, int]]

SHAPES = ((32, 8, 4), (24, 6, 2), (15, 3, 3), (8, 8, 4))
"""H query heads, K key/value heads, C ranks; C divides K."""


def check_once(heads: Heads) -> None:
    """Every query head has its turn once."""
    for shape in SHAPES:
        H = shape[0]
        turns = Counter(query for row in _stages(heads, shape) for query, _ in row)
        if outside := sorted(set(turns) - set(range(H))):
            raise Wrong(f"{_named(shape)}: there is no query head {outside[0]}; they are 0 to {H - 1}")
        if missing := sorted(set(range(H)) - set(turns)):
            again = turns.most_common(1)[0][0]
            raise Wrong(f"{_named(shape)}: query head {missing[0]} has no turn, and head {again} has several")


def check_pairs(heads: Heads) -> None:
    """Each query head meets its own key/value head."""
    for shape in SHAPES:
        G = shape[0] // shape[1]
        for stage, row in enumerate(_stages(heads, shape)):
            for rank, (query, key) in enumerate(row):
                if key != query // G:
                    raise Wrong(
                        f"{_named(shape)}, stage {stage}, rank {rank}: query head {query} shares key/value "
                        f"head {query // G}, and not {key}"
                    )


def check_ranks(heads: Heads) -> None:
    """In a stage, each rank has another key/value head."""
    for shape in SHAPES:
        for stage, row in enumerate(_stages(heads, shape)):
            keys = [key for _, key in row]
            if len(set(keys)) < len(keys):
                raise Wrong(
                    f"{_named(shape)}, stage {stage}: the ranks have the key/value heads {keys}; a head that "
                    "two ranks have is sent twice"
                )


def check_sent_once(heads: Heads) -> None:
    """A rank uses a key/value head in consecutive stages, so that it is sent once."""
    for shape in SHAPES:
        _, K, C = shape
        stages = _stages(heads, shape)
        for rank in range(C):
            keys = [row[rank][1] for row in stages]
            sent = 1 + sum(a != b for a, b in pairwise(keys))
            if sent > K // C:
                raise Wrong(
                    f"{_named(shape)}, rank {rank}: its key/value heads stage by stage are {keys}; they are "
                    f"sent {sent} times, and {K // C} times suffice"
                )


def _stages(heads: Heads, shape: tuple[int, int, int]) -> list[list[tuple[int, int]]]:
    """The pair of each rank in each stage."""
    H, K, C = shape
    return [[_pair(heads(H, K, C, stage, rank)) for rank in range(C)] for stage in range(H // C)]


def _pair(answer: object) -> tuple[int, int]:
    match answer:
        case (int() as query, int() as key):
            return query, key
    raise Wrong(f"it returned {answer!r}, and must return two ints: a query head and a key/value head")


def _named(shape: tuple[int, int, int]) -> str:
    return "H={}, K={}, C={}".format(*shape)


STUB = Stub("stage_heads", checks_in(globals()))
