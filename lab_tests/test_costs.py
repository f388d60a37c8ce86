"""The costs of a step: exact numbers of operations and bytes, each against a formula."""

import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from transformers import Qwen2Config

import lab
from lab import models
from lab.planning.costs import Costs, price
from lab.planning.hardware import hardware
from lab.planning.work_counter import WorkCounter
from lab.recipe.recipe import Recipe
from lab.techniques.exchange import AllToAll, all_to_all
from lab.techniques.experts import grouped_outer_product, grouped_product
from lab_tests.support.costs import (
    ATTENTION,
    FP32,
    RANKS,
    D,
    E,
    H,
    I,
    K,
    L,
    S,
    V,
    model_config,
    planned_costs,
)
from lab_tests.support.long_run import mostly_long
from lab_tests.support.reference import config

LAYER = 2 * E * H * D + 2 * E * K * D + 3 * E * I
MATMULS = L * LAYER + V * E
NORMS = L * 2 * E + E
LAYER_BYTES, ROOT_BYTES = FP32 * (LAYER + 2 * E), FP32 * (2 * V * E + E)


def sent_bytes(nbytes: int, group: int = RANKS) -> int:
    """What of a payload leaves the rank."""
    return nbytes * (group - 1) // group


@pytest.mark.parametrize("rows", [1, 3])
def test_flops_of_a_plain_step(rows):
    assert planned_costs(1, rows=rows).flops == rows * (6 * MATMULS * S + L * ATTENTION * 7 // 2)


def test_a_rank_of_four_does_a_fourth():
    assert planned_costs(fsdp=True, ulysses=4).flops * 4 == planned_costs(1).flops


def test_biases_multiply_nothing():
    # Qwen2 takes head_dim from E / H: it is that of this test's shapes only where it is given.
    assert planned_costs(1, family=Qwen2Config).flops == planned_costs(1).flops


def test_checkpointing_runs_every_attention_and_matmul_twice_but_the_last_of_a_layer():
    again = 2 * S * (LAYER - I * E)  # nothing that backward needs comes after down_proj
    assert planned_costs(1, checkpoint=True).flops - planned_costs(1).flops == L * (again + ATTENTION)


def test_upipe_computes_no_attention_more_than_ulysses():
    ulysses, upipe = ({"ulysses": 4, "checkpoint": True, **more} for more in ({}, {"head_chunk": 8}))
    extra = planned_costs(**upipe).flops - planned_costs(**ulysses).flops
    assert extra % (2 * S // 4) == 0
    assert extra < L * ATTENTION // 4


def test_replicated_ranks_sum_every_gradient():
    parameters = [E * H * D] * 2 + [E * K * D] * 2 + [E * I] * 3 + [E] * 2
    summed = L * sum(2 * sent_bytes(FP32 * n) for n in parameters)
    summed += 2 * sent_bytes(FP32 * V * E) * 2 + 2 * sent_bytes(FP32 * E)
    the_loss = 2 * sent_bytes(FP32)
    assert planned_costs().link_bytes == summed + the_loss


def test_fsdp_gathers_a_layer_twice_and_the_rest_once():
    # Summed beside the loss: the square of the norm of the gradients.
    the_loss = 2 * sent_bytes(FP32) + 2 * sent_bytes(FP32)
    layers = L * 3 * sent_bytes(LAYER_BYTES)  # gathered forward, gathered backward, gradients scattered
    assert planned_costs(fsdp=True).link_bytes == layers + 2 * sent_bytes(ROOT_BYTES) + the_loss
    halves = planned_costs(fsdp=True, compute_dtype="bfloat16")
    gathered = (2 * L * sent_bytes(LAYER_BYTES) + sent_bytes(ROOT_BYTES)) // 2
    scattered = L * sent_bytes(LAYER_BYTES) + sent_bytes(ROOT_BYTES)
    assert halves.link_bytes == gathered + scattered + the_loss


@pytest.mark.long
def test_replicas_gather_among_their_ranks_and_sum_shards_between_them():
    """Two replicas of four ranks, each on a node of its own: the sums alone use the network."""
    knobs = {"ranks": 8, "fsdp": True, "replicas": 2}
    within = L * 3 * sent_bytes(LAYER_BYTES) + 2 * sent_bytes(ROOT_BYTES) + 2 * sent_bytes(FP32)
    between = 2 * sent_bytes((L * LAYER_BYTES + ROOT_BYTES) // 4, 2)
    one, two = planned_costs(**knobs), planned_costs(ranks_per_node=4, **knobs)
    assert one.link_bytes == two.link_bytes == within + between
    h100 = hardware("h100")
    links = h100.link.value * h100.link_share.value
    network = h100.network.value * h100.network_share.value
    assert two.link_seconds - one.link_seconds == pytest.approx(between * (1 / network - 1 / links))


def test_ulysses_exchanges_q_k_v_and_out_both_ways():
    for degree in (2, 4, 8):  # K = 4: with 8 ranks each key and value head goes to two
        more = {"ranks": 8, "fsdp": True}
        sent = planned_costs(ulysses=degree, **more).link_bytes - planned_costs(**more).link_bytes
        payload = FP32 * (S // degree) * D * (2 * H + 2 * max(K, degree))
        assert sent == 2 * L * sent_bytes(payload, degree)


@pytest.mark.parametrize("ring", mostly_long([2, 4], 1))
def test_a_ring_sends_to_one_rank(ring):
    sent = planned_costs(fsdp=True, ring=ring).link_bytes - planned_costs(fsdp=True).link_bytes
    kv = 2 * (S // ring) * K * D * FP32
    assert sent == L * ((ring - 1) * kv + (ring - 1) * kv + ring * kv)


def test_copies_slow_computation_down():
    """Seen red with the larger of the two alone."""
    costs = Costs(device_seconds=3.0, host_seconds=2.0, host_bytes=8, slowed_seconds=0.5)
    assert costs.seconds == 3.5
    assert replace(costs, host_seconds=5.0).seconds == 5.0
    assert replace(costs, disk_seconds=7.0).seconds == 7.0
    h100 = hardware("h100")
    # Copies of memory that is not pinned take longer, and slow computation down no more than others.
    assert costs.with_pageable(h100, 0.5).slowed_seconds == 0.5
    assert h100.copy_slowdown.value == 0.0366 / 0.3067
    offload = planned_costs(checkpoint=True, offload="inputs")
    assert offload.slowed_seconds == h100.copy_slowdown.value * offload.host_seconds > 0


class Priced(WorkCounter):
    """The work of one rank of eight on an H100, priced whenever it is asked for."""

    @property
    def total(self) -> Costs:
        return price(self.work(), hardware("h100"), 8, 8)[0]

    def seconds(self) -> float:
        return self.total.device_seconds


@pytest.fixture
def counter(eight):
    """What this rank of eight does is counted, as if on an H100; nothing is computed."""
    with FakeTensorMode(), Priced() as counted:
        yield counted


SENT, SQUARE = 2**20, 4096


def start_exchange() -> AllToAll:
    send = torch.empty(8, SENT)
    return AllToAll(send, torch.empty_like(send), dist.group.WORLD)


def travel() -> float:
    h100 = hardware("h100")
    return 7 * SENT * FP32 / (h100.link.value * h100.link_share.value)


def compute(counted, rows: int) -> float:
    """Seconds of so many rows times a square matrix."""
    before, x = counted.seconds(), torch.empty(SQUARE, SQUARE)
    x[:rows] @ x
    return counted.seconds() - before


@pytest.mark.parametrize("rows", [64, SQUARE])
def test_an_exchange_is_waited_for_where_its_result_is_used(counter, rows):
    exchange = start_exchange()
    meanwhile = compute(counter, rows)
    assert (meanwhile < travel()) == (rows == 64)
    assert counter.total.link_seconds == 0
    exchange.wait()
    assert counter.seconds() == pytest.approx(max(travel(), meanwhile))
    waited = counter.total.link_seconds
    assert waited == pytest.approx(max(travel() - meanwhile, 0))
    # What comes after hides nothing of it.
    compute(counter, rows)
    assert counter.total.link_seconds == waited


def test_several_exchanges_follow_each_other_and_are_waited_for_one_by_one(counter):
    first, second, third = start_exchange(), start_exchange(), start_exchange()
    assert counter.seconds() == 0
    first.wait()
    assert counter.seconds() == counter.total.link_seconds == pytest.approx(travel())
    # Long enough for the second, and not for the third.
    meanwhile = 0.0
    while meanwhile < 1.2 * travel():
        meanwhile += compute(counter, 64)
    assert meanwhile < 1.9 * travel()
    second.wait()
    assert counter.total.link_seconds == pytest.approx(travel())
    third.wait()
    assert counter.seconds() == pytest.approx(3 * travel())
    assert counter.total.link_seconds == pytest.approx(3 * travel() - meanwhile)


def test_an_exchange_that_is_waited_for_at_once_waits_for_the_links(counter):
    exchange, send = start_exchange(), torch.empty(8, SENT)
    all_to_all(send, dist.group.WORLD)
    assert counter.seconds() == pytest.approx(2 * travel())
    exchange.wait()
    assert counter.seconds() == counter.total.link_seconds == pytest.approx(2 * travel())


def test_an_exchange_that_goes_ahead_costs_what_attention_does_not_hide():
    h100 = hardware("h100")
    links, network = (
        rate.value * share.value
        for rate, share in ((h100.link, h100.link_share), (h100.network, h100.network_share))
    )
    knobs = {"ulysses": 4, "head_chunk": 8, "checkpoint": True}
    for more in ({}, {"ranks_per_node": 1}):
        late, ahead = planned_costs(**knobs, **more), planned_costs(**knobs, overlap=True, **more)
        assert (ahead.flops, ahead.link_bytes) == (late.flops, late.link_bytes)
        hidden = late.link_seconds - ahead.link_seconds
        # Two stages of three go ahead: queries forward, again, and in backward, there with dout and out.
        queries = (H // 8 - 1) * sent_bytes(FP32 * (S // 4) * 8 * D)
        longest = L * 5 * queries / (network if more else links)
        assert 0 < hidden < longest
        # What goes ahead is copied once more.
        assert ahead.device_seconds - ahead.link_seconds >= late.device_seconds - late.link_seconds > 0


def test_a_rings_steps_hide_behind_attention():
    """All steps hide but the last of backward, which sends the sums of the gradients back."""
    h100, model, tokens, layers = hardware("h100"), model_config(), 2**20, 3

    def waiting(ring: int) -> float:
        return lab.plan(model, Recipe(fsdp=True, ring=ring), tokens=tokens, ranks=RANKS).costs.link_seconds

    sums = 2 * (tokens // RANKS) * K * D * FP32
    last = layers * sums / (h100.link.value * h100.link_share.value)
    assert waiting(4) - waiting(1) == pytest.approx(last, rel=1e-6)


def test_offload_copies_all_layer_inputs_but_the_last_to_and_from_the_host():
    offloaded = planned_costs(fsdp=True, ulysses=4, checkpoint=True, offload="inputs")
    one_input = FP32 * (S // 4) * E
    assert offloaded.host_bytes == 2 * (L - 1) * one_input
    h100 = hardware("h100")
    rate = h100.host_link.value * h100.host_link_share.value
    assert offloaded.host_seconds == pytest.approx(offloaded.host_bytes / rate, rel=1e-12)
    kept = planned_costs(fsdp=True, ulysses=4, checkpoint=True)
    assert (kept.host_bytes, kept.host_seconds) == (0, 0.0)
    assert offloaded.device_seconds == pytest.approx(kept.device_seconds, rel=1e-12)


@pytest.mark.parametrize("ulysses", mostly_long([1, 2, 4], 1))
def test_groups_across_nodes_use_the_network(ulysses):
    """On nodes of two ranks: gathers with both adapters, exchanges with each rank's own."""
    h100 = hardware("h100")
    links = h100.link.value * h100.link_share.value
    network = h100.network.value * h100.network_share.value
    one = planned_costs(fsdp=True, ulysses=ulysses)
    two = planned_costs(fsdp=True, ulysses=ulysses, ranks_per_node=2)
    assert (one.flops, one.link_bytes, one.host_bytes) == (two.flops, two.link_bytes, two.host_bytes)
    gathered = planned_costs(fsdp=True).link_bytes
    exchanged = (one.link_bytes - gathered) * (ulysses == 4)
    # Of what a rank exchanges with three others, two are on the other node.
    slower = gathered * (1 / (2 * network) - 1 / links) + exchanged * (2 / 3 / network - 1 / links)
    assert two.device_seconds - one.device_seconds == pytest.approx(slower, rel=1e-3)


def test_matmuls_take_fp32_at_half_the_rate_and_devices_differ():
    a100, h100 = planned_costs(device="a100"), planned_costs()
    assert a100.seconds > h100.seconds > planned_costs(compute_dtype="bfloat16").seconds * 0.9
    assert planned_costs(device="h200").flops == h100.flops


def test_copies_run_beside_the_device():
    assert Costs(device_seconds=4.0, host_seconds=5.0).seconds == 5.0
    assert Costs(device_seconds=5.0, host_seconds=4.0).seconds == 5.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_products_of_experts_take_the_time_of_one_matrix(counter, dtype):
    """Two experts have as many operations as one: each row is multiplied by one matrix of its dtype."""
    rows, matrix = torch.empty(SQUARE, SQUARE, dtype=dtype), torch.empty(SQUARE, SQUARE, dtype=dtype)
    experts, ends = torch.empty(2, SQUARE, SQUARE, dtype=dtype), torch.empty(2, dtype=torch.int32)
    found = []
    for run in (
        lambda: rows @ matrix,
        lambda: grouped_product(rows, experts, ends),
        lambda: grouped_product(rows, experts, ends, experts[:, 0]),
        lambda: grouped_outer_product(rows, rows, ends),
    ):
        before = counter.total
        run()
        found.append((counter.total.flops - before.flops, counter.seconds() - before.device_seconds))
    assert found == [(2 * SQUARE**3, pytest.approx(found[0][1], rel=1e-9))] * 4


def test_upipe_runs_the_projections_of_q_k_and_v_again():
    again = 2 * S * (E * H * D + 2 * E * K * D)
    assert planned_costs(1, head_chunk=H).flops - planned_costs(1).flops == L * again


def _cases():
    """Each dense product of torch as it may be called, with its operations."""
    n, k, m, b = 6, 5, 7, 3
    x, w, out, row, column = (torch.empty(size) for size in ((n, k), (k, m), (n, m), k, n))
    xs, ws, outs = (torch.empty(b, *t.shape) for t in (x, w, out))
    whole, of_row = 2 * n * k * m, 2 * n * k
    yield from (("mm", of, whole) for of in (lambda: x @ w, lambda: torch.mm(x, w, out=out)))
    yield from (("bmm", of, b * whole) for of in (lambda: xs @ ws, lambda: torch.bmm(xs, ws, out=outs)))
    yield "addmm", lambda: torch.addmm(out, x, w), whole
    yield "addmm", lambda: torch.addmm(out, x, w, beta=2, alpha=3, out=out), whole
    yield "addmm_", lambda: out.addmm_(x, w), whole
    yield "baddbmm", lambda: torch.baddbmm(outs, xs, ws), b * whole
    yield "baddbmm_", lambda: outs.baddbmm_(xs, ws), b * whole
    yield "addbmm", lambda: torch.addbmm(out, xs, ws), b * whole
    yield "addbmm_", lambda: out.addbmm_(xs, ws), b * whole
    yield "_addmm_activation", lambda: torch._addmm_activation(out[0], x, w), whole
    yield "mv", lambda: x @ row, of_row
    yield "addmv", lambda: torch.addmv(column, x, row), of_row
    yield "addmv_", lambda: column.addmv_(x, row), of_row
    yield "addr", lambda: torch.addr(x, column, row), of_row
    yield "addr_", lambda: x.addr_(column, row), of_row
    yield "dot", lambda: row @ row, 2 * k
    yield "vdot", lambda: torch.vdot(row, row), 2 * k
    eight = torch.empty(16, 8, dtype=torch.bfloat16)
    grouped = torch.nn.functional.grouped_mm
    ends = torch.tensor([9, 16], dtype=torch.int32)
    yield "_grouped_mm", lambda: grouped(eight, torch.empty(2, 8, 8).bfloat16(), offs=ends), 2 * 16 * 8 * 8


def test_every_dense_product_of_torch_is_counted(counter):
    for name, run, flops in _cases():
        before = counter.total.flops
        run()
        assert counter.total.flops - before == flops, name


NO_DENSE_PRODUCT = {
    "sparse": r"_?(cslt_)?sparse_.*|hspmm|sspaddmm",
    "of integers, or with scales": r"_int_mm|_scaled_.*|_weight_int.*|_dyn_quant_.*|_mixed_dtypes_linear",
    "of another library or device": r"mkldnn_.*|_foreach_mm",
    "of nested tensors": r"linear_backward|matmul_backward",
    "of three factors, or between pixels": r"_trilinear|.*upsample_.*|_compute_linear_combination",
}
"""Products that no step of the lab runs, by the reason."""


def test_the_products_of_torch_are_known():
    """Those that are made of others, as ``matmul`` is, are not seen by a counter."""
    named = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    made = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
    names, composite = (
        {name.removeprefix("aten::").partition(".")[0] for name in of} for of in (named, made)
    )
    products = {
        name
        for name in names - composite
        if re.search(r"(mm|mv|dot|addr|matmul\w*|linear\w*|_mm_\w+|mm_activation)_?$", name)
        and not re.fullmatch("|".join(NO_DENSE_PRODUCT.values()), name)
    }
    assert products == {name for name, *_ in _cases()}


def test_flops_of_experts_are_those_of_the_experts_of_a_token():
    """A layer with experts, and one without; the router has a row for each expert."""
    model = config("qwen3_moe")
    shape = models.shape_of(model)
    norms = 2 * (shape.norms * shape.E + 2 * shape.D) + shape.E
    multiplied = shape.active_weights - norms - shape.V * shape.E
    attention = 2 * S * S * shape.H * shape.D
    flops = lab.plan(model, "plain", tokens=S, ranks=1).costs.flops
    assert flops == 6 * multiplied * S + shape.L * attention * 7 // 2
