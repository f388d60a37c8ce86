"""What lab.hf refuses: each by name, in one line that says what would work."""

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
from lab_tests.support.small_trainings import tokenizer

pytestmark = pytest.mark.filterwarnings(
    # PEFT asks a model for what transformers is about to call otherwise.
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

TOKENS = 20
VOCABULARY = 101


class LongTrainer(lab.hf.LongContext, Trainer):
    """Trainer with a recipe."""


class LongSFTTrainer(lab.hf.LongContext, SFTTrainer):
    """SFTTrainer with a recipe."""


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


def arguments(folder: Path, kind: Any = TrainingArguments, recipe: Any = "tiling", **settings: Any) -> Any:
    common = {
        "output_dir": str(folder),
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "max_steps": 1,
    }
    tokens = {"max_length": TOKENS} if kind is SFTConfig else {"tokens": TOKENS}
    return lab.hf.arguments(kind, recipe=recipe, **{**common, **tokens, **settings})


def rows() -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(1)
    made = [torch.randint(0, VOCABULARY, (TOKENS,), generator=generator).tolist() for _ in range(8)]
    return [{"input_ids": row, "labels": row} for row in made]


# ---- arguments -------------------------------------------------------------------------------------------

SETTINGS = {
    "gradient checkpointing": (
        {"gradient_checkpointing": True},
        "gradient_checkpointing=True with a recipe ... recomputed twice ... recipe with checkpoint=True",
    ),
    "the other name of gradient checkpointing": (
        {"gradient_checkpointing": False, "activation_checkpointing": True},
        "activation_checkpointing=True with a recipe ... recomputed twice ... recipe with checkpoint=True",
    ),
    "offload by gradient checkpointing": (
        {"gradient_checkpointing_kwargs": {"offload": True}},
        "gradient_checkpointing_kwargs={'offload': True} with ... leave it out ... offload='inputs'",
    ),
    "reentrant checkpointing": (
        {"activation_checkpointing_kwargs": {"use_reentrant": True}},
        "activation_checkpointing_kwargs={'use_reentrant': True} with a recipe ... leave it out",
    ),
    "fp16": ({"fp16": True}, "fp16=True with a recipe: ... loss scale ... use bf16=True"),
    "label smoothing": ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1 ... set it to 0"),
    "neftune": ({"neftune_noise_alpha": 5}, "neftune_noise_alpha=5 ... leave it out"),
    "another optimizer": ({"optim": "adafactor"}, "optim='adafactor' ... use 'adamw_torch'"),
    "dispatched batches": (
        {"accelerator_config": {"dispatch_batches": True}},
        "dispatch_batches ... must read the same batch themselves; leave both out",
    ),
    "split batches": (
        {"accelerator_config": {"split_batches": True}}, "split_batches with a recipe ... leave both out"
    ),
    "deepspeed": ({"deepspeed": {"train_batch_size": 1}}, "DeepSpeed's engine ... fsdp=True in the recipe"),
    "liger": ({"use_liger_kernel": True}, "use_liger_kernel=True ... loss_kernel='liger' in the recipe"),
    "compile": ({"torch_compile": True}, "torch_compile=True ... compile='tiles' in the recipe"),
    "means over ranks": (
        {"average_tokens_across_devices": False}, "average_tokens_across_devices=False ... set it to True"
    ),
    "an empty cache": ({"torch_empty_cache_steps": 2}, "torch_empty_cache_steps=2 ... leave it out"),
    "a batch size that is found": ({"auto_find_batch_size": True}, "auto_find_batch_size=True ... hf.fit"),
    "logits": ({"prediction_loss_only": False}, "prediction_loss_only=False ... set it to True"),
    "bf16 evaluation": ({"bf16_full_eval": True}, "bf16_full_eval=True ... set it to False"),
    "no tokens": ({"tokens": None}, "recipe='tiling' without tokens ... give tokens, such as tokens='128K'"),
    "two dtypes": (
        {"bf16": True, "knobs": {"compute_dtype": None}},
        "bf16=True with compute_dtype=None in the recipe ... set compute_dtype='bfloat16' ... or bf16=False",
    ),
    "knobs without values": ({"knobs": ["a"]}, "knobs=['a']: give fields of a recipe ... {'head_chunk': 16}"),
    "knobs of a command line": ({"knobs": "fsdp=True"}, "knobs='fsdp=True': give ... {'head_chunk': 16}"),
    "no such knob": ({"knobs": {"head_chunks": 2}}, "no field 'head_chunks': its fields are fsdp, ulysses"),
}  # fmt: skip

SFT_SETTINGS = {
    "gradient checkpointing": ({"gradient_checkpointing": True}, SETTINGS["gradient checkpointing"][1]),
    "dft": ({"loss_type": "dft"}, "loss_type='dft' ... cross-entropy; use 'nll'"),
    "offloading": ({"activation_offloading": True}, "activation_offloading=True ... offload='inputs'"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_trainer(name: str, tmp_path: Path) -> None:
    settings, words = SETTINGS[name]
    refused(words, lambda: arguments(tmp_path, **settings))


@pytest.mark.parametrize("name", SFT_SETTINGS)
def test_settings_of_sfttrainer(name: str, tmp_path: Path) -> None:
    settings, words = SFT_SETTINGS[name]
    refused(words, lambda: arguments(tmp_path, SFTConfig, **settings))


KINDS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a trainer": (
        lambda folder: Trainer(model(), plain_arguments(TrainingArguments, folder)),
        "arguments of an object of type Trainer",
    ),
    "the class of a trainer": (lambda _: SFTTrainer, "arguments of SFTTrainer"),
    "a name": (lambda _: "SFTConfig", "arguments of an object of type str"),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_what_is_no_class_of_arguments(name: str, tmp_path: Path) -> None:
    make, words = KINDS[name]
    ends = "give the class TrainingArguments, or SFTConfig for SFTTrainer, and the settings by name, or an "
    refused(f"{words} ... {ends}", lambda: arguments(tmp_path, make(tmp_path)))


# ---- arguments that a script has parsed ------------------------------------------------------------------


# TRL's default is named by what transformers has renamed.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
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


PARSED = {
    "label smoothing": ({"label_smoothing_factor": 0.1}, {}, "label_smoothing_factor=0.1 ... set it to 0"),
    "offload": (
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"offload": True}}, {},
        "gradient_checkpointing_kwargs={'offload': True} ... leave it out ... offload='inputs'",
    ),
    "no tokens": ({}, {"tokens": None}, "recipe='tiling' without tokens ... give tokens"),
    "settings": ({}, {"seed": 3}, "seed together with arguments that are made: set them in the arguments"),
    "two dtypes": (
        {"bf16": True}, {"recipe": Recipe()},
        "bf16=True with compute_dtype=None ... set compute_dtype='bfloat16' in the recipe, or bf16=False",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PARSED)
def test_parsed_arguments_that_are_refused(name: str, tmp_path: Path) -> None:
    settings, more, words = PARSED[name]
    given = plain_arguments(TrainingArguments, tmp_path, **settings)
    with_recipe = {"recipe": "tiling", "tokens": TOKENS, **more}
    refused(words, lambda: lab.hf.arguments(given, **with_recipe))


# ---- what accelerate launch puts into the environment ----------------------------------------------------


def test_bf16_of_accelerate_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what bf16=True is, for a class, for an object, and for a model that is given by hand."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    made = [
        lab.hf.arguments(
            SFTConfig, recipe="tiling", max_length=TOKENS, output_dir=str(tmp_path), use_cpu=True
        ),
        arguments(tmp_path),
        lab.hf.arguments(plain_arguments(TrainingArguments, tmp_path), recipe="tiling", tokens=TOKENS),
    ]
    for args in made:
        assert check_arguments(args).knobs == {"compute_dtype": "bfloat16"}
        assert args.mixed_precision == "no"
    LongTrainer(model(), made[-1], train_dataset=rows()).train(None)
    with fresh_process():
        found = Accelerator(cpu=True)
        assert found.mixed_precision == "bf16"
        assert lab.hf.apply(model(), "tiling", found, tokens=TOKENS).recipe.compute_dtype == "bfloat16"


