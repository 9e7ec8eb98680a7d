"""Train a recipe from Python: `retrieval.train`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from retrieval.model.contracts import Combiner, Dataset, Generator, Learner
from retrieval.recipe.read import Recipe, naming, read_recipe
from retrieval.run.objects import objects_of
from retrieval.run.open import Run
from retrieval.run.resume import read_given
from retrieval.serving.files.places import StrPath
from retrieval.serving.progress import Progress, shown
from retrieval.training.process import Interrupted
from retrieval.training.tracking import tracking
from retrieval.training.trainer import train as train_run


@shown
def train(
    recipe: StrPath | Mapping[str, Any] | Recipe,
    output: StrPath | None = None,
    *,
    overrides: Sequence[str] = (),
    plugins: Sequence[str] = (),
    resume: bool = False,
    replace: bool = False,
    replace_plugins: bool = False,
    dataset: Dataset | None = None,
    backbone: nn.Module | None = None,
    combiner: Combiner | None = None,
    loss: Callable[..., Any] | None = None,
    miner: Callable[..., Any] | None = None,
    generator: Generator | None = None,
    learner: Learner | None = None,
    track: Sequence[str] = (),
    progress: Progress = True,
    report: Callable[[str], None] | None = None,
) -> Run:
    """Train a recipe into a run's folder, and return the run with its best weights.

    An object may take the place of a part that the recipe names, or does not name at all. Training
    works on a copy; yours stays as it is. Such a run is resumed and opened (`load_run`) only with
    the same objects, and exported like any other.

    Args:
        recipe: a TOML file, a dictionary of its tables, or a `Recipe`.
        output: the run's folder; by default `runs/NAME`, with the recipe's name.
        overrides: changes to the recipe, as `"loss.margin=0.2"`.
        plugins: further plugin files or modules.
        resume: go on from the run's last checkpoint; with `overrides=["train.epochs=N"]` also for
            longer.
        replace: put a new run in the place of the one that is there.
        replace_plugins: with `resume`, go on with the plugin files as they are now, not with the
            run's copies.
        dataset: instead of `[data]`.
        backbone: instead of `[backbone]`: a `retrieval.Backbone`, or any module from images (B,
            channels, H, W) or vectors (B, F') to features (B, F). The width of its features is
            measured. What its attribute `preprocessing`, a `retrieval.Preprocessing`, says is done
            to images before; without one they become RGB, 224 × 224, normalised as for ImageNet.
        combiner: instead of `[combiner]`. A loss or miner that has it as `distance` keeps it.
        loss: instead of `[loss]`, called as pytorch-metric-learning's.
        miner: instead of `[miner]`.
        generator: instead of `[generator]`.
        learner: instead of `[learner]`: an estimator, not fitted.
        track: trackers that are told how it goes: "wandb", "mlflow", or a plugin's. One that fails
            is told in a sentence, and stops nothing.
        progress: True shows a bar, False nothing; a function is told (what, done, total).
        report: is told a line for each epoch; by default it is printed where bars are shown.

    Raises:
        RecipeError: with every problem of the recipe.
        PluginError: a part breaks its contract.
        DataError: the folder is taken or in use, what is there does not fit, or the loss became
            NaN.
        Interrupted: training was asked to stop (Ctrl-C); the checkpoint is written.
    """
    objects = objects_of(
        dataset=dataset,
        backbone=backbone,
        combiner=combiner,
        loss=loss,
        miner=miner,
        generator=generator,
        learner=learner,
    )
    tell = report or (print if progress is True else _nothing)
    with naming(recipe) if isinstance(recipe, str | PathLike) else nullcontext():
        if resume:
            folder, made = read_given(
                output,
                recipe,
                overrides,
                plugins,
                replace_plugins=replace_plugins,
                report=tell,
                objects=objects,
            )
        else:
            made = read_recipe(recipe, overrides, plugins, objects=objects)
            folder = Path(output) if output else Path("runs") / made.name
        try:
            with tracking(track, made, tell):
                return train_run(
                    folder,
                    made,
                    resume=resume,
                    replace=replace,
                    replace_plugins=replace_plugins,
                    report=tell,
                )
        except Interrupted as stopped:
            raise Interrupted(f"{stopped} Go on with resume=True, into {folder}.") from None


def _nothing(line: str) -> None:
    """Say nothing."""
