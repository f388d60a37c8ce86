"""Attention runs forward once: its output and LSE wait on the host, and a recomputation gets its own."""

import copy
import gc
import itertools

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lab.decoder import Patch
from lab.errors import RecipeError
from lab.memory.categories import HOST
from lab.memory.meter import Meter
from lab.techniques import host_transfer
from lab.techniques.attention.hf_attention import apply_attention
from lab.techniques.loss import apply_loss
from lab.techniques.offload import apply_offload
from lab.techniques.ulysses import apply_ulysses
from lab.techniques.upipe.layer import apply_upipe
from lab_tests.support.decoder_step import (
    BATCH,
    HIDDEN,
    TOKENS,
    VOCAB,
    batch,
    checkpoint_and_offload,
    decoder,
    rows_of,
    step,
    step_timeline,
)
from lab_tests.support.operators import Calls, TransfersAndAttention
from lab_tests.support.reference import build, config, error, tokens

HEADS, HEAD_DIM, LAYERS = 6, 10, 4
INPUT = BATCH * TOKENS * HIDDEN * 8
ATTENDED = BATCH * TOKENS * HEADS * (HEAD_DIM + 1) * 8
"""Bytes of a layer's input, and of its attention's output and LSE, in fp64."""
INPUT_HELD, OUT_HELD, LSE_HELD = 32768, 32768 + 8192, 4096
"""A layer's input, output and LSE on the host, in whole pages."""


def use_upipe(model):
    apply_upipe(model, head_chunk=2, group=None)


def with_offload(model, attention=True, apply=apply_attention, **knobs):
    apply(model)
    return checkpoint_and_offload(model, attention=attention, **knobs)


@pytest.mark.parametrize("apply", [apply_attention, use_upipe])
@pytest.mark.parametrize(
    ("family", "dtype"), [("llama-tied", torch.float64), ("qwen2", torch.float32), ("qwen3", torch.bfloat16)]
)
def test_bit_for_bit_what_a_second_forward_gives(family, dtype, apply):
    model = decoder(family, dtype)
    recomputed = with_offload(copy.deepcopy(model), attention=False, apply=apply)
    assert error(step(with_offload(model, apply=apply)), step(recomputed)) == 0


def test_each_attention_runs_once_and_comes_back_a_layer_ahead():
    model = with_offload(decoder(layers=LAYERS))
    with TransfersAndAttention() as observed:
        step(model)
    run, back = "flash_attention_for_cpu", "flash_attention_for_cpu_backward"
    sent, fetched = ["to_host"] * 2, ["from_host"] * 2
    forward = ["to_host", run, *sent] * (LAYERS - 1) + [run, *sent]
    # The last layer's own set out with its recomputation, and with them all of the layer below.
    backward = [*fetched, "from_host", *fetched, back] + ["from_host", *fetched, back] * (LAYERS - 2) + [back]
    assert observed.order == forward + backward


def test_upipe_runs_none_of_its_stages_again():
    """A stage's projections are batched products; backward makes q, k, v and dout once more by itself."""
    counted = {}
    for attention in (False, True):
        model = with_offload(decoder(), attention, use_upipe)
        with Calls() as calls:
            step(model)
        counted[attention] = {name: calls[name] for name in ("attention forward", "aten.bmm")}
    layers, stages, slots = 3, 3, 3
    made = stages + 2 * slots
    assert counted[False] == {
        "attention forward": layers * stages * 2,
        "aten.bmm": layers * (3 * made + stages),
    }
    assert counted[True] == {"attention forward": layers * stages, "aten.bmm": layers * (2 * made + stages)}