LAUNCHED: dict[str, tuple[dict[str, str], Callable[[Path], object], str]] = {
    "fp16": (
        {"ACCELERATE_MIXED_PRECISION": "fp16"}, arguments,
        "mixed_precision='fp16' with a recipe ... use bf16; ACCELERATE_MIXED_PRECISION=fp16 is in the "
        "environment: accelerate launch sets it by mixed_precision, or the flag --mixed_precision",
    ),
    "two dtypes": (
        {"ACCELERATE_MIXED_PRECISION": "bf16"}, lambda folder: arguments(folder, recipe=Recipe()),
        "mixed_precision='bf16' with compute_dtype=None ... or mixed_precision='no'; ACCELERATE_MIXED",
    ),
    "no bf16": (
        {"ACCELERATE_MIXED_PRECISION": "bf16"}, lambda folder: arguments(folder, bf16=False),
        "bf16=False with mixed_precision='bf16': leave one of them out; ACCELERATE_MIXED_PRECISION=bf16 is",
    ),
    "a parallelism": (
        {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_CP_SIZE": "2"},
        lambda folder: LongTrainer(model(), arguments(folder)),
        "a parallelism_config with a recipe, which makes its own: leave it out; ACCELERATE_USE_PARALLELISM",
    ),
    "fsdp": (
        {"ACCELERATE_USE_FSDP": "true"},
        lambda _: check_parallelism(Recipe(), accelerator(fsdp_plugin=plugin())),
        "leave accelerate's FSDP out; ACCELERATE_USE_FSDP=true is ... sets it by distributed_type, or the",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAUNCHED)
def test_settings_of_accelerate_launch(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables, action, words = LAUNCHED[name]
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    refused(words, lambda: action(tmp_path))


def test_a_setting_that_was_changed_after_the_arguments_were_made(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    args.label_smoothing_factor = 0.1
    refused("label_smoothing_factor=0.1", lambda: LongTrainer(model(), args))


# ---- trainers --------------------------------------------------------------------------------------------


def checkpointing_model() -> nn.Module:
    made = model()
    made.activation_checkpointing_enable()
    return made


def adapters(**settings: Any) -> nn.Module:
    return get_peft_model(model(), LoraConfig(target_modules=["q_proj"], **settings))


def quantized_model() -> nn.Module:
    made = model()
    weight = torch.zeros_like(made.model.layers[0].mlp.up_proj.weight, dtype=torch.int8)
    made.model.layers[0].mlp.up_proj.weight = nn.Parameter(weight, requires_grad=False)
    return made


def bitsandbytes_model() -> nn.Module:
    made = model()
    kind = type("Linear4bit", (nn.Linear,), {"__module__": "bitsandbytes.nn.modules"})
    made.model.layers[0].mlp.up_proj.__class__ = kind
    return made


def model_with_a_loss() -> nn.Module:
    made = model()
    made.loss_function = lambda logits, labels, **_: logits.sum()
    return made


def prompts() -> nn.Module:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return get_peft_model(model(), config)


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "checkpointing": (checkpointing_model, "transformers' gradient checkpointing is on ... checkpoint=True"),
    "dropout": (lambda: adapters(lora_dropout=0.1), "has p=0.1: dropout is not supported ... lora_dropout=0"),
    "dora": (lambda: adapters(use_dora=True), "variant of LoRA ... without options such as use_dora"),
    "int8": (quantized_model, "int8 ... quantized ... load the model without quantization"),
    "bitsandbytes": (bitsandbytes_model, "bitsandbytes.nn.modules.Linear4bit ... replace it"),
    "a loss": (model_with_a_loss, "loss_function of its own ... build the model again, and leave it out"),
    "prompts": (prompts, "prompt and prefix tuning are not supported; use LoRA"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, tmp_path: Path) -> None:
    make, words = MODELS[name]
    refused(words, lambda: LongTrainer(make(), arguments(tmp_path), train_dataset=rows()).train())


def plain_arguments(kind: Any, folder: Path, **settings: Any) -> Any:
    return kind(output_dir=str(folder), report_to=[], use_cpu=True, **settings)


def of_trainer(trainer: Any) -> Callable[[Path], object]:
    """Declare a trainer with a recipe."""
    return lambda _: type("Long", (lab.hf.LongContext, trainer), {})


def with_settings(**settings: Any) -> Callable[[Path], object]:
    """Make a trainer whose model and arguments are right."""
    return lambda folder: LongTrainer(model(), arguments(folder), train_dataset=rows(), **settings)


def overriding(name: str) -> Callable[[Path], object]:
    """Declare a trainer with a recipe in front of one with a method of its own."""
    own = type("Own", (Trainer,), {name: lambda self, *_, **__: None})
    return lambda _: type("Long", (lab.hf.LongContext, own), {})


def adamw_of_whole_parameters(trained: nn.Module) -> tuple[torch.optim.Optimizer, None]:
    return torch.optim.AdamW(trained.parameters()), None


def with_optimizer(folder: Path, recipe: str = "tiling", **settings: Callable[[nn.Module], object]) -> None:
    """Train with an optimizer that was not made by LongContext."""
    made = model()
    given = {name: make(made) for name, make in settings.items()}
    LongTrainer(made, arguments(folder, recipe=recipe), train_dataset=rows(), **given).train()


NO_CHECKPOINTING = {"gradient_checkpointing": False, "activation_checkpointing": False}

NO_RECIPE = "training arguments without a recipe: make them by lab.hf.arguments ... SFTConfig for SFTTrainer"

TRAINERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "dpo": (of_trainer(DPOTrainer), "LongContext with DPOTrainer ... use Trainer or SFTTrainer"),
    "grpo": (of_trainer(GRPOTrainer), "LongContext with GRPOTrainer ... use Trainer or SFTTrainer"),
    "no arguments": (lambda _: LongTrainer(model()), "no arguments: make them by lab.hf.arguments"),
    "plain arguments": (
        lambda folder: LongTrainer(model(), plain_arguments(TrainingArguments, folder)), NO_RECIPE
    ),
    "plain arguments of trl": (
        lambda folder: LongSFTTrainer(
            model(), plain_arguments(SFTConfig, folder, bf16=False, **NO_CHECKPOINTING)
        ),
        NO_RECIPE,
    ),
    "autocast": (
        lambda folder: LongTrainer(model(), plain_arguments(TrainingArguments, folder, bf16=True)), NO_RECIPE
    ),
    "a loss": (with_settings(compute_loss_func=lambda *_: 0), "compute_loss_func ... leave it out"),
    "a loss by its place": (
        lambda folder: LongTrainer(
            model(), arguments(folder), None, rows(), None, None, None, lambda *_: 0
        ),
        "compute_loss_func ... leave",
    ),
    "metrics": (with_settings(compute_metrics=lambda _: {}), "compute_metrics ... leave it out"),
    "a model to be made": (
        lambda folder: LongTrainer(args=arguments(folder), model_init=model), "model_init ... give the model"
    ),
    "the parallelism of another": (
        lambda folder: LongTrainer(
            model(), arguments(folder, parallelism_config=ParallelismConfig(cp_size=2, tp_size=3))
        ),
        "parallelism_config of cp_size=2, sp_size=1, tp_size=3 ... leave it out",
    ),
    "no such recipe": (
        lambda folder: LongTrainer(model(), arguments(folder, recipe="upipes")), "upipes"
    ),
    "degrees that ranks do not have": (
        lambda folder: LongTrainer(model(), arguments(folder, knobs={"ulysses": 2})), "ulysses=2 ... 1 rank"
    ),
    "batches without labels": (
        lambda folder: LongTrainer(
            model(), arguments(folder), train_dataset=[{"input_ids": row["input_ids"]} for row in rows()]
        ).train(),
        "batches without labels: give a collator for language modeling",
    ),
    "another loss": (overriding("compute_loss"), "compute_loss of Own with LongContext ... leave it out"),
    "another step": (overriding("training_step"), "training_step of Own with LongContext ... leave it out"),
    "a trainer before LongContext": (
        lambda _: type("Long", (Trainer, lab.hf.LongContext), {}), "Long ... write LongContext first"
    ),
    "parameters that the recipe replaces": (
        lambda folder: with_optimizer(folder, recipe="fsdp", optimizers=adamw_of_whole_parameters),
        "an optimizer that was made before the recipe ... leave it out, and set learning_rate",
    ),
    "sgd": (
        lambda folder: with_optimizer(
            folder, optimizer_cls_and_kwargs=lambda _: (torch.optim.SGD, {"lr": 0.1})
        ),
        "the optimizer SGD with a recipe ... give torch.optim.AdamW",
    ),
    "amsgrad": (
        lambda folder: with_optimizer(
            folder, optimizer_cls_and_kwargs=lambda _: (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True})
        ),
        "AdamW with amsgrad=True ... set amsgrad=False",
    ),
    "what the recipe was applied to, too early": (
        lambda folder: LongTrainer(model(), arguments(folder)).applied,
        "has not applied its recipe yet: call train or evaluate before",
    ),
    "another loss of trl": (
        lambda folder: LongSFTTrainer(
            model(),
            setting(arguments(folder, SFTConfig), "loss_type", "dft"),
            train_dataset=Dataset.from_list(rows()),
            processing_class=tokenizer(),
        ),
        "loss_type='dft'",
    ),
}  # fmt: skip


def setting(args: Any, name: str, value: object) -> Any:
    setattr(args, name, value)
    return args


@pytest.mark.parametrize("name", TRAINERS)
def test_trainers(name: str, tmp_path: Path) -> None:
    action, words = TRAINERS[name]
    refused(words, lambda: action(tmp_path))


# ---- batches ---------------------------------------------------------------------------------------------

IDS = torch.arange(14).view(2, 7)
MASK = torch.ones_like(IDS)
MASK[1, 5:] = 0
LABELS = IDS.masked_fill(MASK == 0, -100)
BATCH = {"input_ids": IDS, "labels": LABELS, "attention_mask": MASK}

BATCHES = {
    "no labels": ({"labels": None}, "a batch without labels ... collator for language modeling"),
    "embeddings": (
        {"inputs_embeds": IDS},
        "a batch with inputs_embeds, which a recipe does not give to the model: it gives input_ids, labels, "
        "attention_mask and position_ids alone; leave inputs_embeds out of the rows and of what the collator",
    ),
    "types of tokens": (
        {"token_type_ids": torch.zeros_like(IDS)},
        "a batch with token_type_ids, which ... out of the rows ... tokenizer takes return_token_type_ids=F",
    ),
    "lengths of packed rows": (
        {"cu_seq_lens_q": IDS},
        "a batch with cu_seq_lens_q and without position_ids ... return_position_ids=True",
    ),
    "labels that are no whole numbers": (
        {"labels": LABELS.float()}, "labels in torch.float32: give whole numbers, those of the tokens"
    ),
    "labels of another shape": ({"labels": IDS[:, 1:]}, "labels of shape [2, 6]: give two of shape"),
    "padding at the beginning": (
        {"attention_mask": MASK.flip(1), "labels": IDS.masked_fill(MASK.flip(1) == 0, -100)},
        "attention_mask of row 1 has padding before a token ... tokenizer.padding_side='right'",
    ),
    "labels on padding": ({"labels": IDS}, "labels on padding: give -100 there"),
    "positions that skip": (
        {"position_ids": torch.tensor([[0, 1, 2, 4, 5, 6, 7]])},
        "position_ids of row 0 have 4 at token 3: give positions that count from 0 in each document",
    ),
    "labels across documents": (
        {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3]])},
        "labels at the first token of a document ... give -100 there",
    ),
    "a token after the vocabulary": (
        {"input_ids": IDS + VOCABULARY - 13}, "token 101: the model's vocabulary ends at 100; take the"
    ),
    "a token before the vocabulary": ({"input_ids": IDS - 3}, "token -3: the model's vocabulary ends at 100"),
    "labels after the vocabulary": (
        {"labels": LABELS.masked_fill(LABELS == 3, VOCABULARY)}, "labels outside of 0 to 100: give tokens"
    ),
    "labels with another sign": ({"labels": LABELS.masked_fill(LABELS == -100, -1)}, "or -100 where nothing"),
}  # fmt: skip


