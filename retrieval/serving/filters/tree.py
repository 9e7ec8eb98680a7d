"""The tree of conditions that a filter is, hashable and bounded from the moment it is made, and the text it is written as."""

from __future__ import annotations

import dataclasses
import math
import numbers
import re
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from retrieval.errors import DataError, did_you_mean

MOST_NESTED = 14
MOST_CONDITIONS = 1_000
MOST_VALUES = 10_000
MOST_CHARACTERS = 10_000
_MOST_NAMES = 16
_LONGEST_NAME = 500

Field = Literal["id", "label"] | tuple[str, ...]
"""`"id"`, `"label"`, or the names on the way through the metadata: `("maker", "country")`."""

Op = Literal["=", "!=", "<", "<=", ">", ">="]
Value = str | int | float | bool | None

OPS: tuple[Op, ...] = ("=", "!=", "<", "<=", ">", ">=")
_UNFIT = re.compile(
    r'["\\\x00-\x1f]'
)  # SQLite 3.40 finds no name in JSON that has to be written with a backslash

RESERVED = ("and", "or", "not", "in", "exists", "true", "false", "null")
PLAIN_NAME = rf"(?!(?:{'|'.join(RESERVED)})\b)[^\W\d]\w*"
_PLAIN = re.compile(PLAIN_NAME, re.IGNORECASE)


class Size(NamedTuple):
    """How large a filter is: levels of and, or and not; comparisons; values in all."""

    nested: int
    conditions: int
    values: int


@dataclass(frozen=True)
class Compare:
    """A field compared with one value.

    Args:
        field: `"id"`, `"label"` or a tuple of names.
        op: one of `=`, `!=`, `<`, `<=`, `>`, `>=`.
        value: text, a finite number, True, False or None; with an order, text or a number.

    Raises:
        DataError: one of them is something else.
    """

    field: Field
    op: Op
    value: Value
    size: Size = dataclasses.field(init=False, repr=False, compare=False)
    _type: str = dataclasses.field(init=False, repr=False)  # in Python True == 1; these filters differ

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise DataError(f"{_shown(self.op)} is not a comparison; there are {', '.join(OPS)}.")
        value = _checked_value(self.value)
        if self.op not in ("=", "!=") and type_of(value) not in ("number", "text"):
            raise DataError(f"Only numbers and text have an order: {self.op} does not go with {word(value)}.")
        _set(self, field=_checked_field(self.field), value=value, size=Size(0, 1, 1), _type=type_of(value))


@dataclass(frozen=True)
class In:
    """A field that equals one of several values.

    Args:
        field: `"id"`, `"label"` or a tuple of names.
        values: at least one: text, finite numbers, True, False, None.

    Raises:
        DataError: one of them is something else, or they are more than 10,000.
    """

    field: Field
    values: tuple[Value, ...]
    size: Size = dataclasses.field(init=False, repr=False, compare=False)
    _types: tuple[str, ...] = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.values, list | tuple):
            raise DataError(f"`in` takes a list of values, not {_shown(self.values)}.")
        if not self.values:
            raise DataError("`in` needs at least one value.")
        size = _bounded(Size(0, 1, len(self.values)))
        values = tuple(_checked_value(value) for value in self.values)
        types = tuple(type_of(value) for value in values)
        _set(self, field=_checked_field(self.field), values=values, size=size, _types=types)


@dataclass(frozen=True)
class Exists:
    """A field that an item has, be it null."""

    field: Field
    size: Size = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _set(self, field=_checked_field(self.field), size=Size(0, 1, 0))


@dataclass(frozen=True)
class And:
    """All of two or more filters."""

    parts: tuple[Filter, ...]
    size: Size = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        parts = _checked_parts("and", self.parts)
        _set(self, parts=parts, size=_around(parts))


@dataclass(frozen=True)
class Or:
    """At least one of two or more filters."""

    parts: tuple[Filter, ...]
    size: Size = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        parts = _checked_parts("or", self.parts)
        _set(self, parts=parts, size=_around(parts))


@dataclass(frozen=True)
class Not:
    """Whatever a filter is not true of."""

    part: Filter
    size: Size = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.part, Filter):
            raise DataError(f"`not` takes a filter, not {_shown(self.part)}.")
        _set(self, size=_around((self.part,)))


Filter = Compare | In | Exists | And | Or | Not


def fields(filter: Filter) -> frozenset[str]:
    """Return the metadata entries that a filter uses: the first name of each path; `id` and `label` are none."""
    if isinstance(filter, Not):
        return fields(filter.part)
    if isinstance(filter, And | Or):
        return frozenset().union(*(fields(part) for part in filter.parts))
    return frozenset() if isinstance(filter.field, str) else frozenset(filter.field[:1])


def type_of(value: Value) -> str:
    """Return which of the four types a value has."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    return "text" if isinstance(value, str) else "number"


def word(value: Value) -> str:
    """Return how text and JSON write it."""
    return "null" if value is None else str(value).lower()


def number(value: int | float) -> int | float:
    """Return a number as SQLite holds it: an integer of 64 bits, or a float64, infinite where none is near."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return value


