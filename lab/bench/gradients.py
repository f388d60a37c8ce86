"""Gradients of one rank under each technique against those of the plainest recipe of its family."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor

from lab import models
from lab.models.small_copies import first_layers
from lab.recipe.jobs import Job, TrainSettings
from lab.recipe.ladder import recipe_for
from lab.step.on_ranks import make_rank_state
from lab.step.one_rank import one_rank
from lab.step.training_step import loss

FAMILIES: tuple[tuple[tuple[str, dict[str, Any]], ...], ...] = (
    (
        ("checkpoint", {}),
        ("offload", {}),
        ("tiling", {}),
        ("tiling", {"offload": "attention"}),
    ),
    (
        ("upipe", {}),
        ("upipe", {"overlap": True}),
        ("fast", {}),
        ("fast", {"overlap": True}),
        ("upipe", {"kernel": "auto"}),
    ),
)
"""Recipes whose gradients are the same but for rounding, also where peers are stood in for: those of one
family exchange the same heads."""


def measure_gradients(
    model: models.ModelLike, tokens: int, layers: int | None, ranks: int, where: str
) -> dict[str, Any]:
    """The relative distance of each recipe's gradients to its family's first, of the worst parameter.

    Gradients are those of a second backward pass, in which a race on the road to the host would show. "worst"
    is the largest distance of all, NaN if any is.
    """
    part = first_layers(model, layers, config=models.config_of(model))
    found: dict[str, float] = {}
    for family in FAMILIES:
        right: dict[str, Tensor] = {}
        for name, knobs in family:
            recipe = recipe_for(name, model, ranks, tokens, **{"kernel": "torch", **knobs})
            gradients = _gradients(Job(part, recipe, tokens, ranks), where)
            gc.collect()
            torch.cuda.empty_cache()
            right = right or gradients
            said = " ".join((name, *(f"{knob}={value}" for knob, value in knobs.items())))
            found[said] = float(torch.stack([_distance(gradients[n], right[n]) for n in right]).max())
    return {"distances": found, "worst": float(torch.tensor(list(found.values())).max())}


def _gradients(job: Job, where: str) -> dict[str, Tensor]:
    """This rank's shards of the gradients, by parameter, in fp32 on the host."""
    with one_rank(job.recipe, job.ranks, "loopback", where) as mesh:
        state = make_rank_state(job, TrainSettings(steps=1), mesh)
        for _ in range(2):
            state.model.zero_grad()
            loss(state.model, state.batch(0)).backward()
        return {
            name: parameter.grad.to_local().float().cpu()  # type: ignore[attr-defined]
            for name, parameter in state.model.named_parameters()
            if parameter.grad is not None
        }


def _distance(found: Tensor, right: Tensor) -> Tensor:
    distance: Tensor = (found - right).norm() / right.norm()
    return distance
