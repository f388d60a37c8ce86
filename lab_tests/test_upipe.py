"""The schedule, the calls and the bytes of UPipe. Its gradients are in the table of cases."""

import resource
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, LlamaConfig

from lab.errors import RecipeError
from lab.memory.meter import Meter
from lab.techniques.rope import apply_rope
from lab.techniques.ulysses import apply_ulysses
from lab.techniques.upipe.layer import apply_upipe
from lab.techniques.upipe.schedule import schedule
from lab_tests.support.operators import Calls
from lab_tests.support.reference import (
    build,
    config,
    error,
    gradients,
    loss_of,
    tokens,
    truth,
)


def chunks(heads, ranks):
    return [u for u in range(ranks, heads + 1, ranks) if heads % u == 0]


def model_and_positions(cfg, ids, chunk, group, dtype, *, overlap=False):
    model = build(cfg, dtype)
    apply_rope(model)
    apply_upipe(model, head_chunk=chunk, group=group, overlap=overlap)
    local = ids.shape[1] // dist.get_world_size(group)
    return model, torch.arange(local) + local * dist.get_rank(group)


# ---- composed with what wraps it ---------------------------------------------------------------------


def under_fsdp_and_checkpoint(family, heads, kv_heads, chunk):
    """FSDP2 per layer and root, each layer checkpointed: gradients, and what one step calls."""
    group, ids, cfg = dist.group.WORLD, tokens(1, 44), config(family, heads, kv_heads)
    model, positions = model_and_positions(cfg, ids, chunk, group, torch.float64)
    mesh = init_device_mesh("cpu", (4,))
    for layer in model.model.layers:
        inner = layer.forward

        def run(h, *a, inner=inner, **rest):
            return checkpoint(lambda x: inner(x, *a, **rest), h, use_reentrant=False)

        layer.forward = run
        fully_shard(layer, mesh=mesh)
        layer.set_gradient_divide_factor(1.0)
    fully_shard(model, mesh=mesh)
    model.set_gradient_divide_factor(1.0)
    with Calls() as calls:
        logits = model(input_ids=ids[:, positions], position_ids=positions[None]).logits
        (loss_of(logits, ids.roll(-1, 1)[:, positions]) / ids.numel()).backward()
    found = {name: grad.full_tensor() for name, grad in gradients(model).items()}
    return error(found, truth(cfg, ids)[1]), calls["attention forward"], calls["attention backward"]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_under_fsdp_and_checkpointing_each_attention_runs_twice_forward(ranks4, family):
    # 24 heads, K=4, C=4: a chunk of 8 is 3 stages in each of the 2 layers
    for gradient, forward, backward in ranks4.apply(under_fsdp_and_checkpoint, family, 24, 4, 8):
        assert gradient < 1e-9
        assert (forward, backward) == (2 * 2 * 3, 2 * 3)


# ---- integers ----------------------------------------------------------------------------------------


def calls_of_a_layer(heads, kv_heads, chunk, group):
    cfg = config("llama", heads, kv_heads, layers=1)
    model, positions = model_and_positions(cfg, tokens(1, 80), chunk, group, torch.float32)
    with Calls() as forward:
        logits = model(input_ids=tokens(1, 80)[:, positions], position_ids=positions[None]).logits
    with Calls() as backward:
        logits.sum().backward()
    return [(c["all_to_all"], c["attention forward"], c["attention backward"]) for c in (forward, backward)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "chunk"), [(64, 8, 16), (96, 48, 24), (56, 8, 8), (48, 16, 16)]
)
def test_all_to_alls_and_attentions_follow_the_schedule(eight, heads, kv_heads, chunk):
    plan = schedule(heads, kv_heads, 8, chunk)
    stages, runs = len(plan.stages), sum(map(len, plan.stages))
    # Keys that are first wanted in the middle of a stage are sent by themselves, and so are their gradients.
    alone = sum(run.opens for stage in plan.stages for run in stage[1:])
    assert alone == sum(run.closes for stage in plan.stages for run in stage[:-1])
    assert calls_of_a_layer(heads, kv_heads, chunk, eight) == [
        (2 * stages + alone, runs, 0),
        (4 * stages + 2 * alone, 0, runs),
    ]


