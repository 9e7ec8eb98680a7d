"""`--set table.key=value`: changes to a recipe from the command line."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Sequence
from typing import Any

from retrieval.errors import RecipeError
from retrieval.host.values import shown
from retrieval.recipe.tables import host_keys

_SERVE_THE_LOSS = ("miner", "generator")


def apply_overrides(
    table: dict[str, Any], overrides: Sequence[str], components: Collection[str] = ()
) -> None:
    """Put `key.path=value` texts into a recipe's table, in place.

    `loss.name=…` with another name takes the other loss's parameters out before anything is set,
    and `loss=none` the table (with the loss's also miner and generator, which serve it alone): so
    for each of the components.

    Args:
        table: the recipe's.
        overrides: the texts, in order.
        components: the tables that hold a name and that thing's parameters.

    Raises:
        RecipeError: a text has no `=`, or goes through something that is not a table.
    """
    overrides = [text for text in overrides if not _removed(table, text, components)]
    for text in overrides:
        _switch(table, text, components)
    problems = [problem for text in overrides if (problem := _override(table, text))]
    if problems:
        raise RecipeError(problems, "The command line")


def _removed(table: dict[str, Any], text: str, components: Collection[str]) -> bool:
    """Take a component out if that is what a text says."""
    name, _, value = (part.strip() for part in text.partition("="))
    if name not in components or value.strip("'\"") != "none":
        return False
    for each in (name, *(_SERVE_THE_LOSS if name == "loss" else ())):
        table.pop(each, None)
    return True


def _switch(table: dict[str, Any], text: str, components: Collection[str]) -> None:
    """Take another component's parameters out if a text names one; whether the backbone is frozen
    is the recipe's.
    """
    key, _, value = (part.strip() for part in text.partition("="))
    component, _, last = key.partition(".")
    now = table.get(component)
    if component not in components or last != "name" or not isinstance(now, dict):
        return
    if now.get("name") != value.strip("'\""):
        table[component] = {key: now[key] for key in ("name", *host_keys(component)) if key in now}


def _override(table: dict[str, Any], text: str) -> str | None:
    """Apply one override; return what is wrong with it, if anything."""
    key, sep, value = text.partition("=")
    steps = [step.strip() for step in key.split(".")]
    if not sep or not all(steps):
        return f"--set {text}: write it as table.key=value."
    try:
        parsed = tomllib.loads(f"value = {value}")
        new = parsed["value"] if len(parsed) == 1 else value.strip()
    except (ValueError, RecursionError):
        new = value.strip()  # a bare word is text
    place: Any = table
    for i, step in enumerate(steps[:-1]):
        before = ".".join(steps[:i])
        if isinstance(place, list):
            if not step.isdigit() or int(step) >= len(place):
                return (
                    f"--set {text}: {before} has {len(place)}"
                    f" {'entry' if len(place) == 1 else 'entries'}, numbered from 0; '{step}' is"
                    " none of them."
                )
            place = place[int(step)]
        elif steps[i + 1].isdigit() and step not in place:
            return f"--set {text}: the recipe has no list '{'.'.join(steps[: i + 1])}'."
        else:
            place = place.setdefault(step, {})
        if not isinstance(place, dict | list):
            return (
                f"--set {text}: {'.'.join(steps[: i + 1])} is {shown(place)}, and no table to set a"
                " key in."
            )
    if isinstance(place, list):
        if (
            steps[-1].isdigit()
            and int(steps[-1]) < len(place)
            and not isinstance(place[int(steps[-1])], dict)
        ):
            place[int(steps[-1])] = new
            return None
        first = ".".join(steps[:-1])
        return (
            f"--set {text}: {first} is a list; name an entry's key by the entry's number, as in"
            f" {first}.0.{steps[-1]}=…"
        )
    place[steps[-1]] = new
    return None
