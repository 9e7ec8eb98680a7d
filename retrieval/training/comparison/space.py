"""A recipe's table `[search]`: checks of the values to try, and changes of the recipe to them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from retrieval.errors import RecipeError
from retrieval.host.values import toml_value
from retrieval.recipe.read import apply_overrides, check_recipe
from retrieval.recipe.tables import Tables

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


def changed(table: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a recipe's table with `values` set by key, as `--set` does."""
    copied = copy.deepcopy(dict(table))
    apply_overrides(copied, [f"{key}={toml_value(value)}" for key, value in values.items()])
    return copied


def faults(recipe: Tables) -> list[str]:
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
                check_recipe(changed(table, {key: value}), plugins=recipe.loaded)
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
