"""``lab rehearse``: one GPU, or a small size on CPU, as one rank of many."""

from __future__ import annotations

from typing import Any

import click

from lab.commands.base import (
    JSON,
    RECIPE,
    SET,
    TEXT,
    TOKENIZER,
    TOKENS,
    answer,
    grow_segments,
    plainly,
    status,
)


@click.command()
@click.argument("model")
@TOKENS
@click.option("--ranks", type=int, required=True, help="GPUs in all, of which this is one.")
@RECIPE
@SET
@click.option("--rows", type=int, default=1, help="Sequences in a batch. [1]")
@TEXT
@TOKENIZER
@click.option("--layers", type=int, help="The model's first layers alone. [all]")
@click.option("--steps", type=int, default=1, help="Timed, after one under the meter; 0 times that one. [1]")
@click.option("--device-memory", help="Stands for a smaller GPU: 80GiB.")
@click.option("--machine", type=click.Choice(["cuda", "cpu"]), help="Where it runs. [a GPU, if there is one]")
@click.option("--device", default="h100", help="What the links are those of. [h100]")
@click.option("--ranks-per-node", type=int, default=8, help="GPUs that share links. [8]")
@JSON
@plainly
def rehearse(model: str, recipe: str, knobs: tuple[str, ...], as_json: bool, **settings: Any) -> None:
    """One training step of MODEL as one rank of many, measured; each peer is stood in for by the rank."""
    grow_segments()
    from lab.commands.report import rehearsal_text
    from lab.recipe.recipe import parse_knobs
    from lab.rehearsing.rehearse import rehearse

    with status(f"rehearsing {model}") as say:
        made = rehearse(model, recipe, watch=say, **settings, **parse_knobs(knobs))
    answer(made.to_json() if as_json else rehearsal_text(made))
