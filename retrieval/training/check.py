"""Checks before training: open some files, and try a batch in each phase.

`retrieval check` runs only these checks. A new run that one process trains begins with them. They
use copies of the model and restore the random generators, so they do not affect the training.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator

from retrieval.data.augment import Labels, built_transforms
from retrieval.data.datasets import Dataset
from retrieval.data.loading import TrainBatches, inputs
from retrieval.data.splits import Splits
from retrieval.errors import DataError, RecipeError, listed
from retrieval.evaluation.evaluate_run import refuse_unanswerable
from retrieval.host.factory import calling
from retrieval.images.decoding import decode
from retrieval.model.checked_parts import model_parts
from retrieval.model.contracts import Learner
from retrieval.model.model import Model, check_width
from retrieval.recipe.read import Recipe
from retrieval.recipe.tables import Sampler
from retrieval.run import checkpoint_format
from retrieval.run.build import build_learner, build_sampler, code_size
from retrieval.run.open import Run, build_run, texts_of
from retrieval.training.fit_learner import (
    NOTHING,
    fit,
    items_and_backbone,
    nothing_to_train,
    random_frozen,
)
from retrieval.training.process import make_accelerator
from retrieval.training.step import Losses, Step


def run_one_batch(recipe: Recipe) -> list[str]:
    """Build a recipe, open some files, try a batch in each phase, and check `[search]` if present.

    Returns:
        The findings, one line each.

    Raises:
        RetrievalError: something does not work. Training would raise the same error, and comparing
            the same error about `[search]`.
    """
    if recipe.search:
        # most recipes have no [search]
        from retrieval.training.comparison.plan import search_faults

        if wrong := search_faults(recipe):
            raise RecipeError(wrong)
    accelerator = make_accelerator(recipe)
    checkpoint_format.seed_everything(recipe.seed)
    if recipe.learner is not None:
        return _check_learner(recipe)
    run = build_run(Path(recipe.name), recipe)
    refuse_unanswerable(run)
    lines = _described(recipe, run.dataset, run.splits, run.model)
    if nothing_to_train(run):
        open_some(run)
        return [*lines, f"{NOTHING} The recipe is fine."]
    trials, warnings = look_ahead(run, accelerator)
    lines += [*trials, *(f"warning: {warning}" for warning in warnings)]
    batches = len(batches_of(run, recipe.sampler))
    epochs = sum(phase.epochs for phase in recipe.phases)
    if warnings:
        verdict = "The recipe runs; read the warnings."
    else:
        verdict = "The recipe is fine."
    return [*lines, f"{batches} batches per epoch, {epochs} epochs. {verdict}"]


def build_batches(recipe: Recipe) -> None:
    """Read a recipe's data and build its parts and batches, without a step.

    Raises:
        RetrievalError: training would raise the same error.
    """
    if recipe.learner is not None:
        items_and_backbone(recipe)
        return
    run = build_run(Path(recipe.name), recipe)
    refuse_unanswerable(run)
    if not nothing_to_train(run):
        batches_of(run, recipe.sampler)


def _check_learner(recipe: Recipe) -> list[str]:
    assert recipe.learner is not None
    dataset, splits, model = items_and_backbone(recipe)
    backbone = model.backbone
    learner = build_learner(recipe, backbone.features)
    count = _fit_some(learner, model, dataset, splits, recipe)
    head, combiner = model_parts(learner, recipe.learner.name, backbone.features)
    return [
        *_described(recipe, dataset, splits, Model(backbone, head, combiner)),
        *(f"warning: {warning}" for warning in random_frozen(recipe, dataset)),
        f"fitted {count:,} items. The recipe is fine.",
    ]


def _fit_some(
    learner: Learner, model: Model, dataset: Dataset, splits: Splits, recipe: Recipe
) -> int:
    """Fit a learner on a few training items, or on more if it refuses; return their number."""
    assert recipe.learner is not None
    name = recipe.learner.name
    backbone = f"The backbone {recipe.backbone.name}"
    labels = splits.train_labels
    classes = np.unique(labels)
    # Most learners need only a few items of a few classes. A learner with many components, such as
    # PCA, needs more.
    for class_count, items in ((16, 128), (len(classes), 512), (len(classes), 4096)):
        per_class = math.ceil(items / class_count)
        chosen = classes[:class_count]
        rows = np.concatenate([np.flatnonzero(labels == label)[:per_class] for label in chosen])
        batches = inputs(
            dataset, splits.train[rows], model.preprocessing, recipe.evaluate.batch_size
        )
        with calling(backbone), torch.inference_mode():
            x = torch.cat([model.features(batch) for batch in batches]).numpy().astype(np.float64)
        check_width(x, backbone, model.backbone.features)
        try:
            fit(learner, name, x, labels[rows])
            return len(rows)
        except DataError as error:
            refused = error
        if len(rows) == len(labels):
            break
    raise refused


def _described(recipe: Recipe, dataset: Dataset, splits: Splits, model: Model) -> list[str]:
    """Return a line on the data, a line on the model, and the notes on the data."""
    gallery = ""
    if splits.gallery is not None:
        gallery = f" against a gallery of {len(splits.gallery):,}"
    weights = sum(p.numel() for p in model.parameters())
    return [
        f"data: {recipe.data.name}, {len(splits.train):,} to train ({len(splits.train_classes)}"
        f" classes), {len(splits.validation):,} to validate, {len(splits.query):,} to test"
        f"{gallery}",
        f"model: {recipe.backbone.name}, {model.backbone.features} features, embedding size"
        f" {code_size(model)}, {weights:,} weights",
        *(f"note: {note}" for note in (*dataset.notes, *splits.notes)),
    ]


LARGEST_TRIED = 256
"""Largest batch to try; if the recipe's batch is larger, a smaller batch is tried."""
MOST_CLASSES_TRIED = 32
"""Number of classes for which such a batch keeps several items of each."""
MOST_TRIES = 5
"""Number of batches to try until a weight would change."""
FILES = 64
"""Number of files to open."""


