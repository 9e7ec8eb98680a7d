"""Build a run from its recipe, reopen it, and encode its items."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from retrieval.base.arrays import Ints
from retrieval.base.folder_kinds import StrPath, instead
from retrieval.base.machine import cores
from retrieval.base.runtime import installed_packages
from retrieval.data.datasets import Dataset
from retrieval.data.encode import encode, evaluating
from retrieval.data.features import backbone_features
from retrieval.data.splits import Splits, make_splits
from retrieval.data.stored_inputs import StoredInputs, pack_inputs, read_inputs
from retrieval.data.texts import EncodedTexts, ItemTexts
from retrieval.errors import DataError, RecipeError
from retrieval.host.plugins import Plugins
from retrieval.host.python_parts import Absent
from retrieval.model.model import Model
from retrieval.recipe.read import Recipe, naming, read_recipe
from retrieval.run import checkpoint_format
from retrieval.run.build import (
    Objective,
    build_dataset,
    build_model,
    build_objective,
    load_learned,
    load_weights,
    take_weights,
)
from retrieval.run.folder import (
    INPUTS,
    absent_objects,
    checkpoint_file,
    create_folder,
    is_run,
    objects_of,
    record,
    refuse_extra_objects,
    refuse_other_objects,
    weights_files,
)
from retrieval.run.lora import adapt, merge
from retrieval.run.resume import ResumePoint


@dataclass(repr=False)
class Run:
    """A run: its folder and everything built from its recipe. Plugins' hooks receive it.

    Attributes:
        path: the run's folder.
        recipe: the checked recipe.
        dataset: all items.
        splits: which items are for training, validation and test.
        model: the model. A recipe with a learner (an estimator that is fitted once) has a model
            only after fitting.
        objective: loss, miner and generator; `None` if the recipe has a learner or the run was
            reopened.
        device: where the model runs.
    """

    path: Path
    recipe: Recipe
    dataset: Dataset
    splits: Splits
    model: Model
    objective: Objective | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def open(cls, path: StrPath, *, or_kept: bool = False, **objects: Any) -> Self:
        """Open a finished or interrupted run with its best weights, ready to evaluate or export.

        Args:
            path: the run's folder.
            or_kept: if the data cannot be opened, use the held-out inputs in the run's folder.
                `dataset` is then a `StoredInputs`, and `splits.notes` says why. The run can encode
                and export, but not evaluate.
            objects: the objects that were passed to `train`, by the same names: dataset, backbone,
                combiner, learner. Objects that only training needs may be left out.

        Returns:
            The run, with its model in evaluation mode on the CPU.

        Raises:
            DataError: the folder is not a run, has no checkpoint yet, or a file in it is damaged.
            RecipeError: the recipe no longer fits the installed plugins.
        """
        path = Path(path)
        if not is_run(path):
            if path.is_dir():
                lacks = "it holds no recipe.toml"
            else:
                lacks = "there is no such folder"
            raise DataError(f"{path} is not a run: {lacks}.{instead(path, 'run')}")
        # before the recipe is read, which would take an object for any part
        objects = objects_of(**objects)
        refuse_extra_objects(path, objects)
        objects |= absent_objects(path, objects, or_kept)
        recipe = read_recipe(path / "recipe.toml", objects=objects)
        refuse_other_objects(path, recipe)
        with naming(path / "recipe.toml"):
            items, splits = _items(path, recipe, or_kept)
            if recipe.learner is None:
                model = build_model(recipe, items)
            else:
                model = None
        if model is None:
            model = load_learned(recipe, items, checkpoint_file(path, "best"))
        else:
            chosen, advice = _weights_to_use(path)
            if recipe.lora is not None and chosen != checkpoint_file(path, "best"):
                adapt(model, recipe.lora)  # only best.safetensors holds merged weights
            load_weights(model, checkpoint_format.load_checkpoint(chosen, advice), chosen)
            merge(model)
        return cls(path, recipe, items, splits, model.eval())

    def __repr__(self) -> str:
        named = (self.recipe.data, self.recipe.backbone, self.recipe.loss or self.recipe.learner)
        parts = ", ".join(part.name.removeprefix("object.") for part in named if part)
        return (
            f"Run {self.path}: {parts}; {len(self.splits.train):,} items to train,"
            f" {len(self.splits.query):,} to test"
        )

    def require_data(self) -> None:
        """Raise a `DataError` if the run was opened without its data."""
        if isinstance(self.dataset, StoredInputs):
            raise DataError(
                f"{self.path} was opened without its data, so it can encode and export, but not"
                f" evaluate. {self.splits.notes[0]}"
            )

    @property
    def plugins(self) -> Plugins:
        """The recipe's loaded plugins."""
        return self.recipe.loaded

    @property
    def last(self) -> Path:
        """The checkpoint to resume from."""
        return checkpoint_file(self.path, "last")

    @property
    def previous(self) -> Path:
        """The checkpoint before `last`."""
        return checkpoint_file(self.path, "previous")

    @property
    def best(self) -> Path:
        """The weights of the best validated epoch, or the final weights if none was validated."""
        return checkpoint_file(self.path, "best")

    @property
    def metrics_file(self) -> Path:
        """The log, with one JSON object per epoch."""
        return self.path / "metrics.jsonl"

    def log(self, record: Mapping[str, Any]) -> None:
        """Append a record to the log.

        Raises:
            DataError: the file cannot be written.
        """
        try:
            with self.metrics_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise DataError(
                f"{self.metrics_file} cannot be written: {error.strerror or error}. Free some"
                " space, then resume (--resume, in Python resume=True)."
            ) from error


