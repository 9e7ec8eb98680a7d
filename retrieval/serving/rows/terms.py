"""An item's label and metadata as an engine can look for them: terms, which are there or not, and texts in an order.

Everything is hexadecimal digits, so nothing that a user writes can be a part of an engine's language.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from retrieval.serving.filters.tree import Field, Value, number, type_of

LOOSE = "0" * 24
"""The term of an item that has more than its terms say: it is looked at itself."""
LONGEST_TEXT = 500  # bytes of a text that is kept in order
_MOST_ORDERS = 400
_ORDER_BYTES = 40_000


def digest_of(*parts: str | int) -> str:
    """Return 32 digits that tell some texts from all others."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]


def key_of(id: str) -> str:
    """Return an id so that digits are in the order of its code points."""
    return id.encode().hex()


def path_of(field: Field) -> str:
    """Return 24 digits for a field."""
    names = (field,) if isinstance(field, str) else ("", *field)
    return hashlib.sha256("\0".join(names).encode()).hexdigest()[:24]


def term(what: str, path: str, value: str = "") -> str:
    """Return the term of something that is true of a field: 'is' (a value), 'there', 'some', 'many', 'number', 'text'."""
    return hashlib.sha256(f"{what}\0{path}\0{value}".encode()).hexdigest()[:24]


def id_term(id: str) -> str:
    """Return the term of an item's id."""
    return term("is", path_of("id"), id)


def value_text(value: Value) -> str:
    """Return a text that two values share if they are equal: 1 and 1.0 do, 1 and true do not."""
    kind = type_of(value)
    if kind == "number":
        assert isinstance(value, int | float)
        return f"n{sortable(value)}"
    return f"t{value}" if kind == "text" else f"{kind}{value}"


def sortable(value: int | float) -> str:
    """Return a number as 20 digits in the order of numbers, exactly: the float64 at or below it, and how far it is above that."""
    value = number(value)
    low = float(value)
    if isinstance(value, int) and int(low) > value:
        low = math.nextafter(low, -math.inf)
    (bits,) = struct.unpack(">Q", struct.pack(">d", low + 0.0))  # -0.0 is 0
    bits = bits ^ 0xFFFF_FFFF_FFFF_FFFF if bits >> 63 else bits | 1 << 63
    return f"{bits:016x}{int(value) - int(low) if isinstance(value, int) else 0:04x}"


def halves(text: str) -> tuple[float, int]:
    """Return what `sortable` made a text of: a float64, and how far the number is above it."""
    bits = int(text[:16], 16)
    bits = bits ^ 1 << 63 if bits >> 63 else bits ^ 0xFFFF_FFFF_FFFF_FFFF
    (low,) = struct.unpack(">d", struct.pack(">Q", bits))
    return low, int(text[16:], 16)


def indexed(
    id: str, label: str | None, metadata: Mapping[str, Any], most: int
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the terms and ordered texts of an item.

    Args:
        id: the item's.
        label: the item's.
        metadata: the item's.
        most: terms that an engine keeps; of an item with more, and of one with too many or too long texts, there is `LOOSE` alone.
    """
    terms: set[str] = {id_term(id)}
    orders: dict[str, str] = {}
    size = 0
    for field, value in _fields(label, metadata):
        for name, text, least in _entry(path_of(field), value, terms):
            if name not in orders or (text < orders[name]) is least:
                size += len(text) - len(orders.get(name, ""))
                orders[name] = text
        if LOOSE in terms or len(terms) > most or len(orders) > _MOST_ORDERS or size > _ORDER_BYTES:
            return (LOOSE,), {}
    return tuple(sorted(terms)), orders


def part_of(metadata: Mapping[str, Any], name: str) -> str:
    """Return the digits of `Row.part`, by a field of metadata."""
    value = metadata.get(name)
    if not name or name not in metadata or isinstance(value, Mapping | list | tuple):
        return LOOSE
    return term("is", path_of((name,)), value_text(value))


def _fields(label: str | None, metadata: Mapping[str, Any]) -> Iterator[tuple[Field, Any]]:
    if label is not None:
        yield "label", label
    waiting: list[tuple[tuple[str, ...], Mapping[str, Any]]] = [((), metadata)]
    while waiting:
        path, inner = waiting.pop()
        for name, value in inner.items():
            yield (*path, name), value
            if isinstance(value, Mapping):
                waiting.append(((*path, name), value))


def _entry(path: str, value: Any, terms: set[str]) -> Iterator[tuple[str, str, bool]]:
    """Add the terms of a field's value, and give its texts in order: name, text, whether the least of a list counts."""
    candidates: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
    terms.add(term("there", path))
    different: set[str] = set()
    for each in candidates:
        if isinstance(each, Mapping | list | tuple):
            different |= {"", "-"}  # equals no value, so it differs from every one
            continue
        different.add(text := value_text(each))
        terms.add(term("is", path, text))
        kind = type_of(each)
        if kind == "number":
            order = sortable(each)
        elif kind == "text":
            order = each.encode().hex()
            if len(order) > 2 * LONGEST_TEXT:
                terms.add(LOOSE)
        else:
            continue
        terms.add(term(kind, path))
        yield f"{kind[0]}{path}", order, True
        yield f"{kind[0].upper()}{path}", order, False
    if different:
        terms.add(term("some", path))
    if len(different) > 1:
        terms.add(term("many", path))
