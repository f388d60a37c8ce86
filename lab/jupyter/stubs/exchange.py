"""Notebook 02: the all-to-all that leads from a part of the tokens to a part of the heads."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from lab.jupyter.stubs.stub import Stub, Wrong, checks_in
from lab.memory.exchanges import Exchanges

Exchange = Callable[[Tensor, int], Tensor]

RANKS, TOKENS, HEADS = 4, 5, 24
"""C ranks, s tokens of one rank, H heads. C, s and H/C differ, so that two axes cannot be confused."""


def check_shape(exchange: Exchange) -> None:
    """The result is [C*s, H/C, D]."""
    expected, found = _expected(), _exchanged(exchange)
    if found.shape != expected.shape:
        raise Wrong(
            f"x is [{TOKENS}, {HEADS}, 3] on each of {RANKS} ranks, and the result is {list(found.shape)}; "
            f"it must be {list(expected.shape)}"
        )
    if found.dtype != expected.dtype:
        raise Wrong(f"x is {expected.dtype}, and the result is {found.dtype}")


def check_places(exchange: Exchange) -> None:
    """Each rank has all tokens of its own heads, in order."""
    expected, found = _expected(), _exchanged(exchange)
    differs = (found != expected).any(-1).nonzero()
    if len(differs):
        token, head = differs[0].tolist()
        if not bool(found.isfinite().all()):
            raise Wrong(f"rank {dist.get_rank()}: the result has numbers that are not finite")
        (want_token, want_head), (got_token, got_head) = (
            [round(number) for number in x[token, head, :2].tolist()] for x in (expected, found)
        )
        raise Wrong(
            f"rank {dist.get_rank()}, place [{token}, {head}]: it must be token {want_token} of head "
            f"{want_head}, and it is token {got_token} of head {got_head}"
        )


def check_traffic(exchange: Exchange) -> None:
    """It takes one all-to-all, which sends each element once."""
    with Exchanges() as seen:
        _exchanged(exchange)
    received = sum(len(one.received) for one in seen.all)
    if len(seen.all) != 1:
        raise Wrong(
            f"it called dist.all_to_all_single {len(seen.all)} times: call it once, and no other collective, "
            "which this check does not count"
        )
    if received != _here().nbytes:
        raise Wrong(f"a rank received {received} bytes; x has {_here().nbytes}, and as many suffice")


def _here() -> Tensor:
    """This rank's tokens of all heads, [s, H, 3]; an element says its token, its head, and that it exists."""
    first = dist.get_rank() * TOKENS
    return _named(range(first, first + TOKENS), range(HEADS))


def _expected() -> Tensor:
    here = HEADS // RANKS
    first = dist.get_rank() * here
    return _named(range(RANKS * TOKENS), range(first, first + here))


def _named(tokens: range, heads: range) -> Tensor:
    named = torch.ones(len(tokens), len(heads), 3, dtype=torch.float64)
    named[..., 0] = torch.tensor(tokens)[:, None]
    named[..., 1] = torch.tensor(heads)
    return named


def _exchanged(exchange: Exchange) -> Tensor:
    here = _here()
    found = exchange(here, RANKS)
    if not isinstance(found, Tensor):
        raise Wrong(f"it returned {type(found).__name__}, and must return a tensor")
    if not torch.equal(here, _here()):
        raise Wrong("it has changed x, which belongs to its caller")
    return found


STUB = Stub("exchange", checks_in(globals()), ranks=RANKS)
