"""The run folder: what training writes, and what evaluation and export read.

recipe.toml             the recipe as it was run, overrides included
run.json                versions, machine, split sizes
plugins/                copies of the plugin files that the recipe names
metrics.jsonl           one line an epoch
checkpoints/last.safetensors, previous.safetensors, best.safetensors
summary.json            written last: the run is complete
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from retrieval.contracts import Dataset
from retrieval.data.splits import Splits, make_splits
from retrieval.errors import DataError
from retrieval.model import Model
from retrieval.places import instead
from retrieval.plugins import Plugins
from retrieval.recipe import Recipe, naming, read_recipe, to_toml
from retrieval.train import checkpoint
from retrieval.train.build import Objective, build_dataset, build_model, build_objective
from retrieval.trust import digest, remember


@dataclass
class Run:
    """A run: its folder, and everything built from its recipe. Hooks are given it.

    Attributes:
        path: the folder.
        recipe: the checked recipe.
        plugins: the loaded plugins.
        dataset: all items.
        splits: which of them train, validate and test.
        model: the model; of a learner's recipe only once it is fitted.
        objective: loss, miner and generator; None for a learner, and for a run that was loaded to be used.
        device: where it runs.
    """

    path: Path
    recipe: Recipe
    plugins: Plugins
    dataset: Dataset
    splits: Splits
    model: Model
    objective: Objective | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def last(self) -> Path:
        """The checkpoint to resume from."""
        return self.path / "checkpoints" / "last.safetensors"

    @property
    def previous(self) -> Path:
        """The checkpoint that was written before the last one."""
        return self.path / "checkpoints" / "previous.safetensors"

    @property
    def best(self) -> Path:
        """The weights with the best validation MAP@R, or the final ones where there is no validation part."""
        return self.path / "checkpoints" / "best.safetensors"

    @cached_property
    def metrics_file(self) -> Path:
        """One JSON object an epoch."""
        return self.path / "metrics.jsonl"

    def log(self, record: Mapping[str, Any]) -> None:
        """Append a record to `metrics.jsonl`."""
        try:
            with self.metrics_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise DataError(
                f"{self.metrics_file} cannot be written: {error.strerror or error}. Free some space, then go on with --resume."
            ) from error


def write_json(path: Path, value: Any) -> None:
    """Write JSON, whole or not at all.

    Raises:
        DataError: the disk is full or the folder cannot be written.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DataError(f"{path} cannot be written: {error.strerror or error}.") from error


def versions() -> dict[str, str]:
    """Return the versions of what results depend on."""
    found = {"python": platform.python_version()}
    for name in (
        "embedding-retrieval",
        "torch",
        "torchvision",
        "pytorch-metric-learning",
        "accelerate",
        "numpy",
        "scikit-learn",
        "timm",
    ):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def create_folder(path: Path, recipe: Recipe) -> Recipe:
    """Make a run's folder, with the recipe and its plugin files in it.

    Returns:
        The recipe that names the copies.

    Raises:
        DataError: the folder holds something already, or cannot be written.
    """
    if path.exists() and not path.is_dir():
        raise DataError(f"{path} is a file, and a run is a folder. Choose another --output.")
    if path.exists() and any(path.iterdir()):
        raise DataError(
            f"{path} exists already. Go on with it by --resume, or choose another folder with --output."
        )
    try:
        (path / "checkpoints").mkdir(parents=True)
        named = []
        for item in recipe.plugins:
            if item.endswith(".py"):
                (path / "plugins").mkdir(exist_ok=True)
                shutil.copyfile(item, path / "plugins" / Path(item).name)
                named.append(f"plugins/{Path(item).name}")
            else:
                named.append(item)
        copies = [path / item for item in named if item.endswith(".py")]
        remember({copy.resolve(): digest(copy) for copy in copies})  # they have run: here they may run again
        kept = recipe.model_copy(update={"plugins": named})
        (path / "recipe.toml").write_text(to_toml(kept), encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}.") from error
    return kept


def describe(run: Run) -> dict[str, Any]:
    """Return what `run.json` holds."""
    splits = run.splits
    return {
        "name": run.recipe.name,
        "versions": versions(),
        "machine": {
            "platform": platform.platform(),
            "processors": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "device": str(run.device),
        },
        "items": {
            "train": len(splits.train),
            "validation": len(splits.validation),
            "query": len(splits.query),
            "gallery": None if splits.gallery is None else len(splits.gallery),
        },
        "notes": list(splits.notes),
    }


def build_run(path: Path, recipe: Recipe, plugins: Plugins) -> Run:
    """Build everything a recipe with a loss names; the random generators must be seeded before."""
    dataset = build_dataset(recipe, plugins)
    splits = make_splits(dataset, recipe.split)
    model = build_model(recipe, plugins, dataset)
    objective = build_objective(recipe, plugins, model, len(splits.train_classes))
    return Run(path, recipe, plugins, dataset, splits, model, objective)


def load_run(path: Path) -> Run:
    """Open a finished or interrupted run with its best weights, ready to evaluate or export.

    Returns:
        The run; its model is in evaluation mode on the CPU.

    Raises:
        DataError: the folder is no run, has no checkpoint yet, or a file in it is damaged.
        RecipeError: its recipe no longer fits the installed plugins.
    """
    path = Path(path)
    if not (path / "recipe.toml").is_file():
        raise DataError(f"{path} is no run: it holds no recipe.toml.{instead(path, 'run')}")
    recipe, plugins = read_recipe(path / "recipe.toml")
    with naming(path / "recipe.toml"):
        dataset = build_dataset(recipe, plugins)
        splits = make_splits(dataset, recipe.split)
        if recipe.learner is None:
            model = build_model(recipe, plugins, dataset)
    if recipe.learner is not None:
        from retrieval.train.learn import load_learned

        model = load_learned(recipe, plugins, dataset, path / "checkpoints" / "best.safetensors")
    else:
        chosen, advice = _weights_to_use(path)
        load_weights(model, checkpoint.load(chosen, advice), chosen)
    return Run(path, recipe, plugins, dataset, splits, model.eval())


def _weights_to_use(path: Path) -> tuple[Path, str]:
    """Return the checkpoint that evaluation and export read, and what to do if it is damaged."""
    names = [f"{name}.safetensors" for name in ("best", "last", "previous")]
    there = [name for name in names if (path / "checkpoints" / name).is_file()]
    advice = "Train again, with --replace."
    if len(there) > 1:
        advice = f"Remove it to use {there[1]} instead, with the weights of another epoch; or train again, with --replace."
    return path / "checkpoints" / (there[0] if there else names[0]), advice


def load_weights(model: Model, state: Mapping[str, Any], path: Path) -> None:
    """Put a checkpoint's weights into a model.

    Raises:
        DataError: they are of another model.
    """
    try:
        model.load_state_dict(state["model"])
    except (KeyError, RuntimeError) as error:
        first = (str(error).splitlines() or ["?"])[-1].strip()
        raise DataError(
            f"{path} holds the weights of another model: {first} The recipe beside it was changed, or a plugin was."
        ) from error
