"""A filter as plain JSON, for HTTP and Python."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from retrieval.errors import DataError, did_you_mean
from retrieval.serving.filters.tree import (
    MOST_CHARACTERS,
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
    check_count,
    field_of,
    names_of,
    shown,
)

_DEPTH = 32
_NAME = re.compile(r'"[^"]+"|[^."]+')
_FIELD = re.compile(rf"(?:{_NAME.pattern})(?:\.(?:{_NAME.pattern}))*")
_LOGIC = ("and", "or", "not", "exists")


def filter_from_json(value: object) -> Filter:
    """Return the filter that plain JSON means.

        {"label": "shoe"}                                       equal
        {"price": {">=": 5, "<": 20}, "label": {"in": [...]}}   all of these
        {"and": [...]}, {"or": [...]}, {"not": {...}}, {"exists": "maker.country"}

    A key is a field: names joined by dots. A name with a dot is in double quotes, and so is an
    entry called `and`, `or`, `not` or `exists`.

    Raises:
        DataError: it means none, or is too large; says where.
    """
    return _filter(value, "The filter", 1)


def filter_to_json(filter: Filter) -> dict[str, Any]:
    """Return a filter as plain JSON, of which `filter_from_json` makes an equal filter."""
    if isinstance(filter, And | Or):
        return {type(filter).__name__.lower(): [filter_to_json(part) for part in filter.parts]}
    if isinstance(filter, Not):
        return {"not": filter_to_json(filter.part)}
    names = names_of(filter.field)
    quoted = len(names) == 1 and names[0] in _LOGIC
    field = ".".join(f'"{name}"' if quoted or "." in name else name for name in names)
    if isinstance(filter, Exists):
        return {"exists": field}
    if isinstance(filter, In):
        return {field: {"in": list(filter.values)}}
    return {field: filter.value if filter.op == "=" else {filter.op: filter.value}}


def _filter(value: object, where: str, depth: int) -> Filter:
    if not isinstance(value, Mapping):
        raise DataError(
            f'{where} must be an object such as {{"label": "shoe"}}, not {shown(value)}.'
        )
    if depth > _DEPTH:
        raise DataError(
            f"The filter nests objects and lists more than {_DEPTH} deep. Write it flatter."
        )
    if not value:
        raise DataError(f"{where} is an empty object. Leave the filter out to get all items.")
    check_count("conditions", len(value), MOST_CONDITIONS)
    return _joined(And, [_entry(key, entry, where, depth) for key, entry in value.items()])


def _entry(key: object, value: object, where: str, depth: int) -> Filter:
    if not isinstance(key, str):
        raise DataError(f"{where} has a key that is not text, but {shown(key)}.")
    if key in ("and", "or"):
        if not isinstance(value, list | tuple) or not value:
            raise DataError(f'{where}: "{key}" takes a list of filters, not {shown(value)}.')
        check_count("conditions", len(value), MOST_CONDITIONS)
        parts = [
            _filter(part, f'Part {n} of "{key}"', depth + 2) for n, part in enumerate(value, 1)
        ]
        return _joined(And if key == "and" else Or, parts)
    if key == "not":
        return Not(_filter(value, 'What "not" takes', depth + 1))
    if key == "exists":
        if not isinstance(value, str):
            raise DataError(f'{where}: "exists" takes the name of a field, not {shown(value)}.')
        return Exists(_field(value))
    field = _field(key)
    if isinstance(value, list | tuple):
        hint = f' Or is it "{key.lower()}"?' if key.lower() in ("and", "or") else ""
        raise DataError(f'{where}: {shown(key)} has a list. Write {{"in": [...]}}.{hint}')
    if not isinstance(value, Mapping):
        value = {"=": value}
    if not value:
        raise DataError(
            f'{where}: {shown(key)} has an empty object. Write a value or, for one, {{"<": 20}}.'
        )
    check_count("conditions", len(value), MOST_CONDITIONS)
    try:
        return _joined(And, [_condition(field, op, operand) for op, operand in value.items()])
    except DataError as fault:
        raise DataError(f"The filter, at {shown(key)}: {fault}") from None


def _condition(field: Field, op: object, value: Any) -> Filter:
    if op == "in":
        return In(field, value)
    if op not in OPS:
        hint = did_you_mean(op[:40], (*OPS, "in")) if isinstance(op, str) else ""
        raise DataError(f"{shown(op)} is not one of {', '.join(OPS)}, in.{hint}")
    return Compare(field, op, value)


def _joined(kind: type[And | Or], parts: list[Filter]) -> Filter:
    return kind(tuple(parts)) if len(parts) > 1 else parts[0]


def _field(text: str) -> Field:
    if len(text) > MOST_CHARACTERS or not _FIELD.fullmatch(text):
        raise DataError(
            f"{shown(text)} is not a field: names joined by dots, in double quotes where a name"
            " holds a dot."
        )
    return field_of(tuple(name.strip('"') for name in _NAME.findall(text)))