def part_of(batch: dict[str, Any]) -> Any:
    return shard_rows(batch, ulysses=2, ring=1, index=1, vocab_size=VOCABULARY, sequence=None, everyone=None)


def test_a_batch_that_is_right() -> None:
    part = part_of(BATCH)
    # Seven tokens and one of padding.
    assert part["input_ids"].tolist() == [[4, 5, 6, 0], [11, 12, 13, 0]]
    assert part["shifted_labels"].tolist() == [[5, 6, -100, -100], [-100] * 4]
    assert part["position_ids"].tolist() == [[4, 5, 6, 7]]
    assert part["padding"] == 1


@pytest.mark.parametrize("name", BATCHES)
def test_batches(name: str) -> None:
    changed, words = BATCHES[name]
    refused(words, lambda: part_of({**BATCH, **changed}))


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


def accelerator(**settings: Any) -> Any:
    """What check_parallelism reads of an accelerator, of which a process without GPUs would make few."""
    fields = {"parallelism_config": None, "mixed_precision": "no", **settings}
    plugins = {name: fields.pop(name) for name in list(fields) if name.endswith("plugin")}
    return SimpleNamespace(state=SimpleNamespace(**plugins), **fields)


def plugin(**settings: Any) -> Any:
    return FullyShardedDataParallelPlugin(**{"fsdp_version": 2, "reshard_after_forward": True, **settings})


