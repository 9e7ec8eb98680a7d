"""`retrieval report`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from retrieval.cli import say
from retrieval.cli.common import PATH, Choice


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=PATH)
@click.option(
    "--output",
    type=PATH,
    default=Path("report.html"),
    help="The file to write; an existing one is replaced.",
)
@click.option("--queries", default=2000, help="Most test items to use as queries.")
@click.option("--sample", default=600, help="Most test items on the map and in pairs.")
@click.option("--thumbnails", default=800, help="Most thumbnails of items.")
@click.option(
    "--map",
    "method",
    type=Choice(["tsne", "pca", "none"]),
    default="tsne",
    help="Method of the map.",
)
@click.option("--label-column", metavar="COLUMN", help="Column of metadata that names the classes.")
def report(runs: tuple[Path, ...], output: Path, method: str, **options: Any) -> None:
    """Write an HTML report of runs: metrics with intervals, hits and mistakes, a map, thresholds.

    The file is self-contained: it can be sent, read on a phone, and printed.

    Example:  retrieval report runs/digits runs/other --output report.html
    """
    from retrieval.evaluation.report.write import report as write

    file = write(runs, output, map=method, **options)
    say(f"Wrote {file}.")
