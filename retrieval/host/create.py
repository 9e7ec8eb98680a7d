"""Any part that a plugin makes, by its kind and name, for those who write Python and no recipe."""

from __future__ import annotations

import inspect
from typing import Any

from retrieval.errors import PluginError, RecipeError, did_you_mean
from retrieval.host.factory import GIVEN, KINDS
from retrieval.host.plugins import load_plugins


def names(kind: str) -> list[str]:
    """Return the names of all parts of a kind that the installed plugins make, sorted.

    Args:
        kind: "loss", "miner", "backbone", "dataset", "generator", "combiner", "learner", "metric",
            "index", "store", "distance", "reducer" or "regularizer"; the plural will do.

    Raises:
        PluginError: there is no such kind; the sentence suggests the closest.
    """
    return list(load_plugins().factories(_plural(kind)))


def create(kind: str, name: str, /, **parameters: Any) -> Any:
    """Return a part that a plugin makes, as in `create("loss", "pml.triplet_margin", margin=0.1)`.

    Parameters are checked as in a recipe; one that there is not is refused with the list of those
    there are (on the command line `retrieval plugins show NAME` explains them). A part of the part
    is a name, a table `{"name": …, parameters}` or an object. What training knows and gives
    (`features`, `embedding_size`, `classes`) is a parameter here.

    Args:
        kind: see `names`.
        name: the part's, as `PLUGIN.NAME`.
        parameters: the part's own.

    Raises:
        PluginError: there is no such kind or name; the sentence suggests the closest.
        RecipeError: with every problem of the parameters.
    """
    plural = _plural(kind)
    plugins = load_plugins()
    factory = plugins.find(plural, name)
    asked = {p.name: p for p in factory.parameters if p.given}
    given = {key: parameters[key] for key in asked if key in parameters}
    table = {"name": name} | {key: value for key, value in parameters.items() if key not in given}
    problems = plugins.check(plural, table, f"[{KINDS[plural]}]")
    problems += [
        f"[{KINDS[plural]}] {key}: is required ({GIVEN[key]})."
        for key, p in asked.items()
        if p.default is inspect.Parameter.empty and key not in given
    ]
    if problems:
        raise RecipeError(problems, f"{name}, as create() was asked for it,")
    return plugins.build(plural, table, given)


def _plural(kind: str) -> str:
    """Return a kind as `KINDS` has it, of its singular or plural."""
    for plural, singular in KINDS.items():
        if kind in (plural, singular):
            return plural
    known = list(KINDS.values())
    raise PluginError(
        f"There is no kind '{kind}' (known: {', '.join(known)}).{did_you_mean(kind, known)}"
    )
