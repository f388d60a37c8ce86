"""Liger's loss, as a stand-in with its function's signature, has the plain model's loss and gradients."""

import copy
import sys
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch.autograd import Function
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import Gemma3TextConfig

import lab
from lab import models
from lab.errors import RecipeError
from lab.recipe.ladder import ladder
from lab.recipe.recipe import Recipe
from lab.step.compose import apply_recipe
from lab.techniques.liger_loss import MODULE, apply_liger_loss, import_liger
from lab.techniques.sharding import apply_fsdp
from lab_tests.support.decoder_step import (
    BATCH,
    FAMILIES,
    TOKENS,
    TOLERANCE,
    VOCAB,
    batch,
    decoder,
    step,
)
from lab_tests.support.models import small_config, small_decoder
from lab_tests.support.reference import error


class _Gradients(Function):
    """As Liger's: the gradients are made in forward, piece by piece, and scaled in place in backward."""

    @staticmethod
    def forward(ctx, hidden, weight, target, bias, ignore_index, softcap, accum_dtype):
        total = hidden.new_zeros((), dtype=accum_dtype)
        dhidden, dweight = torch.zeros_like(hidden), torch.zeros_like(weight, dtype=accum_dtype)
        dbias = None if bias is None else torch.zeros_like(bias, dtype=accum_dtype)
        for part, labels, dpart in zip(*(t.split(13) for t in (hidden, target, dhidden)), strict=True):
            with torch.enable_grad():
                logits = (part.detach() @ weight.detach().T + (0 if bias is None else bias)).requires_grad_()
                wide = logits.to(accum_dtype)
                if softcap is not None:
                    wide = softcap * torch.tanh(wide / softcap)
                loss = torch.nn.functional.cross_entropy(
                    wide, labels, ignore_index=ignore_index, reduction="sum"
                )
            (dlogits,) = torch.autograd.grad(loss, logits)
            total += loss.detach()
            dpart.copy_(dlogits @ weight)
            dweight += dlogits.T @ part
            if dbias is not None:
                dbias += dlogits.sum(0)
        ctx.save_for_backward(dhidden, dweight.to(weight.dtype), dbias)
        return total

    @staticmethod
    def backward(ctx, upstream):
        dhidden, dweight, dbias = (None if t is None else t.mul_(upstream) for t in ctx.saved_tensors)
        return dhidden, dweight, None, dbias, None, None, None


def liger_fused_linear_cross_entropy(
    input,
    weight,
    target,
    bias=None,
    ce_weight=None,
    ignore_index=-100,
    lse_square_scale=0.0,
    label_smoothing=0.0,
    reduction="mean",
    softcap=None,
    return_z_loss=False,
    accum_dtype=None,
    use_token_scaling=False,
    return_token_accuracy=False,
    return_predicted_tokens=False,
):
    """Of release 0.8; 0.6.2 to 0.7 are without the last argument."""
    assert ce_weight is None
    assert {return_z_loss, use_token_scaling, return_token_accuracy, return_predicted_tokens} == {False}
    assert (lse_square_scale, label_smoothing, reduction, ignore_index) == (0.0, 0.0, "sum", -100)
    assert accum_dtype == torch.promote_types(input.dtype, torch.float32)
    assert input.is_contiguous()
    assert target.shape == input.shape[:1]
    assert not isinstance(weight, DTensor)
    assert weight.shape == (VOCAB, input.shape[1])
    return _Gradients.apply(input, weight, target, bias, ignore_index, softcap, accum_dtype)


def fused(model):
    apply_liger_loss(model, fused=liger_fused_linear_cross_entropy)
    return model


# ---- the same loss -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_every_gradient_are_the_plain_models(family, dtype):
    plain = decoder(family, dtype)
    wanted = step(plain)
    assert error(step(fused(copy.deepcopy(plain))), wanted) <= TOLERANCE[dtype]


