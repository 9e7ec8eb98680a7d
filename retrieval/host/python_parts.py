"""Python objects in place of named parts, offered by a plugin called `object`.

The host may build a part several times, and training changes it. Each build therefore returns a
copy, so that the user's object stays unchanged.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import inspect
import numbers
import re
from collections.abc import Callable, Mapping
from pathlib import PurePath
from types import ModuleType
from typing import Any

from retrieval.errors import PluginError
from retrieval.host.factory import KINDS, OBJECT_KINDS
from retrieval.host.hookspecs import hookimpl

OBJECT = "object"
DICTIONARY = "dictionary_of_sides"
"""`origin` of a dataset that was a dictionary such as `{"train": …, "test": …}`."""
WORDS = {table: KINDS[kind] for table, kind in OBJECT_KINDS.items()}
"""For each table of a recipe, the argument that passes its object: `dataset` for `[data]`."""

_PLAIN = (  # types that a recipe holds; a value of any other type is a part
    str,
    bytes,
    numbers.Number,
    Mapping,
    list,
    tuple,
    PurePath,
    datetime.date,
    datetime.time,
    type(None),
)


def object_name(value: Any) -> str:
    """Return an object's name in a recipe: `object.` and its class (`origin` for a dataset)."""
    short = re.sub(r"\W", "", getattr(value, "origin", "") or _maker(value).__name__)
    return f"{OBJECT}.{short if short.isidentifier() else 'made'}"


def is_part(value: Any) -> bool:
    """Return whether a value is a part itself, not the part's name or table or a TOML value."""
    return not isinstance(value, _PLAIN)


def is_object(name: str) -> bool:
    """Return whether a part's name stands for a Python object."""
    return name.startswith(f"{OBJECT}.")


def named_object(tables: Mapping[str, Any], table: str) -> str | None:
    """Return the name of the object that stands for a part of a recipe's table, if one does."""
    part = dict(tables.get(table) or {})
    # A transform is one of a list, all others are a table's part.
    if table == "augmentation":
        names = part.get("transforms", [])
    else:
        names = [part.get("name")]
    return next((name for name in names if is_object(str(name))), None)


def missing(kind: str, name: str) -> str:
    """Return the error message for a recipe that names an object that was not passed."""
    word = KINDS[kind]
    return (
        f"The {word} '{name}' was made in Python, so no plugin can build it. Pass the same object"
        f" again, in Python: retrieval.load(…, {word}=…), or retrieval.train(…, {word}=…,"
        " resume=True)."
    )


class Absent:
    """Stands for an object that a run was trained with and that its model does not need."""

    def __init__(self, name: str) -> None:
        self.origin = name.partition(".")[2]

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Refuse to be used."""
        raise PluginError(f"'{OBJECT}.{self.origin}' was made in Python. Pass the same object.")


def objects_in(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Python objects among a recipe's parts, by table."""
    return {name: tables[name] for name in OBJECT_KINDS if is_part(tables.get(name))}


def require_objects(objects: Mapping[str, Any]) -> None:
    """Raise a `PluginError` for a class, a name or a table in place of an object."""
    for table, value in objects.items():
        word = WORDS[table]
        if isinstance(value, type):
            raise PluginError(
                f"The {word} is a class, {value.__name__}; pass an object of it:"
                f" {value.__name__}(…)."
            )
        if isinstance(value, str | PurePath | Mapping):
            raise PluginError(
                f"The {word} is text or a table, but must be an object. Name a plugin's part in the"
                f' recipe, as {table}={{"name": …}}, or pass what retrieval.create("{word}", …)'
                " returns."
            )


def object_plugin(objects: Mapping[str, Any]) -> ModuleType:
    """Return a plugin whose factories return these objects, or copies of them."""
    module = ModuleType(OBJECT)
    for table, value in objects.items():
        # If a loss or miner measures with the user's combiner, its copy measures with the run's.
        measures = "combiner" in objects and getattr(value, "distance", None) is objects["combiner"]
        offered = {object_name(value).partition(".")[2]: _factory(table, value, measures)}
        hook = hookimpl(lambda offered=offered: offered)
        setattr(module, f"retrieval_{OBJECT_KINDS[table]}", hook)
    return module


def described(value: Any) -> dict[str, Any]:
    """Return an object's class and constructor arguments, which the run's folder records."""
    maker = _maker(value)
    return {"class": f"{maker.__module__}.{maker.__qualname__}", "settings": _settings(value)}


def _maker(value: Any) -> Any:
    if inspect.isroutine(value):
        return value
    return type(value)


def _factory(table: str, value: Any, measures: bool) -> Callable[..., Any]:
    """Return a factory of the dataset itself, or of copies of another object.

    With `measures`, the run's combiner becomes the distance of a copy.
    """

    def give() -> Any:
        # Nothing changes a dataset, and it may be too large for a copy.
        if table == "data":
            return value
        return _copied(value)

    def give_measuring(distance: Any = None) -> Any:
        part = _copied(value)
        if distance is not None:
            part.distance = distance
        return part

    factory: Callable[..., Any] = give_measuring if measures else give
    stated: dict[str, bool] = {}
    # An object without a signature is assumed to take a reference set and a miner's indices.
    with contextlib.suppress(TypeError, ValueError):
        parameters = inspect.signature(getattr(value, "forward", value)).parameters
        if not any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
            stated = {"ref_emb": "ref_emb" in parameters, "miner": "indices_tuple" in parameters}
    stated |= getattr(value, "__retrieval_traits__", {})
    factory.__retrieval_traits__ = stated  # type: ignore[attr-defined]
    return factory


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception as error:  # copying a user's object may raise anything
        raise PluginError(
            f"{object_name(value)} cannot be copied, and training works on a copy:"
            f" {type(error).__name__}: {error}"
        ) from error


def _settings(value: Any, depth: int = 2) -> dict[str, Any]:
    """Return the constructor's arguments that an object keeps as attributes, as plain values."""
    if inspect.isroutine(value):
        return {}
    settings: dict[str, Any] = {}
    for cls in type(value).__mro__:
        try:
            names = inspect.signature(vars(cls).get("__init__", object.__init__)).parameters
        except (TypeError, ValueError):
            continue
        for name in [n for n in names if n not in ("self", "args", "kwargs") and n not in settings]:
            setting = getattr(value, name, None)
            if isinstance(setting, bool | int | float | str):
                settings[name] = setting
            elif setting is not None:
                inner: dict[str, Any] = {}
                if depth and hasattr(setting, "__dict__"):
                    inner = _settings(setting, depth - 1)
                shown = ", ".join(f"{k}={v}" for k, v in inner.items())
                settings[name] = f"{type(setting).__name__}({shown})"
    if hasattr(value, "preprocessing"):
        settings["preprocessing"] = str(value.preprocessing)
    return settings
