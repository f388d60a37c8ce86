"""What lab.hf refuses: each by name, in one line that says what would work."""

import os
import pydoc
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin, TorchDynamoPlugin
from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM, Trainer, TrainingArguments
from trl import DPOTrainer, GRPOTrainer, SFTConfig, SFTTrainer

import lab
import lab.hf
from lab.errors import LabError
from lab.hf.accelerate_settings import check_parallelism
from lab.hf.applying import mesh_of_all
from lab.hf.batches import shard_rows
from lab.hf.ranks import fresh_process
from lab.hf.training_arguments import check_arguments
from lab.recipe.recipe import Recipe
from lab_tests.support.models import small_config
from lab_tests.support.small_trainings import QUIET, LongSFTTrainer, LongTrainer, tokenizer

pytestmark = [
    # PEFT asks a model for what transformers is about to call otherwise.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # TRL's default is named by what transformers has renamed.
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning"),
]

TOKENS = 20
VOCABULARY = 101

Action = Callable[[Path], object]


@pytest.fixture(autouse=True)
def _own_process() -> Iterator[None]:
    with fresh_process():
        yield


def refused(words: str, action: Callable[[], object]) -> None:
    """``words`` are what was wrong and what would work, in this order."""
    with pytest.raises(LabError, match=".*".join(map(re.escape, words.split(" ... ")))) as error:
        action()
    assert "\n" not in str(error.value)
    assert "  " not in str(error.value)


