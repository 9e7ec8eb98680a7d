"""`retrieval plugins list | show | new`."""

from __future__ import annotations

from pathlib import Path

import click

PLUGIN_OPTION = click.option(
    "--plugin",
    "extra",
    multiple=True,
    metavar="FILE|MODULE",
    help="Also load this plugin file or module; repeatable.",
)


@click.group()
def plugins() -> None:
    """See what plugins offer, or start a new one.

    Example:  retrieval plugins show pml.multi_similarity
    """


@plugins.command("list")
@click.option("--kind", help="Only this kind, such as losses or backbones.")
@PLUGIN_OPTION
def list_command(kind: str | None, extra: tuple[str, ...]) -> None:
    """List everything that the installed plugins offer.

    Example:  retrieval plugins list --kind losses
    """
    from retrieval.describe import list_text
    from retrieval.plugins import load_plugins

    click.echo(list_text(load_plugins(extra), kind))


@plugins.command()
@click.argument("name")
@PLUGIN_OPTION
def show(name: str, extra: tuple[str, ...]) -> None:
    """Show what NAME is: its documentation, its parameters, and lines to paste into a recipe.

    Example:  retrieval plugins show pml.multi_similarity
    """
    from retrieval.describe import show_text
    from retrieval.plugins import load_plugins

    click.echo(show_text(load_plugins(extra), name))


@plugins.command()
@click.argument("name")
@click.option(
    "--output", type=click.Path(path_type=Path), help="Folder to write; by default ./retrieval-NAME."
)
def new(name: str, output: Path | None) -> None:
    """Write a working third-party package NAME with a loss, its test and a recipe, ready to install.

    Example:  retrieval plugins new acme
    """
    from retrieval.scaffold import write_package

    folder = write_package(name, output)
    click.echo(
        f"Wrote {folder}. Next:\n  pip install -e {folder}\n  retrieval plugins show {name}.margin\n  retrieval train {folder}/recipe.toml"
    )
