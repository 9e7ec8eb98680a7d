"""Evaluate filters in Python (`matches`) and in SQLite (`to_sql`).

Both give the same result for metadata that `metadata_text` has written.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from json.encoder import encode_basestring
from types import NoneType
from typing import Any

import numpy as np

from retrieval.errors import DataError
from retrieval.store.filters.tree import (
    LONG_INTEGER,
    Condition,
    Exists,
    Field,
    Filter,
    In,
    Joint,
    Value,
    fold,
    has_surrogate,
    is_long,
    type_of,
)

# `base.strict_json` reads at most as many levels.
_MAX_DEPTH = 64
COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_JOIN: dict[Joint, Callable[[list[bool]], bool]] = {
    "and": all,
    "or": any,
    "not": lambda parts: not parts[0],
}
_FLAT = {str, int, float, bool, NoneType}
# Between two items of the list that `flat_texts` encodes, and after the last.
_BETWEEN = ', "\\u0000", '
_END = ', "\\u0000"]'
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
# What `_encode` calls for these types
_WRITERS: dict[type, Callable[[Any], str]] = {
    str: encode_basestring,
    int: int.__repr__,
    float: float.__repr__,
}
ABSENT = object()


def matches(filter: Filter, id: str, label: str | None, metadata: Mapping[str, Any]) -> bool:
    """Return whether an item matches a filter, by the rules in `docs/indexes.md`.

    `metadata` is what `json.loads` returns for the item's metadata.
    """

    def holds(condition: Condition) -> bool:
        value = value_of(condition.field, id, label, metadata)
        if value is ABSENT or isinstance(condition, Exists):
            return value is not ABSENT
        if isinstance(value, list | tuple):
            elements = value
        else:
            elements = [value]
        if condition.op == "!=":
            return not all(_is_true("=", element, condition.values[0]) for element in elements)
        return any(
            _is_true(condition.op, element, operand)
            for element in elements
            for operand in condition.values
        )

    return fold(filter, holds, lambda joint, parts: _JOIN[joint](parts))


def value_of(field: Field, id: str, label: str | None, metadata: Mapping[str, Any]) -> Any:
    """Return the value of a field, or `ABSENT`."""
    if isinstance(field, str):
        return id if field == "id" else ABSENT if label is None else label
    value: Any = metadata
    for name in field:
        if not isinstance(value, Mapping) or name not in value:
            return ABSENT
        value = value[name]
    return value


def _is_true(op: str, element: Any, operand: Value) -> bool:
    if isinstance(element, Mapping | list | tuple) or type_of(element) != type_of(operand):
        return False
    return COMPARE[op](element, operand)


SqlParameter = str | int
Sql = tuple[str, tuple[SqlParameter, ...]]
_JSON_TYPES = {None: "null", True: "true", False: "false"}
_OF_TYPE = {"text": "type = 'text'", "number": "type in ('integer', 'real')"}


def to_sql(filter: Filter) -> Sql:
    """Return a filter as an SQL expression, and the expression's parameters in order.

    The value of the expression is 1 or 0, never null. The expression reads `items.id` and
    `items.label` (text with binary collation; label may be null), and `items.metadata` (JSON that
    `metadata_text` wrote). SQLite can use an index for conditions on id and label. The size
    limits of filters keep the expression below two limits of SQLite: a depth of 1,000, and in older
    versions a parser stack of 100 entries, which nested brackets fill.
    """

    def join(joint: Joint, parts: list[Sql]) -> Sql:
        texts = [sql for sql, _ in parts]
        if joint == "not":
            sql = f"not {texts[0]}"
        else:
            sql = f" {joint} ".join(texts)
        return f"({sql})", tuple(value for _, values in parts for value in values)

    return fold(filter, _of_condition, join)


def _of_condition(filter: Condition) -> Sql:
    sql, values = _column(filter) if isinstance(filter.field, str) else _entry(filter)
    return f"({sql})", values


def _column(filter: Condition) -> Sql:
    """Return the SQL of a condition on id or label, whose values are text."""
    column = f"items.{filter.field}"
    exists = f"{column} is not null"
    if isinstance(filter, Exists):
        return exists, ()
    texts: tuple[Any, ...] = filter.values
    if isinstance(filter, In):
        return f"{exists} and {column} in ({', '.join('?' * len(texts))})", texts
    return f"{exists} and {column} {filter.op} ?", texts


def _entry(filter: Condition) -> Sql:
    """Return the SQL of a condition on a metadata entry.

    `json_each` yields the elements of a list, or a single value. It also yields the entries of an
    object, which must not match.
    """
    path = "$" + "".join(f'."{name}"' for name in filter.field)
    if isinstance(filter, Exists):
        return "json_type(items.metadata, ?) is not null", (path,)
    if filter.op in ("=", "!="):
        sql, values = _equals(filter.values)
    else:
        (bound,) = filter.values
        mark, parameter = _bound(bound)
        sql = f"{_OF_TYPE[type_of(bound)]} and value {filter.op} {mark}"
        values = (parameter,)
    elements = "exists (select 1 from json_each(items.metadata, ?) where {})"
    kind = "json_type(items.metadata, ?)"
    if filter.op == "!=":
        return f"{kind} is 'object' or {elements.format(f'not ({sql})')}", (path, path, *values)
    # `case` evaluates the second test only for items that pass the first; `and` might reorder them.
    return f"case when {elements.format(sql)} then {kind} is not 'object' else 0 end", (
        path,
        *values,
        path,
    )


def _equals(operands: tuple[Value, ...]) -> Sql:
    """Return the SQL that tests whether a value of `json_each` equals one of the operands."""
    tests = []
    parameters = []
    for kind, of_type in _OF_TYPE.items():
        if chosen := [_bound(value) for value in operands if type_of(value) == kind]:
            tests.append(f"{of_type} and value in ({', '.join(mark for mark, _ in chosen)})")
            parameters += [parameter for _, parameter in chosen]
    plain = {_JSON_TYPES[value] for value in operands if value is None or isinstance(value, bool)}
    tests += [f"type = '{name}'" for name in sorted(plain)]
    return " or ".join(tests), tuple(parameters)


def _bound(value: Value) -> tuple[str, SqlParameter]:
    """Return the placeholder of a string or number, and the parameter to bind to it.

    SQLite parses decimal numbers in several ways, and some round incorrectly. So a float is bound
    as JSON text, which SQLite parses in the same way as the numbers in the metadata.
    """
    if isinstance(value, float):
        return "json_extract(?, '$')", repr(value)
    assert isinstance(value, str | int)
    return "?", value


def metadata_text(metadata: Mapping[str, Any]) -> str:
    """Return metadata as JSON text for which `to_sql` and `matches` give the same results.

    This holds for SQLite 3.40 or later.

    Raises:
        DataError: the metadata are not a JSON object, nest deeper than 64 levels, or contain a
            number that is not finite, a NUL character or a lone surrogate (half of a pair).
    """
    if not isinstance(metadata, Mapping):
        raise DataError(
            f"Metadata must be an object with named entries, not a {type(metadata).__name__}."
        )
    texts = flat_texts([metadata])
    if texts is not None:
        return texts[0]
    return json.dumps(_checked_json(metadata, "metadata", 1), ensure_ascii=False)


def metadata_texts(metadata: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the metadata of items, each as `metadata_text` does."""
    return (metadata and flat_texts(metadata)) or list(map(metadata_text, metadata))


