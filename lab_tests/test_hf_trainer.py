"""Recipes in Trainer and SFTTrainer: losses, norms and evaluations are those of a plain trainer."""

import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import LlamaForCausalLM, TrainingArguments

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
    plain_trainer,
    rows,
    settings,
)
from lab_tests.support.trainers import launch

# PEFT asks a model for what transformers is about to call otherwise.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

ON_FOUR = {
    "hybrid": Case(knobs={"ulysses": 2, "ring": 2}, accumulate=3),
    "upipe": Case(dtype="float32"),
    "ring": Case("tiling", knobs={"ulysses": 1, "ring": 4}),
    "adapters": Case(lora=True),
    "streamed": Case("streamed", accumulate=2),
    "replicas": Case("tiling", knobs={"fsdp": False}, accumulate=3),
    "sft": Case(sft=True, accumulate=2),
    **{
        family: Case(family=family, accumulate=2, steps=3)
        for family in ("gemma3_text", "glm4", "gpt_oss", "olmo3", "phi3", "qwen3_moe")
    },
}
"""Cases in which all four ranks share a sequence.

The families have windows, partial and interleaved positions, sinks, norms after, fused projections, experts.
"""

GROUPS = {
    "groups": Case(knobs={"ulysses": 2, "ring": 1}, rows=1, plain_rows=2),
    "ddp": Case(
        "checkpoint", knobs={"fsdp": False, "ulysses": 1, "ring": 1}, rows=1, plain_rows=4, accumulate=3
    ),
    # Updates of 8, 3, 8 and 3 rows: the last two micro-batches are of 3 of 4 rows.
    "incomplete": Case(
        knobs={"ulysses": 2, "ring": 1}, rows=2, plain_rows=4, accumulate=2, data=11,
        settings={"include_num_input_tokens_seen": "non_padding"},
    ),
    "incomplete ddp": Case(
        "checkpoint", knobs={"fsdp": False, "ulysses": 1, "ring": 1}, rows=2, plain_rows=8, data=11
    ),
}  # fmt: skip
"""Cases in which ranks have rows of their own: evaluations end with 1 of 6, with 7 of 12, or 7 of 24 rows."""

EVALUATED_BEFORE = {"fsdp": ON_FOUR["hybrid"], "ddp": GROUPS["ddp"]}
"""Cases whose model is evaluated before it is trained."""


