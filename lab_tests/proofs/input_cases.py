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
from torch.nn.utils.parametrizations import spectral_norm
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from cluster.ranks import Cluster
from lab.bench.table import Row, Say
from lab.decoder import FAMILIES
from lab.errors import LabError
from lab.recipe.recipe import Recipe
from lab.step.batches import Batch, shard_batch
from lab.step.compose import apply_recipe
from lab.step.training_step import loss, make_optimizer
from lab_tests.support import reference
from lab_tests.support.documents import mean_loss

ROWS, TOKENS = 3, 22
"""The size of the batch. The rows do not divide over two ranks, and a rank's 11 tokens not into the tiles."""

DOCUMENTS = [[5, 13, 4], [22], [2, 20]]
"""The lengths of the documents of each row."""

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
ChangeModel = Callable[[PreTrainedModel], Any]


@dataclass(frozen=True)
class Rank:
    """A rank that applies a recipe to a model and computes the loss of its part of the batch."""

    recipe: Recipe
    mesh: DeviceMesh

    def apply(self, model: Any) -> PreTrainedModel:
        apply_recipe(model, self.recipe, self.mesh)
        return model

    def batch(self, ids: Tensor | None = None, **more: Any) -> Batch:
        return shard_batch(token_ids() if ids is None else ids, self.recipe, self.mesh, **more)

    def loss(self, model: nn.Module, ids: Tensor | None = None, **more: Any) -> Tensor:
        return loss(model, self.batch(ids, **more))

    def train(self, model: nn.Module, **more: Any) -> float:
        """Run forward and backward, and return the loss."""
        value = self.loss(model, **more)
        value.backward()
        return value.item()


RunCase = Callable[[Rank], float]
"""Runs a case on a rank, and returns the relative error of its result."""


@reference.exact_modules()
def outcome(run: RunCase, rank: Rank) -> str:
    """Run a case on this rank, and return "right", "refused: ..." or "WRONG: ..."."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            error = run(rank)
    except LabError as refusal:
        return f"refused: {refusal}"
    except Exception as failure:
        return f"WRONG: {type(failure).__name__}: {failure}"
    return "right" if error < TOLERANCE else f"WRONG: off by {error:.0e}"


def outcomes(recipe: str) -> dict[str, str]:
    """Return the outcomes of all cases with a recipe, by case. Runs on each of two ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: outcome(run, Rank(RECIPES[recipe], mesh)) for name, run in CASES.items()}


def measure_inputs(say: Say) -> list[Row]:
    """Return a row for each case and recipe, run on two ranks."""
    rows: list[Row] = []
    with Cluster(ranks=2) as cluster:
        for recipe in RECIPES:
            say(f"inputs from outside, on two ranks: {recipe}")
            ranks = cluster.apply(outcomes, recipe)
            for name in CASES:
                # An outcome that is wrong on any rank counts.
                said = max((rank[name] for rank in ranks), key=lambda message: message.startswith("WRONG"))
                verdict, _, message = said.partition(": ")
                rows.append({"input": name, "recipe": recipe, "verdict": verdict, "says": message or None})
    return rows


# ---- models, and the error of a step -----------------------------------------------------------------------


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
    return value.item(), gradients_of(model)


def gradients_of(model: nn.Module) -> dict[str, Any]:
    """Return the gradients of the parameters that have one; of a shard, the whole gradient."""
    gradients: dict[str, Any] = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in gradients.items()}


def relative_error(
    model: nn.Module, value: float, expected: tuple[float, dict[str, Tensor]] | None = None
) -> float:
    """Return the largest relative error of the loss ``value`` and of the gradients of ``model``.

    ``expected`` is that of ``plain()`` unless given. The error is infinite if other parameters have gradients
    than expected.
    """
    right, expected_gradients = expected or expected_result(plain())
    gradients = gradients_of(model)
    if gradients.keys() != expected_gradients.keys():
        return float("inf")
    return max(abs(value / right - 1), reference.error(gradients, expected_gradients))


