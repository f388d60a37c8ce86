"""``python -m lab_tests.proofs``: runs all cases of a proof, and prints a row for each."""

from functools import partial

import click

from lab.commands.base import RECIPE, OneLineErrors
from lab.commands.subcommands.benches import prints_rows
from lab.models.presets import PRESETS
from lab.units import parse_tokens
from lab_tests.proofs.cases import measure_cases
from lab_tests.proofs.degrees import compare_degrees
from lab_tests.proofs.faults import measure_faults
from lab_tests.proofs.growth import measure_growth
from lab_tests.proofs.input_cases import measure_inputs
from lab_tests.proofs.length_draws import draw_lengths
from lab_tests.proofs.notebooks import measure_notebooks
from lab_tests.proofs.pages import write_pages
from lab_tests.proofs.scalings import compare_lengths, make_scalings
from lab_tests.proofs.tables import write_tables

MODELS = click.argument("models", nargs=-1)


def number(name, default, text):
    return click.option(name, type=click.IntRange(1), default=default, help=f"{text}. [{default}]")


@click.group(cls=OneLineErrors)
def main() -> None:
    """Run all cases of a proof, of which the tests run a part."""


@prints_rows(main)
def cases():
    """Run the table of cases, in which every two techniques, families and kinds of batches meet."""
    return measure_cases


@prints_rows(main)
def inputs():
    """Check that models, batches and adapters from outside are computed right or refused."""
    return measure_inputs


@prints_rows(main)
@number("--times", 10, "How often each is caused")
def faults(times):
    """Cause each fault, and measure the seconds to its message and to recovery, and processes left."""
    return partial(measure_faults, times)


@prints_rows(main)
@MODELS
def scalings(models):
    """Make the plans that come with the lab: those of all presets, or of MODELS. What still holds is kept."""
    return partial(make_scalings, models or tuple(PRESETS))


@prints_rows(main)
@click.argument("model", default="llama3-8b")
@RECIPE
@number("--ranks", 8, "The number of ranks")
@number("--times", 20, "How many lengths")
def lengths(model, recipe, ranks, times):
    """Compare what follows at random lengths from the plans that come with the lab with plans made now."""
    return partial(compare_lengths, model, recipe, ranks, times)


@prints_rows(main)
@click.option("--seed", type=int, default=0, help="The first seed. [0]")
@number("--times", 200, "How many jobs are drawn")
def length_draws(seed, times):
    """Draw jobs at four lengths, and compare what follows for the last one with its own plan."""
    return partial(draw_lengths, seed, times)


@prints_rows(main)
@number("--tokens", 128, "The tokens of the shortest context")
@number("--doublings", 4, "How often the context is doubled")
@number("--steps", 5, "Timed steps of each")
def growth(tokens, doublings, steps):
    """Measure seconds and bytes of a step: on each rung as the context grows, then as ranks are added."""
    return partial(measure_growth, tokens, doublings, steps)


@prints_rows(main)
@MODELS
@RECIPE
@click.option("--tokens", default="3M", help="Of the sequence. [3M]")
def degrees(models, recipe, tokens):
    """Plan each legal pair of degrees of MODELS (all presets) on 8, 16 and 32 ranks, and the ladder's."""
    return partial(compare_degrees, models, recipe, parse_tokens(tokens))


@prints_rows(main)
@click.argument("names", metavar="[NOTEBOOK]...", nargs=-1)
@number("--times", 10, "How often all are executed")
def notebooks(names, times):
    """Execute the notebooks several times: failures, changed facts and seconds of each."""
    return partial(measure_notebooks, list(names), times)


@main.command
def tables():
    """Write the table of knobs into the README."""
    write_tables()


@prints_rows(main)
def pages():
    """Write what planning commands print into README.md and lab/bench/README.md. It takes 15 minutes."""
    return write_pages


main()
