"""From the plans of a step at some lengths of the context to its plans at others, exactly.

The operators of a planned step do not depend on the number of tokens, as long as each loop over tiles has a
first tile, one that stands for several, and a last one. Then the bytes of each storage, and what each row
holds inside its kernel, are affine functions of the tokens: two lengths give them at every other. Operations
and bytes that are moved are quadratic: three lengths give them. ``LengthClass`` says which lengths are alike.

This module imports neither torch nor transformers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import gcd, lcm
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from lab.memory.moment import Op
from lab.memory.storages import Integers, TensorKind
from lab.memory.timeline import Timeline
from lab.planning.costs import Costs, Work, price
from lab.planning.cuda_workspace import BLOCK
from lab.planning.hardware import Hardware
from lab.recipe.jobs import Job, Machine
from lab.recipe.ladder import ATTENTION_TILE, TILE
from lab.shape import Shape
from lab.techniques.limits import HOST_PAGE, QUERY_BLOCK, SINK_PIECE, WINDOW_PIECE
from lab.techniques.ulysses_degrees import token_multiple

LENGTHS = 3
"""The lengths that give the plan at every other of their class."""

FEWEST_TILES = 4
"""A loop over fewer tiles may have other operators."""

ALIGNED = 256
"""With a multiple of so many local tokens, parts of tiles are whole, and tensors on the host whole pages."""

T = TypeVar("T")

_NUMBER = re.compile(r"\d+")
_COLUMNS = ("first", "end", "category", "module", "phase", "step")


class Step(NamedTuple):
    """A planned step, for any device.

    Attributes:
        timeline: What the rank held, in bytes of tensors. Its clock counts entries of ``work``.
        work: The work of the operators.
    """

    timeline: Timeline
    work: Work

    def priced(self, device: Hardware, machine: Machine, ranks: int) -> tuple[Timeline, Costs]:
        """Return the timeline with the blocks and seconds of a machine with this device, and the costs."""
        costs, until = price(self.work, device, ranks, machine.ranks_per_node)
        timeline = self.timeline.with_seconds(until[self.timeline.seconds.astype(np.int64)])
        return (timeline.with_blocks(int(BLOCK.value)) if machine.workspace else timeline), costs


@dataclass(frozen=True)
class LengthClass:
    """The lengths at which a job's step has the same operators.

    Attributes:
        recipe: The recipe's fields. A tile that follows the length has the number of tiles in its place.
        grid: The distance of two lengths, in tokens.
        residue: The remainder of a length.
        above: Whether the length is above sizes of the model and of kernels.
        only: The one length, where no other is alike; None where others are.
    """

    recipe: dict[str, Any]
    grid: int
    residue: int
    above: tuple[bool, ...]
    only: int | None


def length_class(job: Job, shape: Shape) -> LengthClass:
    """Return the class of a job's length.

    Args:
        job: The job.
        shape: The shape of its model.
    """
    recipe, fields = job.recipe, job.recipe.to_json()
    shards, multiple = recipe.ulysses * recipe.ring, token_multiple(recipe.ulysses, recipe.ring)
    tokens = -(-job.tokens // multiple) * multiple
    local, rows = tokens // shards, -(-job.rows * shards // job.ranks)
    # Of each token, a tensor on the host has a multiple of so many bytes; a kernel's LSE has 4.
    token_bytes = gcd(HOST_PAGE, 2 * shape.E)
    if recipe.offload == "attention" or recipe.stream:
        token_bytes = gcd(token_bytes, 4, 2 * shape.D)
    pages = lcm(ALIGNED, HOST_PAGE // token_bytes if recipe.offload != "none" else 1)
    grid = base = shards * pages
    few = job.documents is not None
    # By name: the tokens that are divided, those of the context to one of them, and the largest tile.
    tiles = [(name, local, shards, TILE) for name in ("mlp_tile", "norm_tile", "stream")]
    tiles.append(("loss_tile", rows * local, shards, TILE))
    # A kernel of a ring has the queries and the keys of a rank, or half of them; one of a gather, half.
    gathers, piece = recipe.ring_exchange == "gather", tokens // (2 * recipe.ring)
    pieces = (2 * recipe.ring,) if gathers else (recipe.ring, 2 * recipe.ring) if recipe.ring > 1 else (1,)
    tiles += [("attention_tile", tokens // piece, piece, ATTENTION_TILE) for piece in pieces]
    parts, ones, several = False, set[str](), set[str]()
    for name, length, to_one, largest in tiles:
        tile = getattr(recipe, name)
        if tile is None:
            continue
        whole = length // rows if name == "loss_tile" else length
        count = -(-length // tile)
        if tile < largest and 4 * tile == whole:
            # The tile of a named recipe, which is a fourth of a short context.
            fields[name] = "a fourth"
        elif count == 1:
            ones.add(name)
        else:
            several.add(name)
            few |= count < FEWEST_TILES
            grid, parts = lcm(grid, tile * to_one), True
    fields |= dict.fromkeys(ones - several, "one")
    if "a fourth" in fields.values():
        grid = lcm(grid, 4 * base)
    at_once = True
    # Streamed layers without chunks have one of all heads.
    chunk = recipe.head_chunk or (shape.H if recipe.stream else None)
    if chunk and (shape.head_norms in ("own", "all") or shape.clipped):
        # ``LayerSettings.tokens_at_once``: a part of the local tokens, in which tiles are divided again.
        eighths = 8 * shape.H // gcd(chunk, 8 * shape.H)
        grid = lcm(grid, eighths * base)
        at_once = local // eighths >= max(t for t in (recipe.stream, recipe.norm_tile, 1) if t)
        few |= parts and not at_once
    limits = {QUERY_BLOCK}
    for window in {window for window in shape.windows if window is not None}:
        # ``window.py`` computes as many whole windows at once as ``WINDOW_PIECE`` has.
        whole = max(1, WINDOW_PIECE // window) * window
        limits |= {window, whole}
        if tokens > window:
            # A gather has the windows of a piece, and W - 1 tokens before it.
            few |= (piece if gathers else tokens) // whole < FEWEST_TILES
            grid = lcm(grid, whole * (2 * recipe.ring if gathers else 1))
    if shape.sinks:
        limits.add(SINK_PIECE)
        few |= SINK_PIECE < tokens // recipe.ring < FEWEST_TILES * SINK_PIECE
        grid = lcm(grid, SINK_PIECE * recipe.ring)
    sizes = (tokens, tokens // recipe.ring, tokens // (2 * recipe.ring), local)
    above = (at_once, *(size > limit for limit in sorted(limits) for size in sizes))
    only = job.tokens if few else None
    return LengthClass(fields, grid, job.tokens % grid, above, only)


@dataclass(frozen=True, eq=False)
class Scaling:
    """The steps of a job at up to ``LENGTHS`` lengths of one class.

    Attributes:
        tokens: The lengths, increasing. The step is not extrapolated to shorter ones.
        steps: The step at each.
        exact: Whether bytes that are no integers raise LookupError. Without it, they are rounded down: a
            length may then be of another class, and its bytes are near the true ones.
        closed: Whether no other length follows from these, since the step at one did not.
    """

    tokens: tuple[int, ...]
    steps: tuple[Step, ...]
    exact: bool = True
    closed: bool = False

    def with_step(self, tokens: int, step: Step) -> Scaling:
        """Return the scaling with one more step; of more than ``LENGTHS``, one in the middle is left out.

        Raises:
            LookupError: The step is not what the others say of its length, has other operators, or comes to
                a closed scaling.
        """
        if self.closed:
            raise LookupError(tokens)
        steps = dict(zip(self.tokens, self.steps, strict=True)) | {tokens: step}
        both = sorted(steps.items(), key=lambda pair: pair[0])
        if len(both) > LENGTHS:
            del both[1]
        kept, of_kept = zip(*both, strict=True)
        found = replace(self, tokens=kept, steps=of_kept)
        if len(both) > 1:
            found.check()
        return found

    def check(self) -> None:
        """Check that the steps have the same operators, and that a third one follows from two.

        Raises:
            LookupError: They have not, or it does not.
        """
        first = self.steps[0]
        for step in self.steps[1:]:
            _check_alike(first, step)
        of_two = replace(self, tokens=self.tokens[:2], steps=self.steps[:2])
        for tokens, step in zip(self.tokens[2:], self.steps[2:], strict=True):
            if not _same_bytes(of_two.timeline_at(tokens), step.timeline):
                raise LookupError(tokens)
            for column in ("flops", "nbytes"):
                one, two, three = (getattr(step.work, column) for step in self.steps)
                if np.any((one == two) & (one != three)):
                    raise LookupError(tokens)

    def agrees(self, tokens: int, step: Step) -> bool:
        """Return whether the step at a length that it ``covers`` is the given one, to the byte."""
        own = self.at(tokens)
        return (
            _same_bytes(own.timeline, step.timeline)
            and np.array_equal(own.work.kind, step.work.kind)
            and np.array_equal(own.work.flops, step.work.flops)
            and np.array_equal(own.work.nbytes, step.work.nbytes)
        )

    def covers(self, tokens: int) -> bool:
        """Return whether the step at a length of this class is known, in all."""
        follows = len(self.tokens) == LENGTHS and tokens >= self.tokens[0] and not self.closed
        return follows or tokens in self.tokens

    def at(self, tokens: int) -> Step:
        """Return the step at a length of this class that it ``covers``."""
        if tokens in self.tokens:
            return self.steps[self.tokens.index(tokens)]
        return Step(self.timeline_at(tokens), self._work_at(tokens))

    def held(self, tokens: int, machine: Machine) -> Timeline:
        """Return the timeline at a length in a machine's memories, from at least two lengths."""
        timeline = self.timeline_at(tokens)
        if machine.workspace:
            timeline = timeline.with_blocks(int(BLOCK.value))
        return timeline if machine.disk is None else timeline.with_tiles_on_disk()

    def timeline_at(self, tokens: int) -> Timeline:
        """Return the timeline at a length: its own, or that from two lengths."""
        if tokens in self.tokens:
            return self.steps[self.tokens.index(tokens)].timeline
        one, two = (step.timeline for step in self.steps[:2])
        op, pairs = self._ops
        kind, kinds = self._kinds
        storages = replace(
            one.storages,
            size=self._affine(one.storages.size, two.storages.size, tokens),
            kind=kind,
            kinds=tuple(self._kind(a, b, tokens) for a, b in kinds),
        )
        return replace(
            one,
            device=self._affine(one.device, two.device, tokens),
            host=self._affine(one.host, two.host, tokens),
            op=op,
            ops=tuple(Op(a.name, self._text(a.shapes, b.shapes, tokens)) for a, b in pairs),
            storages=storages,
        )

    @cached_property
    def _ops(self) -> tuple[Integers, list[tuple[Op, Op]]]:
        """The operator of each row as an index, and the operators at the two first lengths."""
        a, b = (step.timeline for step in self.steps[:2])
        return _joint(a.op, a.ops, b.op, b.ops)

    @cached_property
    def _kinds(self) -> tuple[Integers, list[tuple[TensorKind, TensorKind]]]:
        a, b = (step.timeline.storages for step in self.steps[:2])
        return _joint(a.kind, a.kinds, b.kind, b.kinds)

    def _affine(self, one: Any, two: Any, tokens: int) -> Any:
        """Return an integer, or an array of integers, at a length, from those at the two first lengths.

        Raises:
            LookupError: It is no integer; see ``exact``.
        """
        first, second = self.tokens[:2]
        divisor = gcd(tokens - first, second - first)
        times, parts = (tokens - first) // divisor, (second - first) // divisor
        each, rest = divmod(two - one, parts)
        if self.exact and np.any(rest):
            raise LookupError(tokens)
        return one + each * times + rest * times // parts

    def _text(self, one: str, two: str, tokens: int) -> str:
        """Return a text of sizes at a length."""
        if one == two:
            return one
        others = map(int, _NUMBER.findall(two))
        return _NUMBER.sub(lambda match: str(self._affine(int(match[0]), next(others), tokens)), one)

    def _kind(self, one: TensorKind, two: TensorKind, tokens: int) -> TensorKind:
        pairs = zip(one.shape, two.shape, strict=True)
        return one._replace(shape=tuple(self._affine(a, b, tokens) for a, b in pairs))

    def _work_at(self, tokens: int) -> Work:
        """Return the work at a length: the parabola through three lengths."""
        works = [step.work for step in self.steps]
        a, b, c = self.tokens
        ab, bc, ac, to_a, to_b = b - a, c - b, c - a, tokens - a, tokens - b

        @cache
        def at(one: float, two: float, three: float) -> float:
            # Newton's form in whole numbers: floats lose digits far from the three lengths.
            first, second = int(two) - int(one), int(three) - int(two)
            above = to_a * (ac * bc * first + to_b * (ab * second - bc * first))
            return int(one) + _rounded_quotient(above, ab * bc * ac)

        def column(name: str) -> npt.NDArray[np.float64]:
            columns = (getattr(work, name).tolist() for work in works)
            return np.array([at(*counts) for counts in zip(*columns, strict=True)], dtype=np.float64)

        return replace(works[0], flops=column("flops"), nbytes=column("nbytes"))


