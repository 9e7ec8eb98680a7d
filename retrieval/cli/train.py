"""`retrieval check` and `retrieval train`."""

from __future__ import annotations

import os
from pathlib import Path

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

            # Of several processes, the first speaks.
            is_first = os.environ.get("RANK", "0") == "0"
            folder, checked = read_given(
                output,
                recipe,
                overrides,
                extra,
                replace_plugins=options["replace_plugins"],
                report=say if is_first else lambda line: None,
            )
        else:
            checked = read_recipe(recipe, overrides, extra)
            folder = output or Path("runs") / checked.name
        # slow to import; a wrong path has already been reported
        from accelerate import PartialState

        from retrieval.training.process import interruptible
        from retrieval.training.tracking import tracking
        from retrieval.training.trainer import train_run

    try:
        interruption = interruptible(folder / "recipe.toml", resume)
        with interruption, naming(recipe), tracking(track, checked, say):
            train_run(folder, checked, resume=resume, report=say, **options)
    except Interrupted as error:
        # a run that was not begun has no folder to resume
        if error.begun:
            go_on = this_command("--resume", without=ONCE)
        else:
            go_on = this_command()
        raise Interrupted(f"{error} Go on with: {go_on}") from None
    # of several processes, one speaks
    if PartialState().is_main_process:
        say(f"Trained {folder}. Next:\n  retrieval evaluate {folder}\n  retrieval export {folder}")