def training_error(
    make: MakeModel,
    rank: Rank,
    *,
    before: ChangeModel = lambda _: None,
    after: ChangeModel = lambda _: None,
    around: Callable[[], Any] = nullcontext,
) -> float:
    """Apply the recipe to a model, run forward and backward on one batch, and return the relative error.

    Args:
        make: Makes the model.
        rank: The rank.
        before: Changes the model before the recipe is applied.
        after: Changes the model after the recipe is applied.
        around: Makes the context manager in which the loss is computed.
    """
    model, plain_model = make(), make()
    before(model)
    rank.apply(model)
    after(model)
    with around():
        value = rank.loss(model)
    value.backward()
    before(plain_model)
    return relative_error(model, value.item(), expected_result(plain_model))


# ---- what runs a case --------------------------------------------------------------------------------------


def with_config(family: str = "llama", **fields: Any) -> RunCase:
    """Train a model with these fields of its config."""
    return partial(training_error, partial(plain, family, **fields))


def with_changes(**changes: Any) -> RunCase:
    """Train a plain model that is changed; see ``training_error``."""
    return partial(training_error, plain, **changes)


def before(change: ChangeModel) -> RunCase:
    """Train a plain model that is changed before the recipe is applied."""
    return with_changes(before=change)


def after(change: ChangeModel) -> RunCase:
    """Train a plain model that is changed after the recipe was applied."""
    return with_changes(after=change)


def with_adapters(**settings: Any) -> RunCase:
    """Train a model with adapters; see ``with_lora``."""
    return partial(training_error, with_lora(**settings))


def applied(use: Callable[[Rank, PreTrainedModel], float]) -> RunCase:
    """Use a plain model to which the recipe is applied, in a function that returns its relative error."""
    return lambda rank: use(rank, rank.apply(plain()))


def forward_with(**arguments: Any) -> RunCase:
    """Call forward with arguments of transformers. An argument that is accepted must not change the logits.

    An argument that is a function is called with the token ids.
    """

    @applied
    def run(rank: Rank, model: PreTrainedModel) -> float:
        batch = rank.batch()
        inputs: dict[str, Any] = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
        expected = model(**inputs).logits
        more = {n: value(batch.input_ids) if callable(value) else value for n, value in arguments.items()}
        logits = model(**{**inputs, **more}).logits
        return float((logits - expected).norm() / expected.norm())

    return run


def with_mask(mask: Tensor) -> RunCase:
    return applied(
        lambda rank, model: relative_error(
            model, rank.train(model, attention_mask=mask), expected_result(plain(), mask)
        )
    )


def with_documents(documents: list[list[int]], *, by_positions: bool = False) -> RunCase:
    """Give the lengths of documents, or positions that restart. The plain model computes each alone."""

    @applied
    def run(rank: Rank, model: PreTrainedModel) -> float:
        rows = [torch.cat([torch.arange(length) for length in lengths]) for lengths in documents]
        given = {"position_ids": torch.stack(rows)} if by_positions else {"documents": documents}
        value = rank.train(model, **given)
        plain_model = plain()
        mean = mean_loss(plain_model, token_ids(), documents)
        mean.backward()
        return relative_error(model, value, (mean.item(), gradients_of(plain_model)))

    return run


def with_tokens(change: Callable[[Tensor], Tensor]) -> RunCase:
    return applied(lambda rank, model: float(rank.loss(model, change(token_ids()))))


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


class Doubling(nn.Linear):
    """A Linear whose forward returns twice the result of a Linear."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def double_keys(model: PreTrainedModel) -> None:
    """Replace a projection of the second layer by a ``Doubling`` with its weight."""
    attention = model.model.layers[1].self_attn
    weight = attention.k_proj.weight
    attention.k_proj = Doubling(*weight.T.shape, bias=False, dtype=weight.dtype)
    attention.k_proj.weight = weight


class RowScale(nn.Module):
    """A parametrization that scales each row of a weight [out, in] by a function of the row."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * torch.sigmoid(weight.sum(1, keepdim=True))


def add_parametrization(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        parametrize.register_parametrization(layer.self_attn.q_proj, "weight", RowScale())


def add_hook(name: str) -> ChangeModel:
    """Add a forward hook that doubles the output of a module of the second layer."""
    return lambda model: (
        model.model.layers[1].get_submodule(name).register_forward_hook(lambda _, __, out: 2 * out)
    )


def freeze_except(*words: str) -> ChangeModel:
    """Freeze all parameters but those with one of these words in their name."""

    def change(model: PreTrainedModel) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(word in name for word in words))

    return change


