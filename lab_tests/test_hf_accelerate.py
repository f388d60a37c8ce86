"""Recipes with Accelerate alone, and models that were given a recipe by hand, against a plain loop."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import accelerate.state
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import TrainingArguments

import lab
import lab.hf
from cluster.ranks import Cluster
from lab.errors import LabError
from lab.hf.applying import mesh_of_all
from lab.hf.ranks import fresh_process
from lab.recipe.recipe import Recipe
from lab.techniques.rope import apply_rope
from lab_tests.support.small_trainings import (
    LONGEST,
    Case,
    LongTrainer,
    Outcome,
    assert_same,
    collate,
    expected,
    model,
    outcome,
    rows,
    settings,
)
from lab_tests.support.trainers import launch

pytestmark = pytest.mark.slow

UPDATES, MICRO_BATCHES, CLIP = 3, 2, 0.5
CASE = Case()

UPIPE = Recipe(ulysses=2, head_chunk=4, checkpoint=True, mlp_tile=5, loss_tile=7)
"""Pairs of ranks share a sequence, and the two pairs have different rows."""


@dataclass(frozen=True)
class Loop:
    """A loop of Accelerate's."""

    recipe: Recipe
    plugin: bool = False


LOOPS = {
    "ddp": Loop(UPIPE),
    "fsdp": Loop(Recipe(**{**UPIPE.to_json(), "fsdp": True})),
    "plugin": Loop(Recipe(**{**UPIPE.to_json(), "fsdp": True}), plugin=True),
    "own rows": Loop(Recipe(fsdp=True)),
}


def optimizer_of(trained: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained.parameters(), lr=1e-2)


def plain_loop(rows_of_all: int) -> list[float]:
    """Losses and norms of one process, which has the rows of all ranks."""
    trained = model(CASE)
    apply_rope(trained)
    optimizer = optimizer_of(trained)
    batches = list(DataLoader(rows(), rows_of_all, collate_fn=collate))  # type: ignore[arg-type]
    found: list[float] = []
    for start in range(0, UPDATES * MICRO_BATCHES, MICRO_BATCHES):
        update = batches[start : start + MICRO_BATCHES]
        labels = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in update)
        total = 0.0
        for batch in update:
            logits = trained(batch["input_ids"], batch["attention_mask"]).logits[:, :-1]
            wanted = batch["labels"][:, 1:]
            loss: Tensor = cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum") / labels
            loss.backward()
            total += loss.item()
        # AdamW hides a wrong scale of the gradients, and the norm shows it.
        norm = torch.nn.utils.clip_grad_norm_(trained.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        found += [total, norm.item()]
    return found


def accelerated_loop(loop: Loop) -> list[float]:
    """Accelerate's own example of gradient accumulation, with a recipe. Runs on ranks."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if loop.plugin else None
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=MICRO_BATCHES,
        parallelism_config=lab.hf.parallelism(loop.recipe, 4),
        fsdp_plugin=plugin,
    )
    assert (accelerator.distributed_type == DistributedType.FSDP) == loop.plugin
    trained = model(CASE)
    applied = lab.hf.apply(trained, loop.recipe, accelerator)
    loader = DataLoader(rows(), 1, collate_fn=collate)  # type: ignore[arg-type]
    trained, optimizer, loader = accelerator.prepare(trained, optimizer_of(trained), loader)
    parts = [applied.shard(batch) for batch in loader]
    found: list[float] = []
    for start in range(0, UPDATES * MICRO_BATCHES, MICRO_BATCHES):
        update = parts[start : start + MICRO_BATCHES]
        labels, total = applied.count(update), 0.0
        for part in update:
            with accelerator.accumulate(trained):
                loss = applied.loss(trained, part, labels)
                accelerator.backward(loss)
                total += loss.item()
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(trained.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
        found += [total, norm.item()]
    return found


@contextmanager
def fsdp_on_cpu() -> Iterator[None]:
    """Accelerate turns FSDP off in a process without GPUs."""
    state = accelerate.state
    made = state.AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        made(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and not hasattr(self, "fsdp_plugin"):
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    with patch.object(state.AcceleratorState, "__init__", init):
        yield


def refusal_of_different_batches() -> str:
    """Runs on ranks."""
    accelerator = Accelerator(cpu=True, parallelism_config=lab.hf.parallelism(UPIPE, 4))
    applied = lab.hf.apply(model(CASE), UPIPE, accelerator)
    ids = torch.arange(1, 15).view(2, 7)
    applied.shard({"input_ids": ids, "labels": ids})
    try:
        applied.shard({"input_ids": ids, "labels": ids + accelerator.process_index % 2})
    except LabError as error:
        return str(error)
    return ""


def by_hand(folder: Path) -> Outcome:
    """A model to which the lab has applied a recipe, in Trainer. Runs on ranks."""
    trained = model(BY_HAND)
    lab.apply_recipe(trained, BY_HAND_RECIPE, mesh_of_all(Accelerator(cpu=True)))
    args = lab.hf.arguments(
        TrainingArguments, recipe=BY_HAND_RECIPE, per_device_train_batch_size=2, **settings(BY_HAND, folder)
    )
    data = rows()
    trainer = LongTrainer(trained, args, collate, train_dataset=data, eval_dataset=data[:7])
    with pytest.raises(LabError, match=r"given with a recipe: .* call lab\.plan"):
        lab.hf.plan(trainer, tokens=LONGEST)
    return outcome(trainer)


BY_HAND = Case(accumulate=2)
BY_HAND_RECIPE = Recipe(fsdp=True, ulysses=4, head_chunk=4, checkpoint=True, mlp_tile=5)


def all_of_them(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, loop in LOOPS.items():
        with fresh_process(), fsdp_on_cpu():
            found[name] = accelerated_loop(loop)
    for name, function in {
        "different": refusal_of_different_batches,
        "by hand": lambda: by_hand(folder),
    }.items():
        with fresh_process():
            found[name] = function()
    return found


@pytest.fixture(scope="module")
def on_four(ranks4: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch(ranks4, 4, all_of_them, tmp_path_factory.mktemp("on_four"))


@pytest.mark.parametrize("name", LOOPS)
def test_losses_and_norms_are_those_of_a_plain_loop(name: str, on_four: list[dict[str, Any]]) -> None:
    plain = plain_loop(4 // LOOPS[name].recipe.ulysses)
    assert len(set(plain)) == 2 * UPDATES
    for rank in on_four:
        assert rank[name] == pytest.approx(plain, rel=1e-6)


def test_different_batches_of_ranks_that_share_a_sequence(on_four: list[dict[str, Any]]) -> None:
    for rank in on_four:
        assert "the tokens, the mask or the documents differ on rank" in rank["different"]


def test_a_model_with_a_recipe_in_trainer(on_four: list[dict[str, Any]], tmp_path: Path) -> None:
    plain = expected(BY_HAND, tmp_path)
    for rank in on_four:
        assert_same(rank["by hand"], plain)
