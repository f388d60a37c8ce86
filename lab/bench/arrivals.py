"""Everything that can reach the lab from outside, each with how to bring it: models, batches, adapters,
states.

Each arrival is tried under two recipes on every rank of a group. What it brings is computed right, held
against transformers' own model in one process, or refused by name.
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
"""Of the batch; neither divides over the ranks."""

RECIPES = {
    "plain": Recipe(),
    "everything": Recipe(
        fsdp=True, ulysses=2, head_chunk=4, overlap=True, checkpoint=True, offload="attention", mlp_tile=5,
        norm_tile=4, loss_tile=7,
    ),
}  # fmt: skip
"""Replicated without any technique, and with all of them, on two ranks."""

TOLERANCE = 1e-9

Model = Callable[[], PreTrainedModel]


@dataclass(frozen=True)
class Arrival:
    """One thing from outside, and what is done with it on a rank; ``act`` gives a relative error."""

    name: str
    act: Callable[[Recipe, DeviceMesh], float]


def outcome(arrival: Arrival, recipe: Recipe, mesh: DeviceMesh) -> str:
    """Run on every rank: "right", "refused: ..." or "WRONG: ..."."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            error = arrival.act(recipe, mesh)
    except LabError as refusal:
        return f"refused: {refusal}"
    except Exception as failure:
        return f"WRONG: {type(failure).__name__}: {failure}"
    return "right" if error < TOLERANCE else f"WRONG: off by {error:.0e}"


def outcomes(names: list[str] | None = None) -> dict[tuple[str, str], str]:
    """On each rank of a group of two: what becomes of each arrival under each of ``RECIPES``."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        (arrival.name, name): outcome(arrival, recipe, mesh)
        for arrival in ARRIVALS
        if names is None or arrival.name in names
        for name, recipe in RECIPES.items()
    }


# ---- what all of them do -----------------------------------------------------------------------------------


def token_ids() -> Tensor:
    """The batch, [ROWS, TOKENS]."""
    draw = torch.Generator().manual_seed(0)
    return torch.randint(0, reference.VOCABULARY, (ROWS, TOKENS), generator=draw)


def plain(family: str = "llama", **fields: Any) -> PreTrainedModel:
    """A small model of a family, as transformers makes it, with fields of its config set."""
    return reference.build(reference.config(family, **fields))


def truth(model: nn.Module, kept: Tensor | None = None) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of transformers' model in one process, over the tokens that ``kept`` marks."""
    ids, mask = token_ids(), torch.ones(ROWS, TOKENS, dtype=torch.int64) if kept is None else kept
    labels = ids[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
    logits = reference.exact_rotary(model)(input_ids=ids, attention_mask=mask, use_cache=False).logits
    value = reference.loss_of(logits[:, :-1], labels) / int((labels != -100).sum())
    value.backward()
    return value.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def error_of(model: nn.Module, value: float, right: tuple[float, dict[str, Tensor]]) -> float:
    """The worst relative error of the loss and of any gradient; infinite where others have gradients."""
    found: dict[str, Any] = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    if found.keys() != right[1].keys():
        return float("inf")
    whole = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in found.items()}
    return max(abs(value / right[0] - 1), reference.error(whole, right[1]))


def trained(
    make: Model,
    recipe: Recipe,
    mesh: DeviceMesh,
    *,
    before: Callable[[PreTrainedModel], Any] = lambda _model: None,
    after: Callable[[PreTrainedModel], Any] = lambda _model: None,
    around: Callable[[], Any] = nullcontext,
) -> float:
    """Apply the recipe to ``make()`` and train on one batch; ``before`` and ``after`` change the model."""
    model = make()
    before(model)
    apply_recipe(model, recipe, mesh)
    after(model)
    with around():
        value = loss(model, shard_batch(token_ids(), recipe, mesh))
    value.backward()
    right = make()
    before(right)
    return error_of(model, value.item(), truth(right))


def model_arrives(make: Model) -> Callable[[Recipe, DeviceMesh], float]:
    """A model as it is."""
    return partial(trained, make)


