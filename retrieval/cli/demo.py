"""`retrieval demo`."""

from __future__ import annotations

from pathlib import Path

import click

from retrieval.cli import say


@click.command()
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("demo"),
    show_default=True,
    help="Folder to make.",
)
@click.option("--replace", is_flag=True, help="Remove an earlier demo in that folder first.")
def demo(output: Path, replace: bool) -> None:
    """Try everything on real handwritten digits: train, evaluate, export, index, search.

    Nothing is downloaded.

    Example:  retrieval demo --output demo
    """
    from retrieval.serving.runtime import quiet_threads

    quiet_threads()
    from retrieval.cli.demo_steps import remove, run_demo

    if replace and output.exists():
        remove(output)
    run_demo(output, say)