def model(**config: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(small_config(**config))


def plain_arguments(kind: Any, folder: Path, **settings: Any) -> Any:
    return kind(output_dir=str(folder), report_to=[], use_cpu=True, **settings)


def arguments(folder: Path, kind: Any = TrainingArguments, recipe: Any = "tiling", **settings: Any) -> Any:
    tokens = {"max_length": TOKENS} if kind is SFTConfig else {"tokens": TOKENS}
    common = {"output_dir": str(folder), "max_steps": 1, **QUIET, **tokens}
    return lab.hf.arguments(kind, recipe=recipe, **common | settings)


def rows() -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(1)
    made = [torch.randint(0, VOCABULARY, (TOKENS,), generator=generator).tolist() for _ in range(8)]
    return [{"input_ids": row, "labels": row} for row in made]


# ---- arguments -------------------------------------------------------------------------------------------


def made(kind: Any = TrainingArguments, **settings: Any) -> Action:
    """Make arguments of a class."""
    return lambda folder: arguments(folder, kind, **settings)


def parsed(recipe: Any = "tiling", tokens: Any = TOKENS, more: Any = None, **settings: Any) -> Action:
    """Give a recipe to arguments that a script has parsed, and perhaps more settings."""

    def action(folder: Path) -> object:
        given = plain_arguments(TrainingArguments, folder, **settings)
        return lab.hf.arguments(given, recipe=recipe, tokens=tokens, **more or {})

    return action


TWICE = "recomputed twice ... recipe with checkpoint=True"
NO_CLASS = "give the class TrainingArguments, or SFTConfig for SFTTrainer, and the settings by name, or an "
NO_KNOBS = "give fields of a recipe with their values, such as {'head_chunk': 16}"
TWO_DTYPES = "bf16=True with compute_dtype=None in ... set compute_dtype='bfloat16' in ... , or bf16=False"

ARGUMENTS: list[tuple[str, Action]] = [
    (f"gradient_checkpointing=True with a recipe ... {TWICE}", made(gradient_checkpointing=True)),
    (f"gradient_checkpointing=True with a recipe ... {TWICE}", made(SFTConfig, gradient_checkpointing=True)),
    (f"activation_checkpointing=True with a recipe ... {TWICE}",
     made(gradient_checkpointing=False, activation_checkpointing=True)),
    ("gradient_checkpointing_kwargs={'offload': True} with ... leave it out ... offload='inputs'",
     made(gradient_checkpointing_kwargs={"offload": True})),
    ("activation_checkpointing_kwargs={'use_reentrant': True} with a recipe ... leave it out",
     made(activation_checkpointing_kwargs={"use_reentrant": True})),
    ("fp16=True with a recipe: ... loss scale ... use bf16=True", made(fp16=True)),
    ("label_smoothing_factor=0.1 ... set it to 0", made(label_smoothing_factor=0.1)),
    ("neftune_noise_alpha=5 ... leave it out", made(neftune_noise_alpha=5)),
    ("optim='adafactor' with a recipe: ... use 'adamw_torch'", made(optim="adafactor")),
    ("dispatch_batches ... must read the same batch themselves; leave both out",
     made(accelerator_config={"dispatch_batches": True})),
    ("split_batches with a recipe ... leave both out", made(accelerator_config={"split_batches": True})),
    ("even_batches=False with a recipe: ... leave it out", made(accelerator_config={"even_batches": False})),
    ("DeepSpeed's engine ... fsdp=True in the recipe", made(deepspeed={"train_batch_size": 1})),
    ("use_liger_kernel=True ... loss_kernel='liger' in the recipe", made(use_liger_kernel=True)),
    ("torch_compile=True ... compile='tiles' in the recipe", made(torch_compile=True)),
    ("average_tokens_across_devices=False ... set it to True", made(average_tokens_across_devices=False)),
    ("torch_empty_cache_steps=2 ... leave it out", made(torch_empty_cache_steps=2)),
    ("auto_find_batch_size=True ... hf.fit", made(auto_find_batch_size=True)),
    ("prediction_loss_only=False ... set it to True", made(prediction_loss_only=False)),
    ("bf16_full_eval=True ... set it to False", made(bf16_full_eval=True)),
    ("recipe='tiling' without tokens ... give tokens, such as tokens='128K'", made(tokens=None)),
    (TWO_DTYPES, made(bf16=True, knobs={"compute_dtype": None})),
    (f"knobs=['a']: {NO_KNOBS}", made(knobs=["a"])),
    (f"knobs='fsdp=True': {NO_KNOBS}", made(knobs="fsdp=True")),
    ("no field 'head_chunks': its fields are fsdp, replicas, ulysses", made(knobs={"head_chunks": 2})),
    ("loss_type='dft' ... cross-entropy; use 'nll'", made(SFTConfig, loss_type="dft")),
    ("activation_offloading=True ... offload='inputs'", made(SFTConfig, activation_offloading=True)),
    (f"arguments of an object of type Trainer: {NO_CLASS}",
     lambda folder: arguments(folder, Trainer(model(), plain_arguments(TrainingArguments, folder)))),
    (f"arguments of SFTTrainer: {NO_CLASS}", made(SFTTrainer)),
    (f"arguments of an object of type str: {NO_CLASS}", made("SFTConfig")),
    ("label_smoothing_factor=0.1 ... set it to 0", parsed(label_smoothing_factor=0.1)),
    ("gradient_checkpointing_kwargs={'offload': True} ... leave it out ... offload='inputs'",
     parsed(activation_checkpointing=True, activation_checkpointing_kwargs={"offload": True})),
    ("recipe='tiling' without tokens ... give tokens", parsed(tokens=None)),
    ("seed together with arguments that are made: set them in the arguments", parsed(more={"seed": 3})),
    (TWO_DTYPES, parsed(recipe=Recipe(), bf16=True)),
]  # fmt: skip


@pytest.mark.parametrize("fixed", [0, 3 * 2**30])
def test_a_trainer_on_a_gpu_uses_expandable_segments(
    fixed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for the GPU. Seen red: no call, and no warning."""
    calls: list[str] = []

    def made(*_: object, **__: object) -> None:
        calls.append("trainer")
        raise InterruptedError

    args = lab.hf.arguments(
        TrainingArguments, recipe="upipe", tokens=TOKENS, output_dir=str(tmp_path), **QUIET
    )
    monkeypatch.setattr(TrainingArguments, "device", torch.device("cuda", 0))
    monkeypatch.setattr("lab.hf.trainer.use_expandable_segments", lambda: (calls.append("grow"), fixed)[1])
    monkeypatch.setattr(Trainer, "__init__", made)
    with pytest.raises(InterruptedError):
        LongTrainer(None, args)
    assert calls == ["grow", "trainer"]
    said = [record.getMessage() for record in caplog.records if record.name.startswith("lab.")]
    assert len(said) == bool(fixed)
    assert all("3.00 GiB" in line and "PYTORCH_ALLOC_CONF=expandable_segments:True" in line for line in said)


def test_parsed_arguments_of_trl(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Their defaults are bf16=True and gradient_checkpointing=True. What changes is said in one line."""
    given = plain_arguments(SFTConfig, tmp_path, max_length=TOKENS, learning_rate=3e-4)
    made = lab.hf.arguments(given, recipe="tiling")
    assert check_arguments(made).knobs == {"compute_dtype": "bfloat16"}
    assert check_arguments(made).tokens == TOKENS
    assert (made.bf16, made.mixed_precision, made.gradient_checkpointing) == (False, "no", False)
    different = {name for name in vars(given) if vars(given)[name] != vars(made)[name]}
    assert different == {
        "bf16", "mixed_precision", "gradient_checkpointing", "activation_checkpointing",
        "prediction_loss_only",
    }  # fmt: skip
    [said] = [record.getMessage() for record in caplog.records if record.name.startswith("lab.")]
    for name in different:
        assert f"{name}={vars(given)[name]!r} is now {vars(made)[name]!r} (" in said
    assert (given.bf16, given.gradient_checkpointing) == (True, True)


def test_parsed_arguments_of_transformers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The recipe's own dtype holds: nobody can see whether bf16=False was set."""
    given = plain_arguments(TrainingArguments, tmp_path, prediction_loss_only=True)
    for recipe in "tiling", Recipe(compute_dtype="bfloat16"):
        made = lab.hf.arguments(given, recipe=recipe, tokens=TOKENS)
        knobs = {"compute_dtype": None} if recipe == "tiling" else {}
        assert check_arguments(made).knobs == knobs
    assert not [record for record in caplog.records if record.name.startswith("lab.")]


def test_a_second_recipe_for_the_same_arguments_computes_in_the_same_dtype(tmp_path: Path) -> None:
    """Seen red: bf16 was lost without a word, and a trainer changed the object that was given."""
    for given in (
        plain_arguments(SFTConfig, tmp_path),
        plain_arguments(TrainingArguments, tmp_path, bf16=True),
    ):
        first = lab.hf.arguments(given, recipe="tiling", tokens=TOKENS)
        second = lab.hf.arguments(first, recipe="fsdp", tokens=TOKENS)
        assert check_arguments(second).recipe == "fsdp"
        assert check_arguments(second).knobs == {"compute_dtype": "bfloat16"}
        own = lab.hf.arguments(given, recipe=Recipe(compute_dtype="bfloat16"))
        assert check_arguments(lab.hf.arguments(own, recipe="fsdp", tokens=TOKENS)).knobs == {
            "compute_dtype": "bfloat16"
        }
        in_own = lab.hf.arguments(first, recipe=Recipe())
        assert check_arguments(in_own).knobs == {}
        in_own = lab.hf.arguments(first, recipe="fsdp", tokens=TOKENS, knobs={"compute_dtype": None})
        assert check_arguments(in_own).knobs == {"compute_dtype": None}
        first.accelerator_config.split_batches = True
        assert given.accelerator_config.split_batches is False
    plain = lab.hf.arguments(plain_arguments(TrainingArguments, tmp_path), recipe="tiling", tokens=TOKENS)
    again = lab.hf.arguments(plain, recipe="fsdp", tokens=TOKENS)
    assert check_arguments(again).knobs == {"compute_dtype": None}


# ---- what accelerate launch puts into the environment ----------------------------------------------------


@pytest.mark.long
def test_bf16_of_accelerate_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is what bf16=True is, for a class, for an object, and for a model that is given by hand."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    made = [
        lab.hf.arguments(
            SFTConfig, recipe="tiling", max_length=TOKENS, output_dir=str(tmp_path), use_cpu=True
        ),
        arguments(tmp_path),
        lab.hf.arguments(plain_arguments(TrainingArguments, tmp_path), recipe="tiling", tokens=TOKENS),
    ]
    [said] = [record.getMessage() for record in caplog.records if record.name.startswith("lab.")]
    assert "compute_dtype='bfloat16' (ACCELERATE_MIXED_PRECISION=bf16 is in the environment)" in said
    for args in made:
        assert check_arguments(args).knobs == {"compute_dtype": "bfloat16"}
        assert args.mixed_precision == "no"
    LongTrainer(model(), made[-1], train_dataset=rows()).train(None)
    with fresh_process():
        found = Accelerator(cpu=True)
        assert found.mixed_precision == "bf16"
        assert lab.hf.apply(model(), "tiling", found, tokens=TOKENS).recipe.compute_dtype == "bfloat16"


def launched(action: Action, **variables: str) -> Action:
    def in_environment(folder: Path) -> None:
        with patch.dict(os.environ, variables):
            action(folder)

    return in_environment


LAUNCHED = [
    ("mixed_precision='fp16' with a recipe ... use bf16; ACCELERATE_MIXED_PRECISION=fp16 is in the "
     "environment: accelerate launch sets it by mixed_precision, or the flag --mixed_precision",
     launched(arguments, ACCELERATE_MIXED_PRECISION="fp16")),
    ("mixed_precision='bf16' with compute_dtype=None ... or mixed_precision='no'; ACCELERATE_MIXED",
     launched(made(recipe=Recipe()), ACCELERATE_MIXED_PRECISION="bf16")),
    ("bf16=False with mixed_precision='bf16': leave one of them out; ACCELERATE_MIXED_PRECISION=bf16 is",
     launched(made(bf16=False), ACCELERATE_MIXED_PRECISION="bf16")),
    ("a parallelism_config with a recipe, which makes its own: leave it out; ACCELERATE_USE_PARALLELISM",
     launched(lambda folder: LongTrainer(model(), arguments(folder)),
              ACCELERATE_USE_PARALLELISM_CONFIG="true", PARALLELISM_CONFIG_CP_SIZE="2")),
    ("leave accelerate's FSDP out; ACCELERATE_USE_FSDP=true is ... sets it by distributed_type, or the",
     launched(lambda _: check_parallelism(Recipe(), accelerator(fsdp={})), ACCELERATE_USE_FSDP="true")),
]  # fmt: skip

# ---- models and trainers -----------------------------------------------------------------------------------


def changed(change: Callable[[LlamaForCausalLM], object]) -> nn.Module:
    one = model()
    change(one)
    return one


def quantize(one: Any) -> None:
    up = one.model.layers[0].mlp.up_proj
    up.weight = nn.Parameter(torch.zeros_like(up.weight, dtype=torch.int8), requires_grad=False)


def make_bitsandbytes(one: Any) -> None:
    kind = type("Linear4bit", (nn.Linear,), {"__module__": "bitsandbytes.nn.modules"})
    one.model.layers[0].mlp.up_proj.__class__ = kind


def adapted(config: Any) -> nn.Module:
    return get_peft_model(model(), config)


def training(make: Callable[[], nn.Module] = model, data: Any = None, **settings: Any) -> Action:
    """Train a model; its optimizer is made of it by the settings of the trainer."""

    def action(folder: Path) -> None:
        one = make()
        args = arguments(folder, recipe=settings.pop("recipe", "tiling"))
        given = {name: make(one) for name, make in settings.items()}
        LongTrainer(one, args, train_dataset=data or rows(), **given).train()

    return action


def trainer(args: Action = arguments, kind: Any = LongTrainer, **given: Any) -> Action:
    """Make a trainer with these arguments."""
    return lambda folder: kind(args=args(folder), **{"model": model(), "train_dataset": rows()} | given)


def plain(kind: Any = TrainingArguments, **settings: Any) -> Action:
    return lambda folder: plain_arguments(kind, folder, **settings)


def declared(*bases: type) -> Action:
    """Declare a trainer."""
    return lambda _: type("Long", bases, {})


def overriding(name: str) -> Action:
    """Declare a trainer with a recipe in front of one with a method of its own."""
    return declared(lab.hf.LongContext, type("Own", (Trainer,), {name: lambda self, *_, **__: None}))


def with_setting(name: str, value: object, kind: Any = TrainingArguments) -> Action:
    """Make arguments, and change a setting afterwards."""

    def action(folder: Path) -> Any:
        args = arguments(folder, kind)
        setattr(args, name, value)
        return args

    return action


def of_class(kind: type, **settings: Any) -> Callable[[object], tuple[type, dict[str, Any]]]:
    return lambda _: (kind, {"lr": 0.1, **settings})


UNUSED = "of Own with LongContext ... leave it out"
NOT_COMPARED = "... use Trainer or SFTTrainer"
NO_RECIPE = "training arguments without a recipe: make them by lab.hf.arguments ... SFTConfig for SFTTrainer"

TRAINERS: list[tuple[str, Action]] = [
    ("int8 ... quantized ... load the model without quantization", training(lambda: changed(quantize))),
    ("bitsandbytes.nn.modules.Linear4bit ... replace it", training(lambda: changed(make_bitsandbytes))),
    ("loss_function of its own ... build the model again, and leave it out",
     training(lambda: changed(lambda one: setattr(one, "loss_function", torch.sum)))),
    ("prompt and prefix tuning are not supported; use LoRA",
     training(lambda: adapted(PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)))),
    (f"LongContext with DPOTrainer {NOT_COMPARED}", declared(lab.hf.LongContext, DPOTrainer)),
    (f"LongContext with GRPOTrainer {NOT_COMPARED}", declared(lab.hf.LongContext, GRPOTrainer)),
    (f"compute_loss {UNUSED}", overriding("compute_loss")),
    (f"training_step {UNUSED}", overriding("training_step")),
    ("Long ... write LongContext first", declared(Trainer, lab.hf.LongContext)),
    ("no arguments: make them by lab.hf.arguments", trainer(lambda _: None)),
    (NO_RECIPE, trainer(plain())),
    (NO_RECIPE, trainer(plain(bf16=True))),
    (NO_RECIPE, trainer(plain(SFTConfig, activation_checkpointing=False, bf16=False), LongSFTTrainer)),
    ("compute_loss_func ... leave it out", trainer(compute_loss_func=lambda *_: 0)),
    ("compute_loss_func ... leave it out",
     lambda folder: LongTrainer(model(), arguments(folder), None, rows(), None, None, None, lambda *_: 0)),
    ("compute_metrics ... leave it out", trainer(compute_metrics=lambda _: {})),
    ("preprocess_logits_for_metrics ... leave it out", trainer(preprocess_logits_for_metrics=max)),
    ("model_init ... give the model", trainer(model=None, model_init=model)),
    ("parallelism_config of cp_size=2, sp_size=1, tp_size=3 ... leave it out",
     lambda folder: trainer(made(parallelism_config=ParallelismConfig(cp_size=2, tp_size=3)))(folder)),
    ("upipes", trainer(made(recipe="upipes"))),
    ("ulysses=2 ... 1 rank", trainer(made(knobs={"ulysses": 2}))),
    ("label_smoothing_factor=0.1", trainer(with_setting("label_smoothing_factor", 0.1))),
    ("loss_type='dft'",
     lambda folder: trainer(
         with_setting("loss_type", "dft", SFTConfig), LongSFTTrainer,
         train_dataset=Dataset.from_list(rows()), processing_class=tokenizer())(folder)),
    ("batches without labels: give a collator for language modeling",
     training(data=[{"input_ids": row["input_ids"]} for row in rows()])),
    ("an optimizer that was made before the recipe ... leave it out, and set learning_rate",
     training(recipe="fsdp", optimizers=lambda one: (torch.optim.AdamW(one.parameters()), None))),
    ("the optimizer SGD with a recipe ... give torch.optim.AdamW",
     training(optimizer_cls_and_kwargs=of_class(torch.optim.SGD))),
    ("AdamW with amsgrad=True ... set amsgrad=False",
     training(optimizer_cls_and_kwargs=of_class(torch.optim.AdamW, amsgrad=True))),
    ("has not applied its recipe yet: call train or evaluate before",
     lambda folder: LongTrainer(model(), arguments(folder)).applied),
]  # fmt: skip


