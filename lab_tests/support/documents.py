"""Rows of several documents: transformers' own model on each document alone, and a recipe on whole rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lab import models
from lab.recipe.recipe import Recipe
from lab.step.batches import shard_batch
from lab.step.compose import apply_recipe
from lab.step.training_step import loss
from lab_tests.support import reference
from lab_tests.support.parity import whole_gradients

TOKENS = 44
DOCUMENTS = [[5, 20, 19], [1, 30, 1, 12], [44]]
"""Of three rows. A document of one token predicts nothing; the last row is one document."""


def token_ids(rows: int = len(DOCUMENTS)) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, reference.VOCABULARY, (rows, TOKENS), generator=generator)


def mean_loss(model: nn.Module, ids: Tensor, documents: Sequence[Sequence[int]]) -> Tensor:
    """Return the mean loss over the labels of all documents of rows, each computed alone."""
    reference.exact_rotary(model)
    labels = sum(length - 1 for lengths in documents for length in lengths)
    total = torch.zeros((), dtype=torch.float64)
    for row, lengths in zip(ids, documents, strict=True):
        for document in row.split(list(lengths)):
            if len(document) > 1:
                logits = model(input_ids=document[None], use_cache=False).logits
                total = total + reference.loss_of(logits[:, :-1], document[None, 1:]) / labels
    return total


@reference.exact_modules()
def plain_result(
    model: nn.Module, ids: Tensor, documents: Sequence[Sequence[int]] = DOCUMENTS
) -> tuple[float, dict[str, Tensor]]:
    """Return the mean loss over the labels of all documents, each computed alone, and its gradients."""
    total = mean_loss(model, ids, documents)
    total.backward()
    return total.item(), reference.gradients(model)


def save(folder: Path, family: str = "llama") -> str:
    """Save a checkpoint, and in its folder what the plain model computes of the documents."""
    config = reference.config(family)
    models.save(reference.build(config), folder)
    torch.save(plain_result(reference.build(config), token_ids()), f"{folder}/documents.pt")
    return str(folder)


@reference.exact_modules()
def relative_errors(work: list[tuple[str, Recipe]]) -> list[tuple[float, float]]:
    """Return the relative error of the loss, and the largest of a gradient; runs on each rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    errors = []
    for checkpoint, recipe in work:
        model = models.build(checkpoint)
        apply_recipe(model, recipe, mesh)
        value = loss(model, shard_batch(token_ids(), recipe, mesh, documents=DOCUMENTS))
        value.backward()
        expected_value, expected = torch.load(f"{checkpoint}/documents.pt")
        errors.append(
            (abs(value.item() / expected_value - 1), reference.error(whole_gradients(model), expected))
        )
    return errors
