"""`retrieval distill`."""

from __future__ import annotations

from pathlib import Path

import click

from retrieval.cli import say
from retrieval.cli.common import loading, this_command
from retrieval.cli.plugins import ALLOW_OPTION, PLUGIN_OPTION
from retrieval.cli.train import ONCE, SET_OPTION
from retrieval.errors import Interrupted

_PATH = click.Path(path_type=Path)


@click.command()
@click.argument("teacher")
@click.argument("photos", type=_PATH)
@click.option("--output", "-o", type=_PATH, required=True, help="The student's bundle to write.")
@click.option(
    "--student", default="core.convnet", show_default=True, help="The student's backbone."
)
@click.option(
    "--run", type=_PATH, help="Folder to work in; by default runs/NAME, with the output's name."
)
@click.option("--labels", is_flag=True, help="The folder of a photo is its label; learn it, too.")
@click.option(
    "--dimensions",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="Width of the student's embeddings, at most the teacher's.",
)
@click.option("--epochs", type=click.IntRange(1), default=20, show_default=True)
@click.option("--resume", is_flag=True, help="Go on where an interrupted call stopped.")
@click.option("--replace", is_flag=True, help="Replace the run and the bundle.")
@SET_OPTION
@PLUGIN_OPTION
@ALLOW_OPTION
def distill(
    teacher: str,
    photos: Path,
    output: Path,
    student: str,
    run: Path | None,
    labels: bool,
    dimensions: int,
    epochs: int,
    resume: bool,
    replace: bool,
    overrides: tuple[str, ...],
    extra: tuple[str, ...],
) -> None:
    """Train a small model to embed photos as a large one does, and export it.

    TEACHER is a bundle, a run, or the name of a pretrained backbone. The photos need no labels.

    Example:  retrieval distill core.efficientnet_lite0 photos/ --output small.bundle
    """
    from retrieval.serving.runtime import quiet_threads

    quiet_threads()
    with loading():
        from retrieval.training.distill import distill as distilled
    try:
        result = distilled(
            teacher,
            photos,
            output,
            run=run or Path("runs") / output.stem,
            student=student,
            labels=labels,
            dimensions=dimensions,
            epochs=epochs,
            overrides=overrides,
            plugins=extra,
            resume=resume,
            replace=replace,
            report=say,
        )
    except (KeyboardInterrupt, Interrupted):
        raise Interrupted(
            f"Interrupted. Go on with: {this_command('--resume', without=ONCE)}"
        ) from None
    say(str(result))
    say(f"Next:\n  retrieval index create photos.index {photos} --model {output}")
