"""A run's folder: create it, tell its state, and lock it for the process that writes to it.

The folder holds:

recipe.toml             the recipe as it was run, overrides included, with absolute paths
run.json                versions, machine, split sizes, descriptions of objects made in Python
plugins/                copies of the recipe's plugin files and folders
inputs.safetensors      a few held-out inputs, to verify an export when the data are gone
metrics.jsonl           one line per epoch
checkpoints/last.safetensors, previous.safetensors, best.safetensors
summary.json            written last; marks the run as complete
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import inspect
import json
import os
import shutil
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from retrieval.base.files import hold, whole_folder, write_json, write_text
from retrieval.data.cache import dataset_identity
from retrieval.data.datasets import Dataset
from retrieval.data.foreign_datasets import as_dataset
from retrieval.errors import DataError
from retrieval.host.factory import COMPONENTS
from retrieval.host.importing import FilePlugin, is_file_plugin
from retrieval.host.plugins import Plugins
from retrieval.host.python_parts import WORDS, Absent, described, named_object
from retrieval.recipe.read import Recipe, read_table, to_toml
from retrieval.recipe.tables import Component, Tables

AnyTables = TypeVar("AnyTables", bound=Tables)
INPUTS = "inputs.safetensors"


def checkpoint_file(path: Path, name: str) -> Path:
    """Return the file of a run's checkpoint "last", "previous" or "best"."""
    return path / "checkpoints" / f"{name}.safetensors"


def weights_files(path: Path) -> list[Path]:
    """Return a run's checkpoints that exist, the one with the best weights first."""
    files = [checkpoint_file(path, name) for name in ("best", "last", "previous")]
    return [file for file in files if file.is_file()]


def is_run(path: Path) -> bool:
    """Return whether a folder is a run, that is, whether training was ever started in it."""
    return (path / "recipe.toml").is_file()


def is_complete(path: Path) -> bool:
    """Return whether a run has been trained to the end."""
    return (path / "summary.json").is_file()


