"""The plan of a comparison: what it trains, what `[search]` may try, and what all must share."""

from __future__ import annotations

import copy
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from retrieval.errors import DataError, RecipeError, RetrievalError, listed
from retrieval.host.files import write_json
from retrieval.host.values import toml_value
from retrieval.recipe.read import Recipe, apply_overrides, check_recipe, read_recipe
from retrieval.recipe.tables import Range, Tables
from retrieval.run.folder import absolute_paths, is_run, record
from retrieval.run.open import Run
from retrieval.run.resume import flat
from retrieval.serving.files.places import StrPath

PRIMARY = "map_at_r"
"""The metric for tuning and conclusions, MAP@R (Musgrave et al., ECCV 2020)."""
SHARED = ("data", "split", "sampler", "augmentation", "backbone", "evaluate", "train")
"""Tables that all recipes must share."""
FREE = {
    f"train.{key}"
    for key in ("real_weight", "loss_weight", "mine", "coupling", "clip_norm", "epochs")
}
"""Keys of these tables that belong to the method, or are counted in another way."""
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
"""Further keys that a search may change."""


@dataclass(frozen=True)
class Plan:
    """The content of `plan.json`.

    Attributes:
        recipes: each recipe's table, by name.
        trials: number of settings to try for each recipe; 0 tunes nothing.
        folds: number of folds of the training side.
        pretrained: the backbone of the row of frozen features, or `None` without that row.
        seeds: number of runs of each recipe on each split.
        splits: number of random splits; 1 means the recipes' own split.
    """

    recipes: dict[str, dict[str, Any]]
    trials: int
    folds: int
    pretrained: dict[str, Any] | None
    seeds: int
    splits: int = 1

    @property
    def blocks(self) -> str:
        """The number and kind of blocks for a sentence, such as "5 seeds"."""
        return f"{self.splits} splits" if self.splits > 1 else f"{self.seeds} seeds"


Source: TypeAlias = StrPath | Mapping[str, Any] | Tables | Run
"""What `compare` takes as a recipe."""


def read_recipes(
    sources: Sequence[Source],
    overrides: Sequence[str],
    plugins: Sequence[str],
    search: bool,
    grid: Mapping[str, Sequence[Any]],
) -> list[list[Recipe]]:
    """Return one list per source, with one recipe for each setting of the grid.

    Args:
        sources: TOML files, tables, recipes, or runs or their folders.
        overrides: changes to each recipe.
        plugins: further plugins of each recipe.
        search: whether each recipe must have a `[search]`.
        grid: values by key; each combination is a setting. Empty leaves the recipes as they are.

    Raises:
        DataError: recipes are wrong; the message lists every problem of every file.
    """
    written = [_written(source) for source in sources]
    recipes: list[list[Recipe]] = []
    problems: list[str] = []
    origin: dict[str, str] = {}
    for number, source in enumerate(written):
        path = str(source) if isinstance(source, str | os.PathLike) else f"recipes[{number}]"
        if isinstance(source, str | os.PathLike) and not Path(source).is_file():
            problems.append(f"There is no recipe {path}.")
            continue
        try:
            recipe = read_recipe(source, overrides, plugins)
            if search and (wrong := search_faults(recipe)):
                raise RecipeError(wrong, path)
            if recipe.name in origin:
                problems.append(
                    f"{origin[recipe.name]} and {path} are both called '{recipe.name}': change the"
                    " `name` of one."
                )
            origin.setdefault(recipe.name, path)
            prefix = f"{recipe.name}, " if len(written) > 1 else ""
            recipes.append(
                [
                    absolute_paths(read_recipe(source, [*overrides, *setting], plugins))
                    for setting in settings(grid, prefix)
                ]
            )
        except RetrievalError as error:
            problems.append(str(error))
    if problems:
        raise DataError(problems[0] if len(problems) == 1 else listed("The comparison", problems))
    return recipes


def _written(source: Source) -> StrPath | Mapping[str, Any] | Tables:
    """Return a run's recipe, or the file of a run's folder, in place of the run."""
    if isinstance(source, Run):
        return source.recipe
    if isinstance(source, str | os.PathLike) and is_run(Path(source)):
        return Path(source) / "recipe.toml"
    return source


def tables(recipes: Sequence[Recipe], in_process: bool) -> dict[str, dict[str, Any]]:
    """Return each recipe's table by name; a description of its Python objects belongs to it.

    Raises:
        DataError: recipes have Python objects, and are trained in other processes.
    """
    if not in_process and any(recipe.objects for recipe in recipes):
        raise DataError(
            "Recipes with Python objects train in this process: leave workers and ray out."
        )
    return {
        recipe.name: recipe.model_dump(exclude_unset=True)
        | ({"objects": record(recipe)} if recipe.objects else {})
        for recipe in recipes
    }


def settings(grid: Mapping[str, Sequence[Any]], prefix: str) -> list[list[str]]:
    """Return the overrides of each setting of a grid, including a name made of its values."""
    if not grid:
        return [[]]
    last = [key.rpartition(".")[2] for key in grid]
    short = [name if last.count(name) == 1 else key for name, key in zip(last, grid, strict=True)]
    overrides = []
    for values in itertools.product(*grid.values()):
        name = ", ".join(f"{key}={value}" for key, value in zip(short, values, strict=True))
        # the name of a recipe is also the name of a folder
        name = prefix + "".join("_" if c in '/\\<>:"|?*' else c for c in name)
        changes = [f"{key}={toml_value(value)}" for key, value in zip(grid, values, strict=True)]
        overrides.append([*changes, f"name={toml_value(name)}"])
    return overrides