@pytest.mark.parametrize(
    ("chunk", "inputs", "attention"),
    [
        (8, (32, 8, 4), (24, 4, 4)),  # forward 8, once or twice, and backward 16
        (32, (8, 2, 1), (6, 1, 1)),
        (None, (12, 2, 1), (12, 1, 1)),  # Ulysses exchanges q, k, v again, and what came back
    ],
)
def test_all_to_alls_and_attentions_of_a_step(eight, chunk, inputs, attention):
    for offload, wanted in ((False, inputs), (True, attention)):
        model = build(config("llama", 32, 8, layers=1), torch.float32)
        if chunk is None:
            apply_ulysses(model, group=eight)
        else:
            apply_upipe(model, head_chunk=chunk, group=eight)
        with_offload(model, attention=offload, apply=lambda _: None)
        with Calls() as calls:
            model(
                input_ids=tokens(1, 80)[:, :10], position_ids=torch.arange(10)[None]
            ).logits.sum().backward()
        assert (calls["all_to_all"], calls["attention forward"], calls["attention backward"]) == wanted


# ---- bytes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, LAYERS])
@pytest.mark.parametrize("apply", [apply_attention, use_upipe])
def test_the_host_has_all_inputs_but_one_and_every_attention(layers, apply):
    model = with_offload(decoder(layers=layers), apply=apply)
    timeline = step_timeline(model, batch())
    end = rows_of(timeline, "forward")[-1]
    # UPipe has an LSE of each of its three stages.
    attended = OUT_HELD + LSE_HELD * (3 if apply is use_upipe else 1)
    assert timeline.host[end] == timeline.host_peak == (layers - 1) * INPUT_HELD + layers * attended
    assert timeline.host[-1] == 0
    with torch.no_grad(), TransfersAndAttention() as observed:
        model(**batch())
    assert "to_host" not in observed.order