def flat_texts(metadata: Sequence[Mapping[str, Any]]) -> list[str] | None:
    """Return the metadata of items, each as `metadata_text` does; `None` unless all are flat.

    Flat metadata are dictionaries of plain strings, numbers, truth values and nulls.
    """
    # One call of the encoder for all takes a third of the time of a call for each.
    try:
        names = set(chain.from_iterable(metadata))
        values = list(chain.from_iterable(item.values() for item in metadata))
        kinds = set(map(type, values))
        if not set(map(type, names)) <= {str} or not kinds <= _FLAT:
            return None
        if int in kinds and any(is_long(value) for value in values if type(value) is int):
            return None
        text = _encode([part for item in metadata for part in (item, "\0")])
    except (AttributeError, TypeError, ValueError):
        return None
    # No string holds NUL, so the encoded ones between the items are the only ones.
    if text.count("\\u0000") > len(metadata) or has_surrogate(text):
        return None
    return text[1 : -len(_END)].split(_BETWEEN)


def column_texts(names: Sequence[str], columns: Sequence[Sequence[Any]], count: int) -> list[str]:
    """Return the metadata of `count` rows, each as `metadata_text` does, from columns.

    A column has only strings without NUL and lone surrogates, numbers that are finite and not long,
    truth values and nulls.
    """
    if not columns:
        return ["{}"] * count
    cells = []
    for column in columns:
        kinds = set(map(type, column))
        if len(kinds) == 1:
            write = _WRITERS.get(kinds.pop(), _encode)
        else:
            write = _encode
        cells.append(map(write, column))
    pairs = ", ".join(f"{_encode(name).replace('%', '%%')}: %s" for name in names)
    return list(map(f"{{{pairs}}}".__mod__, zip(*cells, strict=True)))


def _checked_json(value: Any, where: str, depth: int) -> Any:
    """Return a value in types that `json` writes; `where` names it in error messages.

    NumPy's scalars become Python's.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if depth > _MAX_DEPTH + 1:
        raise DataError(f"{where[:80]}… nests deeper than {_MAX_DEPTH} levels.")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _checked_text(value, where)
    if isinstance(value, int | float):
        if is_long(value):
            raise DataError(f"{where} is {LONG_INTEGER}")
        if not math.isfinite(value):
            raise DataError(f"{where} must be a finite number within the range of float64.")
        return value
    if isinstance(value, list | tuple):
        return [_checked_json(element, where, depth + 1) for element in value]
    if not isinstance(value, Mapping):
        raise DataError(
            f"{where} is a {type(value).__name__}; JSON has only text, numbers, true, false, null,"
            " lists and objects."
        )
    for name in value:
        if not isinstance(name, str):
            raise DataError(
                f"{where} has an entry whose name is not text, but a {type(name).__name__}."
            )
        _checked_text(name, f"A name in {where}")
    return {
        name: _checked_json(entry, f"{where}.{name[:40]}", depth + 1)
        for name, entry in value.items()
    }


def _checked_text(value: str, where: str) -> str:
    """Return text; raise a `DataError` if SQLite's JSON functions would refuse or cut it."""
    if has_surrogate(value):
        raise DataError(f"{where} has a lone surrogate, which is not a character. Remove it.")
    if "\0" in value:
        raise DataError(f"{where} has a NUL character. Remove it.")
    return value
