"""Streamed layers: the plain model's gradients, the docstring's bytes, and what is held, sent and refused."""

import copy
import warnings
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from lab.errors import RecipeError
from lab.memory.meter import Meter
from lab.memory.timeline import Timeline
from lab.techniques.rope import apply_rope
from lab.techniques.streaming.layer import apply_streaming
from lab.techniques.upipe.schedule import schedule
from lab_tests.support.long_run import mostly_long
from lab_tests.support.operators import Calls
from lab_tests.support.reference import build, config, error, exact_rotary, gradients, loss_of

ROWS, TOKENS, LAYERS = 3, 44, 5


def batch():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 101, (ROWS, TOKENS), generator=generator)


def streamed(model, **knobs):
    apply_rope(model)
    apply_streaming(model, **{"tile": 8, **knobs})
    return model


def loss(model):
    ids = batch()
    return loss_of(model(input_ids=ids, use_cache=False).logits[:, :-1], ids[:, 1:])


def trained_gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def plain():
    """A model of five layers, untouched, and its gradients."""
    model = build(config("qwen3", 24, 6, layers=LAYERS))
    trained = exact_rotary(copy.deepcopy(model))
    loss(trained).backward()
    return model, gradients(trained)


@pytest.mark.parametrize(
    "knobs",
    [
        {"tile": TOKENS},
        {"tile": 5, "head_chunk": 3},
        {"segment": 2, "head_chunk": 6},
        {"segment": 3, "attention": True},
        {"segment": 9, "head_chunk": 1},
    ],
    ids=str,
)
def test_gradients_are_the_plain_models(plain, knobs):
    model = streamed(copy.deepcopy(plain[0]), **knobs)
    loss(model).backward()
    assert error(gradients(model), plain[1]) < 1e-13


def test_two_passes_before_their_backwards_keep_their_own_tensors(plain):
    model = streamed(copy.deepcopy(plain[0]), segment=2)
    first, second = loss(model), loss(model)
    first.backward()
    second.backward()
    doubled = {name: 2 * gradient for name, gradient in plain[1].items()}
    assert error(gradients(model), doubled) < 1e-13


def test_frozen_weights_get_no_gradient_and_no_stage_of_backward_runs_for_the_tail_alone(plain):
    model = copy.deepcopy(plain[0])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0.mlp" in name or "layers.1.self_attn.q_proj" in name)
    streamed(model, head_chunk=12)
    with Calls() as calls:
        loss(model).backward()
    found = trained_gradients(model)
    assert error(found, {name: plain[1][name] for name in found}) < 1e-13
    assert len(found) == 4
    # Two stages a layer: five layers run forward and again, all but layer 0 run backward.
    assert calls["attention forward"] == 2 * LAYERS * 2
    assert calls["attention backward"] == (LAYERS - 1) * 2


@pytest.mark.parametrize("frozen", [1, 2, 3])
@pytest.mark.parametrize("knobs", [{"segment": 3}, {"segment": 4, "attention": True}], ids=str)
def test_a_segment_begins_at_the_first_layer_that_backward_reaches(plain, knobs, frozen):
    model = copy.deepcopy(plain[0])
    model.model.embed_tokens.requires_grad_(False)
    for layer in model.model.layers[:frozen]:
        layer.requires_grad_(False)
    streamed(model, **knobs)
    loss(model).backward()
    found = trained_gradients(model)
    assert {name.split(".")[2] for name in found if "layers" in name} == {*map(str, range(frozen, LAYERS))}
    assert error(found, {name: plain[1][name] for name in found}) < 1e-13


