"""`retrieval init`, `data`, `distill` and `report`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from retrieval.cli import say
from retrieval.cli.common import PATH, Choice, Group, Number, loading, this_command
from retrieval.cli.train import RECIPE, recipe_options
from retrieval.errors import DataError, Interrupted


@click.command()
@click.argument("photos", type=PATH)
@click.option(
    "--output", "-o", type=PATH, default=Path("recipes"), help="Folder to write the recipes to."
)
@click.option(
    "--minutes",
    type=Number(min=0, min_open=True),
    default=10.0,
    help="How long each may train on this machine, by which sizes and epochs are chosen.",
)
@click.option("--replace", is_flag=True, help="Replace existing recipes.")
def init(photos: Path, output: Path, minutes: float, replace: bool) -> None:
    """Look at photos, and write the recipes that are worth trying on them.

    PHOTOS is a folder with a folder for each class, or a CSV file with the columns path and label.
    Comments in the recipes explain each choice.

    Example:  retrieval init photos/ --output recipes
    """
    with loading():
        from retrieval_lab.proposal import propose

    say(str(propose(photos, output, minutes=minutes, replace=replace)))


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
    from retrieval_lab.check_data import preview

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
    from retrieval_lab.check_data import check_data

    findings = check_data(sources, plugins=extra, **options)
    say(findings.text(lines))
    if output is not None:
        write_json(output, findings.as_dict(), DataError)
    if not findings.clean:
        sys.exit(1)


@click.command()
@click.argument("teacher")
@click.argument("photos", type=PATH)
@click.option("--output", "-o", type=PATH, required=True, help="The student's bundle to write.")
@click.option("--student", "backbone", default="core.convnet", help="The student's backbone.")
@click.option(
    "--run", type=PATH, help="The run's folder; by default runs/small for -o small.bundle."
)
@click.option("--labels", is_flag=True, help="Also learn labels, the names of the photos' folders.")
@click.option(
    "--dimensions",
    type=click.IntRange(1),
    default=128,
    help="Width of the student's embeddings, at most the teacher's.",
)
@click.option("--resume", is_flag=True, help="Continue an interrupted call.")
@click.option("--replace", is_flag=True, help="Replace the run and the bundle.")
@recipe_options
def distill(
    teacher: str,
    photos: Path,
    output: Path,
    run: Path | None,
    resume: bool,
    replace: bool,
    extra: tuple[str, ...],
    **options: Any,
) -> None:
    """Train a small model to embed photos as a large one does, and export it.

    TEACHER is a bundle, a run, or the name of a pretrained backbone. The photos need no labels.

    Example:  retrieval distill core.efficientnet_lite0 photos/ --output small.bundle
    """
    with loading():
        from retrieval.training.process import interruptible

        from retrieval_lab.distill import Student, distill as distilled
    run = run or Path("runs") / output.stem
    student = Student(plugins=extra, **options)
    try:
        with interruptible(run / "distill.json", resume):
            result = distilled(
                teacher,
                photos,
                output,
                student,
                run=run,
                resume=resume,
                replace=replace,
                report=say,
            )
    except Interrupted as error:
        # The suggested command keeps --replace, because the old bundle is still there.
        if error.begun:
            again = this_command("--resume")
        else:
            again = this_command()
        raise Interrupted(f"Interrupted. Go on with: {again}") from None
    say(str(result))
    say(f"Next:\n  retrieval index create photos.index {photos} --model {output}")


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=PATH)
@click.option("--output", type=PATH, default=Path("report.html"), help="File to write or replace.")
@click.option("--sample", default=600, help="Largest number of test items for the map and pairs.")
@click.option(
    "--map", "method", type=Choice(["tsne", "pca", "none"]), default="tsne", help="Kind of map."
)
@click.option("--label-column", metavar="COLUMN", help="Column of metadata that names the classes.")
def report(runs: tuple[Path, ...], output: Path, method: str, **options: Any) -> None:
    """Write an HTML report of runs: metrics with intervals, hits and mistakes, a map, thresholds.

    The file is self-contained: it can be sent, read on a phone, and printed.

    Example:  retrieval report runs/digits runs/other --output report.html
    """
    from retrieval_lab.report.write import report as write

    file = write(runs, output, map=method, **options)
    say(f"Wrote {file}.")
