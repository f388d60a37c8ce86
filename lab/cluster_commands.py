"""``lab cluster``: the places where ranks can run, and what each would do."""

from __future__ import annotations

import click


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
def show(name: str, ranks: int, settings: tuple[str, ...]) -> None:
    """The profile NAME: its fields, rank 0's environment and what would run, each with its reason."""
    from cluster.errors import ClusterError
    from cluster.profiles.showing import describe, override

    try:
        click.echo(describe(override(name, settings), ranks))
    except ClusterError as error:
        raise click.UsageError(str(error)) from None
