"""A group of one rank that stands for N: right sizes, values made of its own, bytes counted."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh

from lab.errors import LabError
from lab.recipe.recipe import Recipe
from lab.step.loopback import Loopback, bytes_sent
from lab.step.one_rank import one_rank
from lab.techniques.exchange import Shift, heads_from_sequence, sequence_from_heads

N, ME = 6, 2
RECIPE = Recipe(ulysses=2, ring=3)  # of a ring the second rank stands: ME = ulysses


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with one_rank(RECIPE, N, "loopback") as found:
        yield found


@pytest.fixture
def own(mesh: DeviceMesh) -> Tensor:
    return torch.arange(N * 5, dtype=torch.float32)


def sent(collective: str) -> int:
    return bytes_sent()[collective]


def test_a_loopback_group_is_one_rank_of_n(mesh: DeviceMesh) -> None:
    assert isinstance(dist.group.WORLD, Loopback)
    assert (dist.get_rank(), dist.get_world_size()) == (ME, N)
    part = dist.new_group([1, ME, 4])
    assert (dist.get_rank(part), dist.get_world_size(part)) == (1, 3)


def test_all_gather(own: Tensor) -> None:
    whole = torch.full((N * own.numel(),), torch.nan)
    dist.all_gather_single(whole, own)
    assert torch.equal(whole, own.repeat(N))
    parts = [torch.full_like(own, torch.nan) for _ in range(N)]
    dist.all_gather(parts, own)
    assert all(torch.equal(part, own) for part in parts)
    assert sent("all_gather") == 2 * (N - 1) * own.nbytes


def test_all_gather_in_place(own: Tensor) -> None:
    whole = torch.full((N, own.numel()), torch.nan)
    whole[ME] = own
    dist.all_gather_single(whole.view(-1), whole[ME])
    assert torch.equal(whole, own.expand(N, -1))


def test_reduce_scatter(own: Tensor) -> None:
    mine = torch.full((5,), torch.nan)
    dist.reduce_scatter_single(mine, own)
    assert torch.equal(mine, N * own[ME * 5 : ME * 5 + 5])
    dist.reduce_scatter(mine, list(own.split(5)), op=dist.ReduceOp.MAX)
    assert torch.equal(mine, own[ME * 5 : ME * 5 + 5])
    assert sent("reduce_scatter") == 2 * (N - 1) * mine.nbytes


def test_all_reduce(own: Tensor) -> None:
    total, most = own.clone(), own.clone()
    dist.all_reduce(total)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    assert torch.equal(total, N * own)
    assert torch.equal(most, own)
    assert sent("all_reduce") == 2 * 2 * (N - 1) * own.nbytes // N


def test_all_to_all(own: Tensor) -> None:
    received = torch.full_like(own, torch.nan)
    dist.all_to_all_single(received, own)
    pieces, got = own.view(N, 5), received.view(N, 5)
    assert torch.equal(got[ME], pieces[ME])
    assert torch.equal(got.sort(0).values, pieces)  # every piece is there once
    lists = [torch.full((5,), torch.nan) for _ in range(N)]
    dist.all_to_all(lists, list(own.split(5)))
    assert torch.equal(torch.stack(lists), got)
    assert sent("all_to_all") == 2 * (N - 1) * 5 * 4


def test_a_step_round_a_ring_brings_what_was_sent(own: Tensor) -> None:
    received = Shift(own, dist.group.WORLD).wait()
    assert torch.equal(received, own)
    assert sent("all_to_all") == own.nbytes


def test_the_exchange_and_back_keeps_every_element(mesh: DeviceMesh) -> None:
    group = dist.new_group([ME, 5])
    x = torch.randn(1, 3, 8, 7, requires_grad=True)
    heads = heads_from_sequence(x, group)
    assert heads.shape == (1, 6, 4, 7)
    back = sequence_from_heads(heads, group)
    assert back.shape == x.shape
    assert torch.equal(back.flatten().sort().values, x.flatten().sort().values)
    (back * 3).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 3.0))


def test_broadcast_send_receive_and_barrier(own: Tensor) -> None:
    kept = own.clone()
    dist.broadcast(own, src=0)
    assert torch.equal(own, kept)
    early = torch.full_like(own, torch.nan)
    dist.recv(early, src=1)
    assert torch.equal(early, torch.zeros_like(own)), "nothing was sent yet"
    dist.isend(own, dst=3)
    own += 1
    late = torch.full_like(own, torch.nan)
    dist.irecv(late, src=1).wait()
    assert torch.equal(late, kept), "as it was when it was sent"
    dist.barrier()
    assert (sent("broadcast"), sent("send")) == (own.nbytes, own.nbytes)


def test_functional_collectives_reach_a_loopback_group(own: Tensor) -> None:
    group = dist.group.WORLD
    assert torch.equal(functional.all_reduce(own, "sum", group), N * own)
    assert torch.equal(functional.all_gather_single(own, 0, group), own.repeat(N))
    assert torch.equal(functional.reduce_scatter_single(own, "sum", 0, group), N * own[ME * 5 : ME * 5 + 5])
    assert functional.all_to_all_single(own, None, None, group).isfinite().all()


def test_no_gradient_flows_through_a_collective(own: Tensor) -> None:
    whole = torch.empty(N * own.numel())
    dist.all_gather_single(whole, own.requires_grad_())
    assert not whole.requires_grad


def test_a_process_of_a_group_is_refused(mesh: DeviceMesh) -> None:
    from lab.step import one_rank as module

    # Not by waiting for its own turn: another thread's is meant by the lock.
    module._TURN.release()
    try:
        with pytest.raises(LabError, match="one of a group of ranks"), one_rank(RECIPE, N, "loopback"):
            pass
    finally:
        module._TURN.acquire()
