"""MLP, norms and loss in tiles: the plain model's loss and gradients, and fewer bytes."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig
from transformers.modeling_outputs import BaseModelOutputWithPast

from lab.errors import RecipeError
from lab.memory.meter import Meter
from lab.techniques.checkpointing import apply_checkpointing
from lab.techniques.loss import apply_loss, apply_tiled_loss, summed_cross_entropy
from lab.techniques.offload import apply_offload
from lab.techniques.sharding import apply_fsdp
from lab.techniques.tiling import apply_tiled_mlp, apply_tiled_norms, run_in_tiles
from lab_tests.support.decoder_step import (
    BATCH,
    FAMILIES,
    HIDDEN,
    LAYERS,
    TOKENS,
    TOLERANCE,
    VOCAB,
    batch,
    decoder,
    step,
)
from lab_tests.support.models import small_config, small_decoder
from lab_tests.support.operators import Calls
from lab_tests.support.reference import error

APPLY = {"mlp": apply_tiled_mlp, "norms": apply_tiled_norms, "loss": apply_tiled_loss}
DIVIDES, DOES_NOT = 5, 11


def everything(model, tile=DOES_NOT, offload=False):
    apply_tiled_mlp(model, tile=tile)
    apply_tiled_norms(model, tile=tile - 2)
    apply_checkpointing(model)
    if offload:
        apply_offload(model)
    apply_tiled_loss(model, tile=tile + 2)
    return model


def tiles(length, tile):
    return -(-length // tile)


# ---- exact ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("what", APPLY)
def test_loss_and_every_gradient_are_the_plain_models(what, dtype):
    """With a tied head; families are in the table of cases."""
    plain = decoder("llama-tied", dtype)
    wanted = step(plain)
    for tile in (DIVIDES, DOES_NOT, 10**6):
        model = copy.deepcopy(plain)
        APPLY[what](model, tile=tile)
        assert error(step(model), wanted) <= TOLERANCE[dtype]


def test_all_tiles_together_under_checkpointing_and_offload():
    plain = decoder("llama-tied")
    assert error(step(everything(copy.deepcopy(plain), offload=True)), step(plain)) <= 1e-9


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("what", [*APPLY, "everything"])
def test_bf16_is_as_near_to_fp32_as_the_plain_model_is(what, family):
    exact = decoder(family, torch.float32)
    plain = copy.deepcopy(exact).bfloat16()
    model = copy.deepcopy(plain)
    everything(model) if what == "everything" else APPLY[what](model, tile=DOES_NOT)
    wanted, rounded, got = step(exact), step(plain), step(model)
    for name in wanted:
        one = {name: wanted[name]}
        assert error({name: got[name]}, one) <= 1.5 * error({name: rounded[name]}, one), name


def test_weight_gradients_are_summed_in_fp32_and_rounded_once():
    torch.manual_seed(0)
    layer, x = nn.Linear(24, 16, bias=False, dtype=torch.bfloat16), torch.rand(1, 2560, 24).bfloat16()
    dout = torch.rand(1, 2560, 16).bfloat16()  # positive: a running sum grows and small addends are lost
    exact = dout[0].double().T @ x[0].double()
    (gradient,) = torch.autograd.grad(run_in_tiles(layer, layer, x, tile=16), layer.weight, dout)
    assert error({"weight": gradient}, {"weight": exact}) < 2.5e-3


def test_the_plain_loss_sums_over_shifted_labels():
    torch.manual_seed(0)
    logits = torch.randn(2, 7, 11, dtype=torch.bfloat16)
    labels = torch.randint(0, 11, (2, 7)).index_fill_(1, torch.tensor([2, 6]), -100)
    by_hand = sum(
        -F.log_softmax(logits[b, i].double(), -1)[labels[b, i]]
        for b in range(2) for i in range(7) if i not in (2, 6)
    )  # fmt: skip
    loss = summed_cross_entropy(logits, labels, 11, num_items_in_batch=3)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, by_hand.float())
    assert summed_cross_entropy(logits.double(), labels, 11).dtype == torch.float64


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_scaled_and_accumulated_losses_and_tiles_without_labels(family):
    plain = decoder(family)
    model = everything(copy.deepcopy(plain))
    gradients = []
    for each in (plain, model):
        for seed in range(3):
            torch.manual_seed(seed)
            ids = torch.randint(0, VOCAB, (BATCH, TOKENS))
            labels = torch.randint(0, VOCAB, (BATCH, TOKENS))
            labels[0, :26] = -100  # two whole tiles of 13
            if seed == 2:
                labels[:] = -100
            loss = each(input_ids=ids, labels=labels).loss
            assert torch.isfinite(loss)
            assert bool(loss == 0) == (seed == 2)
            (loss / 4).backward()
        gradients.append({name: p.grad for name, p in each.named_parameters()})
    assert error(gradients[1], gradients[0]) <= 1e-9


def test_large_logits_neither_overflow_nor_vanish():
    plain = decoder(dtype=torch.float32)
    plain.lm_head.weight.data.mul_(3e4)
    model = copy.deepcopy(plain)
    apply_tiled_loss(model, tile=DOES_NOT)
    assert error(step(model), step(plain)) <= 5e-6


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_logits_that_are_capped(dtype):
    """Seen red: without the cap, and without its derivative."""
    config = small_config(Gemma3TextConfig, vocab_size=VOCAB, final_logit_softcapping=1.5)
    plain = small_decoder(config, dtype)
    plain.lm_head.weight.data.mul_(30)
    wanted, inputs = step(plain), batch()
    logits = plain.lm_head(plain.model(input_ids=inputs["input_ids"]).last_hidden_state)
    assert (logits.abs() > 1.5).any()
    assert (logits.abs() < 0.5).any()
    for tile in (DIVIDES, DOES_NOT, 10**6):
        model = copy.deepcopy(plain)
        apply_tiled_loss(model, tile=tile)
        assert error(step(model), wanted) <= TOLERANCE[dtype]
        with torch.no_grad():
            torch.testing.assert_close(model(**inputs).loss, wanted["loss"])


def test_frozen_parameters_get_no_gradient_and_the_rest_theirs():
    plain, model = decoder(), everything(decoder())
    for each in (plain, model):
        each.model.embed_tokens.requires_grad_(False)
        each.model.layers[0].requires_grad_(False)
        each.model.layers[0].mlp.up_proj.requires_grad_(True)
        each.lm_head.requires_grad_(False)
        each(**batch()).loss.backward()
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}
    assert error({n: p.grad for n, p in model.named_parameters() if p.requires_grad}, wanted) <= 1e-9
    assert [n for n, p in model.named_parameters() if p.grad is None] == [
        n for n, p in plain.named_parameters() if p.grad is None
    ]


def test_gradient_hooks_run_once_a_step():
    model, calls = everything(decoder("qwen2")), []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda _, name=name: calls.append(name))
    step(model)
    assert sorted(calls) == sorted(n for n, _ in model.named_parameters())


def test_a_retained_graph_of_tiled_layers_can_be_walked_twice():
    plain, model = decoder(), decoder()
    apply_tiled_mlp(model, tile=DIVIDES)
    apply_tiled_norms(model, tile=DOES_NOT)
    wanted, loss = step(plain), model(**batch()).loss
    loss.backward(retain_graph=True)
    loss.backward()
    assert (
        error({n: p.grad / 2 for n, p in model.named_parameters()} | {"loss": loss.detach()}, wanted) <= 1e-9
    )


def test_a_second_backward_through_a_tiled_loss_is_refused():
    model = decoder()
    apply_tiled_loss(model, tile=DIVIDES)
    loss = model(**batch()).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RecipeError, match="a second backward through a tiled loss"):
        loss.backward()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_tiled_loss_without_gradients_is_the_plain_one(dtype):
    plain, model = decoder(dtype=dtype), decoder(dtype=dtype)
    apply_loss(plain)
    apply_tiled_loss(model, tile=DIVIDES)
    heads, head = [], model.lm_head.forward
    model.lm_head.forward = lambda hidden: heads.append(torch.is_grad_enabled()) or head(hidden)
    with torch.no_grad():
        loss = model(**batch()).loss
        torch.testing.assert_close(loss, plain(**batch()).loss)
    assert not loss.requires_grad
    assert not any(heads)


def test_the_factor_of_a_bf16_gradient_is_not_rounded():
    torch.manual_seed(0)
    model = decoder(dtype=torch.bfloat16)
    apply_tiled_loss(model, tile=DIVIDES)
    hidden = model.model(input_ids=batch()["input_ids"]).last_hidden_state.detach().requires_grad_()
    model.model.forward = lambda *_, **__: BaseModelOutputWithPast(last_hidden_state=hidden)
    gradients = []
    # In bf16, the second factor is 1 + 2**-7.
    factors = (1.0, 1.0 + 3 * 2**-9)
    for factor in factors:
        hidden.grad = model.lm_head.weight.grad = None
        (factor * model(labels=batch()["labels"]).loss).backward()
        gradients.append([hidden.grad.double(), model.lm_head.weight.grad.double()])
    for one, other in zip(*gradients, strict=True):
        ratio = (one * other).sum() / one.square().sum()
        assert abs(ratio - factors[1]) < 2**-10


def test_without_labels_the_model_answers_as_before():
    plain, model = decoder(), everything(decoder())
    ids = batch(rows=1)["input_ids"]
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    options = {"max_new_tokens": 4, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))
    assert list(model.state_dict()) == list(plain.state_dict())


# ---- under FSDP2 ---------------------------------------------------------------------------------------


def sharded_step():
    model = everything(decoder("llama-tied"), offload=True)
    apply_fsdp(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    row = {name: t[dist.get_rank() :][:1] for name, t in batch(rows=4).items()}
    model(**row).loss.backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def test_fsdp_has_the_parameters_whole_where_the_tiles_need_them(ranks4):
    plain = decoder("llama-tied")
    plain(**batch(rows=4)).loss.backward()
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    for got in ranks4.apply(sharded_step):
        assert got.keys() == wanted.keys()
        assert error(got, wanted) <= 1e-9


# ---- integers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("checkpoint", "norms"), [(False, (2, 2, 2)), (True, (3, 3, 2))])
@pytest.mark.parametrize("tile", [DIVIDES, DOES_NOT])
def test_slices_run_twice_also_in_a_checkpointed_layer(tile, checkpoint, norms):
    model = decoder()
    apply_tiled_mlp(model, tile=tile)
    apply_tiled_norms(model, tile=tile)
    apply_tiled_loss(model, tile=tile)
    if checkpoint:
        apply_checkpointing(model)
    heads, head = [], model.lm_head.forward
    model.lm_head.forward = lambda hidden: heads.append(hidden.shape[:-1].numel()) or head(hidden)
    with Calls() as calls:
        step(model)
    n = tiles(TOKENS, tile)
    assert calls["aten.silu"] == 2 * LAYERS * n
    # The norm before attention and the one before the MLP feed what is recomputed; the last norm does not.
    assert calls["aten.rsqrt"] == n * (LAYERS * (norms[0] + norms[1]) + norms[2])
    # The loss computes its gradients in forward.
    assert len(heads) == tiles(BATCH * TOKENS, tile)
    assert max(heads) == tile
    assert sum(heads) == BATCH * TOKENS


# ---- bytes ---------------------------------------------------------------------------------------------


def peaks(model, run):
    """Bytes held after forward, and the peaks of forward and backward."""
    meter = Meter()
    with meter.measure(model):
        with meter.phase("forward"):
            loss = run()
        with meter.phase("backward"):
            loss.sum().backward()
    timeline = meter.timeline()
    forward = timeline.phase == timeline.phases.index("forward")
    total = timeline.total
    return int(total[forward][-1]), int(total[forward].max()), int(total[~forward].max())


DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)


@DTYPES
def test_held_by_an_mlp_and_a_norm_after_forward(dtype):
    held = {}
    for what in ("plain", "mlp", "norms"):
        model = decoder(dtype=dtype)
        if what != "plain":
            APPLY[what](model, tile=DOES_NOT)
        # Not the loss, whose graph would keep the last norm's output in both.
        held[what] = peaks(model, lambda: model.model(input_ids=batch()["input_ids"]).last_hidden_state)[0]  # noqa: B023
    tokens = BATCH * TOKENS
    assert held["plain"] - held["mlp"] == LAYERS * 4 * tokens * 88 * dtype.itemsize
    assert held["plain"] - held["norms"] == (2 * LAYERS + 1) * tokens * (4 * HIDDEN + 4)


def mlp_peaks(inner, tile, dtype, hidden=6):
    torch.manual_seed(0)
    config = small_config(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=None, vocab_size=8,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    mlp = model.model.layers[0].mlp
    if tile is not None:
        apply_tiled_mlp(model, tile=tile)
    x = torch.randn(BATCH, TOKENS, hidden, dtype=dtype, requires_grad=True)
    return peaks(mlp, lambda: mlp(x))


@DTYPES
@pytest.mark.parametrize("tile", [24, 16, 1, None])
def test_peaks_of_an_mlp(dtype, tile):
    """What grows with I, to the byte: two sizes of I, all else taken out by subtraction."""
    w, wide, e = dtype.itemsize, max(dtype.itemsize, 4), 6
    small, large = mlp_peaks(88, tile, dtype), mlp_peaks(120, tile, dtype)
    grown = [(b - a) / (120 - 88) for a, b in zip(small, large, strict=True)]
    tokens, weights, down = BATCH * (tile or TOKENS) * w, 3 * e * w, e * w
    if tile is None:
        assert grown == [weights + 4 * tokens, weights + 4 * tokens, weights + 6 * tokens + down]
    elif tile == 24:
        # The first tile is longer than the other, and makes the sums when it ends.
        assert grown == [weights, weights + 3 * tokens, weights + 6 * tokens + down]
    else:
        # Wide gradients are added to their sums one by one, that of the last matrix before there is a sixth
        # tensor. Of others, all three are there when the tile ends.
        narrow, one_by_one = max(6 * tokens + down, tokens + 3 * down), max(6 * tokens, 5 * tokens + down)
        inside = narrow if w < wide else one_by_one
        assert grown == [weights, weights + 3 * tokens, weights + inside + 3 * e * wide]


def loss_peaks(vocab, tile, dtype, hidden=12, family=LlamaConfig, **fields):
    """A decoder without layers: a hidden state [b, s, E] and a head, which is the embedding."""
    torch.manual_seed(0)
    config = small_config(
        family, hidden_size=hidden, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=None, vocab_size=vocab, tie_word_embeddings=True, **fields,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    del model.model.layers[:]
    labels = torch.randint(0, vocab, (BATCH, TOKENS))
    if tile is None:
        apply_loss(model)
    else:
        apply_tiled_loss(model, tile=tile)
    state = torch.randn(BATCH, TOKENS, hidden, dtype=dtype, requires_grad=True)
    model.model.forward = lambda *_, **__: BaseModelOutputWithPast(last_hidden_state=state)
    return peaks(model, lambda: model(labels=labels).loss)


@DTYPES
@pytest.mark.parametrize("tile", [32, 13, None])
def test_what_the_loss_holds_grows_with_the_tile_and_not_with_the_sequence(dtype, tile):
    """What grows with V, to the byte."""
    w, wide, e, tokens = dtype.itemsize, max(dtype.itemsize, 4), 12, BATCH * TOKENS
    small, large = loss_peaks(200, tile, dtype), loss_peaks(300, tile, dtype)
    held, forward, backward = ((b - a) / 100 - e * w for a, b in zip(small, large, strict=True))
    if tile is None:
        assert (held, backward) == (tokens * wide, 3 * tokens * wide)
    else:
        assert (held, forward) == (e * wide, tile * w + e * (w + wide))
        assert backward == e * (wide if w == wide else w + wide)


@DTYPES
@pytest.mark.parametrize("tile", [BATCH * TOKENS, None])
def test_what_a_cap_of_the_logits_holds(dtype, tile):
    """What grows with V, to the byte: the tanh of whole logits, or of a block of five tokens."""
    w, wide, tokens, e = dtype.itemsize, max(dtype.itemsize, 4), BATCH * TOKENS, 2
    grown = []
    for cap in (None, 3.0):
        own = {"family": Gemma3TextConfig, "final_logit_softcapping": cap, "hidden": e}
        small, large = (loss_peaks(vocab, tile, dtype, **own) for vocab in (200, 300))
        grown.append([(b - a) / 100 for a, b in zip(small, large, strict=True)])
    held, forward, backward = (capped - plain for plain, capped in zip(*grown, strict=True))
    if tile is None:
        assert (held, backward) == (w * tokens, w * tokens)
    else:
        assert (held, backward) == (0, 0)
        # Without a cap and in a wide dtype, the gradient of the head is more than a block.
        assert forward == 5 * wide - e * wide * (w == wide)


# ---- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", APPLY)
@pytest.mark.parametrize("tile", [0, -3])
def test_refusals(what, tile):
    knob = {"mlp": "mlp_tile", "norms": "norm_tile", "loss": "loss_tile"}[what]
    with pytest.raises(RecipeError, match=f"{knob}={tile}: .* 1 or more"):
        APPLY[what](decoder(), tile=tile)