def look_ahead(run: Run, accelerator: Accelerator) -> tuple[list[str], list[str]]:
    """Try a recipe's batches in each phase, on copies of the model and the objective.

    Returns:
        One line per phase, with the losses and metrics of its batch; and warnings, one sentence per
            setting that is probably a mistake.

    Raises:
        DataError: a file cannot be read, a loss is not finite, or a batch does not fit into memory.
        PluginError: a part breaks its contract, such as a loss without a gradient.
        RecipeError: a phase trains nothing.
    """
    assert run.objective is not None
    open_some(run)
    lines = []
    random = checkpoint_format.random_state()
    try:
        warnings = [*_sampler_warnings(run), *random_frozen(run.recipe, run.dataset)]
        # one copy of both, because loss and model may share the combiner
        model, objective = copy.deepcopy((run.model, run.objective))
        objective.to(accelerator.device)
        model.to(accelerator.device)
        # built only for its errors, which name the recipe's sizes, not the trial's
        batches_of(run, run.recipe.sampler)
        batches = batches_of(run, smaller(run.recipe))
        for phase in run.recipe.phases:
            step = Step(model, objective, run.recipe, phase, len(batches), accelerator, tried=True)
            line, phase_warnings = _try(step, batches)
            lines.append(line)
            warnings += phase_warnings
    finally:
        checkpoint_format.restore_random_state(random)
    return lines, warnings


def open_some(run: Run) -> None:
    """Open up to `FILES` files, evenly spaced over all items of the splits.

    Raises:
        DataError: some of these files cannot be read; the message names them.
    """
    files = run.dataset.files
    if files is None or run.dataset.arrays is not None:
        return
    sides = [run.splits.train, run.splits.validation, run.splits.query, run.splits.gallery]
    items = np.concatenate([side for side in sides if side is not None])
    # an item may be in the gallery and among the queries
    chosen = np.unique(items[spread(len(items), FILES)])
    problems = []
    for item in chosen:
        try:
            decode(files[int(item)])
        except DataError as error:
            problems.append(f"{error} {getattr(run.dataset, 'advice', '')}".rstrip())
    if problems:
        subject = f"[data] {run.recipe.data.name} ({len(chosen)} files were opened)"
        raise DataError(listed(subject, problems))


def spread(count: int, most: int) -> list[int]:
    """Return up to `most` of the numbers below `count`, evenly spaced."""
    return [int(number) for number in np.linspace(0, count - 1, min(most, count))]


