"""Sequence <-> heads, the global sum and the ring's step, forward and backward, on real ranks."""

import pytest
import torch
import torch.distributed as dist

from lab.errors import RecipeError
from lab.techniques import exchange
from lab.techniques.exchange import (
    AllToAll,
    Shift,
    all_to_all,
    heads_from_sequence,
    sequence_from_heads,
    sum_over_ranks,
)
from lab.techniques.ulysses_degrees import check_degree, degrees
from lab_tests.support.reference import subgroup

B, S, D = 2, 40, 10


def whole(heads):
    """The same [b, S, heads, D] on every rank."""
    return torch.randn(B, S, heads, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def exchange_and_back(heads, ranks):
    group = subgroup(ranks)
    rank, local = dist.get_rank(group), S // ranks
    x = whole(heads)
    mine = x[:, rank * local : (rank + 1) * local].clone().requires_grad_()
    there = heads_from_sequence(mine, group)
    copies = max(ranks // heads, 1)
    width = heads * copies // ranks
    first = rank * width // copies
    assert torch.equal(there, x[:, :, first : first + width]), "heads_from_sequence"
    # Each rank weighs what it got by its number: a replicated head's gradient is the sum over its replicas.
    (there * (rank + 1)).sum().backward()
    owners = torch.zeros(heads, dtype=torch.float64)
    for r in range(ranks):
        owners[r * width // copies : r * width // copies + width] += r + 1
    assert torch.equal(mine.grad, owners[:, None].expand_as(mine)), "its gradient"
    if copies == 1:
        back_in = there.detach().clone().requires_grad_()
        back = sequence_from_heads(back_in, group)
        assert torch.equal(back, mine), "sequence_from_heads"
        (back * (rank + 1)).sum().backward()
        pieces = torch.arange(1, ranks + 1).repeat_interleave(local)[:, None, None]
        assert torch.equal(back_in.grad, pieces.expand_as(back_in)), "its gradient"
    return tuple(there.shape)


def permuted_payload():
    """A send buffer that is a permuted view arrives as what it shows, not as what its memory holds."""
    group, rank = dist.group.WORLD, dist.get_rank()
    send = torch.arange(4 * 3 * 5).view(5, 3, 4).permute(2, 1, 0) + 100 * rank
    return all_to_all(send, group)


def sum_and_gradient():
    x = torch.tensor([dist.get_rank() + 1.0], requires_grad=True)
    total = sum_over_ranks(x, dist.group.WORLD)
    (3 * total).backward()
    return total.item(), x.grad.item()


def shift(ranks):
    group = subgroup(ranks)
    rank = dist.get_rank(group)
    first = Shift(torch.full((2, 3), float(rank)), group)
    second = Shift(torch.full((2, 3), float(rank) + 10), group)
    got = [first.wait(), second.wait()]
    return all(g.shape == (2, 3) and (g == (rank - 1) % ranks + 10 * i).all() for i, g in enumerate(got))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("heads", [24, 4, 2, 1])
def test_heads_and_sequence_change_places_and_back(ranks4, heads, ranks):
    if heads < ranks or heads % ranks == 0:
        shapes = ranks4.apply(exchange_and_back, heads, ranks)
        assert shapes == [(B, S, max(heads // ranks, 1), D)] * 4


def test_a_permuted_buffer_is_sent_in_its_own_order(ranks4):
    for rank, got in enumerate(ranks4.apply(permuted_payload)):
        sent = torch.arange(60).view(5, 3, 4).permute(2, 1, 0)[rank]
        assert torch.equal(got, torch.stack([sent + 100 * r for r in range(4)]))


def test_the_sum_is_everyones_and_each_differentiates_its_own_share(ranks4):
    assert ranks4.apply(sum_and_gradient) == [(10.0, 3.0)] * 4


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_step_round_the_ring_brings_the_previous_ranks(ranks4, ranks):
    assert ranks4.apply(shift, ranks) == [True] * 4


def test_an_exchange_is_waited_for_by_its_work(monkeypatch):
    """On CPU its tensors' holders say as much; on a GPU only this holds the computing stream back."""

    class Work:
        waited = 0

        def wait(self):
            self.waited += 1

    work, asked = Work(), []
    monkeypatch.setattr(dist, "all_to_all_single", lambda *a, **k: (asked.append((a, k)), work)[1])
    send, out = torch.ones(4), torch.zeros(4)
    exchange = AllToAll(send, out, "group")
    assert asked == [((out, send, None, None), {"group": "group", "async_op": True})]
    assert work.waited == 0
    assert exchange.wait() is out
    assert work.waited == 1


def test_a_collective_ends_when_a_thread_has_dropped_its_views(monkeypatch):
    """Gloo's all-gather makes views of its output, without autograd, and its thread drops them later."""
    held = []
    monkeypatch.setattr(exchange, "size_of", lambda group: 2)
    monkeypatch.setattr(exchange, "_all_gather_single", lambda whole, own, group: held.append(whole.data))
    monkeypatch.setattr(exchange.time, "sleep", lambda seconds: held.clear())
    whole = exchange.all_gather(torch.ones(3), None)
    assert whole.shape == (6,)
    assert held == []


def test_a_group_of_one_copies_nothing():
    x = whole(4)
    assert heads_from_sequence(x, None) is x
    assert sequence_from_heads(x, None) is x
    assert sum_over_ranks(x, None) is x
    assert all_to_all(x, None) is x


def test_the_degrees_that_heads_allow():
    assert degrees(32, 8) == [1, 2, 4, 8, 16, 32]
    assert degrees(24, 6) == [1, 2, 3, 6, 12, 24]
    assert degrees(28, 4) == [1, 2, 4, 28]
    assert degrees(40, 1) == [1, 2, 4, 5, 8, 10, 20, 40]
    for heads, kv_heads in ((32, 8), (24, 6), (28, 4)):
        for degree in degrees(heads, kv_heads):
            check_degree(heads, kv_heads, degree)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "degree", "named"),
    [
        (32, 8, 3, "ulysses=3: it does not divide the 32 query heads; these work: 1, 2, 4, 8, 16, 32"),
        (
            24,
            6,
            4,
            "ulysses=4: of it and the 6 key/value heads neither divides the other; these work: 1, 2, 3",
        ),
        (28, 4, 0, "ulysses=0: it does not divide"),
        (28, 4, -2, "ulysses=-2: "),
    ],
)
def test_degrees_that_heads_do_not_allow_are_refused_with_those_that_work(heads, kv_heads, degree, named):
    with pytest.raises(RecipeError, match=named):
        check_degree(heads, kv_heads, degree)