def table_of(recipe: Tables) -> dict[str, Any]:
    """Return the keys that a recipe sets, without `[search]`."""
    return {k: v for k, v in recipe.model_dump(exclude_unset=True).items() if k != "search"}


def changed(table: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a recipe's table with `values` set by key, as `--set` does."""
    copied = copy.deepcopy(dict(table))
    apply_overrides(copied, [f"{key}={toml_value(value)}" for key, value in values.items()])
    return copied


def search_faults(recipe: Tables) -> list[str]:
    """Return the problems of a recipe's `[search]`, one sentence each.

    Checks the recipe once with each choice and with each end of a range.
    """
    if not recipe.search:
        return [
            "it has no [search]: say which values may be tried, as in loss.margin = { low = 0.01,"
            " high = 1.0 }."
        ]
    table, problems = table_of(recipe), []
    for key, values in recipe.search.items():
        if (key.partition(".")[0] not in SEARCHED and key not in WEIGHTS) or "." not in key:
            problems.append(
                f"[search] {key}: data, split, batches, epochs and backbone are the same for all"
                " that is compared. A search may change keys of"
                f" {', '.join(f'[{name}]' for name in SEARCHED)}, and {', '.join(WEIGHTS)}."
            )
            continue
        ends: list[Any] = [values.low, values.high]
        for value in values.choices or ends:
            try:
                check_recipe(changed(table, {key: value}), plugins=recipe.loaded)
            except RecipeError as error:
                problems += [
                    f"[search] {key} = {toml_value(value)}: {problem}" for problem in error.problems
                ]
    return problems


def own_values(recipe: Tables) -> dict[str, Any]:
    """Return the recipe's own values of the searched keys that lie within their ranges."""
    own = flat(recipe)
    return {
        key: own[key]
        for key, values in recipe.search.items()
        if key in own and _in(own[key], values)
    }


def _in(value: Any, values: Range) -> bool:
    if values.choices or not isinstance(value, int | float) or isinstance(value, bool):
        return value in values.choices
    assert values.low is not None and values.high is not None
    return bool(values.low <= value <= values.high)


def same(recipe: Recipe) -> dict[str, Any]:
    """Return the values that all recipes must share, by key."""
    values = {
        key: value
        for key, value in flat(recipe).items()
        if key.partition(".")[0] in SHARED and key not in FREE
    }
    if data := record(recipe).get("data"):
        values |= {f"data.{key}": data[key] for key in ("items", "content")}
    if recipe.learner is not None:
        return {**values, "the epochs": "none, it is fitted"}
    return {
        **values,
        "the epochs": sum(phase.epochs for phase in recipe.phases),
        "head.embedding_size": recipe.head.embedding_size,
        "head.hidden": recipe.head.hidden,
    }


def differences(recipes: Sequence[Recipe]) -> list[str]:
    """Return one sentence per shared value in which a recipe differs from the first."""
    first, *rest = recipes
    ours, sentences = same(first), []
    for recipe in rest:
        theirs = same(recipe)
        for key in dict.fromkeys([*ours, *theirs]):
            if key.startswith("head.") and not (key in ours and key in theirs):
                continue  # a learner has no head
            if ours.get(key) != theirs.get(key):
                table, dot, inner = key.partition(".")
                sentences.append(
                    f"{f'[{table}] {inner}' if dot else key}: {shown(ours.get(key))} in"
                    f" {first.name}, {shown(theirs.get(key))} in {recipe.name}."
                )
    return sentences


def shown(value: Any) -> str:
    """Return a recipe's value as text for a sentence."""
    return (
        "nothing" if value is None else str(value) if isinstance(value, str) else toml_value(value)
    )


def refuse_different(recipes: Sequence[Recipe], allowed: bool) -> list[str]:
    """Return the differences that are allowed.

    Raises:
        DataError: there are differences that are not allowed.
    """
    sentences = differences(recipes)
    if sentences and not allowed:
        raise DataError(
            listed(
                "These recipes cannot be compared fairly: what should be the same",
                sentences,
                shown=50,
            )
            + "\nMake them the same, or take them as they are with `allow_different`; the table"
            " then says so."
        )
    return sentences


def settle(folder: Path, plan: Plan) -> None:
    """Write `plan.json`, or update an existing one.

    Recipes may be added, and the numbers of seeds and splits may change.

    Raises:
        DataError: the folder holds something else, or a comparison with another plan.
    """
    file = folder / "plan.json"
    if not file.exists():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise DataError(f"{folder} exists already and is no comparison. Choose another output.")
        folder.mkdir(parents=True, exist_ok=True)
        write_json(file, asdict(plan), DataError)
        return
    try:
        before = Plan(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{file} is damaged: {error}. Choose another output.") from None
    changes = [
        f"{what} was {shown(old)} and is {shown(new)}."
        for what, old, new in (
            ("search", before.trials, plan.trials),
            ("folds", before.folds, plan.folds),
            ("pretrained", before.pretrained, plan.pretrained),
        )
        if old != new
    ]
    for name, table in plan.recipes.items():
        if name in before.recipes and json.loads(json.dumps(table)) != before.recipes[name]:
            changes.append(f"the recipe '{name}' was changed.")
    if changes:
        raise DataError(
            listed(f"{folder} holds another comparison", changes) + " Choose another output."
        )
    write_json(file, {**asdict(plan), "recipes": {**before.recipes, **plan.recipes}}, DataError)
