"""Objects that took the places of named parts: what a run's folder says of them, and whether the
same ones are given again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retrieval.data.cache import dataset_identity
from retrieval.errors import DataError
from retrieval.host.python_parts import WORDS, described, is_object
from retrieval.model.contracts import Dataset
from retrieval.recipe.read import Recipe, read_table


def objects_of(**objects: Any) -> dict[str, Any]:
    """Return the objects that were given, by the recipe's table; None stands for none."""
    tables = {word: table for table, word in WORDS.items()}
    return {tables[word]: value for word, value in objects.items() if value is not None}


def record(recipe: Recipe) -> dict[str, Any]:
    """Return what `run.json` says of a recipe's objects, by table."""
    return {table: _recorded(value) for table, value in recipe.objects.items()}


def _recorded(value: Any) -> dict[str, Any]:
    said = described(value)
    if isinstance(value, Dataset):
        names = json.dumps([list(map(str, value.labels)), list(map(str, value.keys))])
        said["items"] = len(value)
        said["content"] = (
            f"{dataset_identity(value)}"
            f" {hashlib.blake2b(names.encode(), digest_size=16).hexdigest()}"
        )
    return said


def refuse_needless(path: Path, objects: Mapping[str, Any]) -> None:
    """Refuse an object for a part of a run that a plugin makes.

    Raises:
        DataError: there is such a part; the sentence names it.
    """
    table, _ = read_table(path / "recipe.toml") if objects else ({}, [])
    for part in objects:
        named = table.get(part)
        name = str(named.get("name")) if isinstance(named, Mapping) else "none"
        if not is_object(name):
            raise DataError(
                f"{path} was trained with [{part}] {name}, not with an object. Leave"
                f" {WORDS[part]}=… out."
            )


def refuse_others(path: Path, recipe: Recipe) -> None:
    """Refuse other objects than a run was trained with.

    Raises:
        DataError: a class, a setting or the dataset's content is another; the sentence says which.
    """
    try:
        before = json.loads((path / "run.json").read_text(encoding="utf-8")).get("objects", {})
    except (OSError, ValueError, AttributeError) as error:
        if not recipe.objects:
            return
        raise DataError(f"{path / 'run.json'} cannot be read: {error}.") from error
    now = record(recipe)
    for part in before:
        told = before[part]
        if not isinstance(told, Mapping) or part not in now or told == now[part]:
            continue
        raise DataError(
            f"{path} was trained with another {WORDS[part]}: {_difference(told, now[part])}. Give"
            " the object that it was trained with, or train into another folder."
        )


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the first thing in which two descriptions differ, in words."""
    if before.get("class") != now["class"]:
        return f"{before.get('class')} then, {now['class']} now"
    old, new = before.get("settings") or {}, now["settings"]
    for name in dict.fromkeys([*old, *new]):
        if old.get(name) != new.get(name):
            return f"{name} was {old.get(name)}, and is {new.get(name)}"
    if before.get("items") != now.get("items"):
        return f"{before.get('items'):,} items then, {now.get('items'):,} now"
    return "its items or their labels differ"
