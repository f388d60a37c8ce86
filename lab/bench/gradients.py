"""Gradients of one rank with each recipe, compared with those of a simpler recipe."""

from __future__ import annotations

import gc
import math
from typing import Any

import torch
from torch import Tensor

from lab import models
from lab.models.small_copies import first_layers
from lab.recipe.jobs import Job, TrainSettings
from lab.recipe.ladder import resolve_recipe
from lab.step.on_ranks import make_rank_state
from lab.step.one_rank import one_rank
from lab.step.training_step import loss

GROUPS: tuple[tuple[tuple[str, dict[str, Any]], ...], ...] = (
    (("checkpoint", {}), ("offload", {}), ("tiling", {}), ("tiling", {"offload": "attention"})),
    (
        ("upipe", {}), ("upipe", {"overlap": True}), ("fast", {}), ("fast", {"overlap": True}),
        ("upipe", {"kernel": "auto"}), ("streamed", {}), ("streamed", {"attention_tile": None}), ("long", {}),
    ),
)  # fmt: skip
"""Groups of recipes whose gradients are equal but for rounding. The recipes of a group exchange the same
heads, so the simulated data of peers is the same."""


def measure_gradients(
    model: models.ModelLike, tokens: int, layers: int | None, ranks: int, where: str
) -> dict[str, Any]:
    """Return the relative distance of each recipe's gradients to those of the first recipe of its group.

    A distance is that of the parameter for which it is largest. The gradients are those of a second backward
    pass, in which a race in the transfers to the host would show. "worst" is the largest of all distances, or
    NaN if one is NaN, and "worst parameter" is where it is. The first recipe of a group runs twice: "floors"
    has the distances between the two runs by its name, and "floor" is the larger one.
    """
    part = first_layers(model, layers, config=models.config_of(model))

    def gradients(name: str, knobs: dict[str, Any]) -> dict[str, Tensor]:
        recipe = resolve_recipe(name, model, ranks, tokens, **{"kernel": "torch", **knobs})
        gc.collect()
        torch.cuda.empty_cache()
        return _gradients(Job(part, recipe, tokens, ranks), where)

    distances: dict[str, float] = {}
    floors: dict[str, float] = {}
    parameters: dict[str, str] = {}
    for first, *others in GROUPS:
        expected = gradients(*first)
        floors[first[0]], _ = _distance(gradients(*first), expected)
        for name, knobs in others:
            label = " ".join((name, *(f"{knob}={value}" for knob, value in knobs.items())))
            distances[label], parameters[label] = _distance(gradients(name, knobs), expected)
    worst = max(distances, key=lambda label: (math.isnan(distances[label]), distances[label]))
    return {
        "distances": distances,
        "worst": distances[worst],
        "worst parameter": f"{worst}: {parameters[worst]}",
        "floors": floors,
        "floor": float(torch.tensor([*floors.values()]).max()),
    }


def _distance(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """Return the largest relative distance of a parameter's gradient, and its name."""
    by_parameter = torch.stack([(actual[name] - x).norm() / x.norm() for name, x in expected.items()])
    return float(by_parameter.max()), [*expected][int(by_parameter.argmax())]


def error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest relative error of a gradient, in the Frobenius norm."""
    assert actual.keys() == expected.keys()
    assert all(actual[n].isfinite().all() and expected[n].norm() > 0 for n in expected)
    return max(
        float((actual[n].double() - expected[n].double()).norm() / expected[n].double().norm())
        for n in expected
    )


def _gradients(job: Job, where: str) -> dict[str, Tensor]:
    """Return this rank's shards of the gradients, by parameter, in fp32 on the host."""
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
