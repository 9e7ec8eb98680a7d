"""One piece of a comparison's work, in this process or another: a training and its figures, kept in
a file once they are known.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from retrieval.data.datasets import Subset
from retrieval.data.splits import Splits, make_splits
from retrieval.errors import DataError, Diverged, Interrupted, RetrievalError
from retrieval.evaluation.evaluate_run import evaluate_run
from retrieval.host.files import write_json
from retrieval.model.contracts import Dataset
from retrieval.model.model import Model
from retrieval.recipe.read import Recipe, check_recipe
from retrieval.recipe.tables import Sampler, Split
from retrieval.run import checkpoint
from retrieval.run.build import build_backbone, build_dataset, build_model
from retrieval.run.folder import create_folder, is_complete, is_run
from retrieval.run.open import Run, load_run
from retrieval.serving.progress import showing
from retrieval.training.comparison.plan import PRIMARY
from retrieval.training.tracking import tracking
from retrieval.training.trainer import train


@dataclass(frozen=True)
class Job:
    """A piece of work.

    Attributes:
        kind: "fold": train on some training classes, judge on the others; "seed": train, measure on
            the test side; "untrained": measure the net as it begins; "frozen": measure the
            backbone's features.
        table: the recipe's.
        folder: where it runs; of a fold nothing stays there.
        result: the file that its figures are written to.
        fold: which part of the training classes judges, and how many parts there are.
        track: trackers that a training with a seed is told to.
        group: what the comparison is called there.
    """

    kind: Literal["fold", "seed", "untrained", "frozen"]
    table: Mapping[str, Any]
    folder: Path
    result: Path
    fold: tuple[int, int] = (0, 0)
    track: tuple[str, ...] = ()
    group: str | None = None


Figures = dict[str, dict[str, float]]
"""Each contestant's figures by metric; empty for a training that diverged."""