# ---- batches ---------------------------------------------------------------------------------------------

IDS = torch.arange(14).view(2, 7)
MASK = torch.ones_like(IDS)
MASK[1, 5:] = 0
LABELS = IDS.masked_fill(MASK == 0, -100)
BATCH = {"input_ids": IDS, "labels": LABELS, "attention_mask": MASK}


def part_of(batch: dict[str, Any]) -> Any:
    return shard_rows(batch, ulysses=2, ring=1, index=1, vocab_size=VOCABULARY, sequence=None, everyone=None)


def batch(**more: Any) -> Action:
    return lambda _: part_of(BATCH | more)


BATCHES = [
    ("a batch without labels ... collator for language modeling", batch(labels=None)),
    ("the batch has inputs_embeds; with a recipe the model gets only input_ids, labels, attention_mask and "
     "position_ids: remove inputs_embeds from the rows or the collator", batch(inputs_embeds=IDS)),
    ("the batch has token_type_ids; ... from the rows ... tokenizer takes return_token_type_ids=F",
     batch(token_type_ids=torch.zeros_like(IDS))),
    ("labels in torch.float32: give whole numbers, those of the tokens", batch(labels=LABELS.float())),
    ("labels of shape [2, 6]: give two of shape", batch(labels=IDS[:, 1:])),
    ("attention_mask of row 1 has padding before a token ... tokenizer.padding_side='right'",
     batch(attention_mask=MASK.flip(1), labels=IDS.masked_fill(MASK.flip(1) == 0, -100))),
    ("labels on padding: give -100 there", batch(labels=IDS)),
    ("position_ids of row 0 have 4 at token 3: give positions that count from 0 in each document",
     batch(position_ids=torch.tensor([[0, 1, 2, 4, 5, 6, 7]]))),
    ("token 101: the model's vocabulary ends at 100; take the", batch(input_ids=IDS + VOCABULARY - 13)),
    ("token -3: the model's vocabulary ends at 100", batch(input_ids=IDS - 3)),
    ("labels outside of 0 to 100: give tokens", batch(labels=LABELS.masked_fill(LABELS == 3, VOCABULARY))),
    ("or -100 where nothing", batch(labels=LABELS.masked_fill(LABELS == -100, -1))),
]  # fmt: skip


