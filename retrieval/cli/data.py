"""`retrieval data show` and `retrieval data check`."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import click

from retrieval.cli import say
from retrieval.cli.common import Number
from retrieval.cli.plugins import ALLOW_OPTION, PLUGIN_OPTION
from retrieval.cli.train import CHANGES, RECIPE, SET_OPTION


@click.group()
def data() -> None:
    """Show or check data before training."""


@data.command()
@RECIPE
@CHANGES
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="PNG file to write; by default NAME.png, with the recipe's name.",
)
@click.option(
    "--items",
    type=click.IntRange(1, 64),
    default=8,
    show_default=True,
    help="Rows, one per item of the first batch.",
)
@click.option(
    "--draws",
    type=click.IntRange(1, 64),
    default=8,
    show_default=True,
    help="Columns: random augmentations of each item.",
)
@SET_OPTION
@PLUGIN_OPTION
@ALLOW_OPTION
def show(
    recipe: Path,
    changes: tuple[str, ...],
    output: Path | None,
    items: int,
    draws: int,
    overrides: tuple[str, ...],
    extra: tuple[str, ...],
) -> None:
    """Draw the images that the net sees in training: each item unchanged, then with the random
    changes of [augmentation].

    Example:  retrieval data show recipe.toml --set augmentation.transforms='["RandAugment"]'
    """
    from retrieval.serving.runtime import quiet_threads

    quiet_threads()
    from retrieval.errors import DataError
    from retrieval.recipe.read import naming, read_recipe

    checked = read_recipe(recipe, (*overrides, *changes), extra)
    target = output or Path(f"{checked.name}.png")
    if target.suffix.lower() != ".png":
        raise DataError(f"{target} should end in .png, which is what is written.")
    from retrieval.host.files import write_bytes

    # slow to import, so that a wrong path is reported first
    from retrieval.run.check_data import preview

    with naming(recipe):
        picture = preview(checked, items, draws)
    out = io.BytesIO()
    picture.save(out, format="PNG")
    write_bytes(target, out.getvalue(), DataError)
    if not checked.augmentation.active:
        say("note: the recipe's [augmentation] changes nothing.")
    say(f"{target}: {picture.width} × {picture.height} pixels")


@data.command()
@click.argument(
    "sources", nargs=-1, required=True, metavar="FOLDER...", type=click.Path(path_type=Path)
)
@click.option(
    "--model",
    metavar="BUNDLE",
    type=click.Path(path_type=Path),
    help="Also find items that are the same to a model, a bundle of 'retrieval export'.",
)
@click.option(
    "--within",
    type=Number(min=0),
    help=(
        "Items within this distance of the model are the same; by default measured on copies of"
        " items as JPEG of quality 70."
    ),
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also write all findings as JSON to FILE.",
)
@click.option(
    "--show",
    "lines",
    type=click.IntRange(0),
    default=10,
    show_default=True,
    help="Most lines to print of each kind.",
)
@SET_OPTION
@PLUGIN_OPTION
@ALLOW_OPTION
def check(
    sources: tuple[Path, ...],
    model: Path | None,
    within: float | None,
    output: Path | None,
    lines: int,
    overrides: tuple[str, ...],
    extra: tuple[str, ...],
) -> None:
    """Find what is wrong with data: broken files, duplicates, items on both sides of the split,
    likely label errors.

    FOLDER is a folder, a CSV file, a table, or a recipe with its [split]. Several are the sides of
    one split. The exit code is 1 if something was found, otherwise 0.

    Example:  retrieval data check photos --output findings.json
    """
    from retrieval.serving.runtime import quiet_threads

    quiet_threads()
    from retrieval.errors import DataError

    if output is not None and output.suffix.lower() != ".json":
        raise DataError(f"{output} should end in .json, which is what is written.")
    from retrieval.host.files import write_json

    # slow to import, so that a wrong path is reported first
    from retrieval.run.check_data import check_data

    findings = check_data(sources, model=model, within=within, overrides=overrides, plugins=extra)
    say(findings.text(lines))
    if output is not None:
        write_json(output, findings.as_dict(), DataError)
    if not findings.clean:
        sys.exit(1)