def _rounded_quotient(above: int, below: int) -> int:
    return (2 * above + below) // (2 * below)


def _joint(
    first: Integers, of_first: Sequence[T], second: Integers, of_second: Sequence[T]
) -> tuple[Integers, list[tuple[T, T]]]:
    """Return an index into pairs of entries of two tables, and the pairs."""
    pairs, index = np.unique(first * len(of_second) + second, return_inverse=True)
    return index.ravel(), [
        (of_first[p // len(of_second)], of_second[p % len(of_second)]) for p in pairs.tolist()
    ]


def _same_bytes(one: Timeline, two: Timeline) -> bool:
    """Return whether two timelines have the same operators, shapes, bytes and storages."""
    ops = [[timeline.ops[i] for i in timeline.op.tolist()] for timeline in (one, two)]
    return (
        np.array_equal(one.device, two.device)
        and np.array_equal(one.host, two.host)
        and np.array_equal(one.storages.size, two.storages.size)
        and ops[0] == ops[1]
    )


def _check_alike(one: Step, two: Step) -> None:
    """Check that two steps have the same operators, storages and work, but for their sizes.

    Raises:
        LookupError: They have not.
    """
    a, b = one.timeline, two.timeline
    alike = (
        a.phases == b.phases
        and a.modules == b.modules
        and all(np.array_equal(getattr(a, n), getattr(b, n)) for n in ("seconds", "phase", "module", "step"))
        and all(np.array_equal(getattr(a.storages, n), getattr(b.storages, n)) for n in (*_COLUMNS, "moves"))
        and np.array_equal(one.work.kind, two.work.kind)
        and np.array_equal(one.work.other, two.work.other)
        and one.work.peers == two.work.peers
    )
    if not alike:
        raise LookupError("operators")
    for first, second in _joint(a.op, a.ops, b.op, b.ops)[1]:
        if first.name != second.name or len(_NUMBER.findall(first.shapes)) != len(
            _NUMBER.findall(second.shapes)
        ):
            raise LookupError(first, second)
    for kind, other in _joint(a.storages.kind, a.storages.kinds, b.storages.kind, b.storages.kinds)[1]:
        if kind[1:] != other[1:] or len(kind.shape) != len(other.shape):
            raise LookupError(kind, other)
