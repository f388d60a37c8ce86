"""Recipes with Accelerate alone, and models that were given a recipe by hand, against a plain loop."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import accelerate.state
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
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
from lab_tests.support.trainers import launch, whole

pytestmark = pytest.mark.long

UPDATES, MICRO_BATCHES, CLIP = 3, 2, 0.5
CASE = Case()

UPIPE = Recipe(ulysses=2, head_chunk=4, checkpoint=True, mlp_tile=5, loss_tile=7)
"""Pairs of ranks share a sequence, and the two pairs have different rows."""


@dataclass(frozen=True)
class Loop:
    """A loop of Accelerate's."""

    recipe: Recipe
    plugin: bool = False
    no_sync: bool = False


SHARDED = Recipe(**{**UPIPE.to_json(), "fsdp": True})

LOOPS = {
    "ddp": Loop(UPIPE),
    "fsdp": Loop(SHARDED),
    "plugin": Loop(SHARDED, plugin=True),
    "own rows": Loop(Recipe(fsdp=True)),
    "ddp, without accumulate": Loop(UPIPE, no_sync=True),
    "fsdp, without accumulate": Loop(SHARDED, no_sync=True),
    "plugin, without accumulate": Loop(SHARDED, plugin=True, no_sync=True),
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
    """Accelerate's own example of gradient accumulation, with a recipe. Runs on ranks.

    Or with ``no_sync`` in place of ``accumulate``, and a loader that is read by one update after the other.
    """
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if loop.plugin else None
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=1 if loop.no_sync else MICRO_BATCHES,
        parallelism_config=lab.hf.parallelism(loop.recipe, 4),
        fsdp_plugin=plugin,
    )
    assert (accelerator.distributed_type == DistributedType.FSDP) == loop.plugin
    trained = model(CASE)
    applied = lab.hf.apply(trained, loop.recipe, accelerator)
    data = rows()[: UPDATES * MICRO_BATCHES * 4 // applied.shared]
    loader = DataLoader(data, 1, collate_fn=collate)  # type: ignore[arg-type]
    trained, optimizer, loader = accelerator.prepare(trained, optimizer_of(trained), loader)
    parts = map(applied.shard, loader)
    if not loop.no_sync:
        parts = iter(list(parts))
    found: list[float] = []
    for update in zip(*[parts] * MICRO_BATCHES, strict=True):
        labels, total = applied.count(update), 0.0
        for part in update:
            last = part is update[-1]
            if loop.no_sync:
                context = nullcontext() if last else accelerator.no_sync(trained)
            else:
                context = accelerator.accumulate(trained)
            with context:
                loss = applied.loss(trained, part, labels)
                accelerator.backward(loss)
                total += loss.item()
                if last:
                    norm = accelerator.clip_grad_norm_(trained.parameters(), CLIP)
                if last or not loop.no_sync:
                    optimizer.step()
                    optimizer.zero_grad()
        found += [total, norm.item()]
    return found


@dataclass
class Saved:
    """What was saved of a model, and how its training went on."""

    weights: list[dict[str, Tensor]]
    right: dict[str, Tensor]
    refusals: list[str]
    losses: list[float]


def saved(folder: Path) -> Saved:
    """Save a model that the lab has sharded, and go on with another one. Runs on ranks."""
    accelerator = Accelerator(cpu=True, parallelism_config=lab.hf.parallelism(SHARDED, 4))

    def start() -> tuple[Any, Any, Any]:
        trained = model(CASE)
        applied = lab.hf.apply(trained, SHARDED, accelerator)
        return applied, *accelerator.prepare(trained, optimizer_of(trained))

    def step(applied: Any, trained: Any, optimizer: Any) -> float:
        part = applied.shard(collate(rows()[:2]))
        loss = applied.loss(trained, part, applied.count([part]))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()  # type: ignore[no-any-return]

    first, second = start(), start()
    step(*first)
    accelerator.save_model(first[1], folder / "by accelerate")
    first[1].save_pretrained(
        folder / "by transformers",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(first[1]),
    )
    refusals = []
    for function in (accelerator.save_state, accelerator.load_state):
        with pytest.raises(LabError) as error:
            function(folder / "by accelerate")
        refusals.append(str(error.value))
    names = "model", "optimizer"
    state = dict(zip(names, get_state_dict(first[1], first[2].optimizer), strict=True))
    save(state, checkpoint_id=folder / "state")
    right = whole(first[1])
    losses = [step(*first), step(*first)]
    state = dict(zip(names, get_state_dict(second[1], second[2].optimizer), strict=True))
    load(state, checkpoint_id=folder / "state")
    set_state_dict(
        second[1],
        second[2].optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    losses += [step(*second), step(*second)]
    weights = [load_file(path / "model.safetensors") for path in sorted(folder.glob("by *"))]
    return Saved(weights, right, refusals, losses)


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
        "saved": lambda: saved(folder),
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


def test_a_sharded_model_is_saved_and_its_state_by_torch_alone(on_four: list[dict[str, Any]]) -> None:
    for rank in on_four:
        found = rank["saved"]
        assert len(found.weights) == 2
        for weights in found.weights:
            torch.testing.assert_close(weights, found.right, rtol=0, atol=0)
        for refusal in found.refusals:
            assert "use get_state_dict and set_state_dict of torch.distributed.checkpoint" in refusal
        first, second, *again = found.losses
        assert first != second
        assert again == [first, second]


def test_a_model_with_a_recipe_in_trainer(on_four: list[dict[str, Any]], tmp_path: Path) -> None:
    plain = expected(BY_HAND, tmp_path)
    for rank in on_four:
        assert_same(rank["by hand"], plain)
