"""Resume a run: find its checkpoint, and compare recipe and plugins with those it began with."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from retrieval.base.folder_kinds import StrPath
from retrieval.errors import DataError, PluginError, RecipeError
from retrieval.host.importing import FilePlugin, is_file_plugin, require_allowed
from retrieval.recipe.read import Recipe, apart, check_recipe, read_table, read_tables
from retrieval.recipe.tables import Tables
from retrieval.run import checkpoint_format
from retrieval.run.folder import (
    absolute_paths,
    checkpoint_file,
    has_checkpoint,
    is_run,
    refuse_other_objects,
)

ClassSums = tuple[list[float], list[int]]
"""A metric's sum over the queries of each class, and the number of queries in each."""


@dataclass
class Position:
    """How far training has come; every checkpoint contains it."""

    phase: int = 0
    """Index of the current phase."""
    phase_epoch: int = 0
    """Epochs finished in the current phase."""
    epoch: int = 0
    """Epochs finished in all phases."""
    step: int = 0
    """Steps done in the current epoch."""
    total: int = 0
    """Steps done in all epochs."""
    best: float | None = None
    """The best validation value of the metric `[train] monitor`."""
    best_epoch: int = 0
    """The epoch with the best value, from 1; 0 stands for the weights before the first step."""
    start: float | None = None
    """The monitored metric before the first step."""
    with_frozen: float | None = None
    """The best value among the epochs before the backbone was first trained."""
    with_trained: float | None = None
    """The best value among the epochs since the backbone was first trained."""
    kept: str = "start"
    """Which of `start`, `with_frozen` and `with_trained` is `best`."""
    by_class: dict[str, ClassSums] = field(default_factory=dict)
    """The sums of which each of these three values is made."""
    best_metrics: dict[str, float] = field(default_factory=dict)
    """All validation metrics of the best epoch."""
    stale: int = 0
    """Number of validations since the best validation."""
    sums: dict[str, float] = field(default_factory=dict)
    """Sums of the training metrics over the current epoch's steps, by name."""
    counts: dict[str, int] = field(default_factory=dict)
    """Number of steps in each sum; a step without triplets, for example, has no generator loss."""
    drawn: list[Tensor] | None = None
    """The current epoch's batches, if their sampler uses embeddings."""


MAY_CHANGE = re.compile(
    r"train\.(epochs|patience|validate_every|checkpoint_every|workers|device)|phase\.\d+\.epochs|evaluate\..+"
)
"""Recipe keys that may differ when a run is resumed."""
MAY_CHANGE_TEXT = (
    "train.epochs (or phase.N.epochs), patience, validate_every, checkpoint_every, workers and"
    " device, and all of [evaluate]"
)
"""`MAY_CHANGE` in words, for messages."""

Report = Callable[[str], None]


def read_given(
    output: StrPath | None,
    recipe: StrPath | Mapping[str, Any] | Tables,
    overrides: Sequence[str] = (),
    plugins: Sequence[str] = (),
    *,
    replace_plugins: bool = False,
    report: Report = lambda line: None,
    objects: Mapping[str, Any] | None = None,
) -> tuple[Path, Recipe]:
    """Read the recipe of a run to resume, and check it with the run's copies of plugin files.

    Args:
        output: the run's folder, by default `runs/NAME` with the recipe's name.
        recipe: the recipe; see `read_recipe`.
        overrides: see `read_recipe`.
        plugins: see `read_recipe`.
        replace_plugins: use the current plugin files instead of the run's copies.
        report: called with one line for each plugin file that differs from the run's copy.
        objects: Python objects that replace parts of the recipe, by recipe table.

    Returns:
        The run's folder, which may be none yet, and the checked recipe.

    Raises:
        RecipeError: the recipe cannot be read, or does not fit the plugins.
    """
    table, named = read_table(recipe, overrides, plugins)
    if output:
        folder = Path(output)
    else:
        folder = Path("runs") / str(table.get("name", "run"))
    recipe, objects = apart(recipe, objects)
    if isinstance(recipe, str | os.PathLike):
        where = str(recipe)
    else:
        where = None
    # before the run exists, or with new plugins, the recipe's own files are what will run
    if replace_plugins or not is_run(folder):
        if where is not None:
            require_allowed(named, Path(where))
        return folder, check_recipe(table, where, objects)
    run_table, run_plugins = read_table(folder / "recipe.toml")
    require_allowed(run_plugins, folder / "recipe.toml")
    for line in changed_plugins(_plugins(table), run_plugins):
        report(
            f"{line}; the run continues with its own copies. To use the current files, pass"
            " --replace-plugins (in Python replace_plugins=True)."
        )
    return folder, check_recipe(table | {"plugins": _plugins(run_table)}, where, objects)


