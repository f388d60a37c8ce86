"""Gradients of a checkpoint under a recipe, against those of plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lab import models
from lab.errors import RecipeError
from lab.recipe.recipe import Recipe
from lab.step.batches import shard_batch
from lab.step.compose import apply_recipe
from lab.step.training_step import loss
from lab_tests.support import reference

ROWS, TOKENS = 3, 44
"""Neither the rows nor the tokens divide over the ranks of most recipes."""


def token_ids() -> Tensor:
    """Return the batch [ROWS, TOKENS]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, reference.VOCABULARY, (ROWS, TOKENS), generator=generator)


def save_checkpoint(
    folder: Path, family: str, heads: int, kv_heads: int, dtype: torch.dtype = torch.float64, **more: Any
) -> None:
    """Save a checkpoint of transformers, and in its folder the loss and the gradients of the plain model."""
    config = reference.config(family, heads, kv_heads, **more)
    models.save(reference.build(config, dtype), folder)
    torch.save(plain_result(reference.build(config, dtype)), folder / "expected.pt")


@reference.exact_modules()
def plain_result(model: torch.nn.Module) -> tuple[float, dict[str, Tensor]]:
    """Return the mean loss and the gradients of a plain model on the batch."""
    ids = token_ids()
    logits = reference.exact_rotary(model)(input_ids=ids, use_cache=False).logits
    mean = reference.loss_of(logits[:, :-1], ids[:, 1:]) / (ROWS * (TOKENS - 1))
    mean.backward()
    return mean.item(), reference.gradients(model)


@reference.exact_modules()
def relative_errors(work: list[tuple[str, Recipe]]) -> list[tuple[float, float] | None]:
    """Return the relative error of the loss and the largest one of a gradient, for each (checkpoint, recipe).

    It is None if the recipe is refused. Runs on each rank.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    errors: list[tuple[float, float] | None] = []
    for checkpoint, recipe in work:
        model = models.build(checkpoint)
        try:
            apply_recipe(model, recipe, mesh)
        except RecipeError:
            errors.append(None)
            continue
        value = loss(model, shard_batch(token_ids(), recipe, mesh))
        value.backward()
        expected_value, expected = torch.load(f"{checkpoint}/expected.pt")
        error = reference.error(whole_gradients(model), expected)
        errors.append((abs(value.item() / expected_value - 1), error))
    return errors


def whole_gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the gradient of every parameter, gathered from its shards if it is sharded."""
    return {name: whole(gradient) for name, gradient in reference.gradients(model).items()}


def whole(x: Any) -> Tensor:
    """Return a tensor, gathered from its shards if it is sharded."""
    result: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return result
