"""A filter as a condition on rows. What an engine cannot compare makes it a wider one, and that is said."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import cast

from retrieval.serving.filters.tree import And, Compare, Exists, Filter, In, Not, Or, type_of
from retrieval.serving.rows.engine import Between, Condition, Either, Every, Has, OneOf, Op, Ordered, Row
from retrieval.serving.rows.terms import digest_of, id_term, key_of, path_of, sortable, term, value_text

TRUE, FALSE = Every(()), Either(())
_COMPARE: dict[str, Callable[[str, str], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_OPPOSITE: dict[str, Op] = {"<": ">=", "<=": ">", ">": "<=", ">=": "<"}


def condition(where: Filter, orders_text: bool = True) -> tuple[Condition, bool]:
    """Return what is true of the rows of all items that match, and whether it is true of no others.

    Args:
        where: the filter.
        orders_text: whether the engine orders texts.
    """
    return _part(where, False, orders_text)


def _part(where: Filter, negated: bool, orders_text: bool) -> tuple[Condition, bool]:
    """Negation is brought down to the comparisons: an engine's own may know a third value."""
    if isinstance(where, Not):
        return _part(where.part, not negated, orders_text)
    if isinstance(where, And | Or):
        found = [_part(part, negated, orders_text) for part in where.parts]
        parts = tuple(one for one, _ in found)
        joint = Every(parts) if isinstance(where, And) is not negated else Either(parts)
        return joint, all(exact for _, exact in found)
    if where.field == "id":
        return _id(where, negated, orders_text)
    path = path_of(where.field)
    if isinstance(where, Exists):
        return Has((term("there", path),), negated), True
    if isinstance(where, In):
        values = tuple(term("is", path, value_text(value)) for value in where.values)
        return Has(values, negated, path), True
    if where.op not in ("=", "!="):
        return _order(where, path, negated, orders_text)
    equal = (term("is", path, value_text(where.value)),)
    if where.op == "=":
        return Has(equal, negated, path), True
    some, many = (term("some", path),), (term("many", path),)
    if negated:
        return Either((Has(some, True), Every((Has(many, True), Has(equal))))), True
    return Every((Has(some), Either((Has(many), Has(equal, True))))), True


def _order(where: Compare, path: str, negated: bool, orders_text: bool) -> tuple[Condition, bool]:
    """At least one of a field's values is below, so the least of them is; or above, so the greatest is."""
    kind, value = type_of(where.value), where.value
    if kind == "text" and not orders_text:
        return TRUE, False
    text = value.encode().hex() if isinstance(value, str) else sortable(cast(float, value))
    name = (kind[0] if where.op[0] == "<" else kind[0].upper()) + path
    there = (term(kind, path),)
    if negated:
        return Either((Has(there, True), Ordered(name, _OPPOSITE[where.op], text))), True
    return Every((Has(there), Ordered(name, cast(Op, where.op), text))), True


def _id(where: Compare | In | Exists, negated: bool, orders_text: bool) -> tuple[Condition, bool]:
    """Every item has an id, which is text."""
    if isinstance(where, Exists):
        return (FALSE if negated else TRUE), True
    values = where.values if isinstance(where, In) else (where.value,)
    texts = [value for value in values if isinstance(value, str)]
    unlike = isinstance(where, Compare) and where.op == "!="
    if isinstance(where, In) or where.op in ("=", "!="):
        if not texts:
            return (TRUE if negated is not unlike else FALSE), True
        if negated is not unlike:
            return Has(tuple(map(id_term, texts)), True), True
        return OneOf("digest", tuple(map(digest_of, texts))), True
    if not texts:
        return (TRUE if negated else FALSE), True
    if not orders_text:
        return TRUE, False
    op = _OPPOSITE[where.op] if negated else cast(Op, where.op)
    return Ordered("", op, key_of(texts[0])), True


def parts(where: Condition, path: str) -> frozenset[str] | None:
    """Return the values of `Row.part` that rows which fulfil a condition can have, `LOOSE` aside; None for any.

    Args:
        where: the condition.
        path: digits of the field by which rows are kept apart.
    """
    if isinstance(where, Has) and where.path == path and not where.negated:
        return frozenset(where.terms)
    if isinstance(where, Every):
        known = [one for one in (parts(part, path) for part in where.parts) if one is not None]
        return frozenset.intersection(*known) if known else None
    if isinstance(where, Either):
        found = [parts(part, path) for part in where.parts]
        return None if None in found else frozenset().union(*(one for one in found if one is not None))
    return None


def holds(where: Condition) -> Callable[[Row], bool]:
    """Return what says whether a row fulfils a condition: for engines that look up rows by one part of it."""
    if isinstance(where, Every | Either):
        parts, each = [holds(part) for part in where.parts], all if isinstance(where, Every) else any
        return lambda row: each(part(row) for part in parts)
    if isinstance(where, Between):
        return lambda row: bool(where.least <= getattr(row, where.column) <= where.most)
    if isinstance(where, OneOf):
        values = frozenset(where.values)
        return lambda row: getattr(row, where.column) in values
    if isinstance(where, Has):
        terms = frozenset(where.terms)
        return lambda row: terms.isdisjoint(row.terms) is where.negated

    def ordered(row: Row) -> bool:
        text = row.orders.get(where.name) if where.name else row.key
        return text is not None and _COMPARE[where.op](text, where.text)

    return ordered
