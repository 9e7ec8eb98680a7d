"""A filter as plain JSON, for HTTP and Python."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from retrieval.errors import DataError
from retrieval.serving.filters.tree import (
    MOST_CONDITIONS,
    OPS,
    And,
    Compare,
    Exists,
    Field,
    Filter,
    In,
    Not,
    Or,
    field_of,
    prefixed,
    unknown,
)

_DEPTH = 32
_NAME = r'(?:"[^"]+"|[^."]+)'
_FIELD = re.compile(rf"{_NAME}(?:\.{_NAME})*")
_SPLIT = re.compile(_NAME)
_LOGIC = ("and", "or", "not", "exists")


def filter_from_json(value: object) -> Filter:
    """Return the filter that plain JSON means.

        {"label": "shoe"}                                       equal
        {"price": {">=": 5, "<": 20}, "label": {"in": [...]}}   all of these
        {"and": [...]}, {"or": [...]}, {"not": {...}}, {"exists": "maker.country"}

    A key is a field: names joined by dots. A name with a dot is in double quotes, and so is an entry called `and`, `or`,
    `not` or `exists`.

    Raises:
        DataError: it means none, or is too large; says where.
    """
    return _filter(value, "The filter", 1)


def filter_to_json(filter: Filter) -> dict[str, Any]:
    """Return a filter as plain JSON, of which `filter_from_json` makes an equal one."""
    if isinstance(filter, And):
        return {"and": [filter_to_json(part) for part in filter.parts]}
    if isinstance(filter, Or):
        return {"or": [filter_to_json(part) for part in filter.parts]}
    if isinstance(filter, Not):
        return {"not": filter_to_json(filter.part)}
    if isinstance(filter, Exists):
        return {"exists": _key(filter.field)}
    if isinstance(filter, In):
        return {_key(filter.field): {"in": list(filter.values)}}
    return {_key(filter.field): filter.value if filter.op == "=" else {filter.op: filter.value}}


def _filter(value: object, where: str, depth: int) -> Filter:
    if not isinstance(value, Mapping):
        raise DataError(f'{where} must be an object such as {{"label": "shoe"}}, not {_kind(value)}.')
    if depth > _DEPTH:
        raise DataError(f"The filter nests objects and lists more than {_DEPTH} deep. Write it flatter.")
    if not value:
        raise DataError(f"{where} is an empty object. Leave the filter out to get all items.")
    _few(value, where)
    return _all([_entry(key, each, where, depth) for key, each in value.items()])


def _entry(key: object, value: object, where: str, depth: int) -> Filter:
    if not isinstance(key, str):
        raise DataError(f"{where} has a key that is not text, but {_kind(key)}.")
    if key in ("and", "or"):
        if not isinstance(value, list | tuple) or not value:
            raise DataError(f'{where}: "{key}" takes a list of filters, not {_kind(value)}.')
        _few(value, where)
        parts = [_filter(each, f'Part {n} of "{key}"', depth + 2) for n, each in enumerate(value, 1)]
        return _all(parts) if key == "and" else Or(tuple(parts)) if len(parts) > 1 else parts[0]
    if key == "not":
        return Not(_filter(value, 'What "not" takes', depth + 1))
    if key == "exists":
        if not isinstance(value, str):
            raise DataError(f'{where}: "exists" takes the name of a field, not {_kind(value)}.')
        return Exists(_field(value))
    field = _field(key)
    if isinstance(value, Mapping):
        if not value:
            raise DataError(
                f'{where}: {key[:40]!a} has an empty object. Write a value or, for one, {{"<": 20}}.'
            )
        _few(value, where)
        return _all([_condition(field, op, each, key) for op, each in value.items()])
    if isinstance(value, list | tuple):
        raise DataError(f'{where}: {key[:40]!a} has a list. Write {{"in": [...]}}.{_meant(key)}')
    return _condition(field, "=", value, key)


def _condition(field: Field, op: object, value: Any, key: str) -> Filter:
    try:
        if op == "in":
            return In(field, value)
        if op not in OPS:
            raise DataError(unknown(op, (*OPS, "in")))
        return Compare(field, op, value)
    except DataError as fault:
        raise DataError(f"The filter, at {key[:40]!a}: {fault}") from None


def _all(parts: list[Filter]) -> Filter:
    return And(tuple(parts)) if len(parts) > 1 else parts[0]


def _few(value: Any, where: str) -> None:
    if len(value) > MOST_CONDITIONS:
        raise DataError(f"{where} has {len(value):,} parts; {MOST_CONDITIONS:,} conditions are the most.")


def _field(text: str) -> Field:
    if len(text) > 10_000 or not _FIELD.fullmatch(text):
        raise DataError(
            f"{text[:40]!a} is not a field: names joined by dots, in double quotes where a name holds a dot."
        )
    return field_of(tuple(name.strip('"') for name in _SPLIT.findall(text)))


def _key(field: Field) -> str:
    names = prefixed(field)
    if len(names) == 1 and names[0] in _LOGIC:
        return f'"{names[0]}"'
    return ".".join(f'"{name}"' if "." in name else name for name in names)


def _meant(key: str) -> str:
    return f' Or is it "{key.lower()}"?' if key.lower() in ("and", "or") else ""


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", tuple: "a list", str: "text", bool: "true or false"}
    if value is None:
        return "null"
    return names.get(
        type(value), "a number" if isinstance(value, int | float) else f"a {type(value).__name__}"
    )