def changed_plugins(named: Sequence[str], run_plugins: Sequence[str]) -> list[str]:
    """Return one sentence, without a full stop, per plugin that differs from the run's copy.

    Args:
        named: the plugins that the recipe names.
        run_plugins: the plugins that the run's `recipe.toml` names, whose files are the copies.
    """
    copies = {
        plugin.name: plugin.sums
        for plugin in map(FilePlugin.from_name, filter(is_file_plugin, run_plugins))
    }
    lines = []
    for item in filter(is_file_plugin, named):
        try:
            plugin = FilePlugin.from_name(item)
            sums = plugin.sums
            before = copies.get(plugin.name)
        except PluginError as error:
            lines.append(str(error).rstrip("."))
            continue
        if before is None:
            lines.append(f"{item} is not among the plugins that the run was started with")
        elif sums != before:
            files = [name for name in {**before, **sums} if before.get(name) != sums.get(name)]
            lines.append(
                f"The plugin '{plugin.name}' has changed since the run was started"
                f" ({', '.join(files)})"
            )
    return lines


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to resume from.

    Attributes:
        file: the checkpoint's file.
        state: the checkpoint's content.
        progress: how far the run has come.
    """

    file: Path
    state: Any
    progress: Position


def standing(folder: Path) -> ResumePoint | None:
    """Return a run's checkpoint `last`, or else `previous`; `None` if the run has neither.

    Raises:
        DataError: the checkpoint is damaged.
    """
    if not has_checkpoint(folder):
        return None
    last, previous = (checkpoint_file(folder, name) for name in ("last", "previous"))
    chosen = last
    advice = checkpoint_format.TRAIN_AGAIN
    # a kill between two renames can leave only the previous one
    if not last.is_file():
        chosen = previous
    elif previous.is_file():
        advice = f"Remove this file to resume from the checkpoint before it ({previous.name})."
    state = checkpoint_format.load_checkpoint(chosen, advice)
    try:
        return ResumePoint(chosen, state, Position(**state["progress"]))
    except (KeyError, TypeError) as error:
        raise DataError(
            f"{chosen} does not say where training stopped ({error}). {advice}"
        ) from error


def changes(folder: Path, recipe: Recipe, progress: Position | None) -> list[str]:
    """Return one line per key in which a recipe differs from the recipe of a run.

    Raises:
        DataError: a key differs that must stay the same (see `MAY_CHANGE`), or a new number of
            epochs has no effect or would undo finished epochs.
        RecipeError: the `recipe.toml` in the run's folder is wrong.
    """
    refuse_other_objects(folder, recipe)
    run_recipe, faults = read_tables(read_table(folder / "recipe.toml")[0])
    if faults:
        raise RecipeError(faults.values(), str(folder / "recipe.toml"))
    # absolute, because the same file has another relative path in another working directory
    before = flat_recipe(absolute_paths(run_recipe.with_plugins(recipe.loaded)))
    now = flat_recipe(absolute_paths(recipe))
    differing = [key for key in dict.fromkeys([*before, *now]) if before.get(key) != now.get(key)]
    refused = [key for key in differing if not MAY_CHANGE.fullmatch(key)]
    if refused:
        shown = [
            f"{key} was {_text(before.get(key))}, and is {_text(now.get(key))}"
            for key in refused[:6]
        ]
        raise DataError(
            f"{folder} was started with another recipe: {'; '.join(shown)}"
            f"{'; …' if len(refused) > 6 else ''}. Resume with the recipe and overrides that"
            " started the run, or train into another folder. Only these may change:"
            f" {MAY_CHANGE_TEXT}."
        )
    epochs = [key for key in differing if key.endswith(".epochs")]
    if epochs:
        _check_epochs(folder, run_recipe, recipe, progress, epochs)
    return [f"{key}: {_text(before.get(key))} → {_text(now.get(key))}" for key in differing]


def _check_epochs(
    folder: Path, run_recipe: Tables, recipe: Recipe, progress: Position | None, keys: Sequence[str]
) -> None:
    """Refuse numbers of epochs that have no effect, or that would undo finished epochs."""
    if recipe.learner is not None:
        raise DataError(f"{folder}: {keys[0]} has no effect, because a [learner] is fitted once.")
    if recipe.phase and "train.epochs" in keys:
        raise DataError(
            f"{folder}: train.epochs has no effect in a recipe with [[phase]]. Set the epochs of a"
            f" phase, such as phase.{len(recipe.phase) - 1}.epochs."
        )
    if progress is None:
        return
    patience = recipe.train.patience
    for i, (old, new) in enumerate(zip(run_recipe.phases, recipe.phases, strict=True)):
        # number of epochs begun in this phase
        if i < progress.phase:
            begun = old.epochs
        else:
            begun = progress.phase_epoch + bool(progress.step)
        over = i < progress.phase and new.epochs != old.epochs
        if over or (i == progress.phase and new.epochs < begun):
            raise DataError(
                f"{folder} has already begun epoch {begun} of the phase '{new.name}'"
                f"{', which is over' if over else ''}: it cannot have {new.epochs} epochs."
            )
        longer = i == progress.phase and new.epochs > old.epochs
        if longer and patience is not None and progress.stale >= patience:
            raise DataError(
                f"{folder} stopped early, after {progress.stale}"
                f" validation{'s' * (progress.stale > 1)} without an improvement, and would stop"
                f" again at once. Set train.patience above {progress.stale} too."
            )


def _plugins(table: Mapping[str, Any]) -> list[str]:
    """Return the plugins that an unchecked recipe table names."""
    named = table.get("plugins", [])
    if isinstance(named, list):
        return [item for item in named if isinstance(item, str)]
    return []


def flat_recipe(recipe: Tables) -> dict[str, Any]:
    """Return a recipe's values by dotted key, as `--set` names them, without its plugins."""
    values: dict[str, Any] = {}

    def is_array_of_tables(value: Any) -> bool:
        return (
            isinstance(value, list) and value != [] and all(isinstance(v, Mapping) for v in value)
        )

    def walk(value: Any, path: str) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                walk(inner, f"{path}.{key}" if path else str(key))
        elif is_array_of_tables(value):
            for i, inner in enumerate(value):
                walk(inner, f"{path}.{i}")
        elif value is not None:
            values[path] = list(value) if isinstance(value, tuple) else value

    walk(recipe.model_dump(exclude={"plugins"}), "")
    return values


def _text(value: Any) -> str:
    if value is None:
        return "not set"
    return str(value)
