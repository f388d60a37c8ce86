"""A small training of a Trainer, with a recipe and as the plain one in one process."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

import lab
import lab.hf
from lab.hf.ranks import fresh_process
from lab.techniques.rope import apply_rope
from lab_tests.support.models import small_config

QUIET = {"logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True}
"""Settings of a training that writes nothing."""

VOCABULARY, LONGEST, ROWS, EVALUATED = 64, 41, 24, 3


@dataclass(frozen=True)
class Case:
    """A training: what is the same for the plain trainer, and the recipe."""

    recipe: str = "upipe"
    knobs: dict[str, Any] = field(default_factory=dict)
    rows: int = 2
    plain_rows: int | None = None
    accumulate: int = 1
    dtype: str = "float64"
    lora: bool = False
    sft: bool = False
    steps: int = 4
    data: int = ROWS
    settings: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[Any], Any] = lambda trainer: trainer
    """Changes the trainer that is to train, or makes it of this one."""


def model(case: Case) -> Any:
    """Shapes in which nothing coincides, with weights that are not those of another seed."""
    torch.manual_seed(1)
    config = small_config(
        vocab_size=VOCABULARY, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4,
        max_position_embeddings=256, attn_implementation="sdpa", pad_token_id=0,
    )  # fmt: skip
    made = LlamaForCausalLM(config).to(getattr(torch, case.dtype))
    if not case.lora:
        return made
    # B is not zero, or A would have no gradient in the first step.
    return get_peft_model(
        made, LoraConfig(r=3, lora_alpha=7, target_modules="all-linear", init_lora_weights=False)
    )


def rows() -> list[dict[str, list[int]]]:
    """Rows of unequal length whose prompts are masked unevenly: with 4 ranks, some have no label at all."""
    generator, made = torch.Generator().manual_seed(3), []
    for _ in range(ROWS):
        length = int(torch.randint(20, LONGEST, (1,), generator=generator))
        ids = torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
        prompt = int(torch.randint(1, length - 2, (1,), generator=generator))
        made.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return made


def collate(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(sample["input_ids"]) for sample in samples)

    def padded(values: list[int], value: int) -> list[int]:
        return values + [value] * (longest - len(values))

    return {
        "input_ids": torch.tensor([padded(s["input_ids"], 0) for s in samples]),
        "labels": torch.tensor([padded(s["labels"], -100) for s in samples]),
        "attention_mask": torch.tensor([padded([1] * len(s["input_ids"]), 0) for s in samples]),
    }


def settings(case: Case, folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "max_steps": case.steps,
        "gradient_accumulation_steps": case.accumulate,
        "per_device_eval_batch_size": EVALUATED,
        "learning_rate": 1e-3,
        "max_grad_norm": 0.5,
        "seed": 5,
        **QUIET,
        **case.settings,
    }


class LongTrainer(lab.hf.LongContext, Trainer):
    """Trainer with a recipe."""


class LongSFTTrainer(lab.hf.LongContext, SFTTrainer):
    """SFTTrainer with a recipe."""


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({str(n): n for n in range(VOCABULARY)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")


def long_trainer(case: Case, folder: Path, **more: Any) -> Any:
    common = {"per_device_train_batch_size": case.rows, **settings(case, folder), **more}
    if case.sft:
        args: Any = lab.hf.arguments(
            SFTConfig, recipe=case.recipe, knobs=case.knobs, max_length=LONGEST, **{"bf16": False, **common}
        )
        return of_trl(LongSFTTrainer, case, args)
    args = lab.hf.arguments(TrainingArguments, recipe=case.recipe, tokens=LONGEST, knobs=case.knobs, **common)
    return LongTrainer(model(case), args, collate, train_dataset=rows()[: case.data], eval_dataset=rows()[:7])


def of_trl(kind: type[SFTTrainer], case: Case, args: SFTConfig) -> SFTTrainer:
    data = Dataset.from_list(rows())
    made = model(case)
    if kind is SFTTrainer:
        apply_rope(made)
    return kind(
        made, args, train_dataset=data, eval_dataset=data.select(range(7)), processing_class=tokenizer()
    )


def plain_trainer(case: Case, folder: Path) -> Trainer:
    groups = (case.plain_rows or case.rows) // case.rows
    common = {"per_device_train_batch_size": groups * case.rows, **settings(case, folder)}
    common["per_device_eval_batch_size"] *= groups
    if "packing" in case.settings:
        args = SFTConfig(max_length=LONGEST, bf16=False, activation_checkpointing=False, **common)
        return of_trl(SFTTrainer, case, args)
    made = model(case)
    if case.dtype == "float64":
        # Its own angles are fp32, and both would be right to 1e-7 only.
        apply_rope(made.get_base_model() if case.lora else made)
    return Trainer(
        made, TrainingArguments(**common), collate, train_dataset=rows()[: case.data], eval_dataset=rows()[:7]
    )


@dataclass
class Outcome:
    losses: list[float]
    norms: list[float]
    evaluation: float
    seen: list[int] = field(default_factory=list)


def outcome(trainer: Any, resume: str | None = None) -> Outcome:
    trainer.train(resume_from_checkpoint=resume)
    evaluation = trainer.evaluate()["eval_loss"]
    logs = [log for log in trainer.state.log_history if "grad_norm" in log]
    seen = [log["num_input_tokens_seen"] for log in logs if "num_input_tokens_seen" in log]
    return Outcome([log["loss"] for log in logs], [float(log["grad_norm"]) for log in logs], evaluation, seen)


def outcomes(cases: dict[str, Case], folder: Path) -> dict[str, Outcome]:
    """Runs on ranks."""
    return {name: outcome(case.prepare(long_trainer(case, folder / name))) for name, case in cases.items()}


def expected(case: Case, folder: Path) -> Outcome:
    with fresh_process():
        return outcome(case.prepare(plain_trainer(case, folder)))


def assert_same(ours: Outcome, plain: Outcome, *, evaluated: bool = True) -> None:
    assert len(ours.losses) == len(plain.losses) > 0
    torch.testing.assert_close(torch.tensor(ours.losses), torch.tensor(plain.losses), rtol=1e-6, atol=0)
    torch.testing.assert_close(torch.tensor(ours.norms), torch.tensor(plain.norms), rtol=1e-5, atol=0)
    if evaluated:
        torch.testing.assert_close(ours.evaluation, plain.evaluation, rtol=1e-6, atol=0)
    assert ours.seen == plain.seen
