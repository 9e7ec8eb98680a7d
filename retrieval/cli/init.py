"""`retrieval init`."""

from __future__ import annotations

from pathlib import Path

import click

from retrieval.cli import say
from retrieval.cli.common import loading


@click.command()
@click.argument("photos", type=click.Path(path_type=Path))
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    default=Path("recipes"),
    show_default=True,
    help="Folder to write the recipes to.",
)
@click.option("--replace", is_flag=True, help="Replace recipes that are there.")
def init(photos: Path, output: Path, replace: bool) -> None:
    """Look at a folder of photos, and write the recipes that are worth trying on it.

    Each class is a folder in PHOTOS. A comment explains each choice.

    Example:  retrieval init photos/ --output recipes
    """
    from retrieval.serving.runtime import quiet_threads

    quiet_threads()
    with loading():
        from retrieval.training.proposal import propose
    say(str(propose(photos, output, replace=replace)))
