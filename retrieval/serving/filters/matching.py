"""Whether a filter is true of an item, in Python."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from retrieval.serving.filters.tree import (
    And,
    Compare,
    Exists,
    Field,
    Filter,
    Not,
    Or,
    Value,
    number,
    type_of,
)

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_ABSENT = object()


def matches(filter: Filter, id: str, label: str | None, metadata: Mapping[str, Any]) -> bool:
    """Return whether a filter is true of an item; `retrieval.serving.filters` says when it is.

    Args:
        filter: the filter.
        id: the item's.
        label: the item's, or None.
        metadata: the item's, as `json.loads` gives them.
    """
    if isinstance(filter, And):
        return all(matches(part, id, label, metadata) for part in filter.parts)
    if isinstance(filter, Or):
        return any(matches(part, id, label, metadata) for part in filter.parts)
    if isinstance(filter, Not):
        return not matches(filter.part, id, label, metadata)
    found = _find(filter.field, id, label, metadata)
    if found is _ABSENT:
        return False
    if isinstance(filter, Exists):
        return True
    candidates = found if isinstance(found, list | tuple) else [found]
    if isinstance(filter, Compare):
        if filter.op == "!=":
            return not all(_holds("=", each, filter.value) for each in candidates)
        return any(_holds(filter.op, each, filter.value) for each in candidates)
    return any(_holds("=", each, value) for each in candidates for value in filter.values)


def _find(field: Field, id: str, label: str | None, metadata: Mapping[str, Any]) -> Any:
    if isinstance(field, str):
        return id if field == "id" else _ABSENT if label is None else label
    found: Any = metadata
    for name in field:
        if not isinstance(found, Mapping) or name not in found:
            return _ABSENT
        found = found[name]
    return found


def _holds(op: str, found: Any, value: Value) -> bool:
    if isinstance(found, Mapping | list | tuple) or type_of(found) != type_of(value):
        return False
    if isinstance(found, int | float):
        found = number(found)
    return _COMPARE[op](found, value)
