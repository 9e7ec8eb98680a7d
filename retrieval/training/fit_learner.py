"""Runs without training steps: fit a learner (an estimator), or write an untrained model."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from torch import nn

from retrieval.base.arrays import Floats32, Floats64, Ints
from retrieval.base.files import write_json
from retrieval.data.datasets import Dataset
from retrieval.data.features import backbone_features
from retrieval.data.splits import Splits, make_splits
from retrieval.errors import DataError, PluginError, RecipeError
from retrieval.evaluation.evaluate_run import DividedItems, refuse_unanswerable
from retrieval.host.factory import calling
from retrieval.model.checked_parts import model_parts
from retrieval.model.contracts import Learner
from retrieval.model.model import Model
from retrieval.recipe.read import Recipe
from retrieval.run import checkpoint_format
from retrieval.run.build import (
    build_backbone,
    build_dataset,
    build_learner,
    drawn_at_random,
    fitted_state,
    load_learned,
    take_weights,
)
from retrieval.run.open import Run
from retrieval.training.build_optimizers import parts_of
from retrieval.training.process import validate


def fit_learner(
    path: Path,
    recipe: Recipe,
    device: torch.device,
    report: Callable[[str], None],
    create: Callable[[Run], None],
) -> Run:
    """Fit a recipe's learner on the backbone's features and write the run.

    `create` creates the run's folder if it is new.

    Raises:
        DataError: the learner refuses the features.
        RecipeError: there are several processes.
    """
    assert recipe.learner is not None
    _refuse_processes("A learner is fitted without steps")
    dataset, splits, model = items_and_backbone(recipe)
    take_weights(model, recipe)
    for warning in random_frozen(recipe, dataset):
        report(f"warning: {warning}")
    features = backbone_features(model, dataset, device, recipe.evaluate.batch_size)
    learner = build_learner(recipe, model.backbone.features)
    assert features.arrays is not None
    started = time.perf_counter()
    name = recipe.learner.name
    x = np.asarray(features.arrays[splits.train], dtype=np.float64)
    fit(learner, name, x, splits.train_labels)
    seconds = time.perf_counter() - started
    head, combiner = model_parts(learner, name, model.backbone.features)
    model = Model(model.backbone, head, combiner).to(device).eval()
    run = Run(path, recipe, dataset, splits, model, device=device)
    create(run)
    run.plugins.notify("retrieval_run_start", run=run)
    metrics: dict[str, float] = {}
    if len(splits.validation):
        metrics, _ = validate(run, features, True, lambda line: report(f"warning: {line}"))
    checkpoint_format.save(
        run.best,
        {"model": model.state_dict(), "learner": fitted_state(learner), "metrics": metrics},
    )
    # now, while the learner can be fitted again; at export the fitted object is gone
    _verify(run, np.asarray(features.arrays[splits.train[:256]], dtype=np.float32))
    record: dict[str, Any] = {"phase": "fit", "epoch": 1, "step": 0, "seconds": seconds}
    record |= {f"validation_{name}": value for name, value in metrics.items()}
    run.log(record)
    write_json(path / "summary.json", {"validation": metrics, "seconds": seconds}, DataError)
    run.plugins.notify("retrieval_run_end", run=run, metrics=metrics)
    line = f"fitted {len(splits.train)} items in {seconds:.1f} s"
    for name, value in metrics.items():
        if name in ("map_at_r", "recall_at_1"):
            line += f", validation {name} {value:.4f}"
    report(line)
    return run


def items_and_backbone(recipe: Recipe) -> tuple[Dataset, Splits, Model]:
    """Return a learner's items, their sides, and a model that is only the backbone.

    Raises:
        DataError: a side cannot be measured.
    """
    dataset = build_dataset(recipe)
    splits = make_splits(dataset, recipe.split)
    refuse_unanswerable(DividedItems(recipe, dataset, splits))
    return dataset, splits, Model(build_backbone(recipe, dataset), nn.Identity()).eval()


def _refuse_processes(why: str) -> None:
    if PartialState().num_processes > 1:
        raise RecipeError(
            f"{why}, so there is nothing to divide over several processes. Start the command in one"
            " process, without torchrun or accelerate launch."
        )


def fit(learner: Learner, name: str, features: Floats64, labels: Ints) -> None:
    """Fit a learner on features (N, F) and labels (N,).

    Raises:
        DataError: the estimator rejects the data.
        PluginError: the learner fails in any other way.
    """
    try:
        with calling(f"The learner {name}"):
            learner.fit(features, labels)
    except PluginError as error:
        # scikit-learn's estimators refuse data with a ValueError
        if not isinstance(error.__cause__, ValueError):
            raise
        reason = str(error.__cause__).rstrip(".")
        raise DataError(
            f"The learner {name} cannot be fitted on {len(features):,} items: {reason}."
        ) from error


def _verify(run: Run, features: Floats32) -> None:
    """Refuse a run whose checkpoint gives other codes than the fitted learner.

    Raises:
        PluginError: the codes of the features (N, F) differ.
    """
    assert run.recipe.learner is not None
    loaded = load_learned(run.recipe, run.dataset, run.best).to(run.device)
    x = torch.from_numpy(features).to(run.device)
    with torch.inference_mode():
        if not torch.equal(run.model(x, True)[1], loaded(x, True)[1]):
            raise PluginError(
                f"The learner {run.recipe.learner.name} cannot be saved: the model differs after"
                " loading. Everything that to_model_parts() needs must be in attributes that are"
                " arrays, numbers or text and whose names end with an underscore, such as"
                " `components_`."
            )


def random_frozen(recipe: Recipe, dataset: Dataset) -> list[str]:
    """Return a warning if the backbone has random weights and is not trained, else nothing."""
    if not recipe.backbone.frozen and recipe.learner is None:
        return []
    drawn = drawn_at_random(recipe, dataset)
    if not drawn:
        return []
    return [
        f"[backbone] {recipe.backbone.name} is frozen, but its weights are random: {len(drawn)}"
        f" tensors depend on the seed, such as '{drawn[0]}'. Use pretrained weights, start from a"
        " run ([train] start_from), or train the backbone."
    ]


NOTHING = "The model has nothing to train: the backbone's features are used as they are."


def nothing_to_train(run: Run) -> bool:
    """Return whether backbone, head, combiner and texts have no trainable parameter."""
    assert run.objective is not None
    parts = parts_of(run.model, run.objective, run.recipe.backbone.frozen)
    return not any(parts[name] for name in ("backbone", "head", "combiner", "text"))


def write_untrained(run: Run, report: Callable[[str], None], create: Callable[[Run], None]) -> Run:
    """Write a run of an untrained model, which can be evaluated and exported.

    `create` creates the run's folder if it is new.

    Raises:
        RecipeError: there are several processes.
    """
    _refuse_processes("The model has nothing to train")
    run.splits.notes.append(NOTHING)
    create(run)
    run.plugins.notify("retrieval_run_start", run=run)
    checkpoint_format.save(run.best, {"model": run.model.state_dict(), "metrics": {}})
    write_json(run.path / "summary.json", {"validation": {}, "epochs": 0, "steps": 0}, DataError)
    run.model.eval()
    run.plugins.notify("retrieval_run_end", run=run, metrics={})
    for warning in random_frozen(run.recipe, run.dataset):
        report(f"warning: {warning}")
    report(NOTHING)
    return run