CHANGES = {
    "another tensor": lambda y: 2 * y,
    "the same memory": lambda y: y.mul_(2),
    "a part of the same memory": lambda y: y[:, :-3],
    "another order": lambda y: y.flip(1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_hook_that_changes_what_a_layer_returns_is_part_of_a_segment_that_runs_again(plain, change):
    models = exact_rotary(copy.deepcopy(plain[0])), copy.deepcopy(plain[0])
    for model in models:
        model.model.layers[1].register_forward_hook(lambda *arguments: change(arguments[2]))
        model.model.layers[2].register_forward_pre_hook(lambda _, arguments: pad(arguments[0]))
    streamed(models[1], segment=3)
    for model in models:
        loss(model).backward()
    assert error(gradients(models[1]), gradients(models[0])) < 1e-13


def pad(x):
    return x if x.shape[1] == TOKENS else torch.cat([x, x[:, : TOKENS - x.shape[1]]], 1)


def test_a_hook_that_cuts_the_graph_ends_a_segment(plain):
    models = exact_rotary(copy.deepcopy(plain[0])), copy.deepcopy(plain[0])
    for model in models:
        model.model.layers[1].register_forward_hook(lambda *arguments: arguments[2].detach())
        model.model.layers[2].requires_grad_(False)
    streamed(models[1], segment=5)
    for model in models:
        loss(model).backward()
    found, wanted = (trained_gradients(model) for model in reversed(models))
    assert found.keys() == wanted.keys()
    assert error(found, wanted) < 1e-13


def test_a_forward_that_fails_leaves_nothing_to_the_next_one(plain):
    model = copy.deepcopy(plain[0])
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    streamed(model, segment=5)
    hook = model.model.layers[3].register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        loss(model)
    hook.remove()
    loss(model).backward()
    found = trained_gradients(model)
    assert error(found, {name: plain[1][name] for name in found}) < 1e-13


def fail(*_):
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("knobs", "forwards"), mostly_long([({}, 2), ({"segment": 2}, 2), ({"attention": True}, 1)], 2)
)
def test_attention_runs_twice_forward_and_once_where_its_outputs_are_kept(plain, knobs, forwards):
    model = streamed(copy.deepcopy(plain[0]), head_chunk=12, **knobs)
    with Calls() as calls:
        loss(model).backward()
    assert calls["attention forward"] == forwards * LAYERS * 2
    assert calls["attention backward"] == LAYERS * 2


# ---- bytes -------------------------------------------------------------------------------------------------


def layer_timeline(cfg, local, dtype, **knobs) -> tuple[Timeline, int]:
    """One layer's forward and backward, and the bytes of what it is given and of what the loss takes."""
    model = build(cfg, dtype)
    apply_streaming(model, **knobs)
    module = model.model.layers[0]
    x = torch.randn(1, local, cfg.hidden_size, dtype=dtype, requires_grad=True)
    tables = tuple(torch.randn(1, local, cfg.head_dim, dtype=dtype) for _ in range(2))
    factors = torch.randn(cfg.hidden_size, dtype=dtype)
    meter = Meter()
    with meter.measure(module):
        with meter.phase("forward"):
            y = module(x, position_embeddings=tables)
        # The gradient of y is a new tensor, to which the layer has the only reference.
        total = (y * factors).sum()
        del y
        with meter.phase("backward"):
            torch.autograd.grad(total, [x, *module.parameters()])
    given = sum(t.nbytes for t in (*module.parameters(), *tables, x, factors, total)) + total.nbytes
    return meter.timeline(), given


@pytest.mark.parametrize(
    ("heads", "kv_heads", "chunk", "dtype"),
    mostly_long(
        [
            (48, 24, 16, torch.float32),
            (64, 16, 8, torch.bfloat16),
            (64, 16, 16, torch.bfloat16),
            (64, 16, 64, torch.bfloat16),
            (64, 64, 32, torch.float64),
        ],
        0,
    ),
)
def test_bytes_of_a_layer_are_the_docstrings(eight, heads, kv_heads, chunk, dtype):
    cfg, local = config("llama", heads, kv_heads, layers=1), 600
    timeline, given = layer_timeline(cfg, local, dtype, tile=20, head_chunk=chunk, group=eight)
    width, wide = dtype.itemsize, max(dtype.itemsize, 4)
    hidden, head = width * local * cfg.hidden_size, width * local * cfg.head_dim
    plan = schedule(heads, kv_heads, 8, chunk)
    in_flight = 8 * plan.slots_in_flight
    summed = any(not (run.opens and run.closes) for stage in plan.stages for run in stage)
    sums = summed * 2 * head * in_flight * wide // width
    tail = width * cfg.hidden_size * (heads * cfg.head_dim + 3 * cfg.intermediate_size + 1)
    stage = head * (4 * chunk + 4 * in_flight) + sums + wide * local * chunk
    assert timeline.device_peak - given == hidden + tail + stage
    assert "flash_attention_for_cpu_backward" in timeline.peak.op
    # The input, the outputs of the heads, the LSEs, and gradients, in whole pages.
    on_host = hidden + head * heads + wide * local * heads + head * max(heads, 2 * kv_heads)
    assert 0 <= timeline.host_peak - on_host < 4096 * (1 + 3 * heads // chunk)
    assert timeline.host[-1] == 0


@pytest.mark.long
@pytest.mark.parametrize(("segment", "attention"), [(1, False), (2, False), (3, False), (2, True)])
def test_the_host_holds_the_inputs_that_the_docstring_counts(segment, attention):
    """Six layers: b*s*E and b*s*H*D elements are whole pages."""
    cfg = config("llama", 32, 8, layers=6, head_dim=16)
    model = streamed(build(cfg), tile=16, head_chunk=32, segment=segment, attention=attention)
    ids = torch.zeros(1, 128, dtype=torch.int64)
    meter = Meter()
    with meter.measure(model):
        with meter.phase("forward"):
            total = model(input_ids=ids, use_cache=False).logits.sum()
        with meter.phase("backward"):
            total.backward()
    timeline = meter.timeline()
    hidden, heads, lses = 8 * 128 * 64, 8 * 128 * 512, 8 * 128 * 32
    kept = -(-6 // segment)
    between = kept * hidden + attention * 6 * (heads + lses)
    assert timeline.end_of("forward").host == between
    layers = 6 if attention else segment
    assert timeline.host_peak == (kept + segment - 1) * hidden + (layers + 1) * heads + layers * lses
    assert timeline.host[-1] == 0


class Copies(TorchDispatchMode):
    """Counts the bytes that cross between device and host."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() in ("lab::write_host", "lab::from_host"):
            self.bytes[func.name()] += args[func.name() == "lab::from_host"].nbytes
        return func(*args, **(kwargs or {}))


def test_every_tensor_crosses_as_often_as_the_docstring_says():
    cfg = config("llama", 24, 6, layers=1)
    model = streamed(build(cfg, torch.float32), tile=8, head_chunk=12)
    ids = torch.zeros(1, 40, dtype=torch.int64)
    with Copies() as copies:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    hidden, heads, keys = 4 * 40 * 48, 4 * 40 * 240, 4 * 40 * 60
    # x; the outputs twice, their gradients, dq; dk and dv
    assert copies.bytes["lab::write_host"] == hidden + 4 * heads + 2 * keys
    # x for two stages that run again and two of backward, for the tail and for the head; the outputs for the
    # tail twice and for the stages, their gradients, dq; dk and dv; and the LSEs.
    lses = 4 * 40 * 24
    assert copies.bytes["lab::from_host"] == 6 * hidden + 5 * heads + 2 * keys + lses


def on_gradient(model, hook):
    """Call a function with the gradient of the output of layer 1."""
    model.model.layers[1].register_forward_hook(lambda *arguments: register(arguments[2], hook))


def register(output, hook):
    output.register_hook(hook)


# ---- what is refused, or copied and said -------------------------------------------------------------------


def test_a_second_backward_is_refused(plain):
    model = streamed(copy.deepcopy(plain[0]))
    value = loss(model)
    value.backward(retain_graph=True)
    with pytest.raises(RecipeError, match="a second backward through a streamed layer"):
        value.backward()


def test_a_double_backward_is_refused(plain):
    model = streamed(copy.deepcopy(plain[0]))
    with pytest.raises(RecipeError, match="create_graph=True through a streamed layer"):
        torch.autograd.grad(loss(model), list(model.parameters())[:1], create_graph=True)


def test_a_double_backward_is_refused_where_the_first_gradient_has_no_graph(plain):
    """The gradient of a sum is constant; that of the tiled loss has no graph."""
    model = streamed(copy.deepcopy(plain[0]))
    tables = (torch.randn(1, 4, 10, dtype=torch.float64),) * 2
    y = model.model.layers[0](torch.randn(1, 4, 48, dtype=torch.float64), position_embeddings=tables)
    with pytest.raises(RecipeError, match="create_graph=True through a streamed layer"):
        y.sum().backward(create_graph=True)


@pytest.mark.parametrize(
    "keep", [lambda g: g, lambda g: g[:, :1], lambda g: g.view(-1)], ids=["it", "a part", "a view"]
)
def test_a_gradient_that_a_hook_keeps_is_copied_and_said(plain, keep):
    model, kept = streamed(copy.deepcopy(plain[0])), []
    on_gradient(model, lambda g: kept.append(keep(g)))
    with pytest.warns(UserWarning, match="holds the gradient of a layer's output"):
        loss(model).backward()
    assert error(gradients(model), plain[1]) < 1e-13
    other, seen = exact_rotary(copy.deepcopy(plain[0])), []
    on_gradient(other, lambda g: seen.append(keep(g).clone()))
    loss(other).backward()
    assert torch.allclose(kept[0], seen[0], rtol=1e-9)


def test_a_gradient_that_nothing_keeps_is_not_copied(plain):
    model = streamed(copy.deepcopy(plain[0]))
    on_gradient(model, lambda _: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(model).backward()


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        ({"tile": 0}, "stream=0: a tile is a number of tokens"),
        ({"segment": 0}, "segment=0: it takes a whole number, 1 or more"),
        ({"head_chunk": 7}, "head_chunk=7: it does not divide the 24 query heads"),
    ],
)
def test_knobs_that_cannot_work_are_refused(plain, knobs, named):
    with pytest.raises(RecipeError, match=named):
        streamed(copy.deepcopy(plain[0]), **knobs)


def test_masks_caches_and_inner_hooks_are_refused(plain):
    model = streamed(copy.deepcopy(plain[0]))
    layer, x = model.model.layers[0], torch.randn(1, 4, 48, dtype=torch.float64)
    tables = (torch.randn(1, 4, 10, dtype=torch.float64),) * 2
    with pytest.raises(RecipeError, match="with a mask or a cache"):
        layer(x, attention_mask=torch.ones(1), position_embeddings=tables)
    layer.mlp.register_forward_hook(lambda *_: None)
    with pytest.raises(RecipeError, match="a hook on a Qwen3MLP: stream does not call"):
        layer(x, position_embeddings=tables)


def test_without_gradients_nothing_is_kept(plain):
    model = streamed(copy.deepcopy(plain[0]))
    meter = Meter()
    with torch.no_grad(), meter.measure(model), meter.phase("forward"):
        model(input_ids=batch(), use_cache=False)
    timeline = meter.timeline()
    assert timeline.host_peak > 0
    assert timeline.host[-1] == 0
    assert not dist.is_initialized()
