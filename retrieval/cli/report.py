"""`retrieval report`."""

from __future__ import annotations

from pathlib import Path

import click

from retrieval.cli import say
from retrieval.cli.common import Choice


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("report.html"),
    show_default=True,
    help="The file to write; an existing one is replaced.",
)
@click.option(
    "--queries",
    type=int,
    default=2000,
    show_default=True,
    help="Most test items to use as queries.",
)
@click.option(
    "--sample",
    type=int,
    default=600,
    show_default=True,
    help="Most test items for the map and for the distances of pairs.",
)
@click.option(
    "--thumbnails", type=int, default=800, show_default=True, help="Most thumbnails of items."
)
@click.option(
    "--map",
    "method",
    type=Choice(["tsne", "pca", "none"]),
    default="tsne",
    show_default=True,
    help="Method of the map.",
)
def report(
    runs: tuple[Path, ...], output: Path, queries: int, sample: int, thumbnails: int, method: str
) -> None:
    """Write an HTML report of runs: metrics with intervals, hits and mistakes, a map, thresholds.

    The file is self-contained: it can be sent, read on a phone, and printed.

    Example:  retrieval report runs/digits runs/other --output report.html
    """
    from retrieval.serving.runtime import quiet_threads

    quiet_threads()
    from retrieval.evaluation.report.write import report as write

    file = write(runs, output, queries=queries, sample=sample, thumbnails=thumbnails, map=method)
    say(f"Wrote {file}.")
