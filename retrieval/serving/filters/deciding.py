"""Evaluate filters in Python (`matches`) and in SQLite (`to_sql`).

Both agree on metadata written by `metadata_text`.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from retrieval.errors import DataError
from retrieval.serving.filters.tree import (
    And,
    Condition,
    Exists,
    Field,
    Filter,
    In,
    Joint,
    Not,
    Or,
    Value,
    fold,
    has_surrogate,
    number,
    type_of,
)

_DEPTH = 64  # as `serving.files.strict_json` reads
COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_ABSENT = object()


def matches(filter: Filter, id: str, label: str | None, metadata: Mapping[str, Any]) -> bool:
    """Return whether an item matches a filter, by the rules in `docs/indexes.md`.

    Args:
        filter: the filter.
        id: id of the item.
        label: label of the item, or `None`.
        metadata: metadata of the item, as parsed by `json.loads`.
    """
    if isinstance(filter, And):
        return all(matches(part, id, label, metadata) for part in filter.parts)
    if isinstance(filter, Or):
        return any(matches(part, id, label, metadata) for part in filter.parts)
    if isinstance(filter, Not):
        return not matches(filter.part, id, label, metadata)
    value = _find(filter.field, id, label, metadata)
    if value is _ABSENT or isinstance(filter, Exists):
        return value is not _ABSENT
    elements = value if isinstance(value, list | tuple) else [value]
    if filter.op == "!=":
        return not all(_holds("=", element, filter.values[0]) for element in elements)
    return any(
        _holds(filter.op, element, operand) for element in elements for operand in filter.values
    )


def _find(field: Field, id: str, label: str | None, metadata: Mapping[str, Any]) -> Any:
    if isinstance(field, str):
        return id if field == "id" else _ABSENT if label is None else label
    value: Any = metadata
    for name in field:
        if not isinstance(value, Mapping) or name not in value:
            return _ABSENT
        value = value[name]
    return value


def _holds(op: str, element: Any, operand: Value) -> bool:
    if isinstance(element, Mapping | list | tuple) or type_of(element) != type_of(operand):
        return False
    if isinstance(element, int | float):
        element = number(element)
    return COMPARE[op](element, operand)


Parameter = str | int
Sql = tuple[str, tuple[Parameter, ...]]
_JSON_TYPES = {None: "null", True: "true", False: "false"}
_OF_TYPE = {"text": "type = 'text'", "number": "type in ('integer', 'real')"}


def to_sql(filter: Filter) -> Sql:
    """Return a filter as an SQL expression and its parameters in order.

    The expression is 1 or 0, never null. It reads `items.id`, `items.label` (text, collated as
    binary; label may be null) and `items.metadata` (a JSON object as `metadata_text` writes it).
    Conditions on id and label can use an index. A filter's bounds keep its depth below the 1,000
    that SQLite accepts, and its brackets below the 100 entries of an older SQLite's parser stack.
    """

    def join(joint: Joint, parts: list[Sql]) -> Sql:
        texts = [sql for sql, _ in parts]
        sql = f"not {texts[0]}" if joint == "not" else f" {joint} ".join(texts)
        return f"({sql})", tuple(value for _, values in parts for value in values)

    return fold(filter, _of_condition, join)


def _of_condition(filter: Condition) -> Sql:
    sql, values = _column(filter) if isinstance(filter.field, str) else _entry(filter)
    return f"({sql})", values


def _column(filter: Condition) -> Sql:
    """Return the SQL of a condition on id or label.

    Only texts are compared, because SQLite would convert a number to text first.
    """
    column = f"items.{filter.field}"
    exists = f"{column} is not null"
    if isinstance(filter, Exists):
        return exists, ()
    texts = tuple(value for value in filter.values if isinstance(value, str))
    if not texts:
        return (exists if filter.op == "!=" else "0"), ()
    if isinstance(filter, In):
        return f"{exists} and {column} in ({', '.join('?' * len(texts))})", texts
    return f"{exists} and {column} {filter.op} ?", texts


def _entry(filter: Condition) -> Sql:
    """Return the SQL of a condition on a metadata entry.

    `json_each` yields a list's elements or a single value, but also an object's entries, which
    must not match.
    """
    path = "$" + "".join(f'."{name}"' for name in filter.field)
    if isinstance(filter, Exists):
        return "json_type(items.metadata, ?) is not null", (path,)
    if filter.op in ("=", "!="):
        sql, values = _equals(filter.values)
    else:
        (bound,) = filter.values
        mark, parameter = _bound(bound)
        sql, values = f"{_OF_TYPE[type_of(bound)]} and value {filter.op} {mark}", (parameter,)
    elements = "exists (select 1 from json_each(items.metadata, ?) where {})"
    kind = "json_type(items.metadata, ?)"
    if filter.op == "!=":
        return f"{kind} is 'object' or {elements.format(f'not ({sql})')}", (path, path, *values)
    # `case` fixes the order, so the second test runs on few items.
    return f"case when {elements.format(sql)} then {kind} is not 'object' else 0 end", (
        path,
        *values,
        path,
    )


def _equals(operands: tuple[Value, ...]) -> Sql:
    """Return the SQL that tests whether a value of `json_each` equals one of the operands."""
    tests, parameters = [], []
    for kind, of_type in _OF_TYPE.items():
        if chosen := [_bound(value) for value in operands if type_of(value) == kind]:
            tests.append(f"{of_type} and value in ({', '.join(mark for mark, _ in chosen)})")
            parameters += [parameter for _, parameter in chosen]
    plain = {_JSON_TYPES[value] for value in operands if value is None or isinstance(value, bool)}
    tests += [f"type = '{name}'" for name in sorted(plain)]
    return " or ".join(tests), tuple(parameters)


def _bound(value: Value) -> tuple[str, Parameter]:
    """Return the placeholder of a text or number and the parameter to bind.

    SQLite parses decimals in several ways, and some round incorrectly. So a float is bound as JSON
    text and parsed like those in the metadata.
    """
    if isinstance(value, float):
        return "json_extract(?, '$')", repr(value)
    assert isinstance(value, str | int)
    return "?", value


def metadata_text(metadata: Mapping[str, Any]) -> str:
    """Return metadata as JSON text on which `to_sql` and `matches` agree (SQLite 3.40 or later).

    Raises:
        DataError: the metadata are not a JSON object, nest deeper than 64 levels, or contain a
            number that is not finite, a NUL character or a lone surrogate.
    """
    if not isinstance(metadata, Mapping):
        raise DataError(
            f"Metadata are an object with named entries, not a {type(metadata).__name__}."
        )
    return json.dumps(_plain(metadata, "metadata", 1), ensure_ascii=False)


def _plain(value: Any, where: str, depth: int) -> Any:
    if depth > _DEPTH + 1:
        raise DataError(f"{where[:80]}… nests deeper than {_DEPTH} levels.")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value, where)
    if isinstance(value, int | float):
        if not math.isfinite(value := number(value)):
            raise DataError(f"{where} must be a finite number within the range of float64.")
        return value
    if isinstance(value, list | tuple):
        return [_plain(element, where, depth + 1) for element in value]
    if not isinstance(value, Mapping):
        raise DataError(
            f"{where} is a {type(value).__name__}; JSON has text, numbers, true, false, null,"
            " lists, objects."
        )
    for name in value:
        if not isinstance(name, str):
            raise DataError(
                f"{where} has an entry whose name is not text, but a {type(name).__name__}."
            )
        _text(name, f"A name in {where}")
    return {name: _plain(entry, f"{where}.{name[:40]}", depth + 1) for name, entry in value.items()}


def _text(value: str, where: str) -> str:
    """Refuse texts that SQLite cannot hold; its JSON functions cut a text at NUL."""
    if has_surrogate(value):
        raise DataError(f"{where} has a lone surrogate, which is no character.")
    if "\0" in value:
        raise DataError(f"{where} has a NUL character. Leave it out.")
    return value
