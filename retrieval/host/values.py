"""Strict checks of a recipe's values against types.

pydantic decides whether a value fits. This module writes its own error messages, which describe the
expected type in a recipe author's words.
"""

from __future__ import annotations

import datetime
import enum
import inspect
import json
import math
import re
import types
from collections.abc import Hashable, Iterator, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from retrieval.errors import did_you_mean

if TYPE_CHECKING:
    from pydantic import BaseModel

# Path to a value: keys and list positions.
KeyPath = tuple[str | int, ...]

_BASIC = {
    int: "integer",
    float: "number",
    bool: "true or false",
    str: "text",
    type(None): "none",
    Any: "any",
}
_LIMITS = {
    "gt": "> {:g}",
    "ge": "≥ {:g}",
    "lt": "< {:g}",
    "le": "≤ {:g}",
    "multiple_of": "a multiple of {:g}",
    "min_length": "at least {} long",
    "max_length": "at most {} long",
    "pattern": "matching {}",
}
_NUMBER = r"\s*[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?\s*"


def check_values(
    model: type[BaseModel], values: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    """Check values strictly against a model; return the values and the problems by key path."""
    from pydantic import ValidationError

    faults: dict[KeyPath, str] = {}
    # pydantic's strict mode for JSON fits TOML: lists serve as tuples and text as paths, but text
    # does not serve as a number.
    text = json.dumps(_plain(values, (), faults))
    try:
        instance = model.model_validate_json(text, strict=True)
    except ValidationError as error:
        for entry in error.errors(include_url=False):
            path, sentence = _fault(entry, model, values)
            # A union gives an error for each of its types, and a wrong table one for each key. The
            # outermost says what the author has to change.
            if any(path[: len(outer)] == outer for outer in faults):
                continue
            faults = {inner: text for inner, text in faults.items() if inner[: len(path)] != path}
            faults[path] = sentence
        return {}, faults
    names = {name: field.alias or name for name, field in model.model_fields.items()}
    checked = {names[name]: getattr(instance, name) for name in instance.model_fields_set}
    for name, value in checked.items():
        # Path("") would be the working folder.
        if isinstance(value, PurePath) and values.get(name) == "":
            faults[name,] = f"{name}: is empty; name a file or folder."
    if faults:
        return {}, faults
    return checked, {}


def is_plain(value: Any) -> bool:
    """Return whether TOML can express a value."""
    faults: dict[KeyPath, str] = {}
    if isinstance(value, enum.Enum):
        value = value.value
    _plain(value, (), faults)
    return not faults


def _plain(
    value: Any,
    path: KeyPath,
    faults: dict[KeyPath, str],
) -> Any:
    """Return a value as plain JSON; add a fault for what a recipe cannot hold, and leave it out."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v, (*path, str(k)), faults) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, (*path, i), faults) for i, v in enumerate(value)]
    if isinstance(value, PurePath):
        return str(value)
    value = _python_scalar(value)
    if isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
        fault = "holds characters that are not valid Unicode."
    elif isinstance(value, float) and math.isnan(value):
        fault = "is nan, which is not a number."
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        fault = "has more digits than a number of 64 bits can hold."
    elif value is None or isinstance(value, bool | int | float | str):
        return value
    else:
        kind = f"of type {type(value).__name__}"
        # TOML has dates, and an author may have meant text.
        if isinstance(value, datetime.date | datetime.time):
            kind = "a date or time"
        fault = f"is {kind}, which nothing here takes. If it is text, put it in quotes."
    faults[path] = f"{dotted(path)}: {fault}"
    return None


def _python_scalar(value: Any) -> Any:
    """Return a NumPy scalar as Python's; any other value unchanged."""
    # By name, so that reading a recipe does not load NumPy.
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()
    return value


def dotted(path: KeyPath) -> str:
    """Return a key path in the notation of `--set`: `phase.0.epochs`."""
    return ".".join(map(str, path)) or "the recipe"


def _fault(error: Any, model: type[BaseModel], values: Any) -> tuple[KeyPath, str]:
    """Return the key path and message of one of pydantic's errors."""
    path, annotation, value, container = _locate(error["loc"], model, values)
    where = dotted(path)
    kind = error["type"]
    if kind == "extra_forbidden":
        key = str(error["loc"][-1])
        return (*path, key), _unknown(path, key, list(_fields(container)), value)
    if error["loc"] and error["loc"][-1] == "[key]":
        return path, _unknown(path[:-1], str(path[-1]), _choices(get_args(container)[0]), value)
    if kind == "missing" and value is None:
        return path, f"{where}: is required ({_phrase(annotation)})."
    if kind in ("value_error", "assertion_error"):
        return path, f"{where}: {str(error['ctx']['error']).rstrip('.')}."
    hint = ""
    if isinstance(value, str):
        hint = did_you_mean(value, _choices(annotation))
        takes_number = re.search(r"\b(integer|number)\b", type_text(annotation))
        if takes_number and re.fullmatch(_NUMBER, value):
            hint = " Write it without quotes."
    return path, f"{where}: should be {_phrase(annotation)}, not {shown(value)}.{hint}"


def _unknown(
    path: KeyPath,
    key: str,
    known: list[str],
    value: Any,
) -> str:
    what = "unknown key"
    if not path and isinstance(value, Mapping | list):
        what = "there is no such table"
    names = ", ".join(known) or "none"
    return f"{dotted((*path, key))}: {what} (known: {names}).{did_you_mean(key, known)}"


def _locate(
    loc: tuple[Any, ...],
    model: Any,
    values: Any,
) -> tuple[KeyPath, Any, Any, Any]:
    """Follow an error's path up to a union; return the key path, type, value and enclosing type."""
    path: KeyPath = ()
    annotation = model
    value = values
    container = model
    for step in loc:
        bare = _bare(annotation)
        origin = get_origin(bare)
        args = get_args(bare)
        if step == "[key]" or origin in (Union, types.UnionType):
            break
        if inspect.isclass(bare) and hasattr(bare, "model_fields"):
            if step not in _fields(bare):
                return path, annotation, value.get(step), bare
            inner = _fields(bare)[step]
        elif origin is dict:
            inner = args[1]
        elif origin in (list, tuple) and isinstance(value, list | tuple):
            # pydantic names the first element that a tuple lacks.
            if step >= len(value):
                break
            inner = args[0]
            if origin is tuple and args[-1] is not ...:
                inner = args[step]
        else:
            break
        path = (*path, step)
        container = bare
        annotation = inner
        if isinstance(value, list | tuple):
            value = value[step]
        elif isinstance(value, Mapping):
            value = value.get(step)
        else:
            value = None
    return path, annotation, value, container


def _bare(annotation: Any) -> Any:
    """Return a type without `Annotated` and `| None`."""
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        branches = [a for a in get_args(annotation) if a is not type(None)]
        if len(branches) == 1:
            return _bare(branches[0])
        return annotation
    return annotation


def _fields(model: Any) -> dict[str, Any]:
    return {
        field.alias or name: (
            Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
        )
        for name, field in model.model_fields.items()
    }


def _choices(annotation: Any) -> list[str]:
    bare = _bare(annotation)
    if get_origin(bare) in (Union, types.UnionType):
        return [choice for branch in get_args(bare) for choice in _choices(branch)]
    if inspect.isclass(bare) and issubclass(bare, enum.Enum):
        return [str(member.value) for member in bare]
    if get_origin(bare) is Literal:
        return [a for a in get_args(bare) if isinstance(a, str)]
    return []


def _phrase(annotation: Any) -> str:
    """Return a type as it reads after "should be"."""
    text = type_text(annotation)
    articles = {r"\[": "a list ", r"(number|list|table|path)\b": "a ", "integer": "an "}
    article = next((word for start, word in articles.items() if re.match(start, text)), "")
    return article + text


def type_text(annotation: Any) -> str:
    """Return a type in a recipe author's words: `integer`, `"a" or "b"`, `list of number`."""
    origin = get_origin(annotation)
    args = get_args(annotation)
    if origin is None and isinstance(annotation, Hashable) and annotation in _BASIC:
        return _BASIC[annotation]
    if (origin or annotation) in (list, tuple, dict) and not args:
        if annotation is dict or origin is dict:
            return "table"
        return "list"
    if origin is Annotated:
        limits = ", ".join(_limits(args[1:]))
        return type_text(args[0]) + (f" ({limits})" if limits else "")
    if origin is Literal:
        return " or ".join(toml_value(a) for a in args)
    if origin in (Union, types.UnionType):
        return " or ".join(type_text(a) for a in args if a is not type(None))
    if origin is list:
        inner = type_text(args[0])
        if " or " in inner and inner != _BASIC[bool]:
            inner = f"({inner})"
        return f"list of {inner}"
    if origin is tuple:
        return "[" + ", ".join("…" if a is ... else type_text(a) for a in args) + "]"
    if origin is dict:
        if args[1] is Any:
            return "table"
        return f"table of {type_text(args[1])}"
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        return " or ".join(toml_value(member) for member in annotation)
    if inspect.isclass(annotation) and issubclass(annotation, PurePath):
        return "path"
    if hasattr(annotation, "model_fields"):
        return "table"
    return getattr(annotation, "__name__", str(annotation))


def _limits(constraints: tuple[Any, ...]) -> Iterator[str]:
    for constraint in constraints:
        for part in [constraint, *getattr(constraint, "metadata", [])]:
            for name, text in _LIMITS.items():
                if (limit := getattr(part, name, None)) is not None:
                    yield text.format(limit)


def shown(value: Any) -> str:
    """Return a value as TOML, cut to 80 characters."""
    text = toml_value(value)
    if len(text) <= 80:
        return text
    return text[:77] + "…"


def toml_value(value: Any) -> str:
    """Return a value as TOML on one line; None, which TOML lacks, becomes "none"."""
    value = _python_scalar(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, enum.Enum):
        return toml_value(value.value)
    if isinstance(value, str):
        # TOML's strings have JSON's escapes, and TOML forbids DEL, which JSON does not escape.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    if isinstance(value, Mapping):
        if not value:
            return "{}"
        inner = ", ".join(f"{_key(k)} = {toml_value(v)}" for k, v in value.items())
        return f"{{ {inner} }}"
    if value is None:
        return "none"
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, int | float):
        return repr(value)
    return toml_value(str(value))


def _key(key: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9_-]+", key):
        return key
    return toml_value(key)