def has_checkpoint(path: Path) -> bool:
    """Return whether a run has a checkpoint to resume from."""
    return any(checkpoint_file(path, name).is_file() for name in ("last", "previous"))


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Context manager that locks a run's folder against other processes.

    Raises:
        DataError: another process, which the message names, writes to the folder, or the parent
            folder cannot be created.
    """
    # two links to one folder must meet at one lock
    real_path = Path(os.path.realpath(path))
    try:
        real_path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _refused(path, error) from error
    with hold(real_path, "training this run", DataError):
        for leftover in real_path.parent.glob(f".{glob.escape(real_path.name)}.*.run"):
            shutil.rmtree(leftover, ignore_errors=True)  # from a process that was killed
        yield


def refuse_taken(path: Path, replace: bool) -> None:
    """Refuse to start a run in a folder that is not empty, unless `replace` allows it.

    Raises:
        DataError: the folder is not empty; the message says what it holds and what to do.
    """
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not path.is_dir():
        raise DataError(f"{path} is a file, and a run is a folder. Choose another output.")
    if not is_run(path):
        raise DataError(
            f"{path} exists already and is not a run, so it can be neither resumed nor replaced."
            " Choose another output."
        )
    if replace:
        return
    state = "a run that was stopped before its first checkpoint"
    if is_complete(path):
        state = "a complete run, which only a larger train.epochs continues"
    elif has_checkpoint(path):
        state = "a run that was stopped"
    raise DataError(
        f"{path} exists already: {state}. Resume it (--resume, in Python resume=True), replace it"
        " (--replace, in Python replace=True), or choose another output."
    )


def create_folder(
    path: Path, recipe: Recipe, files: Mapping[str, Any] | None = None, *, replace: bool = False
) -> Recipe:
    """Create a run's folder with its recipe and plugin files, atomically.

    Returns:
        The recipe as written to the folder, which names the copies of the plugin files.

    Raises:
        DataError: the folder is not empty, or cannot be written.
    """
    refuse_taken(path, replace)
    real_path = Path(os.path.realpath(path))
    occupied = DataError(
        f"{path} exists already: another process has just created it. Choose another output."
    )
    try:
        with whole_folder(real_path, replace=is_run(real_path), exists_error=occupied) as temporary:
            (temporary / "checkpoints").mkdir()
            recipe = copy_plugins(temporary, recipe)
            (temporary / "recipe.toml").write_text(to_toml(recipe), encoding="utf-8")
            for name, content in (files or {}).items():
                if isinstance(content, bytes):
                    (temporary / name).write_bytes(content)
                else:
                    write_json(temporary / name, content, DataError)
    except OSError as error:
        raise _refused(path, error) from error
    return recipe


def copy_plugins(path: Path, recipe: Recipe) -> Recipe:
    """Copy a recipe's plugin files into a run's folder and return a recipe that names them."""
    named = []
    for item in recipe.plugins:
        if is_file_plugin(item):
            plugin = FilePlugin.from_name(item)
            copied = plugin.copy(path / "plugins")
            named.append(copied.relative_to(path).as_posix() + ("/" if copied.is_dir() else ""))
        else:
            named.append(item)
    return recipe.model_copy(update={"plugins": named})


def record_changes(
    path: Path, recipe: Recipe, changed: Sequence[str], step: int, *, replace_plugins: bool = False
) -> None:
    """Record in `run.json` how a resumed run's recipe changed, and at which step.

    `recipe.toml` is updated too. The summary and the evaluations are removed: the run is no longer
    complete, and its weights will change.

    Args:
        path: the run's folder.
        recipe: the recipe with which the run continues.
        changed: one line per change.
        step: the step that training resumes from.
        replace_plugins: whether the recipe's plugin files replace the run's copies.

    Raises:
        DataError: the folder cannot be written.
    """
    try:
        if replace_plugins:
            recipe = copy_plugins(path, recipe)
        else:
            table = tomllib.loads((path / "recipe.toml").read_text(encoding="utf-8"))
            recipe = recipe.model_copy(update={"plugins": table.get("plugins", [])})
        # before the recipe: a crash in between leaves an incomplete run, not one with old results
        for stale in ("summary.json", "evaluation-*.json", "verification-*.json"):
            for file in path.glob(stale):
                file.unlink()
        write_text(path / "recipe.toml", to_toml(recipe))
        run_data = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise _refused(path, error) from error
    except ValueError as error:
        raise DataError(f"{path / 'run.json'} is damaged: {error}.") from error
    run_data.setdefault("changes", []).append({"step": step, "what": list(changed)})
    write_json(path / "run.json", run_data, DataError)


def absolute_paths(recipe: AnyTables) -> AnyTables:
    """Return a recipe with absolute paths; relative paths are relative to the working directory."""
    tables: dict[str, Any] = {}
    for table, kind in COMPONENTS.items():
        part: Component | None = getattr(recipe, table)
        if part is not None and table in recipe.model_fields_set:
            written = part.model_dump(exclude_unset=True)
            tables[table] = type(part)(**_absolute(recipe.loaded, kind, written))
    if recipe.train.start_from is not None:
        start = str(Path.cwd() / recipe.train.start_from)
        tables["train"] = recipe.train.model_copy(update={"start_from": start})
    return recipe.model_copy(update=tables)


def _absolute(plugins: Plugins, kind: str, values: Any) -> Any:
    if isinstance(values, list):
        return [_absolute(plugins, kind, value) for value in values]
    if isinstance(values, Mapping):
        factory = plugins.named(kind, str(values.get("name")))
    else:
        factory = None
    if factory is None:
        return values
    table = dict(values)
    for p in factory.parameters:
        if p.part and p.name in table:
            table[p.name] = _absolute(plugins, p.part, table[p.name])
        elif isinstance(table.get(p.name), str) and _takes_path(p.annotation):
            table[p.name] = str(Path.cwd() / table[p.name])
    return table


def _takes_path(annotation: Any) -> bool:
    """Return whether a type is a path, or a union that contains a path but not `str`."""
    inner = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return _takes_path(inner[0])
    if inner and get_origin(annotation) in (Union, types.UnionType):
        return str not in inner and any(_takes_path(option) for option in inner)
    return inspect.isclass(annotation) and issubclass(annotation, PurePath)


def _refused(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} cannot be written: {error.strerror or error}.")


def objects_of(**objects: Any) -> dict[str, Any]:
    """Return, by recipe table, the objects that replace parts of the recipe; `None` replaces none.

    Args:
        objects: objects by part, such as `dataset` or `loss`. A dataset may be anything that
            `as_dataset` takes. Names, paths, types and recipe tables are returned unchanged; the
            recipe's checks reject them later.

    Raises:
        TypeError: a keyword is not the name of a part.
    """
    tables = {word: table for table, word in WORDS.items()}
    if unknown := next((word for word in objects if word not in tables), None):
        raise TypeError(
            f"There is no part {unknown!r} to replace with an object. The parts are"
            f" {', '.join(tables)}."
        )
    dataset = objects.get("dataset")
    is_table = isinstance(dataset, Mapping) and isinstance(dataset.get("name"), str)
    if not is_table and not isinstance(dataset, type | str | PurePath | None):
        objects["dataset"] = as_dataset(dataset)
    return {tables[word]: value for word, value in objects.items() if value is not None}


def record(recipe: Recipe) -> dict[str, Any]:
    """Return the descriptions of a recipe's Python objects for `run.json`, by recipe table."""
    return {table: _recorded(value) for table, value in recipe.objects.items()}


