"""`retrieval compare`."""

from __future__ import annotations

from pathlib import Path

import click

from retrieval.cli import say
from retrieval.cli.common import loading
from retrieval.cli.plugins import ALLOW_OPTION, PLUGIN_OPTION
from retrieval.cli.train import TRACK_OPTION


@click.command()
@click.argument(
    "recipes", nargs=-1, required=True, metavar="RECIPE...", type=click.Path(path_type=Path)
)
@click.option("--seeds", type=int, default=5, show_default=True, help="Runs of each recipe.")
@click.option(
    "--search",
    metavar="N",
    type=int,
    default=0,
    show_default=True,
    help="Settings to try for each recipe, of its [search]; 0: recipes are taken as they are.",
)
@click.option(
    "--folds",
    type=int,
    default=4,
    show_default=True,
    help="Parts of the training classes, each of which judges the settings once.",
)
@click.option(
    "--workers",
    type=int,
    default=1,
    show_default=True,
    help="Processes that train at the same time.",
)
@click.option(
    "--ray",
    metavar="ADDRESS",
    help=(
        "Train on a Ray cluster: HOST:PORT of its head, or auto on one of its nodes. All nodes see"
        " --output and the data."
    ),
)
@click.option(
    "--cpus",
    type=click.IntRange(min=1),
    help="With --ray: cores of each training. By default 4, or those of the smallest node.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("comparison"),
    show_default=True,
    help="The comparison's folder: tables, runs, trials.",
)
@click.option(
    "--pretrained",
    metavar="BACKBONE",
    help=(
        "Backbone of the row 'pretrained, frozen', or none. By default the recipes' own if it has"
        " weights, else core.efficientnet_lite0 where its extra is installed."
    ),
)
@click.option(
    "--allow-different",
    is_flag=True,
    help="Compare also what differs in data, backbone or budget; the tables say so.",
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a value of every recipe, as in train.epochs=5; repeatable.",
)
@TRACK_OPTION
@PLUGIN_OPTION
@ALLOW_OPTION
def compare(
    recipes: tuple[Path, ...],
    seeds: int,
    search: int,
    folds: int,
    workers: int,
    ray: str | None,
    cpus: int | None,
    output: Path,
    pretrained: str | None,
    allow_different: bool,
    overrides: tuple[str, ...],
    track: tuple[str, ...],
    extra: tuple[str, ...],
) -> None:
    """Compare recipes fairly: the same data, net, batches, epochs and number of tuning trials,
    several seeds, and baselines.

    Writes tables with intervals, and says in plain words what they show. The same command goes on
    where one was stopped.

    Example:  retrieval compare triplet.toml proxy.toml --seeds 5 --search 20 --output comparison
    """
    if cpus is not None and ray is None:
        raise click.UsageError(
            "--cpus are of a training on a cluster: name the cluster with --ray."
        )
    from retrieval.serving.runtime import quiet_threads

    quiet_threads()
    with loading():
        from retrieval.model.compiler import keep_compiler_out
        from retrieval.training.comparison.compare import compare as run
        from retrieval.training.comparison.written import markdown

    keep_compiler_out()
    found = run(
        recipes,
        output,
        seeds=seeds,
        search=search,
        folds=folds,
        workers=workers,
        ray=ray,
        cpus=cpus,
        pretrained=pretrained,
        allow_different=allow_different,
        overrides=overrides,
        plugins=extra,
        track=track,
        report=say,
    )
    say(markdown(found))
    say(f"Tables: {output}/comparison.md, .csv, .tex, .html, .json; runs: {output}/runs.")
