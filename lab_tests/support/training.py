"""A batch with which many steps of training take a moment, and the manifest of such a training."""

from __future__ import annotations

from typing import Any

from lab.training.manifest import Manifest

TOKENS, ROWS = 40, 3


def manifest_of(config: dict[str, Any], *, ranks: int, step: int = 0) -> Manifest:
    """Makes a manifest of a training of one step, without a text."""
    return Manifest(
        config=config, text="", tokens=TOKENS, rows_per_step=ROWS, seed=0, learning_rate=1e-3, warmup=0,
        schedule="constant", weight_decay=0.01, clip_norm=1.0, steps=1, recipe={}, ranks=ranks, step=step,
    )  # fmt: skip