SHARED = Recipe(fsdp=True, ulysses=2)
OWN = Recipe(fsdp=True)

ACCELERATORS: dict[str, tuple[Recipe, Callable[[], Any], str]] = {
    "tensor parallelism": (
        SHARED,
        lambda: accelerator(parallelism_config=ParallelismConfig(tp_size=2)),
        "tp_size=2 in the parallelism_config together with a recipe ... leave it out",
    ),
    "ulysses of deepspeed": (
        SHARED,
        lambda: accelerator(parallelism_config=ParallelismConfig(sp_size=2, sp_backend="deepspeed")),
        "sp_size=2 in the parallelism_config together with a recipe ... leave it out",
    ),
    "more ranks": (
        SHARED,
        lambda: accelerator(parallelism_config=ParallelismConfig(cp_size=4)),
        "cp_size=4 ... ulysses=2, ring=1: 2 ranks share a sequence; give lab.hf.parallelism(recipe, ranks)",
    ),
    "none": (SHARED, accelerator, "cp_size=1 ... give lab.hf.parallelism(recipe, ranks)"),
    "deepspeed": (
        OWN, lambda: accelerator(deepspeed_plugin=object()), "DeepSpeed's engine ... fsdp=True in the recipe"
    ),
    "autocast": (
        OWN,
        lambda: accelerator(mixed_precision="bf16"),
        "mixed_precision='bf16' ... compute_dtype='bfloat16' in the recipe, or set mixed_precision='no'",
    ),
    "fp8": (
        Recipe(compute_dtype="bfloat16"), lambda: accelerator(mixed_precision="fp8"), "='fp8' ... use bf16"
    ),
    "context parallelism of accelerate": (
        SHARED,
        lambda: accelerator(parallelism_config=ParallelismConfig(cp_size=2)),
        "cp_size=2 ... ulysses=2, ring=1: 2 ranks share a sequence; give lab.hf.parallelism(recipe, ranks)",
    ),
    "compile": (
        OWN,
        lambda: accelerator(dynamo_plugin=TorchDynamoPlugin(backend="inductor")),
        "dynamo_backend='INDUCTOR' with a recipe ... compile='tiles' in the recipe",
    ),
    "fsdp and none": (
        Recipe(),
        lambda: accelerator(fsdp_plugin=plugin()),
        "accelerate's FSDP together with a recipe of fsdp=False ... set fsdp=True",
    ),
    "fsdp of version 1": (
        OWN,
        lambda: accelerator(fsdp_plugin=plugin(fsdp_version=1, reshard_after_forward="FULL_SHARD")),
        "FSDP version 1 ... use version 2"
    ),
    "checkpointing of fsdp": (
        OWN,
        lambda: accelerator(fsdp_plugin=plugin(activation_checkpointing=True)),
        "activation_checkpointing=True of accelerate's FSDP ... leave it out",
    ),
    "offload of fsdp": (
        OWN,
        lambda: accelerator(fsdp_plugin=plugin(cpu_offload=True)),
        "cpu_offload= ... of accelerate's FSDP ... leave it out",
    ),
    "whole parameters after forward": (
        OWN,
        lambda: accelerator(fsdp_plugin=plugin(reshard_after_forward=False)),
        "reshard_after_forward=False of accelerate's FSDP ... leave it out",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCELERATORS)
def test_accelerators(name: str) -> None:
    recipe, make, words = ACCELERATORS[name]
    refused(words, lambda: check_parallelism(recipe, make()))


def test_an_accelerator_that_is_right() -> None:
    check_parallelism(SHARED, accelerator(parallelism_config=lab.hf.parallelism(SHARED, 6)))
    check_parallelism(OWN, accelerator(fsdp_plugin=plugin()))
    check_parallelism(Recipe(compute_dtype="bfloat16"), accelerator(mixed_precision="bf16"))
    assert lab.hf.parallelism(OWN, 6) is None
    refused("ulysses=2 x ring=1 on 5 ranks ... must divide the ranks", lambda: lab.hf.parallelism(SHARED, 5))


def test_the_name_of_a_recipe() -> None:
    made, found = model(), Accelerator(cpu=True)
    for of in made, made.config:
        assert lab.hf.parallelism("upipe", 2, model=of).cp_size == 2
    refused("recipe='upipe' without a model ... give model, such", lambda: lab.hf.parallelism("upipe", 2))
    refused("recipe='upipe' without tokens ... tokens='128K'", lambda: lab.hf.apply(made, "upipe", found))
    applied = lab.hf.apply(made, "upipe", found, tokens="4K")
    assert applied.recipe == lab.ladder(made.config, 1, 4096, compute_dtype=None)["upipe"]


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
    found.state.fsdp_plugin = plugin()
    refused("FSDP with a PeftModel ... leave accelerate's FSDP", lambda: lab.hf.apply(adapters(), OWN, found))


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
    for recipe in OWN, Recipe(compute_dtype="bfloat16"):
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


def test_a_model_of_replicas_that_is_given_another_recipe(tmp_path: Path) -> None:
    """DDP combined the gradients, and the arguments leave it out."""
    made = model()
    lab.apply_recipe(made, Recipe(), mesh_of_all(Accelerator(cpu=True)))
    made.lab_sharding = "accelerate"
    trainer = LongTrainer(made, arguments(tmp_path, recipe=OWN), train_dataset=rows())
    refused("DDP keeps replicas equal, and arguments with ... fsdp=True ... fsdp=False", trainer.train)


def test_a_model_that_was_given_another_recipe(tmp_path: Path) -> None:
    made = model()
    lab.apply_recipe(made, Recipe(), mesh_of_all(Accelerator(cpu=True)))
    made.forward.sequence = (2, 3)
    trainer = LongTrainer(made, arguments(tmp_path), train_dataset=rows())
    refused("ulysses=2, ring=3, and arguments with one of ulysses=1, ring=1", trainer.train)


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