def test_a_batch_that_is_right() -> None:
    part = part_of(BATCH)
    # Seven tokens and one of padding.
    assert part["input_ids"].tolist() == [[4, 5, 6, 0], [11, 12, 13, 0]]
    assert part["shifted_labels"].tolist() == [[5, 6, -100, -100], [-100] * 4]
    assert part["position_ids"].tolist() == [[4, 5, 6, 7]]
    assert part["padding"] == 1


def test_labels_that_a_collator_has_shifted() -> None:
    """They count, and ``labels`` do not. The last of a row may be the token that follows the row."""
    shifted = LABELS.roll(-1, 1)
    shifted[:, -1] = torch.tensor([50, -100])
    part = part_of({**BATCH, "labels": torch.zeros_like(IDS), "shift_labels": shifted})
    assert part["shifted_labels"].tolist() == [[5, 6, 50, -100], [-100] * 4]
    assert part["input_ids"].tolist() == part_of(BATCH)["input_ids"].tolist()
    shifted[1, -1] = 50
    refused("labels on padding", lambda: part_of({**BATCH, "shift_labels": shifted}))


# ---- accelerate ------------------------------------------------------------------------------------------


def accelerator(parallelism: Any = None, precision: str = "no", fsdp: Any = None, **plugins: Any) -> Any:
    """What check_parallelism reads of an accelerator, of which a process without GPUs would make few."""
    if fsdp is not None:
        settings = {"fsdp_version": 2, "reshard_after_forward": True, **fsdp}
        plugins["fsdp_plugin"] = FullyShardedDataParallelPlugin(**settings)
    if isinstance(parallelism, dict):
        parallelism = ParallelismConfig(**parallelism)
    state = SimpleNamespace(**plugins)
    return SimpleNamespace(state=state, parallelism_config=parallelism, mixed_precision=precision)


