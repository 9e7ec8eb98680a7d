"""`retrieval check`: build all that a recipe names and run one batch through it, without writing anything."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

from retrieval.data.loading import TrainBatches, inputs
from retrieval.data.splits import Splits, make_splits
from retrieval.errors import DataError
from retrieval.model import Model
from retrieval.plugins import Plugins
from retrieval.recipe import Recipe
from retrieval.train import checkpoint
from retrieval.train.build import build_backbone, build_dataset, code_size
from retrieval.train.learn import build_learner
from retrieval.train.run import build_run
from retrieval.train.step import Step
from retrieval.train.surroundings import make_accelerator


def run_one_batch(recipe: Recipe, plugins: Plugins) -> list[str]:
    """Build a checked recipe and compute one batch, forward and backward, in each phase.

    Returns:
        What was found, one line each.

    Raises:
        RetrievalError: something does not work; the same sentences as in training.
    """
    accelerator = make_accelerator(recipe)
    checkpoint.seed_everything(recipe.seed)
    if recipe.learner is not None:
        return _check_learner(recipe, plugins)
    with tempfile.TemporaryDirectory() as folder:
        run = build_run(Path(folder), recipe, plugins)
    assert run.objective is not None
    splits, model = run.splits, run.model.to(accelerator.device)
    lines = [_items(recipe, splits), _model(recipe, model)]
    lines += [f"note: {note}" for note in splits.notes]
    batches = TrainBatches(
        run.dataset, splits.train, splits.train_labels, model.preprocessing,
        sampler=recipe.sampler, augmentation=recipe.augmentation, seed=recipe.seed,
    )  # fmt: skip
    for module in (run.objective.loss, run.objective.miner, run.objective.generator):
        if module is not None:
            module.to(accelerator.device)
    step = Step(model, run.objective, recipe, accelerator, from_features=False)
    batch, labels = (t.to(accelerator.device) for t in next(batches.epoch(0)))
    for phase in recipe.phases:
        losses = step(batch, labels, phase)
        shown = []
        for name, value in (("loss", losses.metric), ("generator loss", losses.generator)):
            if value is None:
                continue
            if not torch.isfinite(value):
                raise DataError(
                    f"One batch in phase '{phase.name}' gives {name} {float(value)}: check the data and the parameters."
                )
            if value.requires_grad:
                torch.autograd.backward(value, retain_graph=True)
            shown.append(f"{name} {float(value.detach()):.4f}")
        shown += [f"{name} {_short(float(value))}" for name, value in losses.figures.items()]
        if losses.figures.get("triplets") == 0:
            lines.append(
                f"note: in phase '{phase.name}' the batch has no triplet that the generator could change."
            )
        lines.append(f"one batch of {len(labels)}, phase '{phase.name}': {', '.join(shown)}")
    return [
        *lines,
        f"{len(batches)} batches an epoch, {sum(p.epochs for p in recipe.phases)} epochs. The recipe is fine.",
    ]


def _check_learner(recipe: Recipe, plugins: Plugins) -> list[str]:
    dataset = build_dataset(recipe, plugins)
    splits = make_splits(dataset, recipe.split)
    backbone = build_backbone(recipe, plugins, dataset).eval()
    learner = build_learner(recipe, plugins, backbone.features)
    model = Model(backbone, nn.Identity())
    # a few classes, a few items of each: enough for any learner to fit
    labels = splits.train_labels
    few = np.concatenate([np.flatnonzero(labels == label)[:8] for label in np.unique(labels)[:16]])
    with torch.inference_mode():
        x = torch.cat(
            [
                model.features(b)
                for b in inputs(dataset, splits.train[few], model.preprocessing, recipe.evaluate.batch)
            ]
        )
    try:
        learner.fit(x.numpy().astype(np.float64), labels[few])
    except ValueError as error:
        raise DataError(
            f"{recipe.learner and recipe.learner['name']} refuses a small part of the training features: {error}."
        ) from error
    head, combiner = learner.to_model_parts()
    return [
        _items(recipe, splits), _model(recipe, Model(backbone, head, combiner)),
        *(f"note: {note}" for note in splits.notes), f"fitted {len(few)} items. The recipe is fine.",
    ]  # fmt: skip


def _short(value: float) -> str:
    return f"{value:.0f}" if value.is_integer() else f"{value:.4g}"


def _items(recipe: Recipe, splits: Splits) -> str:
    gallery = f" against a gallery of {len(splits.gallery):,}" if splits.gallery is not None else ""
    return (
        f"data: {recipe.data['name']}, {len(splits.train):,} to train ({len(splits.train_classes)} classes), "
        f"{len(splits.validation):,} to validate, {len(splits.query):,} to test{gallery}"
    )


def _model(recipe: Recipe, model: Model) -> str:
    weights = sum(p.numel() for p in model.parameters())
    return f"model: {recipe.backbone['name']}, {model.backbone.features} features, codes of {code_size(model)}, {weights:,} weights"
