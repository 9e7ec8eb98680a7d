"""`retrieval evaluate`."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--split",
    "side",
    type=click.Choice(["test", "validation"]),
    default="test",
    show_default=True,
    help="Which items are searched for.",
)
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="NAME",
    help="A figure by name; repeatable. By default the recipe's.",
)
@click.option("--clusters", is_flag=True, help="Also NMI and F1 of k-means clusters.")
@click.option(
    "--baseline", is_flag=True, help="Also the raw inputs (pixels, or vectors), which need no training."
)
@click.option(
    "--bundle",
    type=click.Path(path_type=Path),
    help="Also what this bundle gives, searched as a server does.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def evaluate(
    run: Path,
    side: str,
    metrics: tuple[str, ...],
    clusters: bool,
    baseline: bool,
    bundle: Path | None,
    as_json: bool,
) -> None:
    """Evaluate a run's best weights on its held-out items, and write the figures into the run.

    Example:  retrieval evaluate runs/digits --baseline --metric recall_at_1 --metric map_at_r
    """
    from retrieval.runtime import quiet_threads

    quiet_threads()
    from retrieval.evaluate.protocol import evaluate_run
    from retrieval.evaluate.table import table
    from retrieval.train.run import load_run

    results = evaluate_run(
        load_run(run), side=side, metrics=metrics, clusters=clusters, baseline=baseline, bundle=bundle
    )
    click.echo(json.dumps(results, indent=2) if as_json else table(results))
