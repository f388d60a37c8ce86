"""The ladder's Ulysses and ring degrees against every other legal pair, by plan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lab.bench.table import Row, Say
from lab.decoder import keep_layers
from lab.models import config_of, shape_of
from lab.models.presets import PRESETS
from lab.planning.plan import Plan, plan
from lab.recipe.ladder import sequence_degrees
from lab.techniques.ulysses_degrees import degree_pairs
from lab.units import GiB

RANKS = (8, 16, 32)

LAYERS = 2
"""Layers of a planned model. Each layer more is like the last, and takes as long to plan."""


def compare_degrees(models: Iterable[str], rung: str, tokens: int, say: Say) -> list[Row]:
    """Plan a step of two layers of each model on 8, 16 and 32 ranks, with each legal pair of degrees.

    Args:
        models: Names of presets; none for all.
        rung: The named recipe. The head chunk of UPipe is the Ulysses degree.
        tokens: The length of the sequence.
        say: Called with what is planned.

    Returns:
        A row for each model and number of ranks: the ladder's pair, the pair that needs the least device
        memory (of equal ones, that of the largest Ulysses degree), and ratios of their bytes and seconds.

    Raises:
        LabError: No such model or recipe.
    """
    return [compare_pairs(model, ranks, rung, tokens, say) for model in models or PRESETS for ranks in RANKS]


def compare_pairs(model: str, ranks: int, rung: str, tokens: int, say: Say, *, at_least: int = 1) -> Row:
    """Return the row of ``compare_degrees`` for a model on ``ranks`` ranks.

    Pairs with a Ulysses degree smaller than ``at_least`` are left out: their plans take the longest.
    """
    config, shape = config_of(model), shape_of(model)
    keep_layers(config, LAYERS)
    dtype = None if model == "tiny" else "bfloat16"
    plans: dict[tuple[int, int], Plan] = {}
    pairs = [pair for pair in degree_pairs(shape, ranks) if pair[0] >= at_least]
    for ulysses, ring in pairs:
        say(f"{model} on {ranks} ranks, ulysses={ulysses} ring={ring}")
        knobs: dict[str, Any] = {"ulysses": ulysses, "ring": ring, "compute_dtype": dtype}
        plans[ulysses, ring] = plan(config, rung, tokens=tokens, ranks=ranks, workspace=False, **knobs)
    chosen = sequence_degrees(shape, ranks, {})
    least = min(plans, key=lambda pair: plans[pair].device_peak)
    ladder, best = plans[chosen], plans[least]
    return {
        "model": model,
        "ranks": ranks,
        "ladder": "{} x {}".format(*chosen),
        "GiB": ladder.device_peak / GiB,
        "leanest": "{} x {}".format(*least),
        "its GiB": best.device_peak / GiB,
        "bytes, ladder / leanest": ladder.device_peak / best.device_peak,
        "seconds, ladder / leanest": ladder.step_seconds / best.step_seconds,
    }
