"""Jobs of a comparison: a job trains or measures one model, and writes its metrics to a file."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import nn

from retrieval.base.arrays import Ints
from retrieval.base.files import write_json
from retrieval.base.progress import showing
from retrieval.data.datasets import Subset
from retrieval.data.splits import Splits, make_splits
from retrieval.errors import DataError, Diverged, Interrupted, RetrievalError
from retrieval.evaluation.evaluate_run import (
    DividedItems,
    Protocol,
    evaluate,
    refuse_unanswerable,
)
from retrieval.evaluation.evaluation import resolve_metrics
from retrieval.host.importing import answering
from retrieval.host.python_parts import WORDS, named_object
from retrieval.model.model import Model
from retrieval.recipe.read import Recipe, check_recipe, read_table
from retrieval.recipe.tables import Split
from retrieval.run import checkpoint_format
from retrieval.run.build import build_backbone, build_dataset, build_model
from retrieval.run.encoders import encoder_at
from retrieval.run.folder import create_folder, is_complete, is_run
from retrieval.run.open import Run
from retrieval.run.resume import changed_plugins
from retrieval.training.comparison.plan import PRIMARY, saved
from retrieval.training.tracking import tracking
from retrieval.training.trainer import train_run


@dataclass(frozen=True)
class ComparisonJob:
    """One training or measurement of a comparison.

    Attributes:
        kind: "fold" trains on all folds but one and measures that one; "seed" trains on the
            training side and measures the test side; "untrained" measures the untrained net, and
            with seed 0 also the raw items; "frozen" measures the backbone's features; "model"
            measures the model at `address`.
        table: the recipe's table.
        folder: the folder of the run, which is deleted afterwards unless the kind is "seed".
        result: the file for the metrics.
        fold: the fold's number, and the number of folds per division of the training side. If the
            side is divided again, the numbers go on: with 5 folds, the second division has 5 to 9.
        fold_by: "class" holds out whole classes, "item" items of every class.
        track: trackers of a job of the kind "seed".
        group: the comparison's name in the trackers.
        objects: the recipe's Python objects, by table.
        address: the address of a job of the kind "model".
    """

    kind: Literal["fold", "seed", "untrained", "frozen", "model"]
    table: Mapping[str, Any]
    folder: Path
    result: Path
    fold: tuple[int, int] = (0, 0)
    fold_by: Literal["class", "item"] = "class"
    track: tuple[str, ...] = ()
    group: str | None = None
    objects: Mapping[str, Any] = field(default_factory=dict)
    address: str = ""


def recipe_of(table: Mapping[str, Any], objects: Mapping[str, Any]) -> Recipe:
    """Return the checked recipe of a table, with the Python objects that the table names."""
    named = {part: value for part, value in objects.items() if named_object(table, part)}
    return check_recipe(table, objects=named)


Metrics = dict[str, dict[str, float]]
"""Metrics by name of the measured model, such as "trained"; empty for a fold that diverged."""
Do = Callable[[Sequence[ComparisonJob]], list[Metrics]]
"""Runs jobs, in this process or in others, and returns their metrics in the order of the jobs."""


def known(job: ComparisonJob) -> Metrics | None:
    """Return the metrics of a finished job, or `None`.

    Raises:
        DataError: the file of the metrics is damaged.
    """

    def parse(table: Any) -> Metrics:
        return {
            str(name): {str(metric): float(value) for metric, value in row.items()}
            for name, row in table.items()
        }

    return saved(job.result, parse, "Remove it; then the same command measures again.")


def perform(job: ComparisonJob) -> Metrics:
    """Run or resume a job, and write its metrics. A finished job is not run again.

    Raises:
        RetrievalError: the job failed.
        Interrupted: the job was stopped; its checkpoint is written.
    """
    before = known(job)
    if before is not None:
        return before
    with showing(False):
        try:
            metrics = _KINDS[job.kind](job)
        except Diverged:
            if job.kind != "fold":
                raise
            metrics = {}
    job.result.parent.mkdir(parents=True, exist_ok=True)
    write_json(job.result, metrics, DataError)
    if job.kind != "seed":
        shutil.rmtree(job.folder, ignore_errors=True)
    return metrics


def training_side(splits: Splits) -> Ints:
    """Return the training and validation items, the only ones that a search may use."""
    return np.sort(np.concatenate([splits.train, splits.validation]))


def drawn_splits(recipe: Recipe, table: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Return `count` `[split]` tables: the recipe's own if `count` is 1, else random ones.

    Raises:
        DataError: several splits are requested, but the data define their own.
    """
    recipe_split = dict(table.get("split", {}))
    if count == 1:
        return [recipe_split]
    _, splits, split = _training_items(table, recipe.objects)
    if split.by == "given":
        raise DataError(
            f'Several splits cannot be drawn, because {recipe.name} has [split] by = "given", the'
            " split of the data. Use splits=1, or set split.by to class."
        )
    if split.by == "item":
        return [{**recipe_split, "seed": split.seed + number} for number in range(count)]
    # each random split holds out as many classes as the recipe's own
    held_out = len(splits.classes) - len(np.unique(splits.labels[training_side(splits)]))
    drawn = []
    for number in range(count):
        # the bytes keep these numbers apart from other uses of the same seed
        generator = np.random.default_rng([split.seed % 2**64, number, *b"splits"])
        order = generator.permutation(splits.classes)
        drawn.append({**recipe_split, "test": sorted(order[:held_out].tolist())})
    return drawn


