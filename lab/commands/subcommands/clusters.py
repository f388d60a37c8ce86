"""``lab cluster``: the profiles by which ranks start, and the clusters on this machine."""

from __future__ import annotations

import click

from lab.commands.base import integer, once


@click.group()
def cluster() -> None:
    """Show where ranks can run, and list or end clusters."""


@cluster.command()
def profiles() -> None:
    """Say which profile to use on which machines."""
    import cluster.profiles

    click.echo((cluster.profiles.__doc__ or "").strip())


@cluster.command()
@click.argument("name")
@click.option("--ranks", type=integer, default=2, show_default=True)
@click.option(
    "--set", "settings", multiple=True, callback=once, metavar="FIELD=VALUE", help="Override a field."
)
def show(name: str, ranks: int, settings: tuple[str, ...]) -> None:
    """Show the fields of profile NAME, rank 0's environment and what would start, with reasons."""
    from cluster.profiles import find_profile
    from cluster.profiles.base import check_rank_count
    from cluster.profiles.parsing import parse_fields
    from cluster.profiles.showing import describe

    check_rank_count(ranks)
    click.echo(describe(find_profile(name, **parse_fields(name, settings)), ranks))


@cluster.command()
def status() -> None:
    """List your clusters on this machine, with the owner and the living processes of each."""
    from cluster.registry import status_text

    click.echo(status_text())


@cluster.command()
def clean() -> None:
    """End the processes of clusters whose owner is gone, and remove their directories with keys and logs.

    Temporary folders that other killed processes of yours have left are removed too.
    """
    from cluster.registry import clean

    cleaned = clean()
    for name, ended in cleaned:
        click.echo(f"{name}: {ended} processes ended, its directory removed")
    if not cleaned:
        click.echo("nothing to clean")


COMMANDS = (cluster,)
