"""A filter as text, and a field as text."""

from __future__ import annotations

import re

from retrieval.serving.filters.tree import And, Compare, Exists, Field, Filter, In, Not, Or, Value, word

RESERVED = ("and", "or", "not", "in", "exists", "true", "false", "null")
PLAIN_NAME = rf"(?!(?:{'|'.join(RESERVED)})\b)[^\W\d]\w*"
_PLAIN = re.compile(PLAIN_NAME, re.IGNORECASE)


def filter_to_text(filter: Filter) -> str:
    """Return a filter as text; `parse_filter` makes an equal one of it, if it is no longer than 10,000 characters."""
    if isinstance(filter, Compare):
        return f"{_field(filter.field)} {filter.op} {_value(filter.value)}"
    if isinstance(filter, In):
        return f"{_field(filter.field)} in ({', '.join(map(_value, filter.values))})"
    if isinstance(filter, Exists):
        return f"exists({_field(filter.field)})"
    if isinstance(filter, Not):
        return f"not {_within(filter.part, And | Or)}"
    if isinstance(filter, And):
        return " and ".join(_within(part, And | Or) for part in filter.parts)
    return " or ".join(_within(part, Or) for part in filter.parts)


def prefixed(field: Field) -> tuple[str, ...]:
    """Return a field's names, after `metadata` where the first would mean something else."""
    if isinstance(field, str):
        return (field,)
    return ("metadata", *field) if field[0] in ("id", "label", "metadata") else field


def _within(part: Filter, bracketed: type | object) -> str:
    text = filter_to_text(part)
    return f"({text})" if isinstance(part, bracketed) else text  # type: ignore[arg-type]


def _field(field: Field) -> str:
    return ".".join(name if _PLAIN.fullmatch(name) else f'"{name}"' for name in prefixed(field))


def _value(value: Value) -> str:
    if value is None or isinstance(value, bool):
        return word(value)
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else repr(value)