def field_of(names: tuple[str, ...]) -> Field:
    """Return the field that dotted names mean: `metadata.` before a path may be left out.

    Raises:
        DataError: they mean none.
    """
    first, *rest = names
    if first == "metadata":
        if not rest:
            raise DataError(
                "`metadata` alone is not a field; write metadata.NAME (metadata.metadata for an entry called so)."
            )
        return _checked_path(tuple(rest))
    if first in ("id", "label"):
        if rest:
            raise DataError(f"`{first}` has no parts; an entry of the metadata is metadata.{first}.")
        return "id" if first == "id" else "label"
    return _checked_path(names)


def prefixed(field: Field) -> tuple[str, ...]:
    """Return a field's names, with `metadata` in front where the first would mean something else."""
    if isinstance(field, str):
        return (field,)
    return ("metadata", *field) if field[0] in ("id", "label", "metadata") else field


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


def _within(part: Filter, bracketed: type | object) -> str:
    text = filter_to_text(part)
    return f"({text})" if isinstance(part, bracketed) else text  # type: ignore[arg-type]


def _field(field: Field) -> str:
    return ".".join(name if _PLAIN.fullmatch(name) else f'"{name}"' for name in prefixed(field))


def _value(value: Value) -> str:
    if value is None or isinstance(value, bool):
        return word(value)
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else repr(value)


def _set(node: object, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(node, name, value)


def _checked_field(field: Any) -> Field:
    if isinstance(field, str):
        if field in ("id", "label"):
            return "id" if field == "id" else "label"
        raise DataError(
            f"A field is 'id', 'label' or a tuple of names such as ('maker', 'country'), not {_shown(field)}."
        )
    if not isinstance(field, list | tuple) or not field or not all(isinstance(name, str) for name in field):
        raise DataError(f"A field is 'id', 'label' or a tuple of names, not {_shown(field)}.")
    return _checked_path(tuple(str.__str__(name) for name in field))


def _checked_path(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(names) > _MOST_NAMES:
        raise DataError(f"A field has at most {_MOST_NAMES} names one within the other, not {len(names):,}.")
    for name in names:
        if not name or len(name) > _LONGEST_NAME:
            raise DataError(f"A field's name has 1 to {_LONGEST_NAME} characters, not {len(name):,}.")
        if _UNFIT.search(name) or not _encodes(name):
            raise DataError(
                f"The field {_shown(name)} cannot be filtered by: double quotes, backslashes, control characters and "
                "lone surrogates are not possible in its name. Give the metadata entry another name."
            )
    return names


def _checked_value(value: Any) -> Value:
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        if len(value) > MOST_CHARACTERS:
            raise DataError(
                f"A text in a filter has at most {MOST_CHARACTERS:,} characters, not {len(value):,}."
            )
        if "\0" in value or not _encodes(value):
            raise DataError(
                f"The text {_shown(value)} has a NUL character or a lone surrogate; no item's can."
            )
        return str.__str__(value)
    if isinstance(value, numbers.Integral):
        found = number(int(value))
    elif isinstance(value, float):
        found = float(value)
    else:
        raise DataError(f"A value is text, a number, true, false or null, not {_shown(value)}.")
    if not math.isfinite(found):
        raise DataError("A number in a filter is finite and within the range of float64.")
    return found


def _checked_parts(name: str, parts: Any) -> tuple[Filter, ...]:
    if not isinstance(parts, list | tuple) or len(parts) < 2:
        raise DataError(f"`{name}` takes a list of two or more filters, not {_shown(parts)}.")
    if len(parts) > MOST_CONDITIONS:
        raise _too_large("conditions", len(parts), MOST_CONDITIONS)
    for part in parts:
        if not isinstance(part, Filter):
            raise DataError(f"`{name}` takes filters, not {_shown(part)}.")
    return tuple(parts)


def _around(parts: tuple[Filter, ...]) -> Size:
    nested, conditions, values = zip(*(part.size for part in parts), strict=True)
    return _bounded(Size(1 + max(nested), sum(conditions), sum(values)))


def _bounded(size: Size) -> Size:
    if size.nested > MOST_NESTED:
        raise DataError(f"The filter nests and, or and not more than {MOST_NESTED} deep. Write it flatter.")
    if size.conditions > MOST_CONDITIONS:
        raise _too_large("conditions", size.conditions, MOST_CONDITIONS)
    if size.values > MOST_VALUES:
        raise _too_large("values", size.values, MOST_VALUES)
    return size


def _too_large(what: str, count: int, most: int) -> DataError:
    return DataError(f"The filter has {count:,} {what}; {most:,} are the most.")


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: object) -> str:
    """Return a short text for what a user gave, whatever it is and however large."""
    if isinstance(value, str):
        return ascii(value[:40]) + ("…" if len(value) > 40 else "")
    return f"a {type(value).__name__}" if value is not None else "null"


def unknown(name: object, known: tuple[str, ...]) -> str:
    """Return what there is in the place of a name, and which was meant."""
    hint = did_you_mean(name[:40], known) if isinstance(name, str) else ""
    return f"{_shown(name)} is not one of {', '.join(known)}.{hint}"
