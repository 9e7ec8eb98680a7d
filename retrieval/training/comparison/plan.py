"""Plan of a comparison: recipes that share data, backbone and budget, and their `[search]`."""

from __future__ import annotations

import copy
import itertools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from retrieval.base.files import write_json
from retrieval.base.folder_kinds import StrPath
from retrieval.errors import DataError, RecipeError, RetrievalError, listed
from retrieval.host.values import toml_value
from retrieval.recipe.read import Recipe, apply_overrides, check_recipe, read_recipe
from retrieval.recipe.tables import Tables
from retrieval.run.folder import absolute_paths, is_run, record
from retrieval.run.open import Run

Content = TypeVar("Content")

PRIMARY = "map_at_r"
"""The metric by which settings are tuned and conclusions drawn (Musgrave et al., ECCV 2020)."""
FREE = ("real_weight", "loss_weight", "mine", "coupling", "clip_norm")
"""Keys of `[train]` that may differ between recipes, because they belong to the method."""


@dataclass(frozen=True)
class ComparisonPlan:
    """What a comparison trains and measures; the content of `plan.json`.

    Attributes:
        recipes: the recipes' tables, by name.
        trials: number of settings to try for each recipe; 0 tunes nothing.
        folds: number of folds of the training side.
        pretrained: the `[backbone]` whose frozen features are a baseline; `None`: no such baseline.
        seeds: number of runs of each recipe on each split.
        splits: number of random splits; 1 means the recipes' own split.
        repeats: number of times that the training side is divided into folds.
        fold_by: "class" holds out whole classes, "item" items of every class.
    """

    recipes: dict[str, dict[str, Any]]
    trials: int
    folds: int
    pretrained: dict[str, Any] | None
    seeds: int
    splits: int = 1
    repeats: int = 1
    fold_by: Literal["class", "item"] = "class"

    @property
    def blocks(self) -> str:
        """Number and kind of the blocks, which `statistics` defines, such as "5 seeds"."""
        if self.splits > 1:
            return f"{self.splits} splits"
        return f"{self.seeds} seeds"


Source: TypeAlias = StrPath | Mapping[str, Any] | Tables | Run
"""What `compare` takes as a recipe."""


def read_recipes(
    sources: Source | Sequence[Source],
    overrides: Sequence[str],
    plugins: Sequence[str],
    search: bool,
    grid: Mapping[str, Sequence[Any]],
) -> list[list[Recipe]]:
    """Return one list of recipes per source, with one recipe for each combination of the grid.

    If `search` is set, each recipe needs a `[search]`. See `compare` for the other arguments.

    Raises:
        DataError: recipes are wrong; the message lists every problem of every file.
    """
    if isinstance(sources, str | os.PathLike | Mapping | Tables | Run):
        sources = [sources]
    recipes: list[list[Recipe]] = []
    problems: list[str] = []
    origin: dict[str, str] = {}
    for number, source in enumerate(map(_readable, sources)):
        path = f"recipes[{number}]"
        if isinstance(source, str | os.PathLike):
            path = str(source)
        try:
            recipe = read_recipe(source, overrides, plugins)
            if search and (wrong := search_faults(recipe)):
                raise RecipeError(wrong, path)
            if recipe.name in origin:
                problems.append(
                    f"{origin[recipe.name]} and {path} are both called '{recipe.name}'. Change the"
                    " `name` in one of them."
                )
            origin.setdefault(recipe.name, path)
            if len(sources) > 1:
                prefix = f"{recipe.name}, "
            else:
                prefix = ""
            settings = []
            for setting in grid_overrides(grid, prefix):
                changed = read_recipe(source, [*overrides, *setting], plugins)
                # a worker process may have another working directory
                settings.append(absolute_paths(changed))
            recipes.append(settings)
        except RetrievalError as error:
            problems.append(str(error))
    if len(problems) == 1:
        raise DataError(problems[0])
    if problems:
        raise DataError(listed("The comparison", problems))
    return recipes


def _readable(source: Source) -> StrPath | Mapping[str, Any] | Tables:
    """Return a run's recipe or recipe file, and any other source unchanged."""
    if isinstance(source, Run):
        return source.recipe
    if isinstance(source, str | os.PathLike) and is_run(Path(source)):
        return Path(source) / "recipe.toml"
    return source