class Order(TorchDispatchMode):
    """All-to-alls and attentions in the order of their calls; of the first, which are waited for later."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name == "c10d::alltoall_base_":
            self.seen.append("sent" if args[5:6] == (False,) else "sent ahead")
        elif name == "lab::arrival":
            self.seen.append("arrival")
        elif "flash_attention" in name:
            self.seen.append("attention")
        return func(*args, **(kwargs or {}))


def test_what_the_next_stage_needs_travels_while_this_one_attends(eight):
    cfg, ids = config("llama", 32, 8, layers=1), tokens(1, 80)
    model, positions = model_and_positions(cfg, ids, 8, eight, torch.float32, overlap=True)
    orders = []
    with Order() as order:
        logits = model(input_ids=ids[:, positions], position_ids=positions[None]).logits
        orders.append(order.seen)
        order.seen = []
        logits.sum().backward()
        orders.append(order.seen)
    # Four stages: q; and q, dout, out. What is sent back is waited for, and as many are sent as without.
    for things, seen in zip((1, 3), orders, strict=True):
        here = ["attention", "sent"]
        there = ["arrival"] * things
        ahead = ["sent ahead"] * things
        assert seen == ["sent"] * things + (ahead + here + there) * 3 + here


# ---- bytes -------------------------------------------------------------------------------------------


def attention_bytes(cfg, chunk, group, local, dtype, overlap=False):
    """Bytes of one attention module beyond its parameters and tables: forward peak, held, backward peak."""
    module = build_upipe(cfg, chunk, group, dtype, overlap)
    x = torch.randn(1, local, cfg.hidden_size, dtype=dtype, requires_grad=True)
    tables = tuple(torch.randn(1, local, cfg.head_dim, dtype=dtype) for _ in range(2))
    dy = torch.randn_like(x)
    given = sum(t.nbytes for t in (*module.parameters(), *tables))
    found = []
    for backward in (False, True):
        meter = Meter()
        with meter.measure(module):
            with meter.phase("forward"):
                y, _ = module(hidden_states=x, position_embeddings=tables)
            held = int(meter.timeline().total[-1]) - given - x.nbytes - y.nbytes
            if backward:
                loss = y.view(y.shape)  # the view lets go of y itself, as a layer's residual does
                del y
                with meter.phase("backward"):
                    torch.autograd.grad(loss, [x, *module.parameters()], dy)
                found.append(held)
        # y is still held by the test in backward: it is not the attention's
        found.append(meter.timeline().device_peak - given - (x.nbytes if backward else 0))
    return tuple(found)


def build_upipe(cfg, chunk, group, dtype, overlap):
    model = build(cfg, dtype)
    apply_upipe(model, head_chunk=chunk, group=group, overlap=overlap)
    return model.model.layers[0].self_attn


def formula(cfg, chunk, ranks, local, dtype, overlap=False):
    """The docstring of ``apply_upipe``, symbol by symbol."""
    heads, kv_heads = cfg.num_attention_heads, cfg.num_key_value_heads
    width = dtype.itemsize
    wide = max(width, 4)
    hidden, head = width * local * cfg.hidden_size, width * local * cfg.head_dim
    plan = schedule(heads, kv_heads, ranks, chunk)
    in_flight = ranks * plan.slots_in_flight
    held = head * heads + wide * local * heads
    to_come = wide * local * heads * in_flight // max(kv_heads, ranks)
    made = head * (2 * chunk + 4 * in_flight) - to_come
    summed = any(not (run.opens and run.closes) for stage in plan.stages for run in stage)
    sums = summed * 2 * head * in_flight * wide // width
    groups = plan.slots // plan.slots_in_flight
    stage = head * (4 * chunk + 4 * in_flight) + sums
    if overlap and chunk < heads:
        keys = groups > 1
        coming = wide * local * chunk if groups == 1 else to_come
        made = max(made, head * (4 * chunk + 2 * in_flight * (1 + 2 * keys)) - coming)
        stage += head * (6 * chunk + 4 * in_flight * keys)
        there = max(groups - 2, 0)
    else:
        there = groups - 1
    stage += 2 * head * kv_heads * there // groups
    forward = hidden + held + max(made, hidden)
    dwq = dwo = width * heads * cfg.head_dim * cfg.hidden_size
    dwk = dwv = width * kv_heads * cfg.head_dim * cfg.hidden_size
    end = 2 * head * kv_heads + max(hidden + dwq + dwk + dwv, (groups > 1) * head * kv_heads)
    return forward, held, 2 * hidden + held + dwo + max(stage, end)


# The last is so short that the weights' gradients outweigh every stage: there the peak does not move.
BF16, FP64 = torch.bfloat16, torch.float64
SHAPES = [(64, 16, 60, BF16), (64, 64, 120, FP64), (64, 4, 60, BF16), (48, 24, 90, BF16), (64, 8, 3, BF16)]


@pytest.mark.long
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "local", "dtype"), SHAPES)
def test_bytes_are_the_docstrings_and_grow_with_the_chunk(eight, heads, kv_heads, local, dtype, overlap):
    peaks = []
    cfg = config("llama", heads, kv_heads, layers=1)
    for chunk in chunks(heads, 8):
        plan = schedule(heads, kv_heads, 8, chunk)
        found = attention_bytes(cfg, chunk, eight, local, dtype, overlap)
        right = formula(cfg, chunk, 8, local, dtype, overlap)
        several = any(len(stage) > 1 for stage in plan.stages)
        if not several and not (overlap and len(plan.stages) == 2 and plan.slots == 1):
            assert found == right, chunk
        else:  # one after the other come the outputs of several runs; sums, and what the second stage needs
            assert found[1] == right[1]
            assert found[0] <= right[0]
            assert found[2] <= right[2]
        peaks.append(found[2])
    if overlap and local > 3:
        assert peaks.pop() < peaks[-1]  # a single stage has no next one
    assert peaks == sorted(peaks)
    assert (peaks[0] < peaks[-1]) == (local > 3)


def test_bytes_on_real_ranks_are_the_same(ranks4):
    cfg, tried = config("llama", 24, 4, layers=1), [*product((4, 8), (False, True))]
    found = ranks4.apply(
        lambda: [attention_bytes(cfg, u, dist.group.WORLD, 100, torch.bfloat16, o) for u, o in tried]
    )
    assert found == [[formula(cfg, u, 4, 100, torch.bfloat16, o) for u, o in tried]] * 4


@pytest.mark.long
@pytest.mark.parametrize("technique", ["ulysses", "upipe"])
def test_fake_tensors_go_through_at_five_million_tokens(eight, technique):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cfg = LlamaConfig(
        hidden_size=4096,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=16,
        use_cache=False,
    )
    local = 5 * 2**20 // 8
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(cfg, dtype=torch.bfloat16)
        apply_rope(model)
        if technique == "ulysses":
            apply_ulysses(model, group=eight)
        else:
            apply_upipe(model, head_chunk=8, group=eight)
        meter = Meter()
        with meter.measure(model), meter.phase("forward"):
            ids = torch.zeros(1, local, dtype=torch.long)
            model(input_ids=ids, position_ids=torch.arange(local)[None]).logits.sum().backward()
    assert meter.timeline().device_peak > 30 * 2**30
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB


# ---- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunk", "named"),
    [
        (0, "head_chunk=0: the Ulysses degree 1 does not divide it; these work: 1, 2, 3, 4, 6, 8, 12, 24"),
        (5, "head_chunk=5: it does not divide the 24 query heads; these work: 1, 2, 3, 4, 6, 8, 12, 24"),
        (48, "head_chunk=48: it does not divide the 24 query heads"),
    ],
)
def test_chunks_that_heads_do_not_allow_are_refused_with_those_that_work(chunk, named):
    model = build(config())
    with pytest.raises(RecipeError, match=named):
        apply_upipe(model, head_chunk=chunk, group=None)
    assert "forward" not in vars(model.model.layers[0].self_attn)


def test_masks_and_caches_are_refused():
    model, ids = build(config(), torch.float32), tokens(1, 8)
    apply_upipe(model, head_chunk=2, group=None)
    with pytest.raises(RecipeError, match="use_cache=False"):
        model(input_ids=ids, use_cache=True)
    with pytest.raises(RecipeError, match="no attention_mask"):
        model(input_ids=ids, attention_mask=torch.ones(1, 1, 8, 8, dtype=torch.bool))


def test_a_second_backward_is_refused_and_frozen_weights_get_no_gradient():
    model, ids = build(config("qwen3"), torch.float32), tokens(1, 8)
    apply_upipe(model, head_chunk=2, group=None)
    attention = model.model.layers[0].self_attn
    for frozen in (attention.q_proj.weight, attention.k_norm.weight):
        frozen.requires_grad_(False)
    loss = model(input_ids=ids).logits.sum()
    loss.backward(retain_graph=True)
    assert attention.q_proj.weight.grad is None
    assert attention.k_norm.weight.grad is None
    assert attention.q_norm.weight.grad is not None
    with pytest.raises(RecipeError, match="a second backward through UPipe"):
        loss.backward()


def test_parameter_names_stay():
    model = build(config("qwen3"))
    names = list(model.state_dict())
    apply_upipe(model, head_chunk=2, group=None)
    assert list(model.state_dict()) == names


# ---- the schedule ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks"),
    [(24, 6, 2), (32, 8, 8), (32, 8, 4), (28, 4, 2), (40, 8, 4), (24, 2, 4), (24, 24, 4)],
)
def test_every_head_goes_once_and_meets_its_own_key(heads, kv_heads, ranks):
    for chunk in chunks(heads, ranks):
        plan = schedule(heads, kv_heads, ranks, chunk)
        sent = []
        for t, stage in enumerate(plan.stages):
            per_rank = [plan.query_heads(t, r) for r in range(ranks)]
            assert {len(q) for q in per_rank} == {chunk // ranks}
            sent += [q for queries in per_rank for q in queries]
            for r, queries in enumerate(per_rank):
                keys = [q * kv_heads // heads for q in queries]
                assert list(dict.fromkeys(keys)) == list(dict.fromkeys(plan.kv_heads_of(t, r)))
            assert all(run.queries.start == 0 for run in stage if run.opens)
        assert sorted(sent) == list(range(heads))
        assert sum(len(run.slots) for stage in plan.stages for run in stage if run.opens) == plan.slots
        assert sum(len(run.slots) for stage in plan.stages for run in stage if run.closes) == plan.slots


def test_with_the_smallest_chunk_the_schedule_is_the_papers():
    plan = schedule(32, 8, 4, 4)
    group = 4
    for t in range(8):
        for rank in range(4):
            kv = (t // group) * 4 + rank
            assert plan.kv_heads_of(t, rank) == [kv]
            assert plan.query_heads(t, rank) == [kv * group + t % group]


def test_a_slot_that_ends_within_a_stage():
    plan = schedule(12, 4, 2, 4)  # G=3, n=2: parts of 2 and 1, 1 and 2 of the two slots
    assert [
        [(list(r.slots), list(r.queries), r.opens, r.closes) for r in stage] for stage in plan.stages
    ] == [
        [([0], [0, 1], True, False)],
        [([0], [2], False, True), ([1], [0], True, False)],
        [([1], [1, 2], False, True)],
    ]
    assert plan.slots_in_flight == 1
    assert [plan.query_heads(1, rank) for rank in range(2)] == [[2, 6], [5, 9]]
