"""`--set table.key=value`: changes to a recipe from the command line."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Any

from retrieval.errors import RecipeError
from retrieval.values import shown


def apply_overrides(table: dict[str, Any], overrides: Sequence[str]) -> None:
    """Put `key.path=value` texts into a recipe's table, in place.

    Raises:
        RecipeError: a text has no `=`, or goes through something that is no table.
    """
    problems = [problem for text in overrides if (problem := _override(table, text))]
    if problems:
        raise RecipeError(problems, "The command line")


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
                return f"--set {text}: {before} has {len(place)} {'entry' if len(place) == 1 else 'entries'}, numbered from 0; '{step}' is none of them."
            place = place[int(step)]
        elif steps[i + 1].isdigit() and step not in place:
            return f"--set {text}: the recipe has no list '{'.'.join(steps[: i + 1])}'."
        else:
            place = place.setdefault(step, {})
        if not isinstance(place, dict | list):
            return (
                f"--set {text}: {'.'.join(steps[: i + 1])} is {shown(place)}, and no table to set a key in."
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
        return f"--set {text}: {first} is a list; name an entry's key by the entry's number, as in {first}.0.{steps[-1]}=…"
    place[steps[-1]] = new
    return None
