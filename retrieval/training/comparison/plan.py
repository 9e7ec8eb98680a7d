"""What is compared: recipes read, all their problems told at once, and held to the same data, net
and budget.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from retrieval.errors import DataError, RecipeError, RetrievalError, listed
from retrieval.host.files import write_json
from retrieval.host.values import toml_value
from retrieval.recipe.read import Recipe, read_recipe
from retrieval.run.folder import absolute_paths
from retrieval.serving.files.places import StrPath
from retrieval.training.comparison import space

PRIMARY = "map_at_r"
"""The figure that is tuned for, and that sentences are about: MAP@R (Musgrave et al., ECCV 2020).
"""
FREE = ("real_weight", "loss_weight", "mine", "coupling", "clip_norm")
"""Keys of `[train]` that belong to a method, not to its budget."""


@dataclass(frozen=True)
class Plan:
    """A comparison, as `plan.json` holds it.

    Attributes:
        recipes: each recipe's table, by its name.
        trials: how many settings are tried for each recipe; 0: the recipes are taken as they are.
        folds: into how many parts the training classes are divided to judge a setting.
        pretrained: the backbone of the row "pretrained, frozen"; None where there is none.
        seeds: how many runs of each.
    """

    recipes: dict[str, dict[str, Any]]
    trials: int
    folds: int
    pretrained: dict[str, Any] | None
    seeds: int


def read_recipes(
    paths: Sequence[StrPath], overrides: Sequence[str], plugins: Sequence[str], search: bool
) -> list[Recipe]:
    """Read recipes.

    Args:
        paths: TOML files, two at least.
        overrides: changes to each of them.
        plugins: further plugins of each.
        search: whether each must say what may be tried.

    Raises:
        DataError: with every problem of every file.
    """
    if len(paths) < 2:
        raise DataError("A comparison needs two recipes at least: name another one.")
    if missing := [str(path) for path in paths if not Path(path).is_file()]:
        raise _refused([f"There is no recipe {path}." for path in missing])
    recipes: list[Recipe] = []
    problems: list[str] = []
    for path in paths:
        try:
            recipe = read_recipe(path, overrides, plugins)
            if search and (wrong := space.faults(recipe)):
                raise RecipeError(wrong, str(path))
            recipes.append(recipe)
        except RetrievalError as error:
            problems.append(str(error))
    if problems:
        raise DataError("\n".join(problems))
    names: dict[str, StrPath] = {}
    for path, recipe in zip(paths, recipes, strict=True):
        if recipe.name in names:
            problems.append(
                f"{names[recipe.name]} and {path} are both called '{recipe.name}': change the"
                " `name` of one."
            )
        names.setdefault(recipe.name, path)
    if problems:
        raise _refused(problems)
    return [absolute_paths(recipe) for recipe in recipes]


def _refused(problems: Sequence[str]) -> DataError:
    return DataError(problems[0] if len(problems) == 1 else listed("The comparison", problems))


def same(recipe: Recipe) -> dict[str, Any]:
    """Return what must be the same for all that is compared, by what it is called."""
    train = recipe.train.model_dump()
    found: dict[str, Any] = {
        "[data]": recipe.data.table,
        "[split]": recipe.split.model_dump(),
        "[sampler]": recipe.sampler.model_dump(),
        "[augmentation]": recipe.augmentation.model_dump(),
        "[backbone]": {**recipe.backbone.table, "frozen": recipe.backbone.frozen},
        "[evaluate]": recipe.evaluate.model_dump(),
        "[train]": {k: v for k, v in train.items() if k not in (*FREE, "epochs")},
    }
    if recipe.learner is not None:
        return {**found, "the epochs": "none, it is fitted"}
    found["the epochs"] = sum(phase.epochs for phase in recipe.phases)
    found["[head] embedding_size"] = recipe.head.embedding_size
    found["[head] hidden"] = recipe.head.hidden
    return found


def differences(recipes: Sequence[Recipe]) -> list[str]:
    """Return in what recipes differ from the first one that should be the same for all, a sentence
    each.
    """
    first, *others = recipes
    ours, found = same(first), []
    for other in others:
        theirs = same(other)
        for name in dict.fromkeys([*ours, *theirs]):
            if name not in ours or name not in theirs:
                continue  # a learner has no head: that it has no epochs is said
            found += [
                f"{place}: {shown(a)} in {first.name}, {shown(b)} in {other.name}."
                for place, a, b in _apart(name, ours[name], theirs[name])
            ]
    return found


def _apart(name: str, ours: Any, theirs: Any) -> list[tuple[str, Any, Any]]:
    if not isinstance(ours, Mapping) or not isinstance(theirs, Mapping):
        return [] if ours == theirs else [(name, ours, theirs)]
    keys = dict.fromkeys([*ours, *theirs])
    return [
        (f"{name} {key}", ours.get(key), theirs.get(key))
        for key in keys
        if ours.get(key) != theirs.get(key)
    ]


def shown(value: Any) -> str:
    """Return a value of a recipe as a sentence writes it."""
    return (
        "nothing" if value is None else str(value) if isinstance(value, str) else toml_value(value)
    )


def refuse_different(recipes: Sequence[Recipe], allowed: bool) -> list[str]:
    """Return the differences that are allowed.

    Raises:
        DataError: there are some, and they are not.
    """
    found = differences(recipes)
    if found and not allowed:
        raise DataError(
            listed(
                "These recipes cannot be compared fairly: what should be the same", found, shown=50
            )
            + "\nMake them the same, or take them as they are with --allow-different; the table"
            " then says so."
        )
    return found


def settle(folder: Path, plan: Plan) -> None:
    """Write `plan.json`, or go on with the one that is there: recipes may be added, and seeds be
    more or fewer.

    Raises:
        DataError: the folder holds something else, or a comparison that this one does not go on
            with.
    """
    file = folder / "plan.json"
    if not file.exists():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise DataError(
                f"{folder} exists already and is no comparison. Choose another --output."
            )
        folder.mkdir(parents=True, exist_ok=True)
        write_json(file, asdict(plan), DataError)
        return
    try:
        before = Plan(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{file} is damaged: {error}. Choose another --output.") from None
    other = [
        f"{what} was {shown(old)} and is {shown(new)}."
        for what, old, new in (
            ("--search", before.trials, plan.trials),
            ("--folds", before.folds, plan.folds),
            ("--pretrained", before.pretrained, plan.pretrained),
        )
        if old != new
    ]
    for name, table in plan.recipes.items():
        if name in before.recipes and json.loads(json.dumps(table)) != before.recipes[name]:
            other.append(f"the recipe '{name}' was changed.")
    if other:
        raise DataError(
            listed(f"{folder} holds another comparison", other) + " Choose another --output."
        )
    write_json(file, {**asdict(plan), "recipes": {**before.recipes, **plan.recipes}}, DataError)