def called(**given: Any) -> Callable[[Recipe, DeviceMesh], float]:
    """A forward with keywords of transformers; one that is taken must change nothing."""

    def act(recipe: Recipe, mesh: DeviceMesh) -> float:
        model = plain()
        apply_recipe(model, recipe, mesh)
        batch = shard_batch(token_ids(), recipe, mesh)
        told: dict[str, Any] = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
        expected = model(**told).logits
        made = {name: value(batch.input_ids) if callable(value) else value for name, value in given.items()}
        logits = model(**{**told, **made}).logits
        return float((logits - expected).norm() / expected.norm())

    return act


def padded(mask: Tensor) -> Callable[[Recipe, DeviceMesh], float]:
    """A batch with padding."""

    def act(recipe: Recipe, mesh: DeviceMesh) -> float:
        model = plain()
        apply_recipe(model, recipe, mesh)
        value = loss(model, shard_batch(token_ids(), recipe, mesh, attention_mask=mask))
        value.backward()
        return error_of(model, value.item(), truth(plain(), mask))

    return act


def adapted(**settings: Any) -> Model:
    """A model with LoRA adapters by PEFT, none of whose weights is zero."""

    def make() -> PreTrainedModel:
        from peft import LoraConfig, get_peft_model

        family = settings.get("family", "qwen2")
        told = {name: value for name, value in settings.items() if name != "family"}
        torch.manual_seed(3)
        around: Any = get_peft_model(
            plain(family), LoraConfig(r=3, lora_alpha=7, **told), autocast_adapter_dtype=False
        )
        with torch.no_grad():
            for name, parameter in around.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn_like(parameter) * 0.3)
        model: PreTrainedModel = around.get_base_model()
        return model

    return make


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERY_LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


def wrapped_by_peft() -> Any:
    """What ``get_peft_model`` gives: a model around the model."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(plain(), LoraConfig(r=3, target_modules=ATTENTION))


def set_on_attention(name: str, make: Callable[[nn.Linear], nn.Module]) -> Callable[[PreTrainedModel], None]:
    """Put what ``make`` gives in the place of a projection of the second layer."""

    def change(model: PreTrainedModel) -> None:
        attention = model.model.layers[1].self_attn
        setattr(attention, name, make(getattr(attention, name)))

    return change


class Doubling(nn.Linear):
    """A Linear with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        """Twice a Linear's."""
        return 2 * super().forward(x)


def doubling(linear: nn.Linear) -> nn.Module:
    """The same weights in a ``Doubling``."""
    made = Doubling(linear.in_features, linear.out_features, bias=False, dtype=linear.weight.dtype)
    made.weight = linear.weight
    return made


class Scaled(nn.Module):
    """A parametrization: each row of a weight, scaled by what the whole weight says."""

    def forward(self, weight: Tensor) -> Tensor:
        """``weight`` [out, in] -> the same shape."""
        return weight * torch.sigmoid(weight.sum(1, keepdim=True))


def parametrized(model: PreTrainedModel) -> None:
    """A parametrization on a projection of each layer."""
    for layer in model.model.layers:
        parametrize.register_parametrization(layer.self_attn.q_proj, "weight", Scaled())


def hooked(name: str) -> Callable[[PreTrainedModel], None]:
    """A forward hook that doubles what a module of the second layer gives."""

    def change(model: PreTrainedModel) -> None:
        model.model.layers[1].get_submodule(name).register_forward_hook(lambda _, __, out: 2 * out)

    return change


def frozen(*kept: str) -> Callable[[PreTrainedModel], None]:
    """All parameters frozen but those with one of these words in their name."""

    def change(model: PreTrainedModel) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(word in name for word in kept))

    return change


def on_rank_1(change: Callable[[PreTrainedModel], None]) -> Callable[[PreTrainedModel], None]:
    """A change that one rank alone makes."""
    return lambda model: change(model) if dist.get_rank() == 1 else None


def with_dropout(model: PreTrainedModel) -> None:
    """A dropout in the place of an activation."""
    model.model.layers[0].mlp.act_fn = nn.Dropout(0.1)


def other_weights(model: PreTrainedModel) -> None:
    """Weights of another seed."""
    with torch.no_grad():
        model.lm_head.weight.add_(1e-3)


