"""The ``lab`` command, one function a subcommand. Heavy imports stay inside: ``lab --help`` is instant."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import click

from lab.cluster_commands import cluster

P = ParamSpec("P")
T = TypeVar("T")


def _plainly(command: Callable[P, T]) -> Callable[P, T]:
    """Print what the lab refuses as one line and exit with 2, as click does for its own usage errors."""

    @wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        from cluster.errors import ClusterError
        from lab.errors import LabError

        try:
            return command(*args, **kwargs)
        except (LabError, ClusterError) as error:
            click.echo(f"lab: {error}", err=True)
            sys.exit(2)

    return wrapped


class _OneLine(click.Group):
    """Says what is wrong with a command line in one line too; click takes four."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run, and exit with click's code."""
        try:
            return super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(error.exit_code)
        except click.ClickException as error:
            click.echo(f"lab: {' '.join(error.format_message().split())}", err=True)
            sys.exit(error.exit_code)
        except click.Abort:
            click.echo("lab: interrupted", err=True)
            sys.exit(1)


@click.group(cls=_OneLine, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Learn, plan and prove multi-million-token training."""


@main.command("open")
@click.option("--no-browser", is_flag=True, help="Print the address instead of opening a browser.")
@click.option("--port", type=click.IntRange(1, 65535), default=8888, show_default=True)
@click.option("--ip", default="127.0.0.1", help="Where to listen; beyond loopback, others can try its token.")
@_plainly
def open_(no_browser: bool, port: int, ip: str) -> None:
    """Open JupyterLab on the first notebook."""
    from lab.jupyter import serve

    serve(port=port, browser=not no_browser, ip=ip)


@main.command()
@click.argument("notebooks", nargs=-1)
@click.option("-p", "parameters", nargs=2, multiple=True, metavar="NAME VALUE", help="Set a parameter.")
@click.option("--out", type=click.Path(path_type=Path), help="Where the executed copies go [runs/<date>].")
@_plainly
def run(notebooks: tuple[str, ...], parameters: tuple[tuple[str, str], ...], out: Path | None) -> None:
    """Execute NOTEBOOKS (all of them when none is named) into copies, with their own ranks."""
    from lab.notebooks import execute

    failed = execute(list(notebooks), dict(parameters), out)
    if failed:
        click.echo(f"lab: {len(failed)} failed: {', '.join(failed)}", err=True)
        sys.exit(1)


def _planning(command: Callable[..., None]) -> Callable[..., None]:
    """What the planning commands have in common, set on a command that takes it as ``settings``."""
    for option in reversed(
        (
            click.argument("model"),
            click.option("--ranks", type=int, required=True, help="GPUs in all."),
            click.option("--rows", type=int, default=1, help="Sequences in a batch. [1]"),
            click.option("--ranks-per-node", type=int, default=8, help="GPUs that share a host. [8]"),
            click.option("--device", default="h100", help="What the time estimate is for. [h100]"),
            click.option(
                "--no-workspace",
                "workspace",
                is_flag=True,
                flag_value=False,
                default=True,
                help="Leave out what CUDA takes outside torch's view.",
            ),
            click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        )
    ):
        command = option(command)
    return command


_TOKENS = click.option("--tokens", required=True, help="Context: 8192, 128K, 5M (5 x 2^20).")
_RECIPE = click.option("--recipe", default="upipe", help="A rung of the ladder. [upipe]")
_SET = click.option("--set", "knobs", multiple=True, metavar="KNOB=VALUE", help="Set a knob by hand.")


def _memory(device: str | None, host: str | None) -> Callable[[Callable[P, T]], Callable[P, T]]:
    def options(command: Callable[P, T]) -> Callable[P, T]:
        shown = [f" [{value}]" if value else "" for value in (device, host)]
        command = click.option("--host-memory", default=host, help=f"Of a node: 2TiB.{shown[1]}")(command)
        return click.option("--device-memory", default=device, help=f"Of a GPU: 80GiB.{shown[0]}")(command)

    return options


@main.command()
@_planning
@_TOKENS
@_RECIPE
@_SET
@_memory(None, None)
@_plainly
def plan(model: str, recipe: str, knobs: tuple[str, ...], as_json: bool, **settings: Any) -> None:
    """One training step of MODEL on fake tensors: its memory, its cost, and whether it fits."""
    from lab.recipe import parse_knobs
    from lab.report import plan_text
    from lab.verbs.plan import plan

    with _status(f"planning {model}"):
        made = plan(model, recipe, **settings, **parse_knobs(knobs))
    _print(made.to_json() if as_json else plan_text(made))


@main.command()
@_planning
@_TOKENS
@_SET
@_memory(None, None)
@click.option("--figure", type=click.Path(path_type=Path), help="Draw it into this PNG file too.")
@_plainly
def ladder(model: str, knobs: tuple[str, ...], as_json: bool, figure: Path | None, **settings: Any) -> None:
    """A bar a technique: the memory of MODEL's step on each rung of the ladder."""
    from lab.recipe import parse_knobs
    from lab.report import check_folder, draw_ladder, ladder_text
    from lab.verbs.plan import plan_ladder

    if figure is not None:
        check_folder(figure)
    with _status(f"planning {model}") as say:
        plans = plan_ladder(
            model, watch=lambda rung, _: say(f"planned {rung}"), **settings, **parse_knobs(knobs)
        )
    if figure is not None:
        draw_ladder(plans, figure)
    keys = ("device_peak", "host_peak", "fits")
    rows = [{"name": name} | _only(keys, p.to_json()) for name, p in plans.items()]
    _print(rows if as_json else ladder_text(plans))


@main.command("max-context")
@_planning
@_RECIPE
@_SET
@_memory("80GiB", "2TiB")
@_plainly
def max_context(model: str, recipe: str, knobs: tuple[str, ...], as_json: bool, **settings: Any) -> None:
    """The longest context of MODEL that fits, and what stops it."""
    from lab.recipe import parse_knobs
    from lab.report import max_context_text, tried_text
    from lab.verbs.max_context import max_context

    with _status(f"planning {model}") as say:
        found = max_context(
            model, recipe, watch=lambda tried: say(tried_text(tried)), **settings, **parse_knobs(knobs)
        )
    _print(found.to_json() if as_json else max_context_text(found))


@main.command()
@_planning
@_TOKENS
@_memory("80GiB", "2TiB")
@_plainly
def fit(model: str, as_json: bool, **settings: Any) -> None:
    """The fastest recipe that fits MODEL at this context, the runners-up, and the price of less memory."""
    from lab.report import fit_text, tried_text
    from lab.verbs.fit import fit

    with _status(f"planning {model}") as say:
        plans = fit(model, watch=lambda n, of, tried: say(f"{n} of {of}: {tried_text(tried)}"), **settings)
    keys = ("recipe", "device_peak", "host_peak", "step_seconds")
    _print([_only(keys, p.to_json()) for p in plans] if as_json else fit_text(plans))


@contextmanager
def _status(first: str) -> Iterator[Callable[[str], None]]:
    """A line on a terminal's stderr that says what goes on; nothing anywhere else."""
    from rich.console import Console

    with Console(stderr=True).status(first) as status:
        yield status.update


def _only(keys: Iterable[str], facts: Mapping[str, Any]) -> dict[str, Any]:
    return {key: facts[key] for key in keys}


def _print(answer: object) -> None:
    click.echo(answer if isinstance(answer, str) else json.dumps(answer, indent=2))


main.add_command(cluster)


@main.group()
def bench() -> None:
    """Measure ratios, each within one run on this machine."""


@bench.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_plainly
def meter(as_json: bool) -> None:
    """A training step with the memory meter over the same step without it."""
    from lab.bench.meter import measure_meter
    from lab.bench.table import write

    click.echo(write(measure_meter(), as_json=as_json))


@bench.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_plainly
def parity(as_json: bool) -> None:
    """Each technique's worst gradient error against plain transformers, for each kind of model."""
    from lab.bench.parity import measure_parity
    from lab.bench.table import write

    click.echo(write(measure_parity(), as_json=as_json))


@bench.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_plainly
def planning(as_json: bool) -> None:
    """What a plan of Llama3-8B at 5M tokens takes: walked, remembered, in closed form."""
    from lab.bench.planning import measure_planning
    from lab.bench.table import write

    click.echo(write(measure_planning(), as_json=as_json))


@main.command()
@_plainly
def doctor() -> None:
    """Say what this machine has, what the lab would use, and what is missing."""
    from lab.doctor import report

    click.echo(report())
