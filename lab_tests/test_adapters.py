"""LoRA in bf16 on four ranks; frozen weights cost no product. Its gradients are in the table of cases."""

from ast import literal_eval
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import lab
from lab.decoder import decoder_of, shape_of
from lab.errors import ModelError
from lab.models.lora import Lora
from lab.recipe.recipe import Recipe
from lab.step.training_step import make_optimizer
from lab.techniques.upipe.layer import apply_upipe
from lab_tests.proofs.input_cases import EVERY_LINEAR, expected_result, token_ids, with_lora
from lab_tests.support.operators import Calls
from lab_tests.support.parity import whole_gradients
from lab_tests.support.reference import build, config, error, exact_rotary

MAKE = {"target_modules": EVERY_LINEAR, "family": "qwen3"}


# PEFT asks a model for what transformers is about to call otherwise.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapters_frozen_weights_have_no_optimizer_state():
    model = with_lora(**MAKE)()
    optimizer = make_optimizer(model, learning_rate=1e-3)
    trained = {p for n, p in model.named_parameters() if "lora_" in n}
    assert set(optimizer.state) == trained


def bf16_errors(recipe):
    """Errors against fp32 of plain LoRA in bf16, and of LoRA under the recipe in bf16."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plain, right = (
        expected_result(with_lora(**MAKE)().to(dtype))[1] for dtype in (torch.bfloat16, torch.float32)
    )
    model = with_lora(**MAKE)().to(torch.float32)
    lab.apply_recipe(model, recipe, mesh)
    lab.loss(model, lab.shard_batch(token_ids(), recipe, mesh)).backward()
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    found = {name: g for name, g in whole_gradients(model).items() if name in right}
    return error(plain, right), error(found, right)


@pytest.mark.long
def test_lora_in_bf16_is_at_most_half_again_as_far_from_fp32_as_plain_lora(ranks4):
    recipe = Recipe(
        fsdp=True, ulysses=2, head_chunk=4, checkpoint=True, mlp_tile=5, norm_tile=8, loss_tile=7,
        compute_dtype="bfloat16",
    )  # fmt: skip
    own, found = ranks4.apply(bf16_errors, recipe)[0]
    assert 1e-4 < found < 1.5 * own


class Products(TorchDispatchMode):
    """Counts matrix products by the shape of what they give."""

    def __init__(self):
        super().__init__()
        self.shapes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.shapes[tuple(out.shape)] += 1
        return out


def products(trained):
    """Of a backward under UPipe, where the parameters with these words in their names are trained."""
    model = build(config(heads=24, kv_heads=6, layers=1))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(word in name for word in trained))
    apply_upipe(model, head_chunk=4, group=None)
    total = model(input_ids=token_ids()).logits.sum()
    with Products() as counted:
        total.backward()
    return counted.shapes


QUERY, KEY, OUT = (240, 48), (60, 48), (48, 240)
"""Shapes of the gradients of q_proj, of k_proj and v_proj, and of o_proj: H*D=240, K*D=60, E=48."""


@pytest.mark.parametrize(
    ("trained", "expected"),
    [
        ([""], {QUERY: 1, KEY: 2, OUT: 1}),
        (["q_proj", "embed"], {QUERY: 1, KEY: 0, OUT: 0}),
        (["v_proj", "embed"], {QUERY: 0, KEY: 1, OUT: 0}),
        (["o_proj", "embed"], {QUERY: 0, KEY: 0, OUT: 1}),
        (["embed"], {QUERY: 0, KEY: 0, OUT: 0}),
    ],
)
def test_no_product_is_run_for_a_frozen_weights_gradient(trained, expected):
    shapes = products(trained)
    assert {shape: shapes[shape] for shape in expected} == expected


def test_where_the_output_alone_is_trained_attention_is_not_differentiated():
    model = build(config(layers=1))
    model.requires_grad_(False)
    model.model.layers[0].self_attn.o_proj.weight.requires_grad_(True)
    plain = exact_rotary(build(config(layers=1)))
    plain.requires_grad_(False)
    plain.model.layers[0].self_attn.o_proj.weight.requires_grad_(True)
    plain(input_ids=token_ids(), use_cache=False).logits.square().sum().backward()
    exact_rotary(model)
    apply_upipe(model, head_chunk=4, group=None)
    with Calls() as calls:
        model(input_ids=token_ids()).logits.square().sum().backward()
    assert calls["attention backward"] == 0
    own = model.model.layers[0].self_attn.o_proj.weight.grad
    torch.testing.assert_close(own, plain.model.layers[0].self_attn.o_proj.weight.grad)


# ---- adapters that are refused, and those that the line names ---------------------------------------------

USUAL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_lora_on_experts_is_refused_by_that_name_and_the_targets_that_it_names_work(family):
    """Seen red: "tested with the LoRA layers of PEFT alone", of one; and "no projection"."""
    shape = shape_of(config(family))
    for target in (*USUAL[4:], "gate_up_proj", "experts", "w1"):
        with pytest.raises(
            ModelError, match=f"^lora: {target} is a matrix of the experts, .* give targets among "
        ):
            Lora(2, targets=(target,)).targets_in(shape)
    with pytest.raises(
        ModelError, match=r"\.experts is an adapter of experts \(PEFT's ParamWrapper\)"
    ) as caught:
        decoder_of(adapted(family, target_parameters=["mlp.experts.gate_up_proj"]))
    targets = literal_eval(str(caught.value).partition("target_modules=")[2])
    assert tuple(targets) == Lora(2).targets_in(shape)
    decoder_of(adapted(family, target_modules=targets))


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
def test_the_usual_names_of_an_experts_model_are_refused_too():
    with pytest.raises(ModelError, match=r"\.experts is an adapter of experts"):
        decoder_of(adapted("qwen3_moe", target_modules=USUAL))


def adapted(family, **fields):
    from peft import LoraConfig, inject_adapter_in_model

    model = build(config(family), torch.float32)
    inject_adapter_in_model(LoraConfig(r=2, **fields), model)
    return model


def test_a_class_that_is_refused_is_named_before_what_it_shares():
    """Seen red: "give each layer its own", after which the class was refused."""
    from peft import TrainableTokensConfig, inject_adapter_in_model

    model = build(config("llama", tie_word_embeddings=True), torch.float32)
    inject_adapter_in_model(TrainableTokensConfig(token_indices=[1, 2]), model)
    with pytest.raises(
        ModelError, match=r"TrainableTokensLayer: the lab is tested with .* the model's own module$"
    ):
        decoder_of(model)
