"""A layer keeps only its input."""

import pytest
import torch

from lab.errors import RecipeError
from lab.memory.meter import Meter
from lab.techniques.checkpointing import apply_checkpointing
from lab_tests.support.decoder_step import BATCH, HIDDEN, TOKENS, batch, decoder


def bytes_after_forward(model):
    inputs, meter = batch(), Meter()
    with meter.measure(model), meter.phase("forward"):
        loss = model(**inputs).loss
    assert loss.requires_grad
    return int(meter.timeline().total[-1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_layer_more_is_one_block_input_more(dtype):
    held = {}
    for layers in (3, 4):
        model = decoder(dtype=dtype, layers=layers)
        plain = bytes_after_forward(model)
        apply_checkpointing(model)
        parameters = sum(p.nbytes for p in model.model.layers.parameters())
        held[layers] = bytes_after_forward(model) - parameters, plain - parameters
    block_input = BATCH * TOKENS * HIDDEN * dtype.itemsize
    assert held[4][0] - held[3][0] == block_input
    assert held[4][1] - held[3][1] > 10 * block_input


def test_names_and_values_stay_the_plain_models():
    model = decoder()
    before = model.state_dict()
    apply_checkpointing(model)
    assert list(model.state_dict()) == list(before)
    assert type(model.model.layers[0]).forward is type(decoder().model.layers[0]).forward


def test_without_gradients_nothing_is_kept_and_generation_works():
    model = decoder()
    ids = batch(rows=1)["input_ids"]
    wanted = model.generate(ids, max_new_tokens=5, do_sample=False, use_cache=True, pad_token_id=0)
    apply_checkpointing(model)
    got = model.generate(ids, max_new_tokens=5, do_sample=False, use_cache=True, pad_token_id=0)
    assert torch.equal(got, wanted)


def test_refusals():
    model = decoder()
    apply_checkpointing(model)
    with pytest.raises(RecipeError, match="checkpointed already"):
        apply_checkpointing(model)
    with pytest.raises(RecipeError, match="use_cache=False"):
        model(**batch(), use_cache=True)
    model = decoder()
    # The one name is deprecated in newer releases, the other missing in older ones.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    with pytest.raises(RecipeError, match="gradient_checkpointing_disable"):
        apply_checkpointing(model)
