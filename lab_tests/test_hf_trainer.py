"""Recipes in Trainer and SFTTrainer: losses, norms and evaluations are those of a plain trainer.

Seen red: documents that the recipe's model does not get.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import DataCollatorWithFlattening, LlamaForCausalLM, TrainingArguments

import lab.hf
from cluster.ranks import Cluster
from lab.errors import ModelError, RecipeError
from lab.hf.ranks import fresh_process
from lab_tests.support.small_trainings import (
    LONGEST,
    ROWS,
    Case,
    LongTrainer,
    Outcome,
    assert_same,
    collate,
    expected,
    long_trainer,
    model,
    outcome,
    outcomes,
    rows,
    settings,
)
from lab_tests.support.trainers import launch

# PEFT asks a model for what transformers is about to call otherwise.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


# ---- what a trainer is before it trains --------------------------------------------------------------------


def evaluated(trainer: Any) -> Any:
    """Evaluate the model before it is trained, which changes no training. The plain trainer does not."""
    if isinstance(trainer, lab.hf.LongContext):
        trainer.evaluate()
    return trainer


def another(trainer: Any) -> Any:
    """Return the third trainer of a model that one has evaluated, and the next has trained."""
    trainer.evaluate()
    second, third = (
        type(trainer)(trainer.model, trainer.args, collate, train_dataset=rows(), eval_dataset=rows()[:7])
        for _ in range(2)
    )
    second.train()
    return third


def unlabelled(trainer: Any) -> Any:
    """Take the labels from all rows but the first two."""
    trainer.train_dataset = [
        row if number < 2 else {**row, "labels": [-100] * len(row["labels"])}
        for number, row in enumerate(rows())
    ]
    trainer.eval_dataset = trainer.train_dataset[:7]
    return trainer


class Stream(IterableDataset[Any]):
    """Rows without a length.

    Args:
        length: How many rows there are.
    """

    def __init__(self, length: int = ROWS) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        yield from rows()[: self.length]


def streamed(trainer: Any) -> Any:
    trainer.train_dataset = Stream()
    return trainer


def flat(trainer: Any) -> Any:
    """Make one row of the rows of a batch. The batches of an evaluation divide 12 rows on 1 and 4 groups."""
    trainer.data_collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    trainer.eval_dataset = rows()[:12]
    return trainer


# ---- cases -------------------------------------------------------------------------------------------------

SEEN = {"include_num_input_tokens_seen": "non_padding"}
PAIRS = {"ulysses": 2, "ring": 1}
REPLICAS = {"fsdp": False, "ulysses": 1, "ring": 1}

ON_FOUR = {
    "hybrid": Case(knobs={"ulysses": 2, "ring": 2}, accumulate=3),
    "ring": Case("tiling", knobs={"ulysses": 1, "ring": 4}),
    "adapters": Case(lora=True),
    "streamed": Case("streamed", accumulate=2),
    "replicas": Case("tiling", knobs={"fsdp": False}, accumulate=3),
    "sft": Case(sft=True, accumulate=2),
    "packed rows of trl": Case(sft=True, rows=2, steps=3, settings={"packing": True}),
    # An epoch has six updates.
    "a stream": Case(steps=8, accumulate=2, settings=SEEN, prepare=streamed),
    # An epoch, so that there are updates with and without labels.
    "without labels": Case(rows=1, steps=24, settings={"per_device_eval_batch_size": 1}, prepare=unlabelled),
}
"""Cases in which all four ranks share a sequence."""

GROUPS = {
    "groups": Case(knobs=PAIRS, rows=1, plain_rows=2),
    "ddp": Case("checkpoint", knobs=REPLICAS, rows=1, plain_rows=4, accumulate=3),
    # Updates of 8, 3, 8 and 3 rows: the last two micro-batches are of 3 of 4 rows.
    "incomplete": Case(knobs=PAIRS, rows=2, plain_rows=4, accumulate=2, data=11, settings=SEEN),
    "incomplete ddp": Case("checkpoint", knobs=REPLICAS, rows=2, plain_rows=8, data=11),
    "ddp, without labels": Case(
        "tiling", knobs=REPLICAS, rows=1, plain_rows=4, steps=6, prepare=unlabelled,
        settings={"per_device_eval_batch_size": 1},
    ),
}  # fmt: skip
"""Cases in which ranks have rows of their own: evaluations end with 1 of 6, with 7 of 12, or 7 of 24 rows."""

FLAT = {
    "upipe": Case(rows=3, accumulate=2, steps=3, prepare=flat),
    "streamed, adapters": Case("streamed", lora=True, rows=3, steps=3, prepare=flat),
    "groups of ranks": Case(knobs=PAIRS, rows=2, plain_rows=4, steps=3, prepare=flat),
    "ddp": Case("checkpoint", knobs=REPLICAS, rows=1, plain_rows=4, steps=3, prepare=flat),
}
"""Cases whose batches are one row of several documents."""

CASES = {
    **ON_FOUR,
    **GROUPS,
    **{f"flat {name}": case for name, case in FLAT.items()},
    "evaluated before": replace(ON_FOUR["hybrid"], prepare=evaluated),
    "ddp, evaluated before": replace(GROUPS["ddp"], prepare=evaluated),
    "another trainer": replace(ON_FOUR["hybrid"], prepare=another),
    "ddp, another trainer": replace(GROUPS["ddp"], prepare=another),
    "ddp, one sequence, another trainer": replace(ON_FOUR["replicas"], prepare=another),
}

IN_BF16 = {
    "upipe in bf16": Case(dtype="float32", settings={"bf16": True}),
    "replicas in bf16": Case("tiling", knobs={"fsdp": False}, dtype="float32", settings={"bf16": True}),
}


@pytest.fixture(scope="module")
def on_four(ranks4: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Outcome]]:
    return launch(ranks4, 4, outcomes, CASES | IN_BF16, tmp_path_factory.mktemp("on_four"))


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_losses_norms_and_evaluations_are_the_plain_trainers(
    name: str, on_four: list[dict[str, Outcome]], tmp_path: Path
) -> None:
    case = CASES[name]
    plain = expected(case, tmp_path)
    if case.prepare is unlabelled:
        assert 0.0 in plain.losses
        assert any(plain.losses)
    # Of flat batches, groups of ranks have other means of means than one process.
    compared = case.prepare not in (evaluated, another) and not (case.prepare is flat and case.plain_rows)
    for rank in on_four:
        assert_same(rank[name], plain, evaluated=compared)


@pytest.mark.long
@pytest.mark.parametrize("name", ["upipe", "streamed, adapters"])
def test_documents_of_one_row_are_padded_rows(name: str, tmp_path: Path) -> None:
    """The losses of plain trainers, which build masks. Their evaluation has other means of means."""
    padded = replace(FLAT[name], prepare=lambda trainer: trainer)
    assert_same(expected(FLAT[name], tmp_path), expected(padded, tmp_path), evaluated=False)


def distance(found: Outcome, right: Outcome) -> float:
    """Of losses, norms and the evaluation: the largest relative difference."""
    pairs = zip(
        [*found.losses, *found.norms, found.evaluation],
        [*right.losses, *right.norms, right.evaluation],
        strict=True,
    )
    return max(abs(a - b) / b for a, b in pairs)


@pytest.mark.long
def test_bf16_is_at_most_half_again_as_far_from_fp32_as_plain_bf16(
    on_four: list[dict[str, Outcome]], tmp_path: Path
) -> None:
    right = expected(Case(dtype="float32"), tmp_path / "fp32")
    plain = distance(expected(Case(dtype="bfloat16"), tmp_path / "bf16"), right)
    for rank in on_four:
        for name in IN_BF16:
            assert 1e-5 < distance(rank[name], right) < 1.5 * plain, name


def test_arguments_are_used_again(tmp_path: Path) -> None:
    with fresh_process():
        first = long_trainer(Case(accumulate=2, steps=1), tmp_path)
        again = LongTrainer(model(Case()), first.args, collate, train_dataset=rows(), eval_dataset=rows()[:7])
        assert outcome(first).losses == outcome(again).losses


# ---- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_stream_that_is_resumed_in_a_later_pass_is_refused(tmp_path: Path) -> None:
    """Trainer would skip all of its rows, and begin at its first row again."""
    settings = {"save_strategy": "steps", "save_steps": 3}
    with fresh_process():
        trainer = long_trainer(Case(rows=1, steps=7, settings=settings), tmp_path)
        trainer.train_dataset = Stream(5)
        trainer.train()
        for step, refused in ((3, False), (6, True)):
            again = long_trainer(Case(rows=1, steps=7, settings={"save_strategy": "no"}), tmp_path)
            again.train_dataset = Stream(5)
            with (
                pytest.raises(RecipeError, match=r"^a stream that ends before .* set ignore_data_skip=True")
                if refused
                else nullcontext()
            ):
                again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))


@pytest.mark.long
def test_a_model_without_memory_is_planned_and_not_trained(tmp_path: Path) -> None:
    case = Case(dtype="float32")
    with fresh_process():
        planned = lab.hf.plan(long_trainer(case, tmp_path), workspace=False)
        with torch.device("meta"):
            empty = LlamaForCausalLM(model(case).config)
        args = lab.hf.arguments(
            TrainingArguments,
            recipe=case.recipe,
            tokens=LONGEST,
            per_device_train_batch_size=case.rows,
            **settings(case, tmp_path),
        )
        trainer = LongTrainer(empty, args, collate, train_dataset=rows())
        assert lab.hf.plan(trainer, workspace=False).device_peak == planned.device_peak
        with pytest.raises(ModelError, match="has no memory"):
            trainer.train()


def refusals_of_groups(folder: Path) -> list[str]:
    """Runs on ranks. A stream's end is not known, and seven rows fill no batch of two groups."""

    def refusal(prepare: Callable[[Any], Any], ask: str) -> str:
        with pytest.raises(RecipeError) as refused:
            getattr(prepare(long_trainer(GROUPS["groups"], folder)), ask)()
        return str(refused.value)

    def flat_of_seven(trainer: Any) -> Any:
        trainer = flat(trainer)
        trainer.eval_dataset = rows()[:7]
        return trainer

    return [refusal(flat_of_seven, "evaluate"), refusal(streamed, "train")]


@pytest.mark.long
def test_rows_that_accelerate_would_repeat_are_refused_for_groups(ranks4: Cluster, tmp_path: Path) -> None:
    for of_documents, of_stream in launch(ranks4, 4, refusals_of_groups, tmp_path):
        assert re.match("a dataset without a length, .* set dataloader_drop_last=True$", of_stream)
        words = "a last batch of documents in one row, where groups of ranks have rows of their own: "
        assert of_documents.startswith(words)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: model.merge_adapter(), r"^adapters of .* are merged, .* call unmerge_adapter\(\)"),
        (
            lambda model: model.base_model.disable_adapter_layers(),
            "parameter .* or enable the adapters$",
        ),
        (lambda model: model.requires_grad_(False), "^every parameter of this model is frozen: "),
    ],
)
def test_what_would_not_be_trained_is_refused(change: Any, said: str, tmp_path: Path) -> None:
    with fresh_process():
        trainer = long_trainer(Case(lora=True), tmp_path)
        change(trainer.model)
        with pytest.raises(RecipeError, match=said):
            trainer.train()