def checked(recipe: Recipe, **settings: Any) -> Action:
    return lambda _: check_parallelism(recipe, accelerator(**settings))


SHARED = Recipe(fsdp=True, ulysses=2)
OWN = Recipe(fsdp=True)
IN_BF16 = Recipe(compute_dtype="bfloat16")

OTHER_RANKS = "ulysses=2, ring=1: 2 ranks share a sequence; give lab.hf.parallelism(recipe, ranks)"
NOT_OURS = "of accelerate's FSDP ... leave it out"

ACCELERATORS = [
    ("tp_size=2 in the parallelism_config together with a recipe ... leave it out; the lab has no tensor "
     "parallelism: use fsdp=true for the parameters, ulysses and head_chunk for attention, mlp_tile for the "
     "MLPs",
     checked(SHARED, parallelism={"tp_size": 2})),
    ("dp_replicate_size=2 in the parallelism_config with replicas=1 ... set replicas in the recipe, and "
     "leave it out", checked(OWN, parallelism={"dp_replicate_size": 2})),
    ("sp_size=2 in the parallelism_config together with a recipe ... leave it out",
     checked(SHARED, parallelism={"sp_size": 2, "sp_backend": "deepspeed"})),
    (f"cp_size=4 ... {OTHER_RANKS}", checked(SHARED, parallelism={"cp_size": 4})),
    # Accelerate's own context parallelism, for as many ranks.
    (f"cp_size=2 ... {OTHER_RANKS}", checked(SHARED, parallelism={"cp_size": 2})),
    (f"cp_size=1 ... {OTHER_RANKS}", checked(SHARED)),
    ("DeepSpeed's engine ... fsdp=True in the recipe", checked(OWN, deepspeed_plugin=object())),
    ("mixed_precision='bf16' ... compute_dtype='bfloat16' in the recipe, or set mixed_precision='no'",
     checked(OWN, precision="bf16")),
    ("='fp8' ... use bf16", checked(IN_BF16, precision="fp8")),
    ("dynamo_backend='INDUCTOR' with a recipe ... compile='tiles' in the recipe",
     checked(OWN, dynamo_plugin=TorchDynamoPlugin(backend="inductor"))),
    ("accelerate's FSDP together with a recipe of fsdp=False ... set fsdp=True", checked(Recipe(), fsdp={})),
    ("FSDP version 1 ... use version 2",
     checked(OWN, fsdp={"fsdp_version": 1, "reshard_after_forward": "FULL_SHARD"})),
    (f"activation_checkpointing=True {NOT_OURS}", checked(OWN, fsdp={"activation_checkpointing": True})),
    (f"cpu_offload= ... {NOT_OURS}", checked(OWN, fsdp={"cpu_offload": True})),
    (f"reshard_after_forward=False {NOT_OURS}", checked(OWN, fsdp={"reshard_after_forward": False})),
    ("ulysses=2 x ring=1 on 5 ranks ... must divide the ranks", lambda _: lab.hf.parallelism(SHARED, 5)),
    ("recipe='upipe' without a model ... give model, such", lambda _: lab.hf.parallelism("upipe", 2)),
    ("recipe='upipe' without tokens ... tokens='128K'",
     lambda _: lab.hf.apply(model(), "upipe", Accelerator(cpu=True))),
]  # fmt: skip


