"""`retrieval compare` and `retrieval sweep`."""

from __future__ import annotations

import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import click

from retrieval.cli import say
from retrieval.cli.common import PATH, Choice, loading, options
from retrieval.cli.train import TRACK_OPTION, recipe_options

MAX_VALUES = 1000
"""Most values in a range of a sweep."""
OUTPUT = partial(click.option, "--output", type=PATH, help="Folder for tables, runs and trials.")
shared_options = options(
    click.option(
        "--splits", default=1, help="Random splits, each with all seeds; 1 uses the recipes' own."
    ),
    click.option(
        "--against", metavar="NAME", help="Compare all recipes with this recipe or baseline alone."
    ),
    click.option("--test-baselines", is_flag=True, help="Also test recipes against baselines."),
    click.option("--workers", default=1, help="Processes that train at the same time."),
    click.option(
        "--ray",
        metavar="ADDRESS",
        help="Train on a Ray cluster: HOST:PORT of its head, or auto on one of its nodes. All nodes"
        " must share --output and the data.",
    ),
    click.option(
        "--pretrained",
        metavar="BACKBONE",
        help="Backbone of the baseline of frozen features, or none. By default the recipes' own if"
        " it has pretrained weights, else core.efficientnet_lite0 if its extra is installed.",
    ),
    click.option(
        "--model",
        "models",
        multiple=True,
        metavar="ADDRESS",
        help="Also compare the recipes with another model as it comes, such as"
        " core.timm:resnet50.a1_in1k, vectors:FILE or https://HOST/v1/embeddings?model=NAME;"
        " repeatable.",
    ),
    click.option(
        "--latex",
        metavar="METRICS",
        default="",
        help="Columns of comparison.tex, such as map_at_r,recall_at_1. By default all.",
    ),
    click.option("--caption", help="Caption of comparison.tex, in LaTeX."),
    click.option("--label", default="tab:comparison", help="Label of comparison.tex."),
    TRACK_OPTION,
    recipe_options,
)


@click.command()
@click.argument("recipes", nargs=-1, required=True, metavar="RECIPE...", type=PATH)
@click.option("--seeds", default=5, help="Runs of each recipe.")
@click.option(
    "--search", default=0, help="Settings to try for each recipe, from its [search]; 0 tunes none."
)
@click.option(
    "--folds", default=4, help="Folds of the training side; each judges the settings once."
)
@click.option("--repeats", default=1, help="How often the training side is divided into folds.")
@click.option(
    "--fold-by",
    type=Choice(["class", "item"]),
    default="class",
    help="Hold out whole classes or, for data with few classes, items of every class.",
)
@click.option(
    "--allow-different",
    is_flag=True,
    help="Compare recipes that differ in data, backbone or budget; the tables say so.",
)
@OUTPUT(default="comparison")
@shared_options
def compare(recipes: tuple[Path, ...], **options: Any) -> None:
    """Compare recipes fairly: the same data, net, batches, epochs, tuning and seeds.

    Write tables with intervals, and state the conclusions in words. To resume after an
    interruption, run the same command again.

    Example:  retrieval compare triplet.toml proxy_anchor.toml --seeds 5 --search 20
    """
    _run(recipes, **options)


@click.command()
@click.argument("recipe", type=PATH)
@click.argument("values", nargs=-1, required=True, metavar="KEY=VALUES...")
@OUTPUT(default="sweep")
@shared_options
def sweep(recipe: Path, values: tuple[str, ...], **options: Any) -> None:
    """Compare settings of one recipe: every combination of the values, with several seeds.

    VALUES are a list, such as loss.alpha=1,2,4, or a range of whole numbers, such as seed=0..4. The
    tables and the folder are as with 'retrieval compare', and the same command resumes.

    Example:  retrieval sweep recipe.toml loss.alpha=1,2,4 seed=0..4
    """
    grid: dict[str, list[Any]] = {}
    for text in values:
        key, equals, listed = text.partition("=")
        if not equals or not key or key in grid:
            raise click.UsageError(f"{text}: give each key once, as in loss.alpha=1,2,4.")
        grid[key] = _values(text, listed)
    seeds = grid.pop("seed", list(range(5)))
    if seeds != list(range(len(seeds))):
        raise click.UsageError("seed: seeds count from 0, as in seed=0..4.")
    _run((recipe,), grid=grid, seeds=len(seeds), **options)


def _values(text: str, listed: str) -> list[Any]:
    """Return the `listed` values: TOML values, bare words, or a range of whole numbers.

    Errors quote `text`, the whole argument.
    """
    first, dots, last = listed.partition("..")
    if dots:
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise click.UsageError(f"{text}: write a range of whole numbers as in seed=0..4.")
        if int(last) - int(first) >= MAX_VALUES:
            raise click.UsageError(f"{text}: a range has at most {MAX_VALUES:,} values.")
        return list(range(int(first), int(last) + 1))
    # TOML keeps the types of numbers; bare words, such as names of losses, are no TOML
    try:
        values: list[Any] = tomllib.loads(f"values = [{listed}]")["values"]
    except (ValueError, RecursionError):
        values = [word.strip() for word in listed.split(",")]
    if not values or "" in values or any(values.count(value) > 1 for value in values):
        raise click.UsageError(f"{text}: give each value once, as in loss.alpha=1,2,4.")
    return values


def _run(
    recipes: tuple[Path, ...],
    *,
    output: Path,
    latex: str,
    caption: str | None,
    label: str,
    extra: tuple[str, ...],
    **options: Any,
) -> None:
    with loading():
        from retrieval.training.comparison.compare import compare as run
        from retrieval.training.comparison.tables import Latex, markdown

    names = [name.strip() for name in latex.split(",") if name.strip()]
    style = Latex(names, caption, label)
    result = run(recipes, output, plugins=extra, latex=style, report=say, **options)
    say(markdown(result))
    say(f"Tables: {output}/comparison.md, .csv, .tex, .html, .json; runs: {output}/runs.")