def recipe_tables(recipes: Sequence[Recipe], in_process: bool) -> dict[str, dict[str, Any]]:
    """Return the recipes' tables by name, with a description of their Python objects.

    Raises:
        DataError: a recipe has Python objects, but other processes would train it.
    """
    if not in_process and any(recipe.objects for recipe in recipes):
        raise DataError(
            "Recipes with Python objects train only in this process: omit workers and ray."
        )
    tables = {}
    for recipe in recipes:
        tables[recipe.name] = recipe.model_dump(exclude_unset=True)
        if recipe.objects:
            tables[recipe.name]["objects"] = record(recipe)
    return tables


def grid_overrides(grid: Mapping[str, Sequence[Any]], prefix: str) -> list[list[str]]:
    """Return a list of overrides for each combination of a grid's values.

    The last override sets the recipe's name: `prefix` and the values.

    Raises:
        DataError: two combinations get the same name.
    """
    if not grid:
        return [[]]
    # names use the last part of a key, or the whole key if two keys end in the same part
    last_parts = [key.rpartition(".")[2] for key in grid]
    short_keys = [
        part if last_parts.count(part) == 1 else key
        for part, key in zip(last_parts, grid, strict=True)
    ]
    overrides = []
    names = set()
    for values in itertools.product(*grid.values()):
        name = ", ".join(f"{key}={value}" for key, value in zip(short_keys, values, strict=True))
        # the name of a recipe is also the name of a folder
        name = prefix + re.sub(r'[/\\<>:"|?*]', "_", name)
        if name in names:
            raise DataError(
                f"grid: two settings are called '{name}'. Give each value once; in names, the"
                " characters that no file name may have become '_'."
            )
        names.add(name)
        changes = [f"{key}={toml_value(value)}" for key, value in zip(grid, values, strict=True)]
        overrides.append([*changes, f"name={toml_value(name)}"])
    return overrides


