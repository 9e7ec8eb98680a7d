"""`retrieval daml-report`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("daml-report")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Folder for the panels. By default `report` in the run's folder.",
)
def daml_report(run: Path, output: Path | None) -> None:
    """Draw a run as SVG: loss curves of metric and generator, weights of local metrics, synthetic
    beside real samples, a map of both.

    Example:  retrieval daml-report runs/damml
    """
    from retrieval.serving.runtime import quiet_threads

    quiet_threads()
    from retrieval_daml.report import write_report

    for path in write_report(run, output):
        click.echo(path)
