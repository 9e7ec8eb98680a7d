"""`retrieval distill`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from retrieval.cli import say
from retrieval.cli.common import PATH, loading, this_command
from retrieval.cli.plugins import ALLOW_OPTION, PLUGIN_OPTION
from retrieval.cli.train import ONCE, SET_OPTION
from retrieval.errors import Interrupted


@click.command()
@click.argument("teacher")
@click.argument("photos", type=PATH)
@click.option("--output", "-o", type=PATH, required=True, help="The student's bundle to write.")
@click.option("--student", default="core.convnet", help="The student's backbone.")
@click.option("--run", type=PATH, help="Folder to work in; by default runs/NAME, as the output.")
@click.option("--labels", is_flag=True, help="The folder of a photo is its label; learn it, too.")
@click.option(
    "--dimensions",
    type=click.IntRange(1),
    default=128,
    help="Width of the student's embeddings, at most the teacher's.",
)
@click.option("--resume", is_flag=True, help="Go on where an interrupted call stopped.")
@click.option("--replace", is_flag=True, help="Replace the run and the bundle.")
@SET_OPTION
@PLUGIN_OPTION
@ALLOW_OPTION
def distill(
    teacher: str,
    photos: Path,
    output: Path,
    run: Path | None,
    extra: tuple[str, ...],
    **options: Any,
) -> None:
    """Train a small model to embed photos as a large one does, and export it.

    TEACHER is a bundle, a run, or the name of a pretrained backbone. The photos need no labels.

    Example:  retrieval distill core.efficientnet_lite0 photos/ --output small.bundle
    """
    with loading():
        from retrieval.training.distill import distill as distilled
    run = run or Path("runs") / output.stem
    try:
        result = distilled(teacher, photos, output, run=run, plugins=extra, report=say, **options)
    except (KeyboardInterrupt, Interrupted):
        again = this_command("--resume", without=ONCE)
        raise Interrupted(f"Interrupted. Go on with: {again}") from None
    say(str(result))
    say(f"Next:\n  retrieval index create photos.index {photos} --model {output}")
