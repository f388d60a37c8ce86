"""The inputs that a user can bring: models, configs, batches, arguments, adapters, modules and states.

Each case is run with two recipes on every rank of a group. Its result must be that of transformers' own model
in one process, or the lab must refuse the input with a message that names it.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from lab.bench import reference
from lab.errors import LabError
from lab.recipe.recipe import Recipe
from lab.step.batches import shard_batch
from lab.step.compose import apply_recipe
from lab.step.training_step import loss, make_optimizer

ROWS, TOKENS = 3, 22
"""The size of the batch. The rows do not divide over two ranks, and a rank's 11 tokens not into the tiles."""

DOCUMENTS = [[5, 13, 4], [22], [2, 20]]
"""The lengths of the documents of each row."""

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
"""The rotary parameters of dynamic NTK scaling."""

RECIPES = {
    "plain": Recipe(),
    "everything": Recipe(
        fsdp=True, ulysses=2, head_chunk=4, overlap=True, attention_tile=8, checkpoint=True,
        offload="attention", mlp_tile=5, norm_tile=4, loss_tile=7, optimizer="host",
    ),
}  # fmt: skip
"""The recipes of each case: no technique, and all techniques on two ranks."""

TOLERANCE = 1e-9
"""The largest relative error of a right result, in fp64."""

MakeModel = Callable[[], PreTrainedModel]
ChangeModel = Callable[[PreTrainedModel], None]

RunCase = Callable[[Recipe, DeviceMesh], float]
"""Runs a case on a rank, and returns the relative error of its result."""


@dataclass(frozen=True)
class InputCase:
    """An input, and the function that runs it on a rank."""

    name: str
    run: RunCase


@reference.exact_modules()
def outcome(case: InputCase, recipe: Recipe, mesh: DeviceMesh) -> str:
    """Run a case on this rank, and return "right", "refused: ..." or "WRONG: ..."."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            error = case.run(recipe, mesh)
    except LabError as refusal:
        return f"refused: {refusal}"
    except Exception as failure:
        return f"WRONG: {type(failure).__name__}: {failure}"
    return "right" if error < TOLERANCE else f"WRONG: off by {error:.0e}"


def outcomes(names: list[str] | None = None) -> dict[tuple[str, str], str]:
    """Return the outcomes of all cases, or of those named, by case and recipe. Runs on each of two ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        (case.name, name): outcome(case, recipe, mesh)
        for case in CASES
        if names is None or case.name in names
        for name, recipe in RECIPES.items()
    }


# ---- models, batches, and the error of a step --------------------------------------------------------------


def token_ids() -> Tensor:
    """Return the batch [ROWS, TOKENS]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, reference.VOCABULARY, (ROWS, TOKENS), generator=generator)


def plain(family: str = "llama", **fields: Any) -> PreTrainedModel:
    """Return a small model of transformers with these fields of its config."""
    return reference.build(reference.config(family, **fields))


def expected_result(model: nn.Module, mask: Tensor | None = None) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradients of transformers' model in one process.

    Args:
        model: The model.
        mask: The attention mask of the batch [ROWS, TOKENS]; None for a batch without padding.
    """
    ids = token_ids()
    mask = torch.ones(ROWS, TOKENS, dtype=torch.int64) if mask is None else mask
    labels = ids[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
    logits = reference.exact_rotary(model)(input_ids=ids, attention_mask=mask, use_cache=False).logits
    value = reference.loss_of(logits[:, :-1], labels) / int((labels != -100).sum())
    value.backward()
    return value.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def relative_error(model: nn.Module, value: float, expected: tuple[float, dict[str, Tensor]]) -> float:
    """Return the largest relative error of the loss ``value`` and of the gradients of ``model``.

    It is infinite if other parameters have gradients than in ``expected``.
    """
    gradients: dict[str, Any] = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    if gradients.keys() != expected[1].keys():
        return float("inf")
    whole = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in gradients.items()}
    return max(abs(value / expected[0] - 1), reference.error(whole, expected[1]))