def other_tokens(recipe: Recipe, mesh: DeviceMesh) -> float:
    """Each rank brings tokens of its own."""
    model = plain()
    apply_recipe(model, recipe, mesh)
    return float(loss(model, shard_batch(token_ids() + mesh.get_local_rank(), recipe, mesh)))


def second_recipe(recipe: Recipe, mesh: DeviceMesh) -> float:
    """Another recipe on the same model."""
    return trained(plain, recipe, mesh, after=lambda model: apply_recipe(model, Recipe(), mesh))


def labelled(recipe: Recipe, mesh: DeviceMesh) -> float:
    """Labels as transformers takes them, not shifted yet."""
    model = plain()
    apply_recipe(model, recipe, mesh)
    batch = shard_batch(token_ids(), recipe, mesh)
    return float(
        model(input_ids=batch.input_ids, position_ids=batch.position_ids, labels=batch.input_ids).loss
    )


def without_gradients(recipe: Recipe, mesh: DeviceMesh, context: Callable[[], Any]) -> float:
    """A forward without gradients, and then a step."""
    model = plain()
    apply_recipe(model, recipe, mesh)
    model.eval()
    with context():
        first = loss(model, shard_batch(token_ids(), recipe, mesh)).item()
    model.train()
    value = loss(model, shard_batch(token_ids(), recipe, mesh))
    value.backward()
    return max(abs(first / value.item() - 1), error_of(model, value.item(), truth(plain())))


def accumulated(recipe: Recipe, mesh: DeviceMesh) -> float:
    """A loss in three shares, two of them with their graphs alive at once."""
    model = plain()
    apply_recipe(model, recipe, mesh)
    batch = shard_batch(token_ids(), recipe, mesh)
    early, late = 0.5 * loss(model, batch), 0.25 * loss(model, batch)
    early.backward()
    late.backward()
    value = loss(model, batch)
    (0.25 * value).backward()
    return error_of(model, value.item(), truth(plain()))


def two_models(recipe: Recipe, mesh: DeviceMesh) -> float:
    """Two models in one process, their steps interleaved."""
    models = [plain(), plain("qwen3")]
    for model in models:
        apply_recipe(model, recipe, mesh)
    batch = shard_batch(token_ids(), recipe, mesh)
    values = [loss(model, batch) for model in models]
    for value in values:
        value.backward()
    rights = [truth(plain()), truth(plain("qwen3"))]
    return max(error_of(m, v.item(), r) for m, v, r in zip(models, values, rights, strict=True))


def backward_twice(recipe: Recipe, mesh: DeviceMesh) -> float:
    """One graph, differentiated twice."""
    model = plain()
    apply_recipe(model, recipe, mesh)
    value = loss(model, shard_batch(token_ids(), recipe, mesh))
    (0.5 * value).backward(retain_graph=True)
    (0.5 * value).backward()
    return error_of(model, value.item(), truth(plain()))


class _Broken(Exception):
    """What a step is broken off with."""


def broken_off(recipe: Recipe, mesh: DeviceMesh, *, backward: bool) -> float:
    """A step that fails in its middle, on every rank, and the one that follows."""
    model = plain()
    apply_recipe(model, recipe, mesh)

    def fail(*_: Any) -> None:
        raise _Broken

    layer = model.model.layers[0]
    hook = layer.register_full_backward_hook(fail) if backward else layer.register_forward_hook(fail)
    try:
        loss(model, shard_batch(token_ids(), recipe, mesh)).backward()
    except _Broken:
        hook.remove()
    model.zero_grad()
    value = loss(model, shard_batch(token_ids(), recipe, mesh))
    value.backward()
    return error_of(model, value.item(), truth(plain()))


def copied(copying: Callable[[Any], Any]) -> Callable[[Recipe, DeviceMesh], float]:
    """A copy of a model with a recipe, made by ``copying``."""
    return partial(trained, plain, after=copying)


def unfrozen_later(model: PreTrainedModel) -> None:
    """A parameter that is trained from now on, though it was not when the recipe was applied."""
    model.lm_head.weight.requires_grad_(True)