def test_logits_that_are_capped():
    """Seen red without the cap."""
    config = small_config(Gemma3TextConfig, vocab_size=VOCAB, final_logit_softcapping=1.5)
    plain = small_decoder(config)
    plain.lm_head.weight.data.mul_(30)
    assert error(step(fused(copy.deepcopy(plain))), step(plain)) <= 1e-9


def test_a_head_with_a_bias():
    plain = decoder()
    plain.lm_head.bias = torch.nn.Parameter(torch.randn(VOCAB, dtype=torch.float64))
    wanted = step(plain)
    assert "lm_head.bias" in wanted
    assert error(step(fused(copy.deepcopy(plain))), wanted) <= 1e-9


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_scaled_and_accumulated_losses_and_ignored_labels(family):
    plain = decoder(family)
    gradients = []
    for each in (plain, fused(copy.deepcopy(plain))):
        for seed in range(2):
            torch.manual_seed(seed)
            ids, labels = torch.randint(0, VOCAB, (2, BATCH, TOKENS))
            labels[0, 3:26] = -100
            (each(input_ids=ids, labels=labels).loss / 4).backward()
        gradients.append({name: p.grad for name, p in each.named_parameters()})
    assert error(gradients[1], gradients[0]) <= 1e-9


def sharded_step(family):
    model = fused(decoder(family))
    apply_fsdp(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    row = {name: t[dist.get_rank() :][:1] for name, t in batch(rows=4).items()}
    model(**row).loss.backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_fsdp_has_the_head_whole(family, ranks4):
    plain = decoder(family)
    plain(**batch(rows=4)).loss.backward()
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    for got in ranks4.apply(sharded_step, family):
        assert error(got, wanted) <= 1e-9


# ---- without Liger ----------------------------------------------------------------------------------------


def module_with(monkeypatch, **contents):
    for part in ("liger_kernel", "liger_kernel.transformers", MODULE):
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    vars(sys.modules[MODULE]).update(contents)


def test_the_installed_function_is_found(monkeypatch):
    module_with(monkeypatch, liger_fused_linear_cross_entropy=liger_fused_linear_cross_entropy)
    assert import_liger() is liger_fused_linear_cross_entropy


def test_a_missing_or_old_liger_is_refused_with_what_would_work(monkeypatch):
    def before(input, weight, target, bias=None, ignore_index=-100, reduction="mean"):
        raise AssertionError

    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(
        RecipeError,
        match=r"liger': liger_kernel.* cannot be imported .*install .*; loss_kernel='lab' works",
    ):
        import_liger()
    module_with(monkeypatch, liger_fused_linear_cross_entropy=before)
    with pytest.raises(RecipeError, match=r"install 0\.6\.2 or later; loss_kernel='lab' works everywhere"):
        import_liger()


def test_a_recipe_has_a_tile_or_liger():
    with pytest.raises(
        RecipeError, match="loss_tile=16: Liger cuts the tokens itself; set loss_tile=None, or"
    ):
        Recipe(loss_kernel="liger", loss_tile=16)
    with pytest.raises(RecipeError, match="loss_kernel='triton': it takes 'lab' or 'liger'"):
        Recipe(loss_kernel="triton")
    assert ladder("tiny", 4, 1000)["upipe"].loss_tile is not None
    assert ladder("tiny", 4, 1000, loss_kernel="liger", stream=None)["upipe"].loss_tile is None


def test_a_plan_refuses_liger_and_says_what_can_be_planned():
    with pytest.raises(RecipeError, match=r"'liger' cannot be planned.* plan with loss_kernel='lab'"):
        lab.plan("tiny", "upipe", tokens=512, ranks=4, loss_kernel="liger")


def test_liger_is_refused_on_a_cpu(alone):
    with pytest.raises(RecipeError, match=r"it needs a GPU, .* loss_kernel='lab' works everywhere"):
        apply_recipe(models.build("tiny"), Recipe(loss_kernel="liger"), init_device_mesh("cpu", (1,)))