def training_error(
    make: MakeModel,
    recipe: Recipe,
    mesh: DeviceMesh,
    *,
    before: Callable[[PreTrainedModel], Any] = lambda _model: None,
    after: Callable[[PreTrainedModel], Any] = lambda _model: None,
    around: Callable[[], Any] = nullcontext,
) -> float:
    """Apply the recipe to a model, run forward and backward on one batch, and return the relative error.

    Args:
        make: Makes the model.
        recipe: The recipe.
        mesh: The mesh over all ranks.
        before: Changes the model before the recipe is applied.
        after: Changes the model after the recipe is applied.
        around: Makes the context manager in which the loss is computed.
    """
    model = make()
    before(model)
    apply_recipe(model, recipe, mesh)
    after(model)
    with around():
        value = loss(model, shard_batch(token_ids(), recipe, mesh))
    value.backward()
    plain_model = make()
    before(plain_model)
    return relative_error(model, value.item(), expected_result(plain_model))


# ---- cases -------------------------------------------------------------------------------------------------


def model_as_it_is(make: MakeModel) -> RunCase:
    return partial(training_error, make)


def forward_with(**arguments: Any) -> RunCase:
    """Call forward with arguments of transformers. An argument that is accepted must not change the logits.

    An argument that is a function is called with the token ids.
    """

    def run(recipe: Recipe, mesh: DeviceMesh) -> float:
        model = plain()
        apply_recipe(model, recipe, mesh)
        batch = shard_batch(token_ids(), recipe, mesh)
        inputs: dict[str, Any] = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
        expected = model(**inputs).logits
        more = {n: value(batch.input_ids) if callable(value) else value for n, value in arguments.items()}
        logits = model(**{**inputs, **more}).logits
        return float((logits - expected).norm() / expected.norm())

    return run


def batch_with_mask(mask: Tensor) -> RunCase:
    def run(recipe: Recipe, mesh: DeviceMesh) -> float:
        model = plain()
        apply_recipe(model, recipe, mesh)
        value = loss(model, shard_batch(token_ids(), recipe, mesh, attention_mask=mask))
        value.backward()
        return relative_error(model, value.item(), expected_result(plain(), mask))

    return run


def batch_of_documents(documents: list[list[int]], *, by_positions: bool = False) -> RunCase:
    """Give the lengths of documents, or positions that restart. The plain model computes each alone."""

    def run(recipe: Recipe, mesh: DeviceMesh) -> float:
        model = plain()
        apply_recipe(model, recipe, mesh)
        rows = [torch.cat([torch.arange(length) for length in lengths]) for lengths in documents]
        given: dict[str, Any] = (
            {"position_ids": torch.stack(rows)} if by_positions else {"documents": documents}
        )
        value = loss(model, shard_batch(token_ids(), recipe, mesh, **given))
        value.backward()
        plain_model, total = reference.exact_rotary(plain()), torch.zeros((), dtype=torch.float64)
        for row, lengths in zip(token_ids(), documents, strict=True):
            for document in row.split(lengths):
                logits = plain_model(input_ids=document[None], use_cache=False).logits
                total = total + reference.loss_of(logits[:, :-1], document[None, 1:])
        mean = total / sum(length - 1 for lengths in documents for length in lengths)
        mean.backward()
        return relative_error(model, value.item(), (mean.item(), reference.gradients(plain_model)))

    return run


def with_lora(**settings: Any) -> MakeModel:
    """Make a model with LoRA adapters of PEFT whose weights are all random, and none of them 0."""

    def make() -> PreTrainedModel:
        from peft import LoraConfig, get_peft_model

        family = settings.get("family", "qwen2")
        fields = {name: value for name, value in settings.items() if name != "family"}
        torch.manual_seed(3)
        wrapper: Any = get_peft_model(
            plain(family), LoraConfig(r=3, lora_alpha=7, **fields), autocast_adapter_dtype=False
        )
        with torch.no_grad():
            for name, parameter in wrapper.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn_like(parameter) * 0.3)
        model: PreTrainedModel = wrapper.get_base_model()
        return model

    return make


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERY_LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


