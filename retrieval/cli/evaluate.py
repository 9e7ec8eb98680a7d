"""`retrieval evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from retrieval.cli import say, say_json
from retrieval.cli.common import Choice
from retrieval.cli.plugins import ALLOW_OPTION

if TYPE_CHECKING:
    from retrieval.evaluation.evaluate_run import RunEvaluation
    from retrieval.evaluation.verify_run import RunVerification


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--protocol",
    type=Choice(["retrieval", "verification"]),
    default="retrieval",
    show_default=True,
    help="Search for each item, or judge whether pairs are the same.",
)
@click.option(
    "--split",
    "side",
    type=Choice(["test", "validation"]),
    default="test",
    show_default=True,
    help="The items that are queries or form pairs.",
)
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="NAME",
    help="A metric by name; repeatable. By default the recipe's.",
)
@click.option("--clusters", is_flag=True, help="Also compute NMI and F1 of k-means clusters.")
@click.option(
    "--pairs",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help=(
        "Verification: a CSV file with the columns first, second, same (1 or 0) and optionally"
        " fold, or LFW's pairs.txt. By default pairs are random."
    ),
)
@click.option(
    "--draw",
    metavar="N",
    type=int,
    help=(
        "Verification: number of random pairs, half of them same. By default up to 600 per fold."
    ),
)
@click.option(
    "--folds",
    metavar="N",
    type=int,
    help="Verification: number of folds of pairs without a fold. By default 10.",
)
@click.option(
    "--seed", metavar="N", type=int, help="Verification: seed of pairs and folds. By default 0."
)
@click.option(
    "--baseline",
    is_flag=True,
    help=(
        "Also evaluate the raw inputs (pixels, or vectors), which need no training; for"
        " verification also the untrained model."
    ),
)
@click.option(
    "--bundle",
    type=click.Path(path_type=Path),
    help="Also evaluate this bundle, searching as a server does.",
)
@click.option(
    "--gallery",
    type=click.Path(path_type=Path),
    help="For a folder of embeddings: another folder to search in.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@ALLOW_OPTION
def evaluate(
    run: Path,
    protocol: str,
    side: str,
    metrics: tuple[str, ...],
    clusters: bool,
    pairs: Path | None,
    draw: int | None,
    folds: int | None,
    seed: int | None,
    baseline: bool,
    bundle: Path | None,
    gallery: Path | None,
    as_json: bool,
) -> None:
    """Evaluate a run's best weights on its held-out items, and write the metrics into the run.

    RUN may also be a folder of 'retrieval embed' with labels. The metrics then use its vectors and
    Euclidean distance, and the folder may be larger than the memory.

    Example:  retrieval evaluate runs/digits --baseline --metric recall_at_1 --metric map_at_r

    Example:  retrieval evaluate runs/digits --protocol verification --draw 2000
    """
    if protocol == "verification":
        searched = {"--metric": bool(metrics), "--clusters": clusters}
        _refuse(protocol, "retrieval", searched)
    else:
        options = {"--pairs": pairs, "--draw": draw, "--folds": folds, "--seed": seed}
        _refuse(
            protocol, "verification", {name: value is not None for name, value in options.items()}
        )
    if pairs is not None and draw is not None:
        raise click.UsageError(
            "Pairs are either read or drawn: --pairs and --draw exclude each other."
        )

    from retrieval.serving.runtime import quiet_threads

    quiet_threads()
    from retrieval.run.open import Run
    from retrieval.serving.index.locations import is_embedding

    result: RunEvaluation | RunVerification
    if is_embedding(run):
        options_of_runs = {
            "--clusters": clusters,
            "--baseline": baseline,
            "--bundle": bundle is not None,
        }
        options_of_runs |= {
            "--protocol verification": protocol == "verification",
            "--split validation": side == "validation",
        }
        _of_vectors(run, gallery, metrics, as_json, options_of_runs)
        return
    if gallery is not None:
        raise click.UsageError(
            "--gallery belongs to a folder of embeddings; a run brings its own gallery."
        )
    if protocol == "verification":
        from retrieval.evaluation.verify_run import verify

        result = verify(
            Run.open(run),
            side=side,
            pairs=pairs,
            draw=draw,
            folds=folds,
            seed=seed or 0,
            baseline=baseline,
            bundle=bundle,
        )
    else:
        from retrieval.evaluation import evaluate_run

        result = evaluate_run.evaluate(
            Run.open(run),
            side=side,
            metrics=metrics,
            clusters=clusters,
            baseline=baseline,
            bundle=bundle,
        )
    if as_json:
        say_json(result.as_dict())
    else:
        say(result.table())


def _of_vectors(
    folder: Path,
    gallery: Path | None,
    metrics: tuple[str, ...],
    as_json: bool,
    options_of_runs: dict[str, bool],
) -> None:
    """Print the metrics of a folder of embeddings."""
    from retrieval.evaluation.evaluation import DEFAULT_METRICS
    from retrieval.evaluation.pairwise import evaluate_vectors

    if wrong := [name for name, is_set in options_of_runs.items() if is_set]:
        raise click.UsageError(
            f"{', '.join(wrong)} belongs to a run, and {folder} is a folder of embeddings."
        )
    result = evaluate_vectors(folder, gallery=gallery, metrics=metrics or DEFAULT_METRICS)
    if as_json:
        say_json({name: value for name, value in vars(result).items() if name != "groups"})
    else:
        say(result.table())


def _refuse(protocol: str, other: str, options: dict[str, bool]) -> None:
    wrong = [name for name, is_set in options.items() if is_set]
    if wrong:
        verb = "belongs" if len(wrong) == 1 else "belong"
        raise click.UsageError(
            f"{', '.join(wrong)} {verb} to --protocol {other}, and the protocol here is {protocol}."
        )
