"""Weights from checkpoints: load them into a model, start from another run, restore a learner."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from retrieval.data.datasets import Dataset
from retrieval.errors import DataError, PluginError, RecipeError
from retrieval.model.contracts import Learner
from retrieval.model.model import Model
from retrieval.model.products import check_learner, model_parts
from retrieval.recipe.read import Recipe
from retrieval.run import checkpoint
from retrieval.run.build import build_backbone
from retrieval.run.folder import weights_files


def load_weights(model: Model, state: Mapping[str, Any], path: Path) -> None:
    """Load a checkpoint's weights into a model.

    Raises:
        DataError: the weights do not match the model.
    """
    try:
        model.load_state_dict(state["model"])
    except (KeyError, RuntimeError) as error:
        detail = (str(error).splitlines() or ["?"])[-1].strip().rstrip(".")
        raise DataError(
            f"{path}: the checkpoint does not match the model: {detail}. The recipe or a plugin has"
            " changed since training."
        ) from error


def take_weights(model: Model, recipe: Recipe) -> None:
    """Load into a model the weights of the run that `[train] start_from` names, if it is set.

    `[train] start_parts` names the parts to load. A recipe with a learner loads only the backbone.

    Raises:
        RecipeError: the run does not exist, or some of its weights do not match the model's in name
            or shape; the message lists the first eight.
        DataError: the run's checkpoint is damaged.
    """
    if recipe.train.start_from is None:
        return
    source = Path(recipe.train.start_from)
    if source.is_file():
        files = [source]
    else:
        files = weights_files(source)
    if not files:
        raise RecipeError(
            f"[train] start_from: {source} is neither a checkpoint nor a run with a checkpoint."
        )
    theirs: dict[str, Tensor] = checkpoint.load_checkpoint(files[0])["model"]
    parts = [
        part for part in recipe.train.start_parts if recipe.learner is None or part == "backbone"
    ]
    faults = {part: _mismatches(part, model.state_dict(), theirs) for part in parts}
    if problems := [problem for sentences in faults.values() for problem in sentences]:
        matching = ", ".join(f'"{part}"' for part in parts if not faults[part])
        advice = f"Load only the parts that match: [train] start_parts = [{matching}]."
        raise RecipeError(
            [
                *(f"[train] start_from: {problem}" for problem in problems[:8]),
                advice if matching else "No part matches. Name a run of the same model.",
            ]
        )
    model.load_state_dict(
        {name: value for name, value in theirs.items() if name.partition(".")[0] in parts},
        strict=False,
    )


def _mismatches(part: str, ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """Return a sentence for each weight of a part that one model lacks, or whose shapes differ."""
    problems = []
    for name in dict.fromkeys([*ours, *theirs]):
        if not name.startswith(f"{part}."):
            continue
        shape, their_shape = (tuple(w[name].shape) if name in w else None for w in (ours, theirs))
        if shape is None:
            problems.append(f"that run has {name} {their_shape}, but this model does not.")
        elif their_shape is None:
            problems.append(f"this model has {name} {shape}, but that run does not.")
        elif shape != their_shape:
            problems.append(f"{name} has shape {their_shape} in that run, but {shape} here.")
    return problems


def build_learner(recipe: Recipe, features: int) -> Learner:
    """Return the recipe's learner, unfitted."""
    assert recipe.learner is not None
    learner = recipe.build("learner", features=features)
    check_learner(learner, recipe.learner.name)
    return cast(Learner, learner)


def fitted_state(learner: Learner) -> dict[str, Any]:
    """Return a fitted estimator's learned attributes that are arrays, numbers, text or `None`.

    scikit-learn ends the names of learned attributes with an underscore, such as `components_`.
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
    """Return the model of a fitted learner, rebuilt from its checkpoint without fitting again.

    Raises:
        DataError: the checkpoint is missing, damaged, or belongs to another recipe.
    """
    state = checkpoint.load_checkpoint(path, checkpoint.TRAIN_AGAIN)
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
            f"{path} lacks what the learner {name} needs: {error.__cause__ or error}."
            f" {checkpoint.TRAIN_AGAIN}"
        ) from error
    model = Model(backbone, head, combiner)
    load_weights(model, state, path)
    return model.eval()
