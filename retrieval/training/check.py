"""`retrieval check`: build what a recipe names and run one batch through it; nothing is written."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

from retrieval.data.loading import inputs
from retrieval.data.sampling import batches_in_epoch
from retrieval.data.splits import Splits, make_splits
from retrieval.errors import DataError, RecipeError
from retrieval.host.plugin_calls import calling
from retrieval.model.contracts import Dataset, Learner
from retrieval.model.guard import check_width
from retrieval.model.model import Model
from retrieval.model.products import model_parts
from retrieval.recipe.read import Recipe
from retrieval.run import checkpoint
from retrieval.run.build import build_backbone, build_dataset, code_size
from retrieval.run.open import build_run
from retrieval.run.weights import build_learner
from retrieval.training.comparison import space
from retrieval.training.learn import NOTHING, fit, nothing_to_train
from retrieval.training.probe import look_ahead, open_some
from retrieval.training.process import make_accelerator


def run_one_batch(recipe: Recipe) -> list[str]:
    """Build a checked recipe, open some files, and try a batch in each phase.

    `[search]` is checked as a comparison does.

    Returns:
        What was found, one line each.

    Raises:
        RetrievalError: something does not work; the same sentences as in training.
    """
    if recipe.search and (wrong := space.faults(recipe)):
        raise RecipeError(wrong)
    accelerator = make_accelerator(recipe)
    checkpoint.seed_everything(recipe.seed)
    if recipe.learner is not None:
        return _check_learner(recipe)
    with tempfile.TemporaryDirectory() as folder:
        run = build_run(Path(folder), recipe)
    lines = [_items(recipe, run.splits), _model(recipe, run.model)]
    lines += [f"note: {note}" for note in run.splits.notes]
    if nothing_to_train(run):
        open_some(run)
        return [*lines, f"{NOTHING} The recipe is fine."]
    seen = look_ahead(run, accelerator)
    lines += [*seen.lines, *(f"warning: {warning}" for warning in seen.warnings)]
    batches = batches_in_epoch(len(run.splits.train), recipe.sampler)
    verdict = "The recipe runs; read the warnings." if seen.warnings else "The recipe is fine."
    return [
        *lines,
        f"{batches} batches per epoch, {sum(p.epochs for p in recipe.phases)} epochs. {verdict}",
    ]


def _check_learner(recipe: Recipe) -> list[str]:
    assert recipe.learner is not None
    dataset = build_dataset(recipe)
    splits = make_splits(dataset, recipe.split)
    backbone = build_backbone(recipe, dataset).eval()
    learner = build_learner(recipe, backbone.features)
    model = Model(backbone, nn.Identity())
    count = _fit_some(learner, model, dataset, splits, recipe)
    head, combiner = model_parts(learner, recipe.learner.name, backbone.features)
    return [
        _items(recipe, splits),
        _model(recipe, Model(backbone, head, combiner)),
        *(f"note: {note}" for note in splits.notes),
        f"fitted {count:,} items. The recipe is fine.",
    ]


def _fit_some(
    learner: Learner, model: Model, dataset: Dataset, splits: Splits, recipe: Recipe
) -> int:
    """Fit a learner on some training items, on more where it refuses few; return how many."""
    assert recipe.learner is not None
    name, backbone = recipe.learner.name, f"The backbone {recipe.backbone.name}"
    labels = splits.train_labels
    classes = len(np.unique(labels))
    # a few classes and a few items of each are enough for most; as many principal components as
    # that take more
    for number, of in ((16, 8), (classes, -(-512 // classes)), (classes, -(-4096 // classes))):
        rows = np.concatenate(
            [np.flatnonzero(labels == label)[:of] for label in np.unique(labels)[:number]]
        )
        batches = inputs(dataset, splits.train[rows], model.preprocessing, recipe.evaluate.batch)
        with calling(backbone), torch.inference_mode():
            x = torch.cat([model.features(batch) for batch in batches]).numpy().astype(np.float64)
        check_width(x, backbone, model.backbone.features)
        try:
            fit(learner, name, x, labels[rows])
            return len(rows)
        except ValueError as error:
            refused = error
        if len(rows) == len(labels):
            break
    raise DataError(
        f"{name} refuses {len(rows):,} of the {len(labels):,} items that train:"
        f" {str(refused).rstrip('.')}."
    ) from refused


def _items(recipe: Recipe, splits: Splits) -> str:
    gallery = f" against a gallery of {len(splits.gallery):,}" if splits.gallery is not None else ""
    return (
        f"data: {recipe.data.name}, {len(splits.train):,} to train ({len(splits.train_classes)}"
        f" classes), {len(splits.validation):,} to validate, {len(splits.query):,} to test{gallery}"
    )


def _model(recipe: Recipe, model: Model) -> str:
    weights = sum(p.numel() for p in model.parameters())
    return (
        f"model: {recipe.backbone.name}, {model.backbone.features} features, codes of"
        f" {code_size(model)}, {weights:,} weights"
    )