def _shared_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that all recipes must share, by table and key."""
    train = recipe.train.model_dump()
    tables: dict[str, Mapping[str, Any]] = {
        "[data]": recipe.data.table,
        "[split]": recipe.split.model_dump(),
        "[sampler]": recipe.sampler.model_dump(),
        "[augmentation]": recipe.augmentation.model_dump(),
        "[backbone]": {**recipe.backbone.table, "frozen": recipe.backbone.frozen},
        "[evaluate]": recipe.evaluate.model_dump(),
        "[train]": {k: v for k, v in train.items() if k not in (*FREE, "epochs")},
    }
    # a Python object is compared by its items, because its name says nothing
    if data := record(recipe).get("data"):
        tables["[data]"] = {key: data[key] for key in ("items", "content")}
    shared = {}
    for name, table in tables.items():
        for key, value in table.items():
            shared[f"{name} {key}"] = value
    if recipe.learner is not None:
        shared["the epochs"] = "none (it is fitted)"
        return shared
    shared["the epochs"] = sum(phase.epochs for phase in recipe.phases)
    shared["[head] embedding_size"] = recipe.head.embedding_size
    shared["[head] hidden"] = recipe.head.hidden
    return shared


def _as_text(value: Any) -> str:
    """Return a value of a recipe as text for a sentence."""
    if value is None:
        return "nothing"
    if isinstance(value, str):
        return value
    return toml_value(value)


def refuse_different(recipes: Sequence[Recipe], allowed: bool) -> list[str]:
    """Return one sentence for each shared setting by which a recipe differs from the first.

    Raises:
        DataError: there are differences, and they are not allowed.
    """
    first, *rest = recipes
    expected = _shared_settings(first)
    sentences = []
    for recipe in rest:
        actual = _shared_settings(recipe)
        for key in expected | actual:
            # A learner has no head, so heads are compared only if both recipes have one.
            if key.startswith("[head]") and not (key in expected and key in actual):
                continue
            if expected.get(key) != actual.get(key):
                sentences.append(
                    f"{key}: {_as_text(expected.get(key))} in {first.name},"
                    f" {_as_text(actual.get(key))} in {recipe.name}."
                )
    if sentences and not allowed:
        raise DataError(
            listed("The comparison", sentences, shown=50)
            + "\nA fair comparison needs the same settings in all recipes. Make them the same, or"
            " accept the differences with --allow-different (in Python allow_different=True); the"
            " comparison then lists them."
        )
    return sentences


def saved(file: Path, parse: Callable[[Any], Content], advice: str) -> Content | None:
    """Return the parsed content of a JSON file of a comparison; `None` if there is no such file.

    Raises:
        DataError: the file is damaged; the message ends with `advice`.
    """
    try:
        return parse(json.loads(file.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{file} is damaged: {error}. {advice}") from None


def settle(folder: Path, plan: ComparisonPlan) -> None:
    """Write `plan.json`, or update an existing one.

    Recipes may be added, and the numbers of seeds and splits may change.

    Raises:
        DataError: the folder holds something else, or a comparison with another plan.
    """
    file = folder / "plan.json"
    before = saved(file, lambda table: ComparisonPlan(**table), "Choose another output.")
    if before is None:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise DataError(
                f"{folder} exists already and is not a comparison. Choose another output."
            )
        folder.mkdir(parents=True, exist_ok=True)
        write_json(file, asdict(plan), DataError)
        return
    changed = []
    for key in ("trials", "folds", "repeats", "fold_by", "pretrained"):
        old = getattr(before, key)
        new = getattr(plan, key)
        if old != new:
            if key == "trials":
                option = "search"
            else:
                option = key
            changed.append(f"{option} was {_as_text(old)} and is {_as_text(new)} now.")
    for name, table in plan.recipes.items():
        # through JSON, as the plan of the folder went: tuples become lists
        if name in before.recipes and json.loads(json.dumps(table)) != before.recipes[name]:
            changed.append(f"the recipe '{name}' was changed.")
    if changed:
        lines = f" {changed[0]} "
        if len(changed) > 1:
            lines = "\n  - ".join(["", *changed]) + "\n"
        raise DataError(f"{folder} holds another comparison:{lines}Choose another output.")
    # recipes of earlier calls stay, so that leaving one out does not lose what it was
    merged = replace(plan, recipes=before.recipes | plan.recipes)
    write_json(file, asdict(merged), DataError)


SEARCHED = (
    "loss",
    "miner",
    "generator",
    "combiner",
    "learner",
    "optimizer",
    "generator_optimizer",
    "schedule",
)
"""Tables of a recipe that a search may change."""
WEIGHTS = ("train.clip_norm", "train.real_weight", "train.loss_weight")
"""Keys of other tables that a search may change."""


def table_of(recipe: Tables) -> dict[str, Any]:
    """Return the keys that a recipe sets, without `[search]`."""
    return {k: v for k, v in recipe.model_dump(exclude_unset=True).items() if k != "search"}


def with_values(table: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a recipe's table with `values` set by key, as `--set` does."""
    copied = copy.deepcopy(dict(table))
    apply_overrides(copied, [f"{key}={toml_value(value)}" for key, value in values.items()])
    return copied


def search_faults(recipe: Tables) -> list[str]:
    """Return the problems of a recipe's `[search]`, one sentence each.

    The recipe is checked with each choice of a key, and with both ends of each range.
    """
    if not recipe.search:
        return [
            "it has no [search]. Add one with the values to try, such as loss.margin = { low ="
            " 0.01, high = 1.0 }."
        ]
    table = table_of(recipe)
    problems = []
    for key, values in recipe.search.items():
        if (key.partition(".")[0] not in SEARCHED and key not in WEIGHTS) or "." not in key:
            problems.append(
                f"[search] {key}: data, split, batches, epochs and backbone must stay the same in a"
                " comparison. A search may change keys of"
                f" {', '.join(f'[{name}]' for name in SEARCHED)}, and {', '.join(WEIGHTS)}."
            )
            continue
        for value in values.choices or (values.low, values.high):
            try:
                check_recipe(with_values(table, {key: value}), plugins=recipe.loaded)
            except RecipeError as error:
                problems += [
                    f"[search] {key} = {toml_value(value)}: {problem}" for problem in error.problems
                ]
    return problems


def own_values(recipe: Tables) -> dict[str, Any]:
    """Return the values that the recipe sets for keys of `[search]`, if they are in the ranges."""
    inside: dict[str, Any] = {}
    for key, values in recipe.search.items():
        value: Any = table_of(recipe)
        for step in key.split("."):
            if isinstance(value, Mapping):
                value = value.get(step)
            else:
                value = None
        if value in values.choices:
            inside[key] = value
        elif values.low is not None and values.high is not None:
            # Python counts booleans among the integers
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and values.low <= value <= values.high:
                inside[key] = value
    return inside