class HeldInBackward(TorchDispatchMode):
    """Device bytes of the meter around it at each layer's attention backward."""

    def __init__(self, meter):
        super().__init__()
        self.meter, self.seen = meter, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() == "aten::_scaled_dot_product_flash_attention_for_cpu_backward":
            self.seen.append(sum(self.meter._bytes[:HOST]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("prefetch", "coming"), [(True, ATTENDED), (False, 0)])
def test_the_device_has_each_saved_attention_once_and_the_next_to_come(prefetch, coming):
    seen = {}
    for attention in (False, True):
        model, meter = with_offload(decoder(layers=LAYERS), attention, prefetch=prefetch), Meter()
        with meter.measure(model), meter.phase("step"), HeldInBackward(meter) as held:
            model(**batch()).loss.backward(retain_graph=True)  # what is not let go is there at the end
        seen[attention] = held.seen
    more = [b - a for a, b in zip(seen[False], seen[True], strict=True)]
    assert more == [coming] * (LAYERS - 1) + [0]


class Pins(TorchDispatchMode):
    """The bytes of what is sent, the sizes of its pieces, and whether each may be pinned."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.name() == "lab::to_host":
            self.seen.append((args[0].nbytes, [piece.nbytes for piece in result], list(args[1])))
        return result


@pytest.fixture
def pinned(monkeypatch):
    """Books of their own, in place of the process's."""
    books = host_transfer.PinnedMemory()
    monkeypatch.setattr(host_transfer, "PINNED_MEMORY", books)
    return books


OUT, LSE = BATCH * TOKENS * HEADS * HEAD_DIM * 8, BATCH * TOKENS * HEADS * 8
PIECES = {INPUT: [32768], OUT: [32768, 8192], LSE: [4096]}


def test_what_is_pinned_is_bounded_and_pinned_again_in_every_step(pinned):
    limit = 2 * sum(map(sum, PIECES.values()))
    model = with_offload(decoder(layers=3), pinned=limit)
    sent = [(size, pieces, [True] * len(pieces)) for size, pieces in PIECES.items()]
    beyond = [(size, PIECES[size], [False] * len(PIECES[size])) for size in (OUT, LSE)]
    for _ in range(2):
        with Pins() as pins:
            step(model)
        assert pins.seen == sent * 2 + beyond
        assert pinned.nbytes == limit
    # A longer sequence's pieces of other sizes are not pinned: those in reserve take the limit.
    with Pins() as pins:
        model(**batch(tokens=2 * TOKENS)).loss.backward()
    assert all(
        size in (32768, 8192, 4096) for _, sizes, may in pins.seen for size in itertools.compress(sizes, may)
    )
    assert pinned.nbytes == limit


@pytest.mark.long
def test_the_next_model_of_a_process_finds_what_the_last_one_pinned(pinned):
    limit = 2 * INPUT_HELD
    for _ in range(2):
        with Pins() as pins:
            step(with_offload(decoder(layers=3), attention=False, pinned=limit))
        assert [may for _, _, may in pins.seen] == [[True]] * 2
        assert pinned.nbytes == limit
        gc.collect()
    with Pins() as pins:
        with_offload(decoder(layers=3), attention=False, pinned=limit)(**batch(tokens=8)).loss.backward()
    assert [may for _, _, may in pins.seen] == [[False]] * 2
    # A plan of the same process pins nothing.
    with FakeTensorMode():
        step(with_offload(decoder(layers=3), attention=False, pinned=2 * limit))
    assert pinned.nbytes == limit


# ---- passes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("apply", [apply_attention, use_upipe])
def test_passes_that_interleave_keep_their_own_results(apply):
    plain, model = decoder(layers=LAYERS), with_offload(decoder(layers=LAYERS), apply=apply)
    torch.manual_seed(7)
    batches = [{n: torch.randint(0, VOCAB, (1, 20)) for n in ("input_ids", "labels")} for _ in range(2)]
    gradients = []
    for each in (plain, model):
        losses = [each(**b).loss for b in batches]  # both forwards before the first backward
        with torch.no_grad():
            each(**batches[0])
        for loss in losses:
            (loss / 4).backward()
        each(**batches[1]).loss.backward()
        gradients.append({name: p.grad for name, p in each.named_parameters()})
    assert error(gradients[1], gradients[0]) <= 1e-9


def test_a_retained_graph_can_be_walked_twice_but_not_upipes():
    wanted = step(decoder())
    for apply in (apply_attention, use_upipe):
        model = with_offload(decoder(), apply=apply)
        loss = model(**batch()).loss
        loss.backward(retain_graph=True)
        if apply is use_upipe:
            with pytest.raises(RecipeError, match="a second backward through UPipe"):
                loss.backward()
            continue
        loss.backward()
        halves = {n: p.grad / 2 for n, p in model.named_parameters()} | {"loss": loss.detach()}
        assert error(halves, wanted) <= 1e-9


def test_after_a_pass_that_failed_the_next_is_right():
    model, wanted = with_offload(decoder()), step(decoder())
    hook = model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**batch())
    hook.remove()
    assert error(step(model), wanted) <= 1e-9


def test_frozen_layers():
    plain, model = decoder(), decoder()
    for each in (plain, model):
        each.model.embed_tokens.requires_grad_(False)
        each.model.layers[0].requires_grad_(False)
    with_offload(model)
    for each in (plain, model):
        each(**batch()).loss.backward()
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}
    assert error({n: p.grad for n, p in model.named_parameters() if p.requires_grad}, wanted) <= 1e-9


def test_refusals():
    model = decoder()
    with pytest.raises(RecipeError, match=r"offload='attention' without checkpointing: .*checkpoint=True"):
        apply_offload(model, attention=True)
    before = list(model.state_dict())
    inner = model.model.layers[1].self_attn.forward
    model.model.layers[1].self_attn.forward = Patch(lambda *a, lab_cache=None, **k: inner(*a, **k), inner)
    assert list(with_offload(model).state_dict()) == before
    with pytest.raises(RecipeError, match="does not pass keywords on to its attention"):
        step(model)
    apply_loss(model)
    with torch.no_grad():
        model(**batch())
