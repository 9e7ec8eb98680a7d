"""`retrieval compare` and `retrieval sweep`."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from retrieval.cli import say
from retrieval.cli.common import loading
from retrieval.cli.plugins import ALLOW_OPTION, PLUGIN_OPTION
from retrieval.cli.train import TRACK_OPTION

MOST_VALUES = 1000
"""Most values in a range of a sweep."""

OPTIONS = (
    click.option(
        "--splits",
        metavar="N",
        type=int,
        default=1,
        show_default=True,
        help="Number of random splits, each with all seeds; 1 uses the recipes' own split.",
    ),
    click.option(
        "--against",
        metavar="NAME",
        help="Compare each recipe with this recipe or baseline alone, not all pairs.",
    ),
    click.option("--test-baselines", is_flag=True, help="Also test recipes against baselines."),
    click.option(
        "--workers",
        type=int,
        default=1,
        show_default=True,
        help="Processes that train at the same time.",
    ),
    click.option(
        "--ray",
        metavar="ADDRESS",
        help=(
            "Train on a Ray cluster: HOST:PORT of its head, or auto on one of its nodes. All nodes"
            " must share --output and the data."
        ),
    ),
    click.option(
        "--cpus",
        type=click.IntRange(min=1),
        help="With --ray: cores per training. By default 4, or the smallest node's if fewer.",
    ),
    click.option(
        "--pretrained",
        metavar="BACKBONE",
        help=(
            "Backbone of the row of frozen features, or none. By default the recipes' own if it"
            " has weights."
        ),
    ),
    click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        help="Change a value of every recipe, such as train.epochs=5; repeatable.",
    ),
    click.option(
        "--latex",
        "columns",
        metavar="METRICS",
        help="Columns of comparison.tex, such as map_at_r,recall_at_1. By default all.",
    ),
    TRACK_OPTION,
    PLUGIN_OPTION,
    ALLOW_OPTION,
)
"""Options of both commands."""


def _options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def _output(name: str) -> Callable[..., Any]:
    return click.option(
        "--output",
        type=click.Path(path_type=Path),
        default=Path(name),
        show_default=True,
        help="The comparison's folder: tables, runs, trials.",
    )


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
    help="Number of settings of its [search] to try for each recipe; 0 tunes nothing.",
)
@click.option(
    "--folds",
    type=int,
    default=4,
    show_default=True,
    help="Folds of the training side; each is held out once to judge a setting.",
)
@click.option(
    "--allow-different",
    is_flag=True,
    help="Compare recipes that differ in data, backbone or budget; the tables say so.",
)
@_output("comparison")
@_options
def compare(recipes: tuple[Path, ...], **options: Any) -> None:
    """Compare recipes fairly: the same data, net, batches, epochs, tuning and seeds.

    Writes tables with intervals, and states the conclusions in words. To resume after an
    interruption, run the same command again.

    Example:  retrieval compare triplet.toml proxy_anchor.toml --seeds 5 --search 20
    """
    _run(recipes, **options)


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.argument("values", nargs=-1, required=True, metavar="KEY=VALUES...")
@_output("sweep")
@_options
def sweep(recipe: Path, values: tuple[str, ...], **options: Any) -> None:
    """Compare settings of one recipe: every combination of the values, with several seeds.

    Values are a list, such as loss.alpha=1,2,4, or a range of whole numbers, such as seed=0..4. The
    tables and the folder are those of 'retrieval compare', and the same command resumes.

    Example:  retrieval sweep recipe.toml loss.alpha=1,2,4 seed=0..4
    """
    grid: dict[str, list[Any]] = {}
    for text in values:
        key, equals, listed = text.partition("=")
        if not equals or not key or key in grid:
            raise click.UsageError(f"{text}: give each key once, as loss.alpha=1,2,4.")
        grid[key] = _values(text, listed)
    seeds = grid.pop("seed", list(range(5)))
    if seeds != list(range(len(seeds))):
        raise click.UsageError("seed: seeds are counted from 0, as in seed=0..4.")
    _run((recipe,), grid=grid, seeds=len(seeds), **options)


def _values(text: str, listed: str) -> list[Any]:
    """Return the values in a text: TOML values, bare words, or a range of whole numbers."""
    first, dots, last = listed.partition("..")
    if dots:
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise click.UsageError(f"{text}: write a range of whole numbers as seed=0..4.")
        if int(last) - int(first) >= MOST_VALUES:
            raise click.UsageError(f"{text}: that is more than {MOST_VALUES:,} values.")
        return list(range(int(first), int(last) + 1))
    try:
        values: list[Any] = tomllib.loads(f"values = [{listed}]")["values"]
    except (ValueError, RecursionError):
        values = [word.strip() for word in listed.split(",")]
    if not values or "" in values or any(values.count(value) > 1 for value in values):
        raise click.UsageError(f"{text}: name values, each once, as loss.alpha=1,2,4.")
    return values


def _run(
    recipes: tuple[Path, ...],
    *,
    cpus: int | None,
    ray: str | None,
    output: Path,
    columns: str | None,
    extra: tuple[str, ...],
    **options: Any,
) -> None:
    """Compare, and print the tables."""
    if cpus is not None and ray is None:
        raise click.UsageError(
            "--cpus are of a training on a cluster: name the cluster with --ray."
        )
    from retrieval.serving.runtime import quiet_threads

    quiet_threads()
    with loading():
        from retrieval.host.lazy import keep_compiler_out
        from retrieval.training.comparison.compare import compare as run
        from retrieval.training.comparison.result import markdown

    keep_compiler_out()
    names = [name.strip() for name in columns.split(",")] if columns else []
    result = run(
        recipes,
        output,
        cpus=cpus,
        ray=ray,
        plugins=extra,
        latex=names,
        report=say,
        **options,
    )
    say(markdown(result))
    say(f"Tables: {output}/comparison.md, .csv, .tex, .json; runs: {output}/runs.")
