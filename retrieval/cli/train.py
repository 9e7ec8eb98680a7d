"""`retrieval init`, `retrieval check`, `retrieval train` and `retrieval distill`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from retrieval.cli import say
from retrieval.cli.common import PATH, loading, options, refuse_options, this_command
from retrieval.cli.plugins import ALLOW_OPTION, PLUGIN_OPTION
from retrieval.errors import Interrupted

ONCE = ("--replace", "--replace-plugins")
"""Options that the suggested command for resuming a run omits."""

RECIPE = click.argument("recipe", type=PATH)
SET_OPTION = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a value of the recipe, such as loss.margin=0.2; repeatable. loss.name=NAME"
    " chooses another loss and drops the parameters of the old one. loss=none removes the table"
    " [loss]; train.clip_norm=none removes that key.",
)
recipe_options = options(SET_OPTION, PLUGIN_OPTION, ALLOW_OPTION)
"""Adds the options of commands that read a recipe: --set, --plugin and --allow-plugins."""


@click.command()
@click.argument("photos", type=PATH)
@click.option(
    "--output", "-o", type=PATH, default=Path("recipes"), help="Folder to write the recipes to."
)
@click.option("--replace", is_flag=True, help="Replace existing recipes.")
def init(photos: Path, output: Path, replace: bool) -> None:
    """Look at a folder of photos, and write the recipes that are worth trying on it.

    Each class is a folder in PHOTOS. Comments in the recipes explain each choice.

    Example:  retrieval init photos/ --output recipes
    """
    with loading():
        from retrieval.training.proposal import propose

    say(str(propose(photos, output, replace=replace)))


@click.command()
@RECIPE
@recipe_options
def check(recipe: Path, overrides: tuple[str, ...], extra: tuple[str, ...]) -> None:
    """Check a recipe and report all problems at once, then build it and run one batch.

    Example:  retrieval check models/digits/recipe.toml --set loss.alpha=1.5
    """
    with loading():
        from retrieval.recipe.read import naming, read_recipe

        checked = read_recipe(recipe, overrides, extra)
        # slow to import; a wrong path has already been reported
        from retrieval.training.check import run_one_batch

    with naming(recipe):
        say(*run_one_batch(checked))


TRACK_OPTION = click.option(
    "--track",
    multiple=True,
    metavar="TRACKER",
    help="Log the run to a tracker: tensorboard, wandb, mlflow, or a plugin's; repeatable. The"
    " tracker's own environment variables set the server.",
)


@click.command()
@RECIPE
@click.option(
    "--output", type=PATH, help="The run's folder; by default runs/NAME, with the recipe's name."
)
@click.option(
    "--resume", is_flag=True, help="Resume a run; --set train.epochs=N trains it for longer."
)
@click.option("--replace", is_flag=True, help="Replace an existing run.")
@click.option(
    "--replace-plugins",
    is_flag=True,
    help="With --resume: use the current plugin files instead of the run's copies.",
)
@TRACK_OPTION
@recipe_options
def train(
    recipe: Path,
    output: Path | None,
    resume: bool,
    track: tuple[str, ...],
    overrides: tuple[str, ...],
    extra: tuple[str, ...],
    **options: bool,
) -> None:
    """Train a recipe into a run folder.

    \b
    Example:  retrieval train models/digits/recipe.toml --set loss.alpha=1.5 --output runs/digits
    Several GPUs:  accelerate launch -m retrieval.cli train models/digits/recipe.toml
    Several CPU processes:  torchrun --nproc-per-node 2 -m retrieval.cli train recipe.toml
    """
    if resume:
        refuse_options("with --resume", {"replace"})
    else:
        refuse_options("without --resume", {"replace_plugins"})
    with loading():
        from retrieval.recipe.read import naming, read_recipe

        if resume:
            from retrieval.run.resume import read_given

            replace_plugins = options["replace_plugins"]
            # Of several processes, the first speaks.
            report = say if os.environ.get("RANK", "0") == "0" else (lambda line: None)
            folder, checked = read_given(
                output, recipe, overrides, extra, replace_plugins=replace_plugins, report=report
            )
        else:
            checked = read_recipe(recipe, overrides, extra)
            folder = output or Path("runs") / checked.name
        # slow to import; a wrong path has already been reported
        from accelerate import PartialState

        from retrieval.training.process import interruptible
        from retrieval.training.tracking import tracking
        from retrieval.training.trainer import train as train_run

    try:
        interruption = interruptible(folder / "recipe.toml", resume)
        with interruption, naming(recipe), tracking(track, checked, say):
            train_run(folder, checked, resume=resume, report=say, **options)
    except Interrupted as error:
        go_on = this_command("--resume", without=ONCE) if error.begun else this_command()
        raise Interrupted(f"{error} Go on with: {go_on}") from None
    if PartialState().is_main_process:
        say(f"Trained {folder}. Next:\n  retrieval evaluate {folder}\n  retrieval export {folder}")


@click.command()
@click.argument("teacher")
@click.argument("photos", type=PATH)
@click.option("--output", "-o", type=PATH, required=True, help="The student's bundle to write.")
@click.option("--student", default="core.convnet", help="The student's backbone.")
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
    extra: tuple[str, ...],
    **options: Any,
) -> None:
    """Train a small model to embed photos as a large one does, and export it.

    TEACHER is a bundle, a run, or the name of a pretrained backbone. The photos need no labels.

    Example:  retrieval distill core.efficientnet_lite0 photos/ --output small.bundle
    """
    with loading():
        from retrieval.training.distill import distill as distilled
        from retrieval.training.process import interruptible
    run = run or Path("runs") / output.stem
    options |= {"run": run, "plugins": extra, "report": say}
    try:
        with interruptible(run / "distill.json", options["resume"]):
            result = distilled(teacher, photos, output, **options)
    except Interrupted as error:
        # The suggested command keeps --replace, because the old bundle is still there.
        again = this_command("--resume") if error.begun else this_command()
        raise Interrupted(f"Interrupted. Go on with: {again}") from None
    say(str(result))
    say(f"Next:\n  retrieval index create photos.index {photos} --model {output}")
