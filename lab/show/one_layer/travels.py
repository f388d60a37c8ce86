"""Where bytes are while they move between ranks, or between the device and the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lab.show.one_layer.frames import LayerFrames
from lab.show.one_layer.names import Moving


class Part(NamedTuple):
    """A part of a box.

    Attributes:
        lane: The index of the rank's lane.
        box: The index of the box in it.
        start: Where the part begins, as a fraction of the box.
        length: How long it is, as a fraction of the box.
    """

    lane: int
    box: int
    start: float
    length: float


class Flight(NamedTuple):
    """A part of a box that becomes a part of another."""

    source: Part
    target: Part


def flights(layer: LayerFrames, frame: int) -> Iterator[Flight]:
    """Yield what moves between the boxes of the lanes in a frame."""
    travels = [lane.frames[frame].travel for lane in layer.lanes]
    for there, travel in enumerate(travels):
        if travel is None:
            continue
        if travel.kind in (Moving.TO_HOST, Moving.FROM_HOST):
            if travel.sources and travel.targets:
                for target in travel.targets:
                    yield Flight(Part(there, travel.sources[0], 0.0, 1.0), Part(there, target, 0.0, 1.0))
            continue
        targets = travel.targets or travel.sources
        for here, other in enumerate(travels):
            sources = (other.sources or other.targets) if other is not None else ()
            if not sources or not targets or not _meet(layer, travel.kind, here, there):
                continue
            sent, received = _parts(layer, travel.kind, here, there)
            yield Flight(Part(here, sources[0], *sent), Part(there, targets[0], *received))


def arrivals(layer: LayerFrames, frame: int) -> set[tuple[int, int]]:
    """Return the lanes and boxes that hold nothing before this frame, in which a first move fills them."""
    return {
        (flight.target.lane, flight.target.box)
        for flight in flights(layer, frame)
        if _first_fill(layer, flight.target) == frame
    }


def _first_fill(layer: LayerFrames, part: Part) -> int | None:
    """Return the first frame that moves bytes into a box; None if it held what is moved before."""
    for number, frame in enumerate(layer.lanes[part.lane].frames):
        travel = frame.travel
        if travel is None or part.box not in (*travel.sources, *travel.targets):
            continue
        # A gather reads the rank's own shard in the memory that it fills.
        fills = part.box not in travel.sources or travel.kind is Moving.ALL_GATHER
        return number if fills else None
    return None


def _meet(layer: LayerFrames, kind: Moving, here: int, there: int) -> bool:
    """Return whether a rank sends to another in such a collective."""
    degree = layer.job.recipe.ulysses
    block = degree * layer.job.recipe.ring
    if kind is Moving.ALL_TO_ALL:
        return here != there and here // degree == there // degree
    if kind is Moving.RING:
        return here != there and here // block == there // block and (here + degree - there) % block == 0
    if kind in (Moving.GATHER, Moving.SCATTER):
        return here != there and here // block == there // block and (here - there) % degree == 0
    return here != there


def _parts(
    layer: LayerFrames, kind: Moving, here: int, there: int
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return which part is sent by one rank, and which is received by another: start and length of each."""
    if kind is Moving.ALL_TO_ALL:
        degree = layer.job.recipe.ulysses
        return ((there % degree) / degree, 1 / degree), ((here % degree) / degree, 1 / degree)
    if kind in (Moving.GATHER, Moving.SCATTER):
        ring = layer.job.recipe.ring
        sender, receiver = (((rank // layer.job.recipe.ulysses) % ring) / ring for rank in (here, there))
        if kind is Moving.GATHER:
            return (0.0, 1.0), (sender, 1 / ring)
        return (receiver, 1 / ring), (0.0, 1.0)
    each = 1 / layer.job.ranks
    if kind is Moving.ALL_GATHER:
        return (here * each, each), (here * each, each)
    if kind is Moving.REDUCE_SCATTER:
        return (there * each, each), (0.0, 1.0)
    return (0.0, 1.0), (0.0, 1.0)