LIBRARIES = (
    "embedding-retrieval",
    "torch",
    "torchvision",
    "pytorch-metric-learning",
    "accelerate",
    "numpy",
    "scikit-learn",
    "timm",
)
"""Distributions on which a run's results depend."""


def run_versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that results depend on."""
    installed = {name: version(name) for name in installed_packages(LIBRARIES)}
    return {"python": platform.python_version(), **installed}


def describe(run: Run) -> dict[str, Any]:
    """Return the content of `run.json`."""
    splits = run.splits
    return {
        "name": run.recipe.name,
        "versions": run_versions(),
        "machine": {
            "platform": platform.platform(),
            "processors": cores(),
            "threads": torch.get_num_threads(),
            "device": str(run.device),
        },
        "items": {
            "train": len(splits.train),
            "validation": len(splits.validation),
            "query": len(splits.query),
            "gallery": None if splits.gallery is None else len(splits.gallery),
        },
        "notes": [*run.dataset.notes, *splits.notes],
        **({"objects": record(run.recipe)} if run.recipe.objects else {}),
    }


def begin_folder(run: Run, report: Callable[[str], None], *, replace: bool = False) -> None:
    """Create a run's folder and write the files that exist before training.

    Raises:
        DataError: the folder is not empty, or cannot be written.
    """
    files: dict[str, Any] = {"run.json": describe(run)}
    try:
        texts = None
        if run.recipe.text is not None:
            texts = ItemTexts(run.dataset, run.recipe.text)
        files[INPUTS] = pack_inputs(run.dataset, run.splits, run.model.preprocessing, texts)
    except DataError as error:
        report(f"note: the run keeps no held-out inputs, so its export will need the data: {error}")
    create_folder(run.path, run.recipe, files, replace=replace)


def build_run(path: Path, recipe: Recipe, standing: ResumePoint | None = None) -> Run:
    """Build a run from a recipe with a loss; the caller seeds the random generators first.

    Args:
        path: the run's folder; nothing is written to it.
        recipe: the checked recipe.
        standing: the checkpoint of a resumed run, whose weights are loaded into the model.
    """
    dataset = build_dataset(recipe)
    splits = make_splits(dataset, recipe.split)
    if recipe.evaluate.tags is not None:
        splits.notes.append(
            "training uses each item's single label;"
            f' [evaluate] tags = "{recipe.evaluate.tags}" affects evaluation only.'
        )
    model = build_model(recipe, dataset)
    objective = build_objective(recipe, model, _classes(recipe, splits))
    # a resumed run has trained since, and the other run may be gone
    if standing is None:
        take_weights(model, recipe)
    # after the other run's weights, which have no additions; before a checkpoint's, which have them
    if recipe.lora is not None:
        adapt(model, recipe.lora)
    if standing is not None:
        load_weights(model, standing.state, standing.file)
    return Run(path, recipe, dataset, splits, model, objective)


def _classes(recipe: Recipe, splits: Splits) -> int:
    """Return the number of classes that the loss sees.

    With `[augmentation] positives = "item"`, each training item is its own class.
    """
    return len(splits.train if recipe.augmentation.positives == "item" else splits.train_classes)


def _items(path: Path, recipe: Recipe, or_kept: bool) -> tuple[Dataset, Splits]:
    """Return a run's dataset and splits; see `Run.open` for `or_kept`."""
    if isinstance(recipe.objects.get("data"), Absent):
        why = "The dataset was made in Python. Pass the same object: retrieval.load(…, dataset=…)."
    else:
        try:
            dataset = build_dataset(recipe)
            return dataset, make_splits(dataset, recipe.split)
        except (DataError, RecipeError, OSError) as error:
            if not or_kept or not (path / INPUTS).is_file():
                raise
            why = f"The run's data cannot be opened: {error}"
    stored = read_inputs(path / INPUTS)
    return stored, stored.splits_of(why)


