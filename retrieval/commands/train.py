"""`retrieval check` and `retrieval train`."""

from __future__ import annotations

from pathlib import Path

import click

from retrieval.commands import say
from retrieval.commands.again import this_command
from retrieval.commands.plugins import PLUGIN_OPTION, TRUST_OPTION

RECIPE = click.argument("recipe", type=click.Path(path_type=Path))
CHANGES = click.argument("changes", nargs=-1, metavar="[KEY=VALUE]...")
SET_OPTION = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a value of the recipe, as in loss.margin=0.2; repeatable. loss.name=… takes the other loss's parameters "
    "out, loss=none the loss. Further changes may follow the recipe without --set.",
)


@click.command()
@RECIPE
@CHANGES
@SET_OPTION
@PLUGIN_OPTION
@TRUST_OPTION
def check(recipe: Path, changes: tuple[str, ...], overrides: tuple[str, ...], extra: tuple[str, ...]) -> None:
    """Check a recipe: every problem at once; then build it all and run one batch.

    Example:  retrieval check models/digits/recipe.toml --set loss.alpha=1.5
    """
    from retrieval.runtime import quiet_threads

    quiet_threads()
    from retrieval.recipe import naming, read_recipe

    made, plugins = read_recipe(recipe, (*overrides, *changes), extra)
    from retrieval.train.check import run_one_batch  # slow to import: a wrong path is said at once

    with naming(recipe):
        for line in run_one_batch(made, plugins):
            say(line)


@click.command()
@RECIPE
@CHANGES
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="The run's folder; by default runs/NAME, with the recipe's name.",
)
@click.option("--resume", is_flag=True, help="Go on from the run's last checkpoint.")
@SET_OPTION
@PLUGIN_OPTION
@TRUST_OPTION
def train(
    recipe: Path,
    changes: tuple[str, ...],
    output: Path | None,
    resume: bool,
    overrides: tuple[str, ...],
    extra: tuple[str, ...],
) -> None:
    """Train a recipe into a run folder.

    \b
    Example:  retrieval train models/digits/recipe.toml --set loss.alpha=1.5 --output runs/digits
    Several GPUs:  accelerate launch -m retrieval.cli train models/digits/recipe.toml
    Several CPU processes:  torchrun --nproc-per-node 2 -m retrieval.cli train models/digits/recipe.toml
    """
    from retrieval.runtime import quiet_threads

    quiet_threads()
    from retrieval.recipe import naming, read_recipe

    made, plugins = read_recipe(recipe, (*overrides, *changes), extra)
    from retrieval.train.resume import same_recipe  # slow to import: a wrong path is said at once
    from retrieval.train.surroundings import Interrupted
    from retrieval.train.trainer import train as train_run

    folder = output or Path("runs") / made.name
    if resume:
        made, plugins = same_recipe(folder, made)
        if (folder / "summary.json").is_file():
            say(f"{folder} is complete already. Next: retrieval evaluate {folder}")
            return
    try:
        with naming(recipe):
            train_run(folder, made, plugins, resume=resume, report=say)
    except KeyboardInterrupt:
        started = ["--resume"] if (folder / "recipe.toml").is_file() else []
        raise Interrupted(f"Interrupted. Go on with: {this_command(*started)}") from None
    except Interrupted as stopped:
        raise Interrupted(f"{stopped} Go on with: {this_command('--resume')}") from None
    say(f"Trained {folder}. Next:\n  retrieval evaluate {folder}\n  retrieval export {folder}")