def on_rank_1(change: ChangeModel) -> ChangeModel:
    """Make a change on rank 1 only."""
    return lambda model: change(model) if dist.get_rank() == 1 else None


def change_weights(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.lm_head.weight.add_(1e-3)


def set_attribute(path: str, name: str, value: object) -> ChangeModel:
    return lambda model: setattr(model.get_submodule(path), name, value)


def set_in_layer(path: str, name: str, value: object) -> ChangeModel:
    return set_attribute(f"model.layers.0.{path}", name, value)


def add_adapter(model: PreTrainedModel) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(LoraConfig(r=3, target_modules=["q_proj"]), model)


def add_spectral_norm(model: PreTrainedModel) -> None:
    spectral_norm(model.model.layers[0].mlp.up_proj)


def add_gradient_hook(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.up_proj.weight.register_hook(lambda gradient: 3 * gradient)


def unfreeze_head(model: PreTrainedModel) -> None:
    model.lm_head.weight.requires_grad_(True)


def replace_head(model: PreTrainedModel) -> None:
    model.lm_head = nn.Linear(48, reference.VOCABULARY, bias=False, dtype=torch.float64)


def add_gradients(model: PreTrainedModel) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def share_mlp(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp = model.model.layers[0].mlp


@applied
def labels_of_transformers(rank: Rank, model: PreTrainedModel) -> float:
    """Call forward with labels, which transformers shifts itself."""
    ids, positions = rank.batch().input_ids, rank.batch().position_ids
    return float(model(input_ids=ids, position_ids=positions, labels=ids).loss)


@applied
def second_recipe(rank: Rank, model: PreTrainedModel) -> float:
    Rank(Recipe(), rank.mesh).apply(model)
    return 0.0


@applied
def batch_of_another_recipe(rank: Rank, model: PreTrainedModel) -> float:
    other = Recipe(ulysses=2) if rank.recipe.ulysses == 1 else Recipe()
    return float(loss(model, Rank(other, rank.mesh).batch()))


def without_gradients(context: Callable[[], Any]) -> RunCase:
    """Run a forward without gradients, and then a step with them."""

    @applied
    def run(rank: Rank, model: PreTrainedModel) -> float:
        model.eval()
        with context():
            first = rank.loss(model).item()
        model.train()
        value = rank.train(model)
        return max(abs(first / value - 1), relative_error(model, value))

    return run


@applied
def accumulation(rank: Rank, model: PreTrainedModel) -> float:
    """Accumulate the gradients of three losses, the first two of which are computed before a backward."""
    batch = rank.batch()
    early, late = 0.5 * loss(model, batch), 0.25 * loss(model, batch)
    early.backward()
    late.backward()
    value = loss(model, batch)
    (0.25 * value).backward()
    return relative_error(model, value.item())


def two_models(rank: Rank) -> float:
    """Interleave the steps of two models in one process."""
    families, batch = ("llama", "qwen3"), rank.batch()
    models = [rank.apply(plain(family)) for family in families]
    values = [loss(model, batch) for model in models]
    for value in values:
        value.backward()
    return max(
        relative_error(model, value.item(), expected_result(plain(family)))
        for model, value, family in zip(models, values, families, strict=True)
    )


@applied
def backward_twice(rank: Rank, model: PreTrainedModel) -> float:
    """Run backward twice through one graph."""
    value = rank.loss(model)
    (0.5 * value).backward(retain_graph=True)
    (0.5 * value).backward()
    return relative_error(model, value.item())


class _HookError(Exception):
    """The error with which a hook ends a step."""


def after_failure(register: str) -> RunCase:
    """Fail in a hook of a layer on every rank, and return the error of the next step."""

    def fail(*_: Any) -> None:
        raise _HookError

    @applied
    def run(rank: Rank, model: PreTrainedModel) -> float:
        hook = getattr(model.model.layers[0], register)(fail)
        try:
            rank.train(model)
        except _HookError:
            hook.remove()
        model.zero_grad()
        return relative_error(model, rank.train(model))

    return run


@applied
def graph_of_gradients(rank: Rank, model: PreTrainedModel) -> float:
    """Run backward with ``create_graph``, so that the gradients can be differentiated again."""
    value = rank.loss(model)
    value.backward(create_graph=True)
    return relative_error(model, value.item())


@applied
def update_before_backward(rank: Rank, model: PreTrainedModel) -> float:
    """Update the parameters between a forward and its backward."""
    optimizer = make_optimizer(model, learning_rate=0.1)
    early, late = rank.loss(model), rank.loss(model)
    early.backward()
    optimizer.step()
    late.backward()
    return relative_error(model, late.item())


def compile_before(rank: Rank) -> float:
    rank.apply(torch.compile(plain()))
    return 0.0


SMALL: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 24,
    "num_key_value_heads": 6, "head_dim": 10, "vocab_size": reference.VOCABULARY,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def of_any_family(kind: str) -> RunCase:
    """Train a small model of any family of transformers, also of one that the lab does not support."""

    def make() -> PreTrainedModel:
        config = CONFIG_MAPPING[kind]()
        for name, value in SMALL.items():
            if hasattr(config, name):
                setattr(config, name, value)
        return AutoModelForCausalLM.from_config(config)

    return partial(training_error, make)


def masked(*places: tuple[int, slice]) -> Tensor:
    """Return a mask [ROWS, TOKENS] that is 0 at these tokens of these rows."""
    mask = torch.ones(ROWS, TOKENS, dtype=torch.int64)
    for row, tokens in places:
        mask[row, tokens] = 0
    return mask


FOREIGN = ("apertus", "gemma2", "gpt2", "helium", "olmoe")
"""Families that the lab refuses, though their layers have the same names, or nearly."""

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
"""The rotary parameters of dynamic NTK scaling."""

LAST = {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}
"""The fields of a window in the last layer."""

LEFT = masked((0, slice(3)))

ARGUMENTS = {
    "use_cache": True, "output_hidden_states": True, "output_attentions": True, "return_dict": False,
    "logits_to_keep": 1, "num_items_in_batch": 3, "is_causal": False,
}  # fmt: skip
"""Arguments of forward, with values that are refused."""

RIGHT = {
    **{f"model: {family}": with_config(family) for family in FAMILIES},
    "config: sliding_window": with_config("mistral", sliding_window=16),
    "config: a window in the last layer": with_config("qwen3", sliding_window=16, **LAST),
    "config: a window that no layer has": with_config("qwen2", sliding_window=16),
    "config: rope_type=dynamic": with_config(rope_parameters=DYNAMIC, max_position_embeddings=TOKENS - 5),
    "config: rope_type=dynamic with short rows": with_config(rope_parameters=DYNAMIC),
    "config: a key that no class declares": with_config(written_by="somebody"),
    "batch: padding at the right": with_mask(masked((0, slice(-3, None)), (2, slice(-12, None)))),
    "batch: several documents by lengths": with_documents(DOCUMENTS),
    "batch: several documents by positions": with_documents(DOCUMENTS, by_positions=True),
    "forward: attention_mask of ones": forward_with(attention_mask=torch.ones_like),
    "forward: use_cache=False": forward_with(use_cache=False),
    "adapter: LoRA on q, k, v, o": with_adapters(target_modules=ATTENTION),
    "adapter: LoRA on every linear": with_adapters(target_modules=EVERY_LINEAR),
    "adapter: LoRA on the head": with_adapters(target_modules=["lm_head"]),
    "adapter: LoRA on the embedding": with_adapters(target_modules=["embed_tokens"]),
    "adapter: LoRA with norms of heads": with_adapters(family="qwen3", target_modules=ATTENTION),
    "adapter: LoRA with a bias": with_adapters(target_modules=["k_proj"], lora_bias=True),
    "adapter: LoRA beside a trained head":
        with_adapters(target_modules=ATTENTION, modules_to_save=["lm_head"]),
    "module: a parametrized weight": before(add_parametrization),
    "module: a hook on an MLP": before(add_hook("mlp")),
    "state: frozen but for norms of heads":
        partial(training_error, partial(plain, "qwen3"), before=freeze_except("q_norm", "layers.1.mlp")),
    "state: torch.compile of the model": after(lambda model: model.compile()),
    "state: eval and no_grad": without_gradients(torch.no_grad),
    "state: accumulation": accumulation,
    "state: two models": two_models,
    "state: a forward that fails": after_failure("register_forward_hook"),
}  # fmt: skip
"""The inputs that are computed right. The first word of a name says what kind of input it is."""

REFUSED = {
    **{
        f"model: {kind}": (of_any_family(kind),
            f"{kind} is not a family that the lab computes right: Arcee, ")
        for kind in FOREIGN
    },
    **{
        f"forward: {name}={value}": (forward_with(**{name: value}), f"{name}={value}: ")
        for name, value in ARGUMENTS.items()
    },
    "config: is_causal=False": (with_config(is_causal=False),
        "is_causal=False in the config of a Llama model: .*is_causal=True"),
    "config: attention_dropout": (with_config(attention_dropout=0.1),
        "attention_dropout=0.1 .*only with attention_dropout=0.0"),
    "config: residual_dropout": (with_config("starcoder2", residual_dropout=0.1),
        "residual_dropout=0.1 .*only with residual_dropout=0.0"),
    "config: quantization_config": (with_config(quantization_config={"bits": 4}),
        r"a checkpoint with quantized weights \({'bits': 4}\): "),
    "batch: padding at the left": (with_mask(LEFT), "attention_mask of row 0 has padding before a token"),
    "batch: holes": (with_mask(masked((1, slice(5, 6)))),
        "attention_mask of row 1 has padding before a token"),
    "batch: padding alone": (with_mask(0 * LEFT), "attention_mask leaves no token to predict"),
    "batch: other tokens on a rank": (with_tokens(lambda ids: ids + dist.get_rank()),
        "the tokens, the mask or the documents differ on rank 1"),
    "batch: labels of transformers": (labels_of_transformers, r"labels=\.\.\.: .*use lab\.loss"),
    "batch: several documents by mask": (with_mask(LEFT + 1), "attention_mask has values other than 0 and 1"),
    "batch: documents that do not add up": (with_documents([[4, 19], [22], [22]]),
        "documents of row 0 have 23 tokens together, and the row"),
    "batch: a token outside the vocabulary": (with_tokens(lambda ids: ids - ids.max() + reference.VOCABULARY),
        "input_ids with token 101: the model's vocabulary"),
    "batch: made for another recipe": (batch_of_another_recipe,
        "a batch that was not made for ulysses=[12], ring=1"),
    "forward: attention_mask of another shape": (forward_with(attention_mask=torch.ones(1, 5)),
        r"attention_mask has shape \[1, 5\]: "),
    "forward: a 4D attention_mask": (forward_with(attention_mask=torch.ones(1, 1, 4, 4, dtype=torch.bool)),
        r"attention_mask has shape \[1, 1, 4, 4\]: "),
    "forward: position_ids that restart": (forward_with(position_ids=torch.arange(11).repeat(2)[None]),
        "position_ids are not the positions that this rank holds"),
    "forward: inputs_embeds": (forward_with(inputs_embeds=torch.zeros(1, 4, 48)), "inputs_embeds=a tensor: "),
    "adapter: LoRA with dropout": (with_adapters(target_modules=ATTENTION, lora_dropout=0.1),
        r".*q_proj\.lora_dropout\.default has p=0\.1: .*lora_dropout=0"),
    "adapter: DoRA": (with_adapters(target_modules=ATTENTION, use_dora=True),
        r".*q_proj has a variant of LoRA \(DoraLinearVariant\)"),
    "adapter: a model of PEFT": (partial(training_error, peft_model),
        r"a PeftModel of PEFT .*model\.get_base_model\(\)"),
    "adapter: added after the recipe": (after(add_adapter), ".* after the recipe was applied"),
    "module: a Linear with its own forward": (before(double_keys),
        r".*k_proj is a lab_tests\.proofs\.input_cases\.Doubling: "),
    "module: a spectral norm": (before(add_spectral_norm),
        r"model\.layers\.0\.mlp\.up_proj.* has a buffer _u"),
    "module: one MLP in two layers": (before(share_mlp),
        r"model\.layers\.1\.mlp is the same as model\.layers\.0\.mlp"),
    "module: a gradient hook": (before(add_gradient_hook),
        r"model\.layers\.0\.mlp\.up_proj has a gradient hook"),
    "module: other rotary frequencies": (before(set_attribute("model.rotary_emb", "attention_scaling", 1.7)),
        "the rotary embedding has other frequencies than config"),
    "module: dropout by an attribute": (before(set_in_layer("self_attn", "attention_dropout", 0.5)),
        r"model\.layers\.0\.self_attn has attention_dropout=0\.5"),
    "module: another scale on one rank": (before(on_rank_1(set_in_layer("self_attn", "scaling", 0.9))),
        "the modules or their attributes differ on rank 1: "),
    "module: is_causal=False after the recipe": (after(set_in_layer("self_attn", "is_causal", False)),
        r".*0\.self_attn changed after the recipe"),
    "module: another head after the recipe": (after(replace_head), "lm_head"),
    "module: transformers' checkpointing": (before(lambda model: model.gradient_checkpointing_enable()),
        "transformers' gradient checkpointing is on in model: "),
    "state: frozen on one rank": (before(on_rank_1(freeze_except("mlp"))),
        "the weights, or which of them are trained, differ on rank 1: "),
    "state: other weights on a rank": (before(on_rank_1(change_weights)),
        "the weights, or which of them are trained, differ on rank 1"),
    "state: dropout on one rank": (before(on_rank_1(set_in_layer("mlp", "act_fn", nn.Dropout(0.1)))),
        r".*has p=0\.1: dropout is not supported"),
    "state: unfrozen after the recipe": (with_changes(before=freeze_except("mlp"), after=unfreeze_head),
        r"lm_head\.weight was frozen or unfrozen after the recipe"),
    "state: gradients from before": (before(add_gradients), ".* has gradients already"),
    "state: an update before backward": (update_before_backward, r".* changed between forward and backward"),
    "state: a second recipe": (second_recipe,
        ".* already: build|.* already, and a second would add to it"),
    "state: copy.deepcopy": (after(copy.deepcopy), "a model with techniques applied cannot be copied"),
    "state: pickle": (after(pickle.dumps), "a model with techniques applied cannot be pickled"),
    "state: autocast": (with_changes(around=partial(torch.autocast, "cpu", torch.bfloat16)),
        "autocast around a model with a recipe: .*compute_dtype='bfloat16'"),
    "state: torch.compile before the recipe": (compile_before,
        "a OptimizedModule is not a transformers model"),
    "state: inference_mode": (without_gradients(torch.inference_mode),
        r"torch\.inference_mode .*torch\.no_grad"),
}  # fmt: skip
"""The inputs that are refused, with the beginning of the message as a pattern."""

REFUSED_WITH_EVERYTHING = {
    "forward: position_ids left out": (forward_with(position_ids=None),
        "position_ids left out with ulysses=2, ring=1"),
    "module: a hook on a projection": (before(add_hook("self_attn.v_proj")),
        "a hook on a Linear: UPipe does not call"),
    "module: a hook inside an MLP": (before(add_hook("mlp.up_proj")),
        "a hook on a Linear: mlp_tile does not"),
    "state: a graph of gradients": (graph_of_gradients, "backward with create_graph=True under FSDP"),
    "state: backward twice": (backward_twice, "a second backward through a tiled loss"),
    "state: a backward that fails": (after_failure("register_full_backward_hook"),
        "the backward before this forward failed"),
}  # fmt: skip
"""The inputs that the recipe of all techniques refuses, and that are computed right without techniques."""

CASES = RIGHT | {name: run for name, (run, _) in (REFUSED | REFUSED_WITH_EVERYTHING).items()}


def expected(name: str, recipe: str) -> str:
    """Return a pattern of the outcome of a case."""
    if name in RIGHT or (recipe == "plain" and name in REFUSED_WITH_EVERYTHING):
        return "right$"
    return f"refused: ({(REFUSED | REFUSED_WITH_EVERYTHING)[name][1]})"
