"""A layer keeps its input and nothing else, and runs twice."""

import copy
from collections import Counter

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from lab.errors import RecipeError
from lab.memory.meter import Meter
from lab.techniques.checkpointing import apply_checkpointing
from lab.techniques.loss import apply_loss

ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"
LAYERS, BATCH, TOKENS, VOCAB, HIDDEN = 3, 2, 40, 67, 48
FAMILIES = {
    "llama": (LlamaConfig, {"head_dim": 10}),
    "llama-tied": (LlamaConfig, {"head_dim": 10, "tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 10}),
}
TOLERANCE = {torch.float64: 1e-9, torch.float32: 5e-6}


def decoder(family="llama", dtype=torch.float64, layers=LAYERS):
    config, further = FAMILIES[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config(
            vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=88, num_hidden_layers=layers,
            num_attention_heads=6, num_key_value_heads=3, use_cache=False, **further,
        ),
        dtype=dtype, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():  # a bug hides behind biases of 0 and norms of 1
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    apply_loss(model)
    return model


def batch(tokens=TOKENS, rows=BATCH):
    torch.manual_seed(1)
    return {name: torch.randint(0, VOCAB, (rows, tokens)) for name in ("input_ids", "labels")}


def step(model):
    model.zero_grad()
    loss = model(**batch()).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == dict(model.named_parameters()).keys()
    return {"loss": loss.detach(), **gradients}


def worst(got, wanted):
    return max(((got[n] - w).norm() / w.norm()).item() for n, w in wanted.items())


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


def held_after_forward(model):
    inputs, meter = batch(), Meter()
    with meter.measure(model), meter.phase("forward"):
        loss = model(**inputs).loss
    assert loss.requires_grad
    return int(meter.timeline().total[-1])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_every_gradient_are_the_plain_models(family, dtype):
    plain = decoder(family, dtype)
    model = copy.deepcopy(plain)
    apply_checkpointing(model)
    assert worst(step(model), step(plain)) <= TOLERANCE[dtype]


def test_each_layer_runs_attention_twice():
    model = decoder()
    with Counting() as plain:
        step(model)
    apply_checkpointing(model)
    with Counting() as checkpointed:
        step(model)
    assert plain.ops[ATTENTION] == LAYERS
    assert checkpointed.ops[ATTENTION] == 2 * LAYERS


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_layer_more_is_one_block_input_more(dtype):
    held = {}
    for layers in (3, 4):
        model = decoder(dtype=dtype, layers=layers)
        plain = held_after_forward(model)
        apply_checkpointing(model)
        parameters = sum(p.nbytes for p in model.model.layers.parameters())
        held[layers] = held_after_forward(model) - parameters, plain - parameters
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


def test_runs_on_fake_tensors_at_any_length():
    with FakeTensorMode():
        model = decoder(dtype=torch.bfloat16)
        apply_checkpointing(model)
        meter, inputs = Meter(), batch(tokens=2**20, rows=1)
        with meter.measure(model):
            with meter.phase("forward"):
                loss = model.model(input_ids=inputs["input_ids"]).last_hidden_state.sum()
            with meter.phase("backward"):
                loss.backward()
    assert meter.timeline().device_peak > LAYERS * 2**20 * HIDDEN * 2


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