def known(job: Job) -> Figures | None:
    """Return what a job found before; None where it was never done.

    Raises:
        DataError: its file is damaged.
    """
    try:
        found = json.loads(job.result.read_text(encoding="utf-8"))
        return {str(name): {str(k): float(v) for k, v in of.items()} for name, of in found.items()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DataError(
            f"{job.result} is damaged: {error}. Remove it, and the same command measures anew."
        ) from None


def perform(job: Job) -> Figures:
    """Do a job, or go on with it, and keep its figures.

    Raises:
        RetrievalError: what refused it.
        Interrupted: it was asked to stop; where it trained, its checkpoint is written.
    """
    before = known(job)
    if before is not None:
        return before
    with showing(False):
        try:
            figures = {"fold": _fold, "seed": _seed, "untrained": _untrained, "frozen": _frozen}[
                job.kind
            ](job)
        except Diverged:
            if job.kind != "fold":
                raise
            figures = {}
    job.result.parent.mkdir(parents=True, exist_ok=True)
    write_json(job.result, figures, DataError)
    if job.kind != "seed":
        shutil.rmtree(job.folder, ignore_errors=True)
    return figures


def training_side(splits: Splits) -> NDArray[np.int64]:
    """Return the items that a search may see: those that train and those that validate."""
    return np.sort(np.concatenate([splits.train, splits.validation]))


def fold_classes(splits: Splits, seed: int, folds: int) -> list[list[str]]:
    """Return the classes of the training side in `folds` parts of about the same size.

    Raises:
        DataError: there are too few for two in each part.
    """
    classes = np.unique(splits.labels[training_side(splits)])
    if len(classes) < max(2 * folds, 4):
        raise DataError(
            f"The training side has {len(classes)} classes, and each of {folds} folds needs two:"
            " take fewer with --folds, or hold out fewer for the test."
        )
    order = np.random.default_rng([seed % 2**64, *b"folds"]).permutation(classes)
    return [[splits.classes[i] for i in sorted(part)] for part in np.array_split(order, folds)]


def fold_recipe(job: Job) -> tuple[Recipe, Dataset]:
    """Return the recipe of a fold, and its dataset: the training side alone, with one part of its
    classes as the test side.

    Where fewer classes are left than a batch takes, it takes those, and so many more items of each
    that it is about as large.
    """
    inner, splits, split = _training_items(job.table)
    part, folds = job.fold
    held = fold_classes(splits, split.seed, folds)[part]
    table = {**job.table, "split": {**split.model_dump(), "by": "class", "test": held}}
    recipe = check_recipe(table, objects={"data": inner})
    if recipe.learner is None:
        train = make_splits(inner, recipe.split).train_labels
        sampler = _fitting(recipe.sampler, len(np.unique(train)))
        if sampler is not recipe.sampler:
            recipe = check_recipe(
                {**table, "sampler": sampler.model_dump(exclude_none=True)}, objects={"data": inner}
            )
    return recipe, inner


def _fitting(sampler: Sampler, classes: int) -> Sampler:
    """Return a sampler of no more classes than there are, whose batch is about as large."""
    if sampler.classes <= classes:
        return sampler
    items = round(sampler.classes * sampler.items / classes)
    return sampler.model_copy(update={"classes": classes, "items": items})


_items: dict[str, tuple[Subset, Splits, Split]] = {}
"""The training side of the data that this process opened last: a search asks for the same one again
and again.
"""


def _training_items(table: Mapping[str, Any]) -> tuple[Subset, Splits, Split]:
    """Return the items of the training side, and the split that they come from."""
    key = json.dumps([table.get(name) for name in ("plugins", "data", "split")], default=str)
    if key not in _items:
        recipe = check_recipe(table)
        dataset = build_dataset(recipe)
        splits = make_splits(dataset, recipe.split)
        _items.clear()
        _items[key] = Subset(dataset, training_side(splits)), splits, recipe.split
    return _items[key]


def _metrics(recipe: Recipe) -> list[str | dict[str, Any]]:
    named = list(recipe.evaluate.metrics)
    return named if PRIMARY in named else [*named, PRIMARY]


def _trained(recipe: Recipe, folder: Path, dataset: Dataset | None = None) -> Run:
    if is_complete(folder):
        return load_run(folder, dataset=dataset)
    return train(folder, recipe, resume=is_run(folder))


def _fold(job: Job) -> Figures:
    recipe, dataset = fold_recipe(job)
    try:
        found = evaluate_run(_trained(recipe, job.folder, dataset), metrics=_metrics(recipe))
    except (Diverged, Interrupted):
        raise
    except RetrievalError as error:
        raise DataError(
            f"{recipe.name}, in the search, where one of {job.fold[1]} parts of the training"
            f" classes is held out each time: {error}\nMore --folds leave more classes to train on."
        ) from error
    return {"trained": found.figures["trained"]}


def _seed(job: Job) -> Figures:
    recipe = check_recipe(job.table)
    called = f"{recipe.name} seed {recipe.seed}"
    # what failed is kept in the run's folder, since a worker has nobody to tell
    with tracking(job.track, recipe, lambda line: None, name=called, group=job.group) as told:
        run = _trained(recipe, job.folder)
        told.retrieval_run_start(run)  # one that was trained before goes on with its figures
        found = evaluate_run(run, metrics=_metrics(recipe)).figures["trained"]
        told.figures({f"test_{name}": value for name, value in found.items()})
    return {"trained": found}


def _untrained(job: Job) -> Figures:
    """Measure a net as it begins; with the first seed also the raw items, which are the same for
    all.
    """
    recipe = check_recipe(job.table)
    return _measured(
        recipe,
        job.folder,
        with_head=recipe.learner is None,
        raw=recipe.seed == 0,
        called="untrained",
    )


def _frozen(job: Job) -> Figures:
    """Measure the features of a backbone with the weights that it comes with."""
    return _measured(
        check_recipe(job.table), job.folder, with_head=False, raw=False, called="pretrained, frozen"
    )


def _measured(recipe: Recipe, folder: Path, *, with_head: bool, raw: bool, called: str) -> Figures:
    checkpoint.seed_everything(recipe.seed)
    dataset = build_dataset(recipe)
    splits = make_splits(dataset, recipe.split)
    model = (
        build_model(recipe, dataset)
        if with_head
        else Model(build_backbone(recipe, dataset), nn.Identity())
    )
    shutil.rmtree(folder, ignore_errors=True)
    create_folder(folder, recipe)
    run = Run(folder, recipe, dataset, splits, model.eval())
    figures = evaluate_run(run, metrics=_metrics(recipe), baseline=raw).figures
    return {called if name == "trained" else name: values for name, values in figures.items()}


def perform_elsewhere(job: Job) -> tuple[Figures, str, int]:
    """Do a job in a worker process: its figures, or a sentence that refuses and the exit code,
    since not every error can be sent.
    """
    if _asked_to_stop:
        return {}, _asked_to_stop[0], Interrupted.exit_code
    try:
        return perform(job), "", 0
    except RetrievalError as error:
        if isinstance(error, Interrupted):
            _asked_to_stop.append(str(error))
        return {}, str(error), error.exit_code


_asked_to_stop: list[str] = []
"""What a worker that was asked to stop said: the pool has handed it the next job already, which it
does not begin.
"""


def begin_worker(threads: int) -> None:
    """Prepare a worker process: its share of the cores; signals come from the process that started
    it, and with that it ends.
    """
    import multiprocessing
    import threading

    from retrieval.host.lazy import keep_compiler_out
    from retrieval.serving.runtime import quiet_threads

    keep_compiler_out()
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # Ctrl-C goes to the first process, which asks each worker to stop
    quiet_threads()
    torch.set_num_threads(threads)
    parent = multiprocessing.parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)  # whatever is written is written whole

    threading.Thread(target=follow, daemon=True).start()


def outcome(found: tuple[Figures, str, int]) -> Figures:
    """Return what a worker found, or raise what refused it."""
    figures, sentence, code = found
    if code == Interrupted.exit_code:
        raise Interrupted(sentence)
    if sentence:
        raise DataError(sentence)
    return figures