def peft_model() -> Any:
    """Return the result of ``get_peft_model``, which wraps the model."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(plain(), LoraConfig(r=3, target_modules=ATTENTION))


def replace_projection(name: str, make: Callable[[nn.Linear], nn.Module]) -> ChangeModel:
    """Replace a projection of the second layer by the result of ``make``."""

    def change(model: PreTrainedModel) -> None:
        attention = model.model.layers[1].self_attn
        setattr(attention, name, make(getattr(attention, name)))

    return change


class Doubling(nn.Linear):
    """A Linear whose forward returns twice the result of a Linear."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def double(linear: nn.Linear) -> nn.Module:
    """Return a ``Doubling`` with the weight of ``linear``."""
    module = Doubling(linear.in_features, linear.out_features, bias=False, dtype=linear.weight.dtype)
    module.weight = linear.weight
    return module


class RowScale(nn.Module):
    """A parametrization that scales each row of a weight [out, in] by a function of the row."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * torch.sigmoid(weight.sum(1, keepdim=True))


def add_parametrization(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        parametrize.register_parametrization(layer.self_attn.q_proj, "weight", RowScale())


def add_hook(name: str) -> ChangeModel:
    """Add a forward hook that doubles the output of a module of the second layer."""

    def change(model: PreTrainedModel) -> None:
        model.model.layers[1].get_submodule(name).register_forward_hook(lambda _, __, out: 2 * out)

    return change


def freeze_except(*words: str) -> ChangeModel:
    """Freeze all parameters but those with one of these words in their name."""

    def change(model: PreTrainedModel) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(word in name for word in words))

    return change


def on_rank_1(change: ChangeModel) -> ChangeModel:
    """Make a change on rank 1 only."""
    return lambda model: change(model) if dist.get_rank() == 1 else None


def replace_activation_by_dropout(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.act_fn = nn.Dropout(0.1)


def change_weights(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.lm_head.weight.add_(1e-3)


def different_tokens(recipe: Recipe, mesh: DeviceMesh) -> float:
    """Give each rank different tokens."""
    model = plain()
    apply_recipe(model, recipe, mesh)
    return float(loss(model, shard_batch(token_ids() + mesh.get_local_rank(), recipe, mesh)))


def second_recipe(recipe: Recipe, mesh: DeviceMesh) -> float:
    return training_error(plain, recipe, mesh, after=lambda model: apply_recipe(model, Recipe(), mesh))


def labels_of_transformers(recipe: Recipe, mesh: DeviceMesh) -> float:
    """Call forward with labels, which transformers shifts itself."""
    model = plain()
    apply_recipe(model, recipe, mesh)
    batch = shard_batch(token_ids(), recipe, mesh)
    return float(
        model(input_ids=batch.input_ids, position_ids=batch.position_ids, labels=batch.input_ids).loss
    )


def without_gradients(recipe: Recipe, mesh: DeviceMesh, context: Callable[[], Any]) -> float:
    """Run a forward without gradients, and then a step with them."""
    model = plain()
    apply_recipe(model, recipe, mesh)
    model.eval()
    with context():
        first = loss(model, shard_batch(token_ids(), recipe, mesh)).item()
    model.train()
    value = loss(model, shard_batch(token_ids(), recipe, mesh))
    value.backward()
    step = relative_error(model, value.item(), expected_result(plain()))
    return max(abs(first / value.item() - 1), step)


def accumulation(recipe: Recipe, mesh: DeviceMesh) -> float:
    """Accumulate the gradients of three losses, the first two of which are computed before a backward."""
    model = plain()
    apply_recipe(model, recipe, mesh)
    batch = shard_batch(token_ids(), recipe, mesh)
    early, late = 0.5 * loss(model, batch), 0.25 * loss(model, batch)
    early.backward()
    late.backward()
    value = loss(model, batch)
    (0.25 * value).backward()
    return relative_error(model, value.item(), expected_result(plain()))


def two_models(recipe: Recipe, mesh: DeviceMesh) -> float:
    """Interleave the steps of two models in one process."""
    models = [plain(), plain("qwen3")]
    for model in models:
        apply_recipe(model, recipe, mesh)
    batch = shard_batch(token_ids(), recipe, mesh)
    values = [loss(model, batch) for model in models]
    for value in values:
        value.backward()
    expected = [expected_result(plain()), expected_result(plain("qwen3"))]
    return max(relative_error(m, v.item(), e) for m, v, e in zip(models, values, expected, strict=True))


def backward_twice(recipe: Recipe, mesh: DeviceMesh) -> float:
    """Run backward twice through one graph."""
    model = plain()
    apply_recipe(model, recipe, mesh)
    value = loss(model, shard_batch(token_ids(), recipe, mesh))
    (0.5 * value).backward(retain_graph=True)
    (0.5 * value).backward()
    return relative_error(model, value.item(), expected_result(plain()))


class _HookError(Exception):
    """The error with which a hook ends a step."""


def step_after_failure(recipe: Recipe, mesh: DeviceMesh, *, backward: bool) -> float:
    """Fail in the middle of a step on every rank, and return the error of the next step."""
    model = plain()
    apply_recipe(model, recipe, mesh)

    def fail(*_: Any) -> None:
        raise _HookError

    layer = model.model.layers[0]
    hook = layer.register_full_backward_hook(fail) if backward else layer.register_forward_hook(fail)
    try:
        loss(model, shard_batch(token_ids(), recipe, mesh)).backward()
    except _HookError:
        hook.remove()
    model.zero_grad()
    value = loss(model, shard_batch(token_ids(), recipe, mesh))
    value.backward()
    return relative_error(model, value.item(), expected_result(plain()))


def copy_with(function: Callable[[Any], Any]) -> RunCase:
    """Copy a model with ``function`` after a recipe was applied."""
    return partial(training_error, plain, after=function)


def unfreeze_head(model: PreTrainedModel) -> None:
    model.lm_head.weight.requires_grad_(True)


def add_adapter(model: PreTrainedModel) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(LoraConfig(r=3, target_modules=["q_proj"]), model)


def compile_after(recipe: Recipe, mesh: DeviceMesh) -> float:
    return training_error(plain, recipe, mesh, after=lambda model: model.compile())


def compile_before(recipe: Recipe, mesh: DeviceMesh) -> float:
    apply_recipe(torch.compile(plain()), recipe, mesh)  # type: ignore[arg-type]
    return 0.0


def set_attribute(path: str, name: str, value: object) -> ChangeModel:
    return lambda model: setattr(model.get_submodule(path), name, value)


def replace_head(model: PreTrainedModel) -> None:
    model.lm_head = nn.Linear(48, reference.VOCABULARY, bias=False, dtype=torch.float64)


def add_gradient_hook(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.up_proj.weight.register_hook(lambda gradient: 3 * gradient)


def add_gradients(model: PreTrainedModel) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def add_spectral_norm(model: PreTrainedModel) -> None:
    torch.nn.utils.parametrizations.spectral_norm(model.model.layers[0].mlp.up_proj)


def share_mlp(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp = model.model.layers[0].mlp


def graph_of_gradients(recipe: Recipe, mesh: DeviceMesh) -> float:
    """Run backward with ``create_graph``, so that the gradients can be differentiated again."""
    model = plain()
    apply_recipe(model, recipe, mesh)
    value = loss(model, shard_batch(token_ids(), recipe, mesh))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value.backward(create_graph=True)
    return relative_error(model, value.item(), expected_result(plain()))


def update_before_backward(recipe: Recipe, mesh: DeviceMesh) -> float:
    """Update the parameters between a forward and its backward."""
    model = plain()
    apply_recipe(model, recipe, mesh)
    optimizer = make_optimizer(model, learning_rate=0.1)
    early, late = (loss(model, shard_batch(token_ids(), recipe, mesh)) for _ in range(2))
    early.backward()
    optimizer.step()
    late.backward()
    return relative_error(model, late.item(), expected_result(plain()))


def token_outside_vocabulary(recipe: Recipe, mesh: DeviceMesh) -> float:
    model = plain()
    apply_recipe(model, recipe, mesh)
    ids = token_ids() - token_ids().max() + reference.VOCABULARY
    return float(loss(model, shard_batch(ids, recipe, mesh)))


def batch_of_another_recipe(recipe: Recipe, mesh: DeviceMesh) -> float:
    model = plain()
    apply_recipe(model, recipe, mesh)
    other = Recipe(ulysses=2) if recipe.ulysses == 1 else Recipe()
    return float(loss(model, shard_batch(token_ids(), other, mesh)))


LEFT_MASK = torch.ones(ROWS, TOKENS, dtype=torch.int64)
LEFT_MASK[0, :3] = 0
RIGHT_MASK = torch.ones(ROWS, TOKENS, dtype=torch.int64)
RIGHT_MASK[0, -3:], RIGHT_MASK[2, -12:] = 0, 0
MASK_WITH_HOLE = torch.ones(ROWS, TOKENS, dtype=torch.int64)
MASK_WITH_HOLE[1, 5] = 0

SMALL: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 24,
    "num_key_value_heads": 6, "head_dim": 10, "vocab_size": reference.VOCABULARY,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def of_any_family(kind: str) -> MakeModel:
    """Make a small model of any family of transformers, also of one that the lab does not support."""

    def make() -> PreTrainedModel:
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM

        config = CONFIG_MAPPING[kind]()
        for name, value in SMALL.items():
            if hasattr(config, name):
                setattr(config, name, value)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        return model

    return make


FOREIGN = ("apertus", "gemma2", "gpt2", "helium", "olmoe")
"""Families that the lab refuses, though their layers have the same names, or nearly."""

CASES = (
    *(InputCase(f"model: {family}", model_as_it_is(partial(plain, family))) for family in reference.FAMILIES),
    *(InputCase(f"model: {kind}", model_as_it_is(of_any_family(kind))) for kind in FOREIGN),
    InputCase("config: is_causal=False", model_as_it_is(partial(plain, is_causal=False))),
    InputCase("config: attention_dropout", model_as_it_is(partial(plain, attention_dropout=0.1))),
    InputCase("config: residual_dropout", model_as_it_is(partial(plain, "starcoder2", residual_dropout=0.1))),
    InputCase("config: sliding_window", model_as_it_is(partial(plain, "mistral", sliding_window=16))),
    InputCase(
        "config: a window in the last layer",
        model_as_it_is(
            partial(
                plain,
                "qwen3",
                use_sliding_window=True,
                sliding_window=16,
                layer_types=["full_attention", "sliding_attention"],
            )
        ),
    ),
    InputCase(
        "config: a window that no layer has", model_as_it_is(partial(plain, "qwen2", sliding_window=16))
    ),
    InputCase("config: quantization_config", model_as_it_is(partial(plain, quantization_config={"bits": 4}))),
    InputCase(
        "config: rope_type=dynamic",
        model_as_it_is(partial(plain, rope_parameters=DYNAMIC, max_position_embeddings=TOKENS - 5)),
    ),
    InputCase(
        "config: rope_type=dynamic with short rows", model_as_it_is(partial(plain, rope_parameters=DYNAMIC))
    ),
    InputCase("config: a key that no class declares", model_as_it_is(partial(plain, written_by="somebody"))),
    InputCase("batch: padding at the right", batch_with_mask(RIGHT_MASK)),
    InputCase("batch: padding at the left", batch_with_mask(LEFT_MASK)),
    InputCase("batch: holes", batch_with_mask(MASK_WITH_HOLE)),
    InputCase("batch: padding alone", batch_with_mask(torch.zeros(ROWS, TOKENS, dtype=torch.int64))),
    InputCase("batch: other tokens on a rank", different_tokens),
    InputCase("batch: labels of transformers", labels_of_transformers),
    InputCase("batch: several documents by mask", batch_with_mask(LEFT_MASK + 1)),
    InputCase("batch: several documents by lengths", batch_of_documents(DOCUMENTS)),
    InputCase("batch: several documents by positions", batch_of_documents(DOCUMENTS, by_positions=True)),
    InputCase("batch: documents that do not add up", batch_of_documents([[4, 19], [22], [22]])),
    InputCase("batch: a token outside the vocabulary", token_outside_vocabulary),
    InputCase("batch: made for another recipe", batch_of_another_recipe),
    InputCase("forward: attention_mask of ones", forward_with(attention_mask=torch.ones_like)),
    InputCase("forward: attention_mask of another shape", forward_with(attention_mask=torch.ones(1, 5))),
    InputCase(
        "forward: a 4D attention_mask", forward_with(attention_mask=torch.ones(1, 1, 4, 4, dtype=torch.bool))
    ),
    InputCase(
        "forward: position_ids that restart", forward_with(position_ids=torch.arange(11).repeat(2)[None])
    ),
    InputCase("forward: position_ids left out", forward_with(position_ids=None)),
    InputCase("forward: inputs_embeds", forward_with(inputs_embeds=torch.zeros(1, 4, 48))),
    InputCase("forward: use_cache=True", forward_with(use_cache=True)),
    InputCase("forward: use_cache=False", forward_with(use_cache=False)),
    InputCase("forward: output_hidden_states", forward_with(output_hidden_states=True)),
    InputCase("forward: output_attentions", forward_with(output_attentions=True)),
    InputCase("forward: return_dict=False", forward_with(return_dict=False)),
    InputCase("forward: logits_to_keep=1", forward_with(logits_to_keep=1)),
    InputCase("forward: num_items_in_batch", forward_with(num_items_in_batch=3)),
    InputCase("forward: is_causal=False", forward_with(is_causal=False)),
    InputCase("adapter: LoRA on q, k, v, o", model_as_it_is(with_lora(target_modules=ATTENTION))),
    InputCase("adapter: LoRA on every linear", model_as_it_is(with_lora(target_modules=EVERY_LINEAR))),
    InputCase("adapter: LoRA on the head", model_as_it_is(with_lora(target_modules=["lm_head"]))),
    InputCase("adapter: LoRA on the embedding", model_as_it_is(with_lora(target_modules=["embed_tokens"]))),
    InputCase(
        "adapter: LoRA with norms of heads",
        model_as_it_is(with_lora(family="qwen3", target_modules=ATTENTION)),
    ),
    InputCase(
        "adapter: LoRA with a bias", model_as_it_is(with_lora(target_modules=["k_proj"], lora_bias=True))
    ),
    InputCase(
        "adapter: LoRA beside a trained head",
        model_as_it_is(with_lora(target_modules=ATTENTION, modules_to_save=["lm_head"])),
    ),
    InputCase(
        "adapter: LoRA with dropout", model_as_it_is(with_lora(target_modules=ATTENTION, lora_dropout=0.1))
    ),
    InputCase("adapter: DoRA", model_as_it_is(with_lora(target_modules=ATTENTION, use_dora=True))),
    InputCase("adapter: a model of PEFT", model_as_it_is(peft_model)),
    InputCase("adapter: added after the recipe", partial(training_error, plain, after=add_adapter)),
    InputCase("module: a parametrized weight", partial(training_error, plain, before=add_parametrization)),
    InputCase(
        "module: a Linear with its own forward",
        partial(training_error, plain, before=replace_projection("k_proj", double)),
    ),
    InputCase(
        "module: a hook on a projection", partial(training_error, plain, before=add_hook("self_attn.v_proj"))
    ),
    InputCase("module: a hook inside an MLP", partial(training_error, plain, before=add_hook("mlp.up_proj"))),
    InputCase("module: a hook on an MLP", partial(training_error, plain, before=add_hook("mlp"))),
    InputCase("module: a spectral norm", partial(training_error, plain, before=add_spectral_norm)),
    InputCase("module: one MLP in two layers", partial(training_error, plain, before=share_mlp)),
    InputCase("module: a gradient hook", partial(training_error, plain, before=add_gradient_hook)),
    InputCase(
        "module: other rotary frequencies",
        partial(training_error, plain, before=set_attribute("model.rotary_emb", "attention_scaling", 1.7)),
    ),
    InputCase(
        "module: dropout by an attribute",
        partial(
            training_error, plain, before=set_attribute("model.layers.0.self_attn", "attention_dropout", 0.5)
        ),
    ),
    InputCase(
        "module: another scale on one rank",
        partial(
            training_error, plain, before=on_rank_1(set_attribute("model.layers.0.self_attn", "scaling", 0.9))
        ),
    ),
    InputCase(
        "module: is_causal=False after the recipe",
        partial(training_error, plain, after=set_attribute("model.layers.0.self_attn", "is_causal", False)),
    ),
    InputCase("module: another head after the recipe", partial(training_error, plain, after=replace_head)),
    InputCase(
        "module: transformers' checkpointing",
        partial(training_error, plain, before=lambda model: model.gradient_checkpointing_enable()),
    ),
    InputCase(
        "state: frozen but for norms of heads",
        partial(training_error, partial(plain, "qwen3"), before=freeze_except("q_norm", "layers.1.mlp")),
    ),
    InputCase(
        "state: frozen on one rank",
        partial(training_error, plain, before=on_rank_1(freeze_except("mlp"))),
    ),
    InputCase(
        "state: other weights on a rank", partial(training_error, plain, before=on_rank_1(change_weights))
    ),
    InputCase(
        "state: dropout on one rank",
        partial(training_error, plain, before=on_rank_1(replace_activation_by_dropout)),
    ),
    InputCase(
        "state: unfrozen after the recipe",
        partial(training_error, plain, before=freeze_except("mlp"), after=unfreeze_head),
    ),
    InputCase("state: gradients from before", partial(training_error, plain, before=add_gradients)),
    InputCase("state: a graph of gradients", graph_of_gradients),
    InputCase("state: an update before backward", update_before_backward),
    InputCase("state: a second recipe", second_recipe),
    InputCase("state: copy.deepcopy", copy_with(copy.deepcopy)),
    InputCase("state: pickle", copy_with(pickle.dumps)),
    InputCase(
        "state: autocast",
        partial(training_error, plain, around=partial(torch.autocast, "cpu", torch.bfloat16)),
    ),
    InputCase("state: torch.compile of the model", compile_after),
    InputCase("state: torch.compile before the recipe", compile_before),
    InputCase("state: eval and no_grad", partial(without_gradients, context=torch.no_grad)),
    InputCase("state: inference_mode", partial(without_gradients, context=torch.inference_mode)),
    InputCase("state: accumulation", accumulation),
    InputCase("state: two models", two_models),
    InputCase("state: backward twice", backward_twice),
    InputCase("state: a forward that fails", partial(step_after_failure, backward=False)),
    InputCase("state: a backward that fails", partial(step_after_failure, backward=True)),
)
"""All cases. The first word of a name says what kind of input it is."""