def _sampler_warnings(run: Run) -> Iterator[str]:
    """Yield warnings about batches larger than the training data or without positive pairs."""
    recipe = run.recipe
    sampler = recipe.sampler
    loss = recipe.loss
    assert loss is not None
    views = recipe.augmentation.views
    items = len(run.splits.train)
    drawn = recipe.batch_size // views
    if drawn > items:
        yield (
            f"[sampler]: a batch takes {sampler.classes} classes × {sampler.items} items ="
            f" {drawn:,}, but there are only {items:,} training items, so that items are several"
            " times in a batch. Lower [sampler] items."
        )
    pairs = run.plugins.every("losses", loss.table, lambda factory: factory.supports_miner)
    if sampler.items * views == 1 and pairs and recipe.text is None:
        yield (
            f"[sampler] items = 1: {loss.name} compares items of the same class, but a batch has"
            " only one item of each class. Set items = 2 or more."
        )


def batches_of(run: Run, sampler: Sampler) -> TrainBatches:
    """Return the run's training batches, with the batch size of `sampler`."""
    recipe = run.recipe
    texts = None
    if run.model.text is not None:
        texts = texts_of(run, ahead=False)
    return TrainBatches(
        run.dataset,
        run.splits.train,
        run.splits.train_labels,
        run.model.preprocessing,
        sampler=sampler,
        batch_sampler=build_sampler(recipe),
        augmentation=recipe.augmentation,
        transforms=built_transforms(recipe),
        seed=recipe.seed,
        texts=texts,
    )


def _try(step: Step, batches: TrainBatches) -> tuple[str, list[str]]:
    """Try batches in a step's phase until one would change a weight.

    Returns:
        A line with the losses and metrics of the last batch, and warnings.
    """
    step.set_modes()
    device = step.accelerator.device
    phase = step.phase.name
    warnings = []
    # a miner may find no pair in one batch of a good recipe, so several are tried
    for number in range(min(MOST_TRIES, len(batches))):
        batch, labels = next(batches.epoch(0, start=number))
        losses = _losses(step, batch.to(device), labels.to(device))
        gradients = [p.grad for part in step.parts.values() for p in part if p.numel()]
        changes = any(g is not None and bool(g.abs().max() > 0) for g in gradients)
        if changes:
            break
    values = []
    for name, loss in (("loss", losses.metric), ("generator loss", losses.generator)):
        if loss is not None:
            values.append(f"{name} {float(loss.detach()):.4f}")
    for name, value in losses.metrics.items():
        metric = float(value)
        if metric.is_integer():
            digits = ".0f"
        else:
            digits = ".4g"
        values.append(f"{name} {metric:{digits}}")
    if losses.metrics.get("triplets") == 0:
        warnings.append(f"in phase '{phase}' the batch has no triplet for the generator.")
    if not changes:
        mined = losses.metrics.get("mined")
        why = ""
        if mined is not None and int(mined) == 0:
            why = ": the miner found no pair"
        if number == 0:
            tried = "1 sampled batch"
        else:
            tried = f"{number + 1} sampled batches"
        warnings.append(
            f"phase '{phase}': no weight would change in {tried}{why}. Check the loss, the miner"
            " and [sampler]."
        )
    return f"one batch of {len(labels)}, phase '{phase}': {', '.join(values)}", warnings


def smaller(recipe: Recipe) -> Sampler:
    """Return the `[sampler]` of the batches to try.

    If the recipe's batch is larger than `LARGEST_TRIED`, the batch to try has fewer items of each
    class and, if that is not enough, fewer classes.
    """
    sampler = recipe.sampler
    size = LARGEST_TRIED // 2 // recipe.augmentation.views
    if recipe.batch_size <= LARGEST_TRIED:
        return sampler
    items = max(1, min(sampler.items, size // min(sampler.classes, MOST_CLASSES_TRIED)))
    classes = max(2, min(sampler.classes, size // items))  # negatives need a second class
    return sampler.model_copy(update={"items": items, "classes": classes})


def _losses(step: Step, batch: torch.Tensor, labels: Labels) -> Losses:
    """Return a batch's losses after computing the gradients of the parts that train."""
    step.zero_grad()
    try:
        losses = step.losses(batch, labels)
        losses.refuse()
    except DataError as error:
        raise DataError(
            f"On a trial batch of phase '{step.phase.name}', {str(error).rstrip('.')}. Check the"
            " data and the recipe's parameters."
        ) from error
    step.backward(losses)
    return losses
