"""``lab plan``, ``ladder``, ``max-context`` and ``fit``: commands that need no GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from lab.commands.base import (
    ACCUMULATE,
    DOES_NOT_FIT,
    DTYPE,
    JSON,
    LAYERS,
    LORA,
    RECIPE,
    ROWS,
    SET,
    TOKENS,
    Decorator,
    integer,
    options,
    path,
    pick,
    print_answer,
    status,
)
from lab.errors import LabError
from lab.units import check_counts

if TYPE_CHECKING:
    from lab.planning.plan import Plan


DEVICE_HELP = "The GPU: its rates, and its memory; or a file of `lab bench machine`. [h100]"


def _planning_options(*, required: bool = True) -> Decorator:
    """Return the options of all planning commands, which take them as ``settings``."""
    return options(
        click.argument("model", required=required),
        click.option("--ranks", type=integer, required=required, help="GPUs in all."),
        ROWS,
        ACCUMULATE,
        LORA,
        DTYPE,
        click.option("--ranks-per-node", type=integer, default=8, help="GPUs that share a host. [8]"),
        click.option("--device", default="h100", help=DEVICE_HELP),
        click.option(
            "--no-workspace",
            "workspace",
            is_flag=True,
            flag_value=False,
            default=True,
            help="Leave out the memory that CUDA takes outside torch's view.",
        ),
        JSON,
    )


def _memory_options(host: str | None) -> Decorator:
    of_node = "Of a node: 2TiB, of which the system and the processes keep some."
    return options(
        click.option("--device-memory", help="Of a GPU: 80GiB. [that of --device]"),
        click.option("--host-memory", default=host, help=f"{of_node} [{host or 'no limit'}]"),
    )


DISK = options(
    click.option("--disk", metavar="BYTES", help="Of a node, for the long tensors of streamed layers: 4TB."),
    click.option(
        "--disk-rate", metavar="RATE", help="Of the disk, reading and writing: 3GB/s. [one NVMe drive's]"
    ),
)


Answer = tuple[Any, str]
"""What a command answers: the plain values that ``--json`` prints, and the text."""


def print_cached_answer(as_json: bool, make: Callable[[], Answer], *, saved: bool = True) -> None:
    """Print the answer of the command that runs, as it was saved when the same was asked before, or made now.

    To read a saved answer takes neither torch nor transformers. With ``saved=False`` it is made in any case.
    After one plan that does not fit, the command exits with ``DOES_NOT_FIT``; after a list, with 0.
    """
    from lab.planning.plan_cache import cached, model_identity

    context = click.get_current_context()
    facts = {"command": context.info_name, **context.params, "model": model_identity(context.params["model"])}
    del facts["as_json"]
    # A device may be a file, which can change.
    with suppress(OSError, ValueError):
        facts["device file"] = Path(context.params["device"]).read_bytes().hex()
    values, text = (
        cached("answers", facts, make, encode=lambda a: {"answer": a}, decode=_answer) if saved else make()
    )
    print_answer(values if as_json else text)
    if isinstance(values, dict) and values["verdict"] == "does not fit":
        context.exit(DOES_NOT_FIT)


def _answer(document: dict[str, Any]) -> Answer:
    values, text = document["answer"]
    return values, text


EXPORTS = {"chrome_trace": "write_chrome_trace", "memory_snapshot": "write_memory_snapshot"}
"""The options that name a file for the timeline, and the functions of ``lab.memory.export`` that write it."""


@click.command()
@_planning_options()
@TOKENS
@RECIPE
@SET
@LAYERS
@_memory_options(None)
@DISK
@click.option(
    "--documents",
    metavar="N,N,...",
    help="The documents of a row, which add up to its tokens: 1M,512K,512K. [one]",
)
@click.option(
    "--holders",
    type=integer,
    is_flag=False,
    flag_value="12",
    metavar="[N]",
    help="Also list the N largest tensors that the step holds at its peak (12 without N).",
)
@click.option(
    "--chrome-trace",
    type=path,
    metavar="FILE",
    help="Also write the timeline as JSON, for Perfetto.",
)
@click.option(
    "--memory-snapshot",
    type=path,
    metavar="FILE",
    help="Also write the timeline as a snapshot, for PyTorch's memory viewer.",
)
@click.option("--animation", type=path, help="Also draw one layer, moving, into this GIF file.")
def plan(
    model: str,
    recipe: str,
    knobs: tuple[str, ...],
    as_json: bool,
    holders: int | None,
    animation: Path | None,
    **settings: Any,
) -> None:
    """Plan one training step of MODEL: its memory, its cost, and whether it fits."""
    exports = {name: file for name in EXPORTS if (file := settings.pop(name)) is not None}

    def make() -> Answer:
        from lab.recipe.recipe import parse_knobs

        if holders is not None:
            check_counts({"holders": holders})
        if animation is not None:
            from lab.show.one_layer.gif import check_animation

            check_animation(animation)
        from lab.memory import export

        for file in exports.values():
            export.check_file(file)
        from lab.commands.report import holders_text, plan_text
        from lab.planning.plan import plan

        with status(f"planning {model}") as say:
            planned = plan(model, recipe, **settings, **parse_knobs(knobs))
            if animation is not None:
                from lab.show.one_layer.frames import layer_frames
                from lab.show.one_layer.gif import RANKS, write_gif

                frames = layer_frames(planned, None, RANKS)
                write_gif(frames, animation, lambda n, of: say(f"drawing frame {n} of {of}"))
        for name, file in exports.items():
            getattr(export, EXPORTS[name])([planned.timeline], file)
        if holders is None:
            return planned.to_json(), plan_text(planned)
        held = planned.holders()
        listed = held.grouped().to_json()
        values = planned.to_json() | {"held": listed | {"holders": listed["holders"][:holders]}}
        return values, f"{plan_text(planned)}\n\n{holders_text(planned, held, holders)}"

    print_cached_answer(as_json, make, saved=animation is None and not exports)


@click.command()
@_planning_options()
@TOKENS
@SET
@_memory_options(None)
@click.option("--figure", type=path, help="Also draw it into this PNG file.")
def ladder(model: str, knobs: tuple[str, ...], as_json: bool, figure: Path | None, **settings: Any) -> None:
    """Plan one training step of MODEL for each rung of the ladder."""

    def make() -> Answer:
        from lab.commands.report import check_figure, draw_ladder, ladder_text
        from lab.planning.plan import plan_ladder
        from lab.recipe.recipe import parse_knobs

        if figure is not None:
            check_figure(figure)
        with status(f"planning {model}") as say:
            plans = plan_ladder(
                model, watch=lambda rung, _: say(f"planned {rung}"), **settings, **parse_knobs(knobs)
            )
        if figure is not None:
            draw_ladder(plans, figure)
        keys = ("state", "device_peak", "host_peak", "fits", "verdict")
        rows = [{"name": name} | pick(keys, planned.to_json()) for name, planned in plans.items()]
        return rows, ladder_text(plans)

    print_cached_answer(as_json, make, saved=figure is None)


@click.command("max-context")
@_planning_options(required=False)
@RECIPE
@SET
@_memory_options("2TiB")
@DISK
@click.option("--table", is_flag=True, help="Instead: every preset, or MODEL, on machines that people rent.")
@click.option("--figure", type=path, help="With --table: also draw it into this PNG file.")
def max_context(
    model: str | None,
    recipe: str,
    knobs: tuple[str, ...],
    as_json: bool,
    table: bool,
    figure: Path | None,
    **settings: Any,
) -> None:
    """Find the longest context of MODEL that fits, and what stops a longer one."""
    if table:
        _print_table(model, figure, as_json)
        return
    if figure is not None:
        raise LabError("--figure draws the table: give --table too")
    missing = [name for name, given in (("MODEL", model), ("--ranks", settings["ranks"])) if given is None]
    if missing:
        raise LabError(f"{' and '.join(missing)} missing: lab max-context MODEL --ranks N, or --table")
    assert model is not None

    def make() -> Answer:
        from lab.planning.max_context import max_context
        from lab.recipe.recipe import parse_knobs

        with status(f"planning {model}") as say:
            longest = max_context(
                model, recipe, watch=lambda tried: say(tried.summary), **settings, **parse_knobs(knobs)
            )
        return longest.to_json(), repr(longest)

    print_cached_answer(as_json, make)


def _print_table(model: str | None, figure: Path | None, as_json: bool) -> None:
    """Print the table of all presets, or of one model; a line for each cell goes to stderr."""
    from lab.commands.report import check_figure, context_table_text, draw_context_table
    from lab.planning.max_context_table import MODELS, longest_contexts

    context = click.get_current_context()
    given = [
        option.opts[0]
        for option in context.command.params
        if option.name not in ("model", "table", "figure", "as_json")
        and context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
    ]
    if given:
        raise LabError(f"--table has machines and recipes of its own: leave out {', '.join(given)}")
    if figure is not None:
        check_figure(figure)
    with status("searching the longest contexts") as say:
        cells = longest_contexts(
            MODELS if model is None else (model,),
            say=say,
            watch=lambda cell: click.echo(cell.summary, err=True),
        )
    if figure is not None:
        draw_context_table(cells, figure)
    print_answer([cell.to_json() for cell in cells] if as_json else context_table_text(cells))


@click.command()
@_planning_options()
@TOKENS
@_memory_options("2TiB")
@DISK
@click.option(
    "--tokens-total",
    metavar="N",
    help="The tokens of the whole training: adds the days that they take. Decimal, other than --tokens: "
    "10B = 10^10, 500M = 5 x 10^8.",
)
@click.option(
    "--price",
    metavar="MONEY",
    help="For one hour of one GPU, in any currency: adds the money that --tokens-total takes.",
)
def fit(model: str, as_json: bool, **settings: Any) -> None:
    """Find the fastest recipes that fit MODEL at this context, and the price in time of less memory."""

    def make() -> Answer:
        from lab.commands.report import fit_text
        from lab.planning.fit import fit

        with status(f"planning {model}") as say:
            seen: list[Plan] = []

            def watch(number: int, most: int, tried: Plan) -> None:
                seen.append(tried)
                fitting = (plan for plan in seen if plan.fits)
                best = min(fitting, key=lambda plan: plan.step_seconds, default=None)
                so_far = f"; the fastest so far: {best.recipe.summary}" if best else ""
                say(f"{number} of at most {most}: {tried.summary}{so_far}")

            plans = fit(model, watch=watch, **settings)
        keys = (
            "recipe", "state", "device_peak", "reserved_peak", "reserved_peak_fixed_segments", "host_peak",
            "disk_peak", "verdict", "step_seconds", "mfu",
        )  # fmt: skip
        rows = [pick(keys, planned.to_json()) for planned in plans]
        bills = [{"bill": bill.to_json()} for bill in plans.bills] or [{}] * len(rows)
        return [row | bill for row, bill in zip(rows, bills, strict=True)], fit_text(plans)

    print_cached_answer(as_json, make)


COMMANDS = (plan, ladder, max_context, fit)
