"""A filter as a condition of SQLite's, 3.40 or newer. What a user wrote is a parameter, never a part of the text."""

from __future__ import annotations

import heapq
from typing import NamedTuple

from retrieval.serving.filters.tree import And, Compare, Exists, Filter, In, Not, Or, Value, type_of

Parameter = str | int


class _Part(NamedTuple):
    need: int
    """How much of the parser's stack it takes, relative to one comparison."""
    order: int
    sql: str
    values: tuple[Parameter, ...]


def to_sql(filter: Filter) -> tuple[str, tuple[Parameter, ...]]:
    """Return a filter as an SQL expression, and its parameters in order.

    The expression is 1 or 0, never null. It reads `items.id`, `items.label` (text, collated as binary; label may be null) and
    `items.metadata` (a JSON object as `metadata_text` writes it). Conditions on id and label can use an index.
    """
    part = _part(filter, 0)
    return part.sql, part.values


def _part(filter: Filter, order: int) -> _Part:
    if isinstance(filter, Not):
        part = _part(filter.part, order)
        return _Part(part.need + 1, order, f"(not {part.sql})", part.values)
    if isinstance(filter, And | Or):
        joint = "and" if isinstance(filter, And) else "or"
        return _joined([_part(part, n) for n, part in enumerate(filter.parts)], joint)._replace(order=order)
    sql, values = _column(filter) if isinstance(filter.field, str) else _entry(filter)
    return _Part(0, order, f"({sql})", values)


def _joined(parts: list[_Part], joint: str) -> _Part:
    """Join parts in pairs, the ones that need least first and the needier one in front.

    SQLite refuses expressions deeper than 1,000, and until 3.45 its parser has a stack of 100 entries. So depth and need grow with
    the logarithm of the number of conditions.
    """
    heapq.heapify(parts)
    while len(parts) > 1:
        small, large = heapq.heappop(parts), heapq.heappop(parts)
        # an open parenthesis before the first, that and two more before the second
        need = max(large.need + 1, small.need + 3)
        sql = f"({large.sql} {joint} {small.sql})"
        heapq.heappush(parts, _Part(need, large.order, sql, large.values + small.values))
    return parts[0]


def _column(filter: Compare | In | Exists) -> tuple[str, tuple[Parameter, ...]]:
    """Id or label. Only text is compared: SQLite would turn a number into text before."""
    there = f"items.{filter.field} is not null"
    if isinstance(filter, Exists):
        return there, ()
    if isinstance(filter, In):
        texts = tuple(value for value in filter.values if isinstance(value, str))
        return (f"{there} and items.{filter.field} in ({_marks(len(texts))})", texts) if texts else ("0", ())
    if not isinstance(filter.value, str):
        return (there if filter.op == "!=" else "0"), ()
    return f"{there} and items.{filter.field} {filter.op} ?", (filter.value,)


def _entry(filter: Compare | In | Exists) -> tuple[str, tuple[Parameter, ...]]:
    """An entry of the metadata. `json_each` gives a list's elements, or a single value; but an object's entries, too."""
    path = "$" + "".join(f'."{name}"' for name in filter.field)
    if isinstance(filter, Exists):
        return "json_type(items.metadata, ?) is not null", (path,)
    negated = isinstance(filter, Compare) and filter.op == "!="
    if isinstance(filter, In):
        sql, values = _one_of(filter.values)
    else:
        sql, values = _test("=" if negated else filter.op, filter.value)
    each = "exists (select 1 from json_each(items.metadata, ?) where {})"
    kind = "json_type(items.metadata, ?)"
    if negated:
        return f"{kind} is 'object' or {each.format(f'not ({sql})')}", (path, path, *values)
    # `case` keeps the order: the second question is asked of few items
    return f"case when {each.format(sql)} then {kind} is not 'object' else 0 end", (path, *values, path)


def _test(op: str, value: Value) -> tuple[str, tuple[Parameter, ...]]:
    """A comparison of `value`, as `json_each` gives it, with one value."""
    if value is None or isinstance(value, bool):
        return f"type = '{_TYPES[value]}'", ()
    mark, parameter = _mark(value)
    return f"{_KINDS[type_of(value)]} and value {op} {mark}", (parameter,)


def _one_of(values: tuple[Value, ...]) -> tuple[str, tuple[Parameter, ...]]:
    tests, parameters = [], []
    for kind in ("text", "number"):
        chosen = [_mark(value) for value in values if type_of(value) == kind]
        if chosen:
            tests.append(f"{_KINDS[kind]} and value in ({', '.join(mark for mark, _ in chosen)})")
            parameters += [parameter for _, parameter in chosen]
    plain = {_TYPES[value] for value in values if value is None or isinstance(value, bool)}
    tests += [f"type = '{name}'" for name in sorted(plain)]
    return " or ".join(tests), tuple(parameters)


_TYPES = {None: "null", True: "true", False: "false"}
_KINDS = {"text": "type = 'text'", "number": "type in ('integer', 'real')"}


def _mark(value: Value) -> tuple[str, Parameter]:
    """Return the place of a text or number, and what is bound there.

    SQLite reads decimals in several ways, and not all round correctly. So a float goes through the same one as those in the
    metadata, from the same digits.
    """
    if isinstance(value, float):
        return "json_extract(?, '$')", repr(value)
    assert isinstance(value, str | int)
    return "?", value


def _marks(count: int) -> str:
    return ", ".join("?" * count)