def _weights_to_use(path: Path) -> tuple[Path, str]:
    """Return the checkpoint to evaluate or export, and advice in case the file is damaged."""
    files = weights_files(path)
    if not files:
        raise DataError(
            f"{path} has no checkpoint yet. Resume it (--resume, in Python resume=True)."
        )
    if files[1:]:
        other = f"Remove the file to use {files[1].name} instead. Or: "
    else:
        other = ""
    return files[0], other + checkpoint_format.TRAIN_AGAIN


def texts_of(run: Run, *, ahead: bool = True) -> EncodedTexts:
    """Return the texts of a run's items for its model; see `EncodedTexts` for `ahead`.

    Raises:
        DataError: no item has a text.
    """
    assert run.recipe.text is not None
    assert run.model.text is not None
    texts = ItemTexts(run.dataset, run.recipe.text)
    return EncodedTexts(texts, run.model.text, run.device, ahead)


class ItemCodes:
    """Encodes items of a run by index; uses cached features if the backbone was not trained.

    Attributes:
        source: the dataset that is encoded: cached backbone features, or the run's dataset.
        from_features: whether `source` holds backbone features.
    """

    def __init__(self, run: Run, device: torch.device) -> None:
        self.run = run
        self.device = device
        self.batch_size = run.recipe.evaluate.batch_size
        untrained_backbone = run.recipe.backbone.frozen or run.recipe.learner is not None
        # the cache holds features of the dataset's items, not of the inputs stored in the run
        self.from_features = untrained_backbone and not isinstance(run.dataset, StoredInputs)
        self.source: Dataset = run.dataset
        if self.from_features:
            self.source = backbone_features(run.model, run.dataset, device, self.batch_size)

    def __call__(self, indices: Ints) -> Tensor:
        """Return the codes (N, C) of items by index (N,): the head's outputs, on the CPU."""
        model = self.run.model.to(self.device)
        if isinstance(self.source, StoredInputs):  # these are few and already preprocessed
            with evaluating(model):
                inputs = torch.from_numpy(self.source.inputs[indices]).to(self.device)
                codes: Tensor = model(inputs)[1].float().cpu()
            return codes
        return encode(
            model,
            self.source,
            indices,
            batch_size=self.batch_size,
            device=self.device,
            progress="encoding",
            from_features=self.from_features,
        )
