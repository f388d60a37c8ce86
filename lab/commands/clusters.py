"""``lab cluster``: the places where ranks can run, what each would do, and the clusters that are there."""

from __future__ import annotations

import click

from lab.commands.base import plainly


@click.group()
def cluster() -> None:
    """Choose where ranks run, and see what would be started."""


@cluster.command()
def profiles() -> None:
    """Which profile fits where you are."""
    import cluster.profiles

    click.echo((cluster.profiles.__doc__ or "").strip())


@cluster.command()
@click.argument("name")
@click.option("--ranks", type=click.IntRange(1), default=2, show_default=True)
@click.option("--set", "settings", multiple=True, metavar="FIELD=VALUE", help="Override a field.")
@plainly
def show(name: str, ranks: int, settings: tuple[str, ...]) -> None:
    """The profile NAME: its fields, rank 0's environment and what would run, each with its reason."""
    from cluster.profiles import find_profile
    from cluster.profiles.parsing import parse_fields
    from cluster.profiles.showing import describe

    click.echo(describe(find_profile(name, **parse_fields(name, settings)), ranks))


@cluster.command()
@plainly
def status() -> None:
    """Your clusters on this machine: whose each is, and what of it is alive."""
    from cluster.registry import status_text

    click.echo(status_text())


@cluster.command()
@plainly
def clean() -> None:
    """End what is left of clusters whose owner is gone, by the process ids they recorded; nothing else."""
    from cluster.registry import clean

    cleaned = clean()
    for entry, ended in cleaned:
        click.echo(f"{entry.name}: {ended} processes ended")
    if not cleaned:
        click.echo("nothing to clean")