@pytest.mark.parametrize(("words", "action"), ARGUMENTS + LAUNCHED + TRAINERS + BATCHES + ACCELERATORS)
def test_what_is_refused(words: str, action: Action, tmp_path: Path) -> None:
    refused(words, lambda: action(tmp_path))


def test_an_accelerator_that_is_right() -> None:
    check_parallelism(SHARED, accelerator(lab.hf.parallelism(SHARED, 6)))
    check_parallelism(OWN, accelerator(fsdp={}))
    check_parallelism(IN_BF16, accelerator(precision="bf16"))
    assert lab.hf.parallelism(OWN, 6) is None


def test_the_name_of_a_recipe() -> None:
    one = model()
    for of in one, one.config:
        assert lab.hf.parallelism("upipe", 2, model=of).cp_size == 2
    applied = lab.hf.apply(one, "upipe", Accelerator(cpu=True), tokens="4K")
    assert applied.recipe == lab.ladder(one.config, 1, 4096, compute_dtype=None)["upipe"]


def test_rows_of_several_lengths_with_dynamic_frequencies() -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    made = model(rope_parameters=dynamic, max_position_embeddings=6)
    applied = lab.hf.apply(made, OWN, Accelerator(cpu=True))
    words = "rows of 8 tokens and rows of 7 with rope_type='dynamic' ... pad or cut all rows to one length"
    # The second micro-batch of an update is refused before the forward of the first.
    applied.shard({"input_ids": IDS, "labels": IDS})
    ids = torch.arange(8)[None]
    refused(words, lambda: applied.shard({"input_ids": ids, "labels": ids}))