def adapter_added_later(model: PreTrainedModel) -> None:
    """An adapter, after the recipe."""
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(LoraConfig(r=3, target_modules=["q_proj"]), model)


def compiled(recipe: Recipe, mesh: DeviceMesh) -> float:
    """``torch.compile`` around a model with a recipe."""
    return trained(plain, recipe, mesh, after=lambda model: model.compile())


def compiled_before(recipe: Recipe, mesh: DeviceMesh) -> float:
    """A recipe for what ``torch.compile`` gives."""
    apply_recipe(torch.compile(plain()), recipe, mesh)  # type: ignore[arg-type]
    return 0.0


def set_attribute(path: str, name: str, value: object) -> Callable[[PreTrainedModel], None]:
    """An attribute of a module set by hand."""
    return lambda model: setattr(model.get_submodule(path), name, value)


def other_head(model: PreTrainedModel) -> None:
    """Another head in the place of the model's."""
    model.lm_head = nn.Linear(48, reference.VOCABULARY, bias=False, dtype=torch.float64)


def gradient_hook(model: PreTrainedModel) -> None:
    """A hook that changes the gradient of a parameter."""
    model.model.layers[0].mlp.up_proj.weight.register_hook(lambda gradient: 3 * gradient)


def with_gradients(model: PreTrainedModel) -> None:
    """Gradients from before the recipe."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def spectral(model: PreTrainedModel) -> None:
    """A parametrization with a state of its own."""
    torch.nn.utils.parametrizations.spectral_norm(model.model.layers[0].mlp.up_proj)


def shared_layer(model: PreTrainedModel) -> None:
    """One MLP in two layers."""
    model.model.layers[1].mlp = model.model.layers[0].mlp


def graph_of_gradients(recipe: Recipe, mesh: DeviceMesh) -> float:
    """Gradients that are to be differentiated again."""
    model = plain()
    apply_recipe(model, recipe, mesh)
    value = loss(model, shard_batch(token_ids(), recipe, mesh))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value.backward(create_graph=True)
    return error_of(model, value.item(), truth(plain()))


def update_before_backward(recipe: Recipe, mesh: DeviceMesh) -> float:
    """An optimizer that updates the parameters between forward and backward."""
    model = plain()
    apply_recipe(model, recipe, mesh)
    optimizer = make_optimizer(model, learning_rate=0.1)
    early, late = (loss(model, shard_batch(token_ids(), recipe, mesh)) for _ in range(2))
    early.backward()
    optimizer.step()
    late.backward()
    return error_of(model, late.item(), truth(plain()))


def outside_the_vocabulary(recipe: Recipe, mesh: DeviceMesh) -> float:
    """A token that the model does not have."""
    model = plain()
    apply_recipe(model, recipe, mesh)
    ids = token_ids() - token_ids().max() + reference.VOCABULARY
    return float(loss(model, shard_batch(ids, recipe, mesh)))


def of_another_recipe(recipe: Recipe, mesh: DeviceMesh) -> float:
    """A batch that was sharded for another recipe."""
    model = plain()
    apply_recipe(model, recipe, mesh)
    other = Recipe(ulysses=2) if recipe.ulysses == 1 else Recipe()
    return float(loss(model, shard_batch(token_ids(), other, mesh)))


LEFT = torch.ones(ROWS, TOKENS, dtype=torch.int64)
LEFT[0, :3] = 0
RIGHT = torch.ones(ROWS, TOKENS, dtype=torch.int64)
RIGHT[0, -3:], RIGHT[2, -12:] = 0, 0
HOLES = torch.ones(ROWS, TOKENS, dtype=torch.int64)
HOLES[1, 5] = 0

SMALL: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 24,
    "num_key_value_heads": 6, "head_dim": 10, "vocab_size": reference.VOCABULARY,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def of_family(kind: str) -> Model:
    """A small model of any family that transformers has."""

    def make() -> PreTrainedModel:
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM

        config = CONFIG_MAPPING[kind]()
        for name, value in SMALL.items():
            if hasattr(config, name):
                setattr(config, name, value)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        return model

    return make


FOREIGN = ("apertus", "cohere", "gemma2", "gpt2", "helium", "mixtral", "olmo2", "phi3", "smollm3")
"""Families with layers of the same names, or nearly, that are refused."""

ARRIVALS = (
    *(Arrival(f"model: {family}", model_arrives(partial(plain, family))) for family in reference.FAMILIES),
    *(Arrival(f"model: {kind}", model_arrives(of_family(kind))) for kind in FOREIGN),
    Arrival("config: is_causal=False", model_arrives(partial(plain, is_causal=False))),
    Arrival("config: attention_dropout", model_arrives(partial(plain, attention_dropout=0.1))),
    Arrival("config: residual_dropout", model_arrives(partial(plain, "starcoder2", residual_dropout=0.1))),
    Arrival("config: sliding_window", model_arrives(partial(plain, "mistral", sliding_window=16))),
    Arrival(
        "config: a window in the last layer",
        model_arrives(
            partial(
                plain,
                "qwen3",
                use_sliding_window=True,
                sliding_window=16,
                layer_types=["full_attention", "sliding_attention"],
            )
        ),
    ),
    Arrival("config: a window that no layer has", model_arrives(partial(plain, "qwen2", sliding_window=16))),
    Arrival("config: quantization_config", model_arrives(partial(plain, quantization_config={"bits": 4}))),
    Arrival(
        "config: rope_type=dynamic",
        model_arrives(
            partial(plain, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
        ),
    ),
    Arrival("config: a key that no class declares", model_arrives(partial(plain, written_by="somebody"))),
    Arrival("batch: padding at the right", padded(RIGHT)),
    Arrival("batch: padding at the left", padded(LEFT)),
    Arrival("batch: holes", padded(HOLES)),
    Arrival("batch: padding alone", padded(torch.zeros(ROWS, TOKENS, dtype=torch.int64))),
    Arrival("batch: other tokens on a rank", other_tokens),
    Arrival("batch: labels of transformers", labelled),
    Arrival("batch: several documents by mask", padded(LEFT + 1)),
    Arrival("batch: a token outside the vocabulary", outside_the_vocabulary),
    Arrival("batch: made for another recipe", of_another_recipe),
    Arrival("forward: attention_mask of ones", called(attention_mask=torch.ones_like)),
    Arrival("forward: attention_mask of another shape", called(attention_mask=torch.ones(1, 5))),
    Arrival("forward: a 4D attention_mask", called(attention_mask=torch.ones(1, 1, 4, 4, dtype=torch.bool))),
    Arrival("forward: position_ids that restart", called(position_ids=torch.arange(11).repeat(2)[None])),
    Arrival("forward: position_ids left out", called(position_ids=None)),
    Arrival("forward: inputs_embeds", called(inputs_embeds=torch.zeros(1, 4, 48))),
    Arrival("forward: use_cache=True", called(use_cache=True)),
    Arrival("forward: use_cache=False", called(use_cache=False)),
    Arrival("forward: output_hidden_states", called(output_hidden_states=True)),
    Arrival("forward: output_attentions", called(output_attentions=True)),
    Arrival("forward: return_dict=False", called(return_dict=False)),
    Arrival("forward: logits_to_keep=1", called(logits_to_keep=1)),
    Arrival("forward: num_items_in_batch", called(num_items_in_batch=3)),
    Arrival("forward: is_causal=False", called(is_causal=False)),
    Arrival("adapter: LoRA on q, k, v, o", model_arrives(adapted(target_modules=ATTENTION))),
    Arrival("adapter: LoRA on every linear", model_arrives(adapted(target_modules=EVERY_LINEAR))),
    Arrival("adapter: LoRA on the head", model_arrives(adapted(target_modules=["lm_head"]))),
    Arrival("adapter: LoRA on the embedding", model_arrives(adapted(target_modules=["embed_tokens"]))),
    Arrival(
        "adapter: LoRA with norms of heads", model_arrives(adapted(family="qwen3", target_modules=ATTENTION))
    ),
    Arrival("adapter: LoRA with a bias", model_arrives(adapted(target_modules=["k_proj"], lora_bias=True))),
    Arrival(
        "adapter: LoRA beside a trained head",
        model_arrives(adapted(target_modules=ATTENTION, modules_to_save=["lm_head"])),
    ),
    Arrival("adapter: LoRA with dropout", model_arrives(adapted(target_modules=ATTENTION, lora_dropout=0.1))),
    Arrival("adapter: DoRA", model_arrives(adapted(target_modules=ATTENTION, use_dora=True))),
    Arrival("adapter: a model of PEFT", model_arrives(wrapped_by_peft)),
    Arrival("adapter: added after the recipe", partial(trained, plain, after=adapter_added_later)),
    Arrival("module: a parametrized weight", partial(trained, plain, before=parametrized)),
    Arrival(
        "module: a Linear with its own forward",
        partial(trained, plain, before=set_on_attention("k_proj", doubling)),
    ),
    Arrival("module: a hook on a projection", partial(trained, plain, before=hooked("self_attn.v_proj"))),
    Arrival("module: a hook inside an MLP", partial(trained, plain, before=hooked("mlp.up_proj"))),
    Arrival("module: a hook on an MLP", partial(trained, plain, before=hooked("mlp"))),
    Arrival("module: a spectral norm", partial(trained, plain, before=spectral)),
    Arrival("module: one MLP in two layers", partial(trained, plain, before=shared_layer)),
    Arrival("module: a gradient hook", partial(trained, plain, before=gradient_hook)),
    Arrival(
        "module: other rotary frequencies",
        partial(trained, plain, before=set_attribute("model.rotary_emb", "attention_scaling", 1.7)),
    ),
    Arrival(
        "module: dropout by an attribute",
        partial(trained, plain, before=set_attribute("model.layers.0.self_attn", "attention_dropout", 0.5)),
    ),
    Arrival(
        "module: another scale on one rank",
        partial(trained, plain, before=on_rank_1(set_attribute("model.layers.0.self_attn", "scaling", 0.9))),
    ),
    Arrival(
        "module: is_causal=False after the recipe",
        partial(trained, plain, after=set_attribute("model.layers.0.self_attn", "is_causal", False)),
    ),
    Arrival("module: another head after the recipe", partial(trained, plain, after=other_head)),
    Arrival(
        "module: transformers' checkpointing",
        partial(trained, plain, before=lambda model: model.gradient_checkpointing_enable()),
    ),
    Arrival(
        "state: frozen but for norms of heads",
        partial(trained, partial(plain, "qwen3"), before=frozen("q_norm", "layers.1.mlp")),
    ),
    Arrival("state: frozen on one rank", partial(trained, plain, before=on_rank_1(frozen("mlp")))),
    Arrival("state: other weights on a rank", partial(trained, plain, before=on_rank_1(other_weights))),
    Arrival("state: dropout on one rank", partial(trained, plain, before=on_rank_1(with_dropout))),
    Arrival(
        "state: unfrozen after the recipe",
        partial(trained, plain, before=frozen("mlp"), after=unfrozen_later),
    ),
    Arrival("state: gradients from before", partial(trained, plain, before=with_gradients)),
    Arrival("state: a graph of gradients", graph_of_gradients),
    Arrival("state: an update before backward", update_before_backward),
    Arrival("state: a second recipe", second_recipe),
    Arrival("state: copy.deepcopy", copied(copy.deepcopy)),
    Arrival("state: pickle", copied(pickle.dumps)),
    Arrival(
        "state: autocast", partial(trained, plain, around=partial(torch.autocast, "cpu", torch.bfloat16))
    ),
    Arrival("state: torch.compile of the model", compiled),
    Arrival("state: torch.compile before the recipe", compiled_before),
    Arrival("state: eval and no_grad", partial(without_gradients, context=torch.no_grad)),
    Arrival("state: inference_mode", partial(without_gradients, context=torch.inference_mode)),
    Arrival("state: accumulation", accumulated),
    Arrival("state: two models", two_models),
    Arrival("state: backward twice", backward_twice),
    Arrival("state: a forward that fails", partial(broken_off, backward=False)),
    Arrival("state: a backward that fails", partial(broken_off, backward=True)),
)
"""All of them, by name."""
