"""`retrieval evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from retrieval.cli import say, say_json
from retrieval.cli.common import JSON, PATH, Choice, refuse_options
from retrieval.cli.plugins import ALLOW_OPTION

SEARCH = {"metrics", "clusters", "models", "bundle", "on", "rankings"}
"""Options of the protocol "retrieval" only."""
PAIRS = {"pairs", "draw", "seed"}
"""Options of the protocol "verification" only."""


@click.command("evaluate")
@click.argument("run", type=PATH)
@click.option(
    "--protocol",
    type=Choice(["retrieval", "verification"]),
    default="retrieval",
    help="Search for each item, or judge whether two items are the same.",
)
@click.option(
    "--split",
    "side",
    type=Choice(["test", "validation"]),
    default="test",
    help="Side of the split whose items are the queries, or form the pairs.",
)
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="NAME",
    help="Name of a metric; repeatable. By default the recipe's.",
)
@click.option("--clusters", is_flag=True, help="Also compute NMI and F1 of k-means clusters.")
@click.option(
    "--pairs",
    metavar="FILE",
    type=PATH,
    help="Verification: a CSV file with the columns first, second, same (1 or 0) and optionally"
    " fold, or LFW's pairs.txt. By default pairs are random.",
)
@click.option(
    "--draw",
    type=click.IntRange(4),
    help="Verification: largest number of random pairs, by default 6,000. Half of them are of one"
    " class.",
)
@click.option("--seed", default=0, help="Verification: seed of pairs and folds.")
@click.option(
    "--baseline",
    is_flag=True,
    help="Also evaluate the raw inputs (pixels, or vectors), which need no training.",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="ADDRESS",
    help="Also evaluate another model, and its difference from the run's; repeatable. ADDRESS is"
    " such as core.timm:resnet50.a1_in1k, vectors:FILE or https://HOST/v1/embeddings?model=NAME.",
)
@click.option("--bundle", type=PATH, help="Also evaluate this bundle, and search as a server does.")
@click.option(
    "--on",
    type=PATH,
    help="A TOML file whose [data] and [evaluate] replace the recipe's: other data to test on.",
)
@click.option(
    "--rankings",
    type=PATH,
    help="Also write the first 1,000 hits of each query into this file, as a TREC run, and what is"
    " relevant into a file beside it with the suffix .qrels.",
)
@click.option(
    "--gallery",
    type=PATH,
    help="If RUN is a folder of embeddings: search another such folder instead of RUN itself.",
)
@JSON
@ALLOW_OPTION
def evaluate_command(
    run: Path, protocol: str, gallery: Path | None, as_json: bool, **options: Any
) -> None:
    """Evaluate a run's best weights on its held-out items, and write the metrics into the run.

    RUN may also be a folder that 'retrieval embed' wrote, if its items have labels. Metrics then
    use the folder's vectors and Euclidean distance. The folder may be larger than the memory.

    Example:  retrieval evaluate runs/digits --baseline --metric recall_at_1 --metric map_at_r

    Example:  retrieval evaluate runs/digits --protocol verification --draw 2000

    Example:  retrieval evaluate runs/photos --on roxford.toml --rankings hits.trec
    """
    from retrieval.index.sources import is_embedding

    if is_embedding(run):
        of_runs = {"protocol", *options} - {"metrics"}
        refuse_options(f"with {run}, a folder of embeddings", of_runs)
        from retrieval.evaluation.evaluation import DEFAULT_METRICS
        from retrieval.evaluation.pairwise import evaluate_vectors

        metrics = options["metrics"] or DEFAULT_METRICS
        evaluation = evaluate_vectors(run, gallery=gallery, metrics=metrics)
        if as_json:
            names = ("values", "queries", "gallery", "singletons")
            say_json({name: getattr(evaluation, name) for name in names})
        else:
            say(evaluation.table())
        return
    refuse_options("with a run, which has its own gallery", {"gallery"})
    other = SEARCH if protocol == "verification" else PAIRS
    refuse_options(f"with --protocol {protocol}", other)
    options = {name: value for name, value in options.items() if name not in other}
    # slow to import, so that wrong options are reported first
    from retrieval.evaluation import evaluate_run, verify_run
    from retrieval.run.open import Run

    measure: Any = verify_run.verify if protocol == "verification" else evaluate_run.evaluate
    result = measure(Run.open(run), **options)
    say_json(result.as_dict()) if as_json else say(result.table())