@pytest.fixture(scope="module")
def on_four(ranks4: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Outcome]]:
    return launch(ranks4, 4, outcomes, ON_FOUR | GROUPS, tmp_path_factory.mktemp("on_four"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_FOUR)
def test_losses_norms_and_evaluations_are_the_plain_trainers(
    name: str, on_four: list[dict[str, Outcome]], tmp_path: Path
) -> None:
    plain = expected(ON_FOUR[name], tmp_path)
    for rank in on_four:
        assert_same(rank[name], plain)


@pytest.mark.slow
@pytest.mark.parametrize("name", GROUPS)
def test_groups_of_ranks_have_rows_of_their_own(
    name: str, on_four: list[dict[str, Outcome]], tmp_path: Path
) -> None:
    plain = expected(GROUPS[name], tmp_path)
    for rank in on_four:
        assert_same(rank[name], plain)


def test_arguments_are_used_again(tmp_path: Path) -> None:
    with fresh_process():
        first = long_trainer(Case(accumulate=2, steps=1), tmp_path)
        again = LongTrainer(model(Case()), first.args, collate, train_dataset=rows())
        assert outcome(first).losses == [log["loss"] for log in trained_logs(again)]


def rows_without_labels() -> list[dict[str, list[int]]]:
    """Rows of which the first two alone have labels."""
    return [
        row if number < 2 else {**row, "labels": [-100] * len(row["labels"])}
        for number, row in enumerate(rows())
    ]


UNLABELLED = {
    "one sequence": Case(rows=1, steps=24, settings={"per_device_eval_batch_size": 1}),
    "ddp": Case(
        "tiling", knobs={"fsdp": False, "ulysses": 1, "ring": 1}, rows=1, plain_rows=4, steps=6,
        settings={"per_device_eval_batch_size": 1},
    ),
}  # fmt: skip
"""An epoch of each, so that there are updates with and without labels."""


def given_rows_without_labels(trainer: Any) -> Any:
    trainer.train_dataset, trainer.eval_dataset = rows_without_labels(), rows_without_labels()[:7]
    return trainer


def without_labels(folder: Path) -> dict[str, Outcome]:
    """Runs on ranks."""
    return {
        name: outcome(given_rows_without_labels(long_trainer(case, folder / name)))
        for name, case in UNLABELLED.items()
    }


@pytest.mark.slow
def test_rows_without_labels_count_nothing(ranks4: Cluster, tmp_path: Path) -> None:
    found = launch(ranks4, 4, without_labels, tmp_path)
    for name, case in UNLABELLED.items():
        with fresh_process():
            trainer = plain_trainer(case, tmp_path)
            trainer.args.per_device_eval_batch_size = case.plain_rows or 1
            plain = outcome(given_rows_without_labels(trainer))
        assert 0.0 in plain.losses
        assert any(plain.losses)
        for rank in found:
            assert [loss == 0 for loss in rank[name].losses] == [loss == 0 for loss in plain.losses]
            assert_same(rank[name], plain)


class Stream(IterableDataset[Any]):
    """Rows without a length.

    Args:
        length: How many rows there are.
    """

    def __init__(self, length: int = ROWS) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        yield from rows()[: self.length]


TOKENS_SEEN = {"include_num_input_tokens_seen": "non_padding"}
STREAMED = Case(steps=8, accumulate=2, settings=TOKENS_SEEN)
"""An epoch has six updates."""


def trained_logs(trainer: Any) -> list[dict[str, Any]]:
    trainer.train()
    return [log for log in trainer.state.log_history if "grad_norm" in log]


def of_a_stream(folder: Path) -> list[tuple[float, int]]:
    """Runs on ranks."""
    trainer = long_trainer(STREAMED, folder)
    trainer.train_dataset = Stream()
    return [(log["loss"], log["num_input_tokens_seen"]) for log in trained_logs(trainer)]


@pytest.mark.slow
def test_a_stream_and_its_tokens(ranks4: Cluster, tmp_path: Path) -> None:
    found = launch(ranks4, 4, of_a_stream, tmp_path)
    with fresh_process():
        plain = plain_trainer(STREAMED, tmp_path)
        plain.train_dataset = Stream()
        right = [(log["loss"], log["num_input_tokens_seen"]) for log in trained_logs(plain)]
    for rank in found:
        assert [seen for _, seen in rank] == [seen for _, seen in right]
        assert [loss for loss, _ in rank] == pytest.approx([loss for loss, _ in right], rel=1e-6)


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


def evaluated_before(folder: Path) -> dict[str, Outcome]:
    """Runs on ranks."""
    results = {}
    for name, case in EVALUATED_BEFORE.items():
        trainer = long_trainer(case, folder / name)
        trainer.evaluate()
        results[name] = outcome(trainer)
    return results


@pytest.mark.slow
def test_an_evaluation_before_changes_no_training(ranks4: Cluster, tmp_path: Path) -> None:
    found = launch(ranks4, 4, evaluated_before, tmp_path)
    for name, case in EVALUATED_BEFORE.items():
        plain = expected(case, tmp_path)
        for rank in found:
            assert_same(Outcome(rank[name].losses, rank[name].norms, plain.evaluation), plain)


AGAIN = {"fsdp": ON_FOUR["hybrid"], "ddp": GROUPS["ddp"], "ddp, one sequence": ON_FOUR["replicas"]}
"""Cases whose model is given to another trainer."""


def trained_again(trainer: Any) -> Outcome:
    """A model that three trainers have: one evaluates it, and two train it."""
    trainer.evaluate()
    second, third = (
        type(trainer)(trainer.model, trainer.args, collate, train_dataset=rows(), eval_dataset=rows()[:7])
        for _ in range(2)
    )
    second.train()
    return outcome(third)


def all_trained_again(folder: Path) -> dict[str, Outcome]:
    """Runs on ranks."""
    return {name: trained_again(long_trainer(case, folder / name)) for name, case in AGAIN.items()}


@pytest.mark.slow
def test_another_trainer_of_the_same_model(ranks4: Cluster, tmp_path: Path) -> None:
    found = launch(ranks4, 4, all_trained_again, tmp_path)
    for name, case in AGAIN.items():
        with fresh_process():
            plain = trained_again(plain_trainer(case, tmp_path))
        for rank in found:
            assert_same(Outcome(rank[name].losses, rank[name].norms, plain.evaluation), plain)


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


def streams_of_groups(folder: Path) -> str:
    """Runs on ranks."""
    trainer = long_trainer(GROUPS["groups"], folder)
    trainer.train_dataset = Stream()
    with pytest.raises(RecipeError) as refused:
        trainer.train()
    return str(refused.value)


@pytest.mark.slow
def test_a_stream_whose_end_is_not_known_is_refused_for_groups(ranks4: Cluster, tmp_path: Path) -> None:
    for said in launch(ranks4, 4, streams_of_groups, tmp_path):
        assert re.match("a dataset without a length, .* set dataloader_drop_last=True$", said)


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


def test_batches_that_some_ranks_do_not_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"^even_batches=False with a recipe: .*; leave it out"):
        long_trainer(Case(settings={"accelerator_config": {"even_batches": False}}), tmp_path)
