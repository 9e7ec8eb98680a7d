"""`retrieval data show` and `retrieval data check`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from retrieval.cli import say
from retrieval.cli.common import PATH, Group, Number
from retrieval.cli.train import RECIPE, recipe_options
from retrieval.errors import DataError


@click.group(cls=Group)
def data() -> None:
    """Show or check data before training."""


@data.command()
@RECIPE
@click.option(
    "--output", type=PATH, help="PNG file to write; by default NAME.png, by the recipe's name."
)
@click.option(
    "--items", type=click.IntRange(1, 64), default=8, help="Rows, one per item of the first batch."
)
@click.option(
    "--draws", type=click.IntRange(1, 64), default=8, help="Columns: random changes of each item."
)
@recipe_options
def show(
    recipe: Path,
    output: Path | None,
    overrides: tuple[str, ...],
    extra: tuple[str, ...],
    **counts: int,
) -> None:
    """Draw the images that the net sees in training: each item unchanged, then with the random
    changes of [augmentation].

    Example:  retrieval data show recipe.toml --set augmentation.transforms='["RandAugment"]'
    """
    from retrieval.recipe.read import naming, read_recipe

    checked = read_recipe(recipe, overrides, extra)
    target = output or Path(f"{checked.name}.png")
    if target.suffix.lower() != ".png":
        raise DataError(f"{target} must end in .png, because the picture is a PNG file.")
    from retrieval.base.files import whole_file

    # slow to import, so that a wrong path is reported first
    from retrieval.run.check_data import preview

    with naming(recipe):
        picture = preview(checked, **counts)
    with whole_file(target, DataError) as file:
        picture.save(file, format="PNG")
    if not checked.augmentation.active:
        say("note: the recipe's [augmentation] changes nothing.")
    say(f"{target}: {picture.width} × {picture.height} pixels")


@data.command()
@click.argument("sources", nargs=-1, required=True, metavar="FOLDER...", type=PATH)
@click.option(
    "--model",
    metavar="BUNDLE",
    type=PATH,
    help="Also find items that a model, a bundle of 'retrieval export', cannot tell apart.",
)
@click.option(
    "--within",
    type=Number(min=0),
    help="With --model: the largest distance of items that count as the same. By default measured"
    " between items and their copies as JPEG of quality 70.",
)
@click.option("--output", type=PATH, metavar="FILE", help="Also write all findings as JSON.")
@click.option(
    "--show", "lines", type=click.IntRange(0), default=10, help="Most lines to print of each kind."
)
@recipe_options
def check(
    sources: tuple[Path, ...],
    output: Path | None,
    lines: int,
    extra: tuple[str, ...],
    **options: Any,
) -> None:
    """Find what is wrong with data: broken files, duplicates, items on both sides of the split,
    likely label errors.

    FOLDER is a folder, a CSV file, a table, or a recipe with its [split]. Several of them are the
    sides of one split. The exit code is 1 if there are findings, otherwise 0.

    Example:  retrieval data check photos --output findings.json
    """
    if output is not None and output.suffix.lower() != ".json":
        raise DataError(f"{output} must end in .json, because the findings are written as JSON.")
    from retrieval.base.files import write_json

    # slow to import, so that a wrong path is reported first
    from retrieval.run.check_data import check_data

    findings = check_data(sources, plugins=extra, **options)
    say(findings.text(lines))
    if output is not None:
        write_json(output, findings.as_dict(), DataError)
    if not findings.clean:
        sys.exit(1)