def fold_classes(splits: Splits, seed: int, folds: int, repeat: int = 0) -> list[list[str]]:
    """Return the names of the training side's classes, divided at random into `folds` parts.

    `repeat` is the number of the division, from 0.

    Raises:
        DataError: a part would have fewer than two classes.
    """
    classes = np.unique(splits.labels[training_side(splits)])
    if len(classes) < max(2 * folds, 4):
        raise DataError(
            f"The training side has {len(classes)} classes, but each of {folds} folds needs two."
            " Use fewer folds, hold out items with fold_by=item, or leave fewer classes to the test"
            " side."
        )
    # the first division has no number, as in comparisons from before there were repeats
    if repeat:
        numbers = [repeat]
    else:
        numbers = []
    order = np.random.default_rng([seed % 2**64, *numbers, *b"folds"]).permutation(classes)
    return [[splits.classes[i] for i in sorted(part)] for part in np.array_split(order, folds)]


def fold_recipe(job: ComparisonJob) -> Recipe:
    """Return the recipe of a "fold" job. Its dataset is the comparison's training side.

    Its test side is the fold. If the other folds have fewer classes than a batch takes, a batch
    takes more items of each class, so that its size stays about the same.
    """
    inner, splits, split = _training_items(job.table, job.objects)
    number, folds = job.fold
    if job.fold_by == "item":
        held_out = {"by": "item", "test": 1 / folds, "seed": split.seed + 1 + number}
    else:
        parts = fold_classes(splits, split.seed, folds, number // folds)
        held_out = {"by": "class", "test": parts[number % folds]}
    table = {**job.table, "split": {**split.model_dump(), **held_out}}
    objects = {**job.objects, "data": inner}
    recipe = check_recipe(table, objects=objects)
    if recipe.learner is not None:
        return recipe
    sampler = recipe.sampler
    labels = make_splits(inner, recipe.split).train_labels
    classes = len(np.unique(labels))
    if recipe.augmentation.positives == "item":
        classes = len(labels)  # each item is a class
    if sampler.classes <= classes:
        return recipe
    items = round(sampler.classes * sampler.items / classes)
    fitting = {**sampler.model_dump(exclude_none=True), "classes": classes, "items": items}
    return check_recipe({**table, "sampler": fitting}, objects=objects)


def refuse_fold(job: ComparisonJob) -> None:
    """Refuse a fold that cannot be measured, before any fold is trained.

    Raises:
        DataError: no held-out query has a right answer, or the items cannot be divided.
    """
    try:
        recipe = fold_recipe(job)
        dataset = recipe.objects["data"]
        refuse_unanswerable(DividedItems(recipe, dataset, make_splits(dataset, recipe.split)))
    except DataError as error:
        number, folds = job.fold
        raise DataError(
            f"{job.table.get('name')}, in the search, where fold {number % folds + 1} of {folds}"
            f" of the training side is held out as the test side: {error} Use other folds, or hold"
            " out items with fold_by=item."
        ) from error


def _training_items(
    table: Mapping[str, Any], objects: Mapping[str, Any]
) -> tuple[Subset, Splits, Split]:
    """Return the items of the training side, the splits of all items, and the `[split]` table."""
    recipe = recipe_of(table, objects)
    dataset = build_dataset(recipe)
    splits = make_splits(dataset, recipe.split)
    return Subset(dataset, training_side(splits)), splits, recipe.split


def _evaluated(run: Run, baseline: bool = False) -> Metrics:
    """Return a run's metrics on the test side, MAP@R always among them."""
    metrics = dict.fromkeys([*run.recipe.evaluate.metrics, PRIMARY])
    return evaluate(run, metrics=list(metrics), baseline=baseline).metrics


def _trained(recipe: Recipe, folder: Path) -> Run:
    if not is_complete(folder):
        return train_run(folder, recipe, resume=is_run(folder))
    # The user has allowed the recipe's plugin files, so equal copies in the run are allowed too.
    copies = read_table(folder / "recipe.toml")[0].get("plugins", [])
    with answering(None, allowed=not changed_plugins(recipe.plugins, copies)):
        return Run.open(folder, **{WORDS[part]: value for part, value in recipe.objects.items()})


def _fold(job: ComparisonJob) -> Metrics:
    recipe = fold_recipe(job)
    try:
        return _evaluated(_trained(recipe, job.folder))
    except (Diverged, Interrupted):
        raise  # `perform` counts the first as a result; the second is no fault of the folds
    except RetrievalError as error:
        raise DataError(
            f"{recipe.name}, in the search, which holds out one of {job.fold[1]} folds of the"
            f" training side at a time: {error}\nWith more folds, there is more to train on."
        ) from error


def _seed(job: ComparisonJob) -> Metrics:
    recipe = recipe_of(job.table, job.objects)
    name = f"{recipe.name} seed {recipe.seed}"
    # a worker process cannot report a tracker's failure; `failures` reads it from the run's folder
    with tracking(job.track, recipe, lambda line: None, name=name, group=job.group) as tracker:
        run = _trained(recipe, job.folder)
        tracker.retrieval_run_start(run)  # for a run that was already trained
        metrics = _evaluated(run)
        tracker.log({f"test_{name}": value for name, value in metrics["trained"].items()})
    return metrics


def _measured(job: ComparisonJob) -> Metrics:
    """Measure an untrained net or a backbone's features; see `ComparisonJob.kind`."""
    recipe = recipe_of(job.table, job.objects)
    is_untrained = job.kind == "untrained"
    checkpoint_format.seed_everything(recipe.seed)
    dataset = build_dataset(recipe)
    splits = make_splits(dataset, recipe.split)
    if is_untrained and recipe.learner is None:
        model = build_model(recipe, dataset)
    else:
        model = Model(build_backbone(recipe, dataset), nn.Identity())
    # an interrupted measurement may have left a folder, and measuring again is cheap
    shutil.rmtree(job.folder, ignore_errors=True)
    create_folder(job.folder, recipe)
    run = Run(job.folder, recipe, dataset, splits, model.eval())
    rows = _evaluated(run, baseline=is_untrained and recipe.seed == 0)
    return {job.kind if name == "trained" else name: values for name, values in rows.items()}


def _model(job: ComparisonJob) -> Metrics:
    """Measure the model at an address."""
    recipe = recipe_of(job.table, job.objects)
    encoder = encoder_at(recipe.loaded, job.address)
    dataset = build_dataset(recipe)
    splits = make_splits(dataset, recipe.split)
    protocol = Protocol(DividedItems(recipe, dataset, splits), splits.query, splits.gallery)
    vectors = protocol.encoded(partial(encoder, dataset))
    metrics = resolve_metrics(recipe.evaluate.metrics, recipe.loaded, [PRIMARY])
    return {"model": protocol.measure(*vectors, metrics=metrics).values}


_KINDS = {
    "fold": _fold,
    "seed": _seed,
    "untrained": _measured,
    "frozen": _measured,
    "model": _model,
}
