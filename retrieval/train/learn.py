"""Learners: features → a scikit-learn estimator → a model."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from retrieval.contracts import Dataset, Learner
from retrieval.data.splits import make_splits
from retrieval.errors import DataError, PluginError
from retrieval.model import Model
from retrieval.plugin_calls import calling
from retrieval.plugins import Plugins
from retrieval.products import check_learner, model_parts
from retrieval.recipe import Recipe
from retrieval.train import checkpoint
from retrieval.train.build import build_backbone, build_dataset
from retrieval.train.features import backbone_features
from retrieval.train.folder import write_json
from retrieval.train.run import Run, begin_folder, load_weights
from retrieval.train.start import take_weights
from retrieval.train.surroundings import make_accelerator
from retrieval.train.validate import validate


def fit_learner(
    path: Path,
    recipe: Recipe,
    plugins: Plugins,
    *,
    report: Callable[[str], None] = lambda line: None,
    resume: bool = False,
    replace: bool = False,
) -> Run:
    """Fit a recipe's learner on the backbone's features and write the run.

    Args:
        path: the run's folder.
        recipe: a checked recipe with a `[learner]`.
        plugins: the plugins it was checked with.
        report: is told what was done.
        resume: write into the run that is there; a fit has no steps to go on from, and is made again.
        replace: put the run in the place of one that is there.

    Raises:
        DataError: the learner refuses the features.
    """
    checkpoint.seed_everything(recipe.seed)
    dataset = build_dataset(recipe, plugins)
    splits = make_splits(dataset, recipe.split)
    model = Model(build_backbone(recipe, plugins, dataset), nn.Identity())
    take_weights(model, recipe)
    device = make_accelerator(recipe).device
    features = backbone_features(model, dataset, device, recipe.evaluate.batch)
    learner = build_learner(recipe, plugins, model.backbone.features)
    assert features.arrays is not None
    started = time.perf_counter()
    name = str((recipe.learner or {}).get("name"))
    try:
        fit(learner, name, np.asarray(features.arrays[splits.train], dtype=np.float64), splits.train_labels)
    except ValueError as refused:
        raise DataError(f"{name} refuses the training features: {refused}.") from refused
    seconds = time.perf_counter() - started
    head, combiner = model_parts(learner, name, model.backbone.features)
    model = Model(model.backbone, head, combiner).to(device).eval()
    run = Run(path, recipe, plugins, dataset, splits, model, device=device)
    if not resume:
        begin_folder(run, report, replace=replace)
    metrics = validate(run, features, True) if len(splits.validation) else {}
    checkpoint.save(
        run.best, {"model": model.state_dict(), "learner": fitted_state(learner), "metrics": metrics}
    )
    _verify(run, np.asarray(features.arrays[splits.train[:256]], dtype=np.float32))
    run.log(
        {
            "phase": "fit",
            "epoch": 0,
            "step": 0,
            "seconds": seconds,
            **{f"validation_{k}": v for k, v in metrics.items()},
        }
    )
    write_json(path / "summary.json", {"validation": metrics, "seconds": seconds})
    shown = "".join(
        f", validation {k} {v:.4f}" for k, v in metrics.items() if k in ("map_at_r", "recall_at_1")
    )
    report(f"fitted {len(splits.train)} items in {seconds:.1f} s{shown}")
    return run


def build_learner(recipe: Recipe, plugins: Plugins, features: int) -> Learner:
    """Return the recipe's learner, not fitted."""
    learner = plugins.build("learners", recipe.component("learner") or {}, {"features": features})
    check_learner(learner, str((recipe.learner or {}).get("name")))
    return cast(Learner, learner)


def fit(learner: Learner, name: str, features: NDArray[np.float64], labels: NDArray[np.int64]) -> None:
    """Fit a learner on features (N, F) and labels (N,).

    Raises:
        ValueError: an estimator's way to say that data do not serve.
        PluginError: it failed in any other way.
    """
    try:
        with calling(f"The learner {name}"):
            learner.fit(features, labels)
    except PluginError as error:
        if isinstance(error.__cause__, ValueError):
            raise error.__cause__ from None
        raise


def fitted_state(learner: Learner) -> dict[str, Any]:
    """Return a fitted estimator's attributes (scikit-learn's `name_`) that are arrays, numbers or text."""
    state: dict[str, Any] = {}
    for name, value in vars(learner).items():
        if not name.endswith("_") or name.startswith("_"):
            continue
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
            state[name] = torch.from_numpy(np.array(value))
        elif isinstance(value, bool | int | float | str) or value is None:
            state[name] = value
    return state


def load_learned(recipe: Recipe, plugins: Plugins, dataset: Dataset, path: Path) -> Model:
    """Return the model of a fitted learner from its checkpoint, without fitting again.

    Raises:
        DataError: the checkpoint is missing, damaged, or of another recipe.
    """
    state = checkpoint.load(path, "Train again, with --replace.")
    backbone = build_backbone(recipe, plugins, dataset)
    learner = build_learner(recipe, plugins, backbone.features)
    for name, value in state.get("learner", {}).items():
        setattr(learner, name, value.numpy() if isinstance(value, torch.Tensor) else value)
    name = str((recipe.learner or {}).get("name"))
    try:
        head, combiner = model_parts(learner, name, backbone.features)
    except PluginError as error:
        raise DataError(f"{path} does not hold what {name} needs: {error.__cause__ or error}.") from error
    model = Model(backbone, head, combiner)
    load_weights(model, state, path)
    return model.eval()


def _verify(run: Run, features: NDArray[np.float32]) -> None:
    """What was saved must give the same codes as what was fitted."""
    again = load_learned(run.recipe, run.plugins, run.dataset, run.best).to(run.device)
    x = torch.from_numpy(features).to(run.device)
    with torch.inference_mode():
        if not torch.equal(run.model(x, True)[1], again(x, True)[1]):
            raise PluginError(
                f"{run.recipe.learner and run.recipe.learner['name']} keeps what it learned in something else than arrays and "
                "numbers named like `components_`, so it cannot be saved. Its fitted attributes must be enough for to_model_parts()."
            )
