"""A learner: made from a recipe, kept in a checkpoint, and its model made from that again."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from retrieval.errors import DataError, PluginError
from retrieval.model.contracts import Dataset, Learner
from retrieval.model.model import Model
from retrieval.model.products import check_learner, model_parts
from retrieval.recipe.read import Recipe
from retrieval.run import checkpoint
from retrieval.run.build import build_backbone
from retrieval.run.weights import load_weights


def build_learner(recipe: Recipe, features: int) -> Learner:
    """Return the recipe's learner, not fitted."""
    assert recipe.learner is not None
    learner = recipe.build("learner", features=features)
    check_learner(learner, recipe.learner.name)
    return cast(Learner, learner)


def fitted_state(learner: Learner) -> dict[str, Any]:
    """Return a fitted estimator's attributes (scikit-learn's `name_`) that are arrays, numbers or
    text.
    """
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


def load_learned(recipe: Recipe, dataset: Dataset, path: Path) -> Model:
    """Return the model of a fitted learner from its checkpoint, without fitting again.

    Raises:
        DataError: the checkpoint is missing, damaged, or of another recipe.
    """
    state = checkpoint.load(path, "Train again, with --replace.")
    backbone = build_backbone(recipe, dataset)
    learner = build_learner(recipe, backbone.features)
    for name, value in state.get("learner", {}).items():
        setattr(learner, name, value.numpy() if isinstance(value, torch.Tensor) else value)
    assert recipe.learner is not None
    name = recipe.learner.name
    try:
        head, combiner = model_parts(learner, name, backbone.features)
    except PluginError as error:
        raise DataError(
            f"{path} does not hold what {name} needs: {error.__cause__ or error}."
        ) from error
    model = Model(backbone, head, combiner)
    load_weights(model, state, path)
    return model.eval()