def test_adapters_with_accelerates_fsdp() -> None:
    found = Accelerator(cpu=True)
    found.state.fsdp_plugin = accelerator(fsdp={}).state.fsdp_plugin
    one = adapted(LoraConfig(target_modules=["q_proj"]))
    refused("FSDP with a PeftModel ... leave accelerate's FSDP", lambda: lab.hf.apply(one, OWN, found))


def test_a_scheduler_that_accelerate_prepares() -> None:
    """It would step once for each rank, where the ranks of a sequence have one batch."""
    found = Accelerator(cpu=True)
    applied = lab.hf.apply(model(), OWN, found)
    optimizer = torch.optim.SGD(applied.inner.parameters())
    found.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1))
    shared = replace(applied, recipe=SHARED)
    part = applied.shard({"input_ids": IDS, "labels": IDS})
    applied.loss(applied.inner, part, 12)
    words = "a scheduler that accelerate steps once for each rank ... step_scheduler_with_optimizer=False"
    refused(words, lambda: shared.loss(applied.inner, part, 12))


def test_an_optimizer_that_was_made_before_the_recipe() -> None:
    """Its parameters have no gradients, and it would train nothing."""
    words = "an optimizer that was made before the recipe ... after the recipe was applied"
    for recipe in OWN, IN_BF16:
        found, made = Accelerator(cpu=True), model()
        found.prepare(torch.optim.AdamW(made.parameters()))
        refused(words, lambda made=made, recipe=recipe, found=found: lab.hf.apply(made, recipe, found))
        found = Accelerator(cpu=True)
        optimizer = torch.optim.AdamW(made.parameters())
        lab.hf.apply(made, recipe, found)
        refused(words, found.prepare(optimizer).step)


def test_an_optimizer_of_parameters_that_a_recipe_leaves() -> None:
    found, made = Accelerator(cpu=True), model()
    optimizer = found.prepare(torch.optim.AdamW(made.parameters()))
    step(lab.hf.apply(made, Recipe(), found), optimizer)


def step(applied: Any, optimizer: Any) -> None:
    before = applied.inner.lm_head.weight.detach().clone()
    part = applied.shard(BATCH)
    applied.accelerator.backward(applied.loss(applied.inner, part, applied.count([part])))
    optimizer.step()
    assert not torch.equal(applied.inner.lm_head.weight, before)