def _recorded(value: Any) -> dict[str, Any]:
    description = described(value)
    if isinstance(value, Dataset):
        columns = (value.labels, value.keys, value.splits or (), value.roles or ())
        # the identity covers the items' content, but not who is in which class or side
        names = json.dumps([list(map(str, column)) for column in columns])
        settings = description["settings"]
        description["settings"] = {k: v for k, v in settings.items() if not hasattr(Dataset, k)}
        description["items"] = len(value)
        description["content"] = (
            f"{dataset_identity(value)}"
            f" {hashlib.blake2b(names.encode(), digest_size=16).hexdigest()}"
        )
    return description


def absent_objects(path: Path, objects: Mapping[str, Any], or_kept: bool) -> dict[str, Absent]:
    """Return stand-ins for the objects that only training needs and that are not in `objects`.

    With `or_kept`, a dataset is such an object too, if the run keeps inputs.
    """
    table, _ = read_table(path / "recipe.toml")
    parts = ["sampler", "loss", "miner", "generator", "augmentation"]
    if or_kept and (path / INPUTS).is_file():
        parts.append("data")
    names = {part: named_object(table, part) for part in parts if part not in objects}
    return {part: Absent(name) for part, name in names.items() if name is not None}


def refuse_extra_objects(path: Path, objects: Mapping[str, Any]) -> None:
    """Refuse an object for a part that was not an object when the run was trained.

    Raises:
        DataError: there is such an object; the message names the part.
    """
    table, _ = read_table(path / "recipe.toml") if objects else ({}, [])
    for part in objects:
        if named_object(table, part) is None:
            name = (table.get(part) or {}).get("name", "none")
            raise DataError(
                f"{path} was trained with [{part}] {name}, not with an object. Leave"
                f" {WORDS[part]}=… out."
            )


def refuse_other_objects(path: Path, recipe: Recipe) -> None:
    """Refuse a recipe whose Python objects differ from those that a run was trained with.

    Raises:
        DataError: a class, a setting or the dataset's content differs; the message says which.
    """
    try:
        before = json.loads((path / "run.json").read_text(encoding="utf-8")).get("objects", {})
    except (OSError, ValueError, AttributeError) as error:
        if not recipe.objects:
            return
        raise DataError(f"{path / 'run.json'} cannot be read: {error}.") from error
    current = record(recipe)
    for part in before:
        recorded = before[part]
        if isinstance(recipe.objects.get(part), Absent):
            continue
        if not isinstance(recorded, Mapping) or part not in current or recorded == current[part]:
            continue
        difference = _difference(recorded, current[part])
        raise DataError(
            f"{path} was trained with another {WORDS[part]}: {difference}."
            f" Pass the {WORDS[part]} that the run was trained with, or train into another folder."
        )


def _difference(before: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Describe the first difference between two descriptions of an object."""
    old, new = (
        {"class": entry.get("class"), **(entry.get("settings") or {})}
        for entry in (before, current)
    )
    for name in dict.fromkeys([*old, *new]):
        if old.get(name) != new.get(name):
            return f"its {name} was {old.get(name)}, and is {new.get(name)} now"
    if before.get("items") != current.get("items"):
        return f"it had {before.get('items'):,} items, and has {current.get('items'):,} now"
    return "items, labels or sides differ"
