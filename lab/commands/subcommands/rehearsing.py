"""``lab rehearse``: one real training step on one GPU, or at a small size on CPU, as one rank of many."""

from __future__ import annotations

from typing import Any

import click

from lab.commands.base import (
    ACCUMULATE,
    DTYPE,
    HOST_DIR,
    JSON,
    LORA,
    MACHINE,
    PART,
    RECIPE,
    ROWS,
    SET,
    TEXT,
    TOKENS,
    integer,
    print_answer,
    status,
)


@click.command()
@click.argument("model")
@TOKENS
@click.option("--ranks", type=integer, required=True, help="GPUs in all; this machine is one of them.")
@RECIPE
@SET
@LORA
@DTYPE
@ROWS
@ACCUMULATE
@TEXT
@PART
@click.option(
    "--steps", type=integer, default=1, help="Timed steps after the metered step; 0 times that one. [1]"
)
@click.option("--machine", type=MACHINE, help="Where it runs. [a GPU, if there is one]")
@click.option("--device", default="h100", help="The GPU whose links are assumed, or a file. [h100]")
@click.option("--ranks-per-node", type=integer, default=8, help="GPUs that share links. [8]")
@HOST_DIR
@JSON
def rehearse(model: str, recipe: str, knobs: tuple[str, ...], as_json: bool, **settings: Any) -> None:
    """Run one training step of MODEL as one rank of many, and measure it; all peers are simulated."""
    from lab.recipe.recipe import parse_knobs
    from lab.rehearsing.rehearse import rehearse

    with status(f"rehearsing {model}") as say:
        result = rehearse(model, recipe, watch=say, **settings, **parse_knobs(knobs))
    print_answer(result.to_json() if as_json else repr(result))


COMMANDS = (rehearse,)