def test_a_model_without_ddp() -> None:
    """Nobody would combine the gradients of its replicas."""
    applied = replace(lab.hf.apply(model(), Recipe(), Accelerator(cpu=True)), sharding="accelerate")
    part = applied.shard(BATCH)
    words = "a model without DDP ... accelerator.prepare, and use what it returns"
    refused(words, lambda: applied.loss(applied.inner, part, 12))
    with torch.no_grad():
        applied.loss(applied.inner, part, 12)


def read_ahead(steps: int, *, accumulate: bool = True, micro_batches: int = 2) -> int:
    """Train in updates whose micro-batches are read first; return the number of steps of the optimizer."""
    with fresh_process():
        return _read_ahead(steps, accumulate, micro_batches)


def _read_ahead(steps: int, accumulate: bool, micro_batches: int) -> int:
    found = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    applied = lab.hf.apply(model(), OWN, found)
    optimizer = torch.optim.AdamW(applied.inner.parameters())
    taken: list[None] = []
    optimizer.register_step_post_hook(lambda *_: taken.append(None))
    data = [{"input_ids": IDS[0], "labels": IDS[0]}] * 4
    optimizer, loader = found.prepare(optimizer, DataLoader(data))  # type: ignore[arg-type]
    for update in zip(*[map(applied.shard, loader)] * micro_batches, strict=True):
        labels = applied.count(update)
        for part in update:
            with found.accumulate(applied.inner) if accumulate else nullcontext():
                found.backward(applied.loss(applied.inner, part, labels))
                if accumulate or part is update[-1]:
                    optimizer.step()
                    optimizer.zero_grad()
    return len(taken)


@pytest.mark.long
def test_an_update_that_ends_at_another_micro_batch() -> None:
    words = " an update of which 1 counted micro-batches are left ... accelerator.no_sync(model) around"
    refused("accelerator.accumulate ends" + words, lambda: read_ahead(2))
    refused("accelerator.accumulate ends" + words, lambda: read_ahead(1))
    refused("accelerator.accumulate ends" + words, lambda: read_ahead(2, accumulate=False))
    refused("accelerator.accumulate does not end" + words.replace("1", "0"), lambda: read_ahead(3))
    assert read_ahead(1, accumulate=False) == 2
    assert read_ahead(1, micro_batches=1) == 4


def test_an_evaluation_ends_no_update() -> None:
    found = Accelerator(cpu=True, gradient_accumulation_steps=3)
    applied = lab.hf.apply(model(), OWN, found)
    part = applied.shard(BATCH)
    with torch.no_grad():
        labels = applied.count([part, part])
        for _ in range(2):
            applied.loss(applied.inner, part, labels)
    assert not applied.outstanding


def test_a_model_that_was_given_another_recipe(tmp_path: Path) -> None:
    """Its degrees are others; or DDP combined the gradients, and the arguments leave DDP out."""
    one = model()
    lab.apply_recipe(one, Recipe(), mesh_of_all(Accelerator(cpu=True)))
    one.lab_sharding = "accelerate"
    words = "DDP keeps replicas equal, and arguments with ... fsdp=True ... fsdp=False"
    refused(words, lambda: training(lambda: one, recipe=OWN)(tmp_path))
    one.forward.sequence = (2, 3)
    words = "ulysses=2, ring=3, and arguments with one of ulysses=1, ring=1"
    refused(words, lambda: training(lambda: one)(tmp_path))


@pytest.mark.long
def test_a_package_of_the_extra_that_is_not_installed_is_named():
    """In a new process, because this one has imported it."""
    code = "import sys; sys.modules['accelerate'] = None; import lab.hf; lab.hf.LongContext"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert said.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: lab.hf.LongContext without accelerate: install the extra, "
        "pip install -e '.[hf]'"
    )


def test_help_shows_what_is_loaded_when_it_is_used():
    code = "import sys, lab.hf; print({'accelerate', 'datasets', 'peft', 'trl'} & set(sys.modules))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert said.stdout == "set()\n"
    text = pydoc.render_doc(lab.hf, renderer=pydoc.plaintext)
    for name in lab.hf.__all__:
        assert re.search(rf"^    (class )?{name}\(", text, re.MULTILINE), name
    assert set(lab.hf.__all__) == set(dir(lab.hf))


def test_the_compute_dtype_of_a_knob_is_not_contradicted_by_a_default_of_trl(tmp_path):
    args = lab.hf.arguments(
        SFTConfig, recipe="upipe", tokens=64, output_dir=str(tmp_path), knobs={"compute_dtype": None},
        use_cpu=True,
    )  # fmt: skip
    assert check_arguments(args).knobs["compute_dtype"] is None
