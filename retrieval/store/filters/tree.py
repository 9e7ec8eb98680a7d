"""Filters as immutable trees of limited size, and conversions to and from text and JSON."""

from __future__ import annotations

import dataclasses
import math
import numbers
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from retrieval.errors import DataError, did_you_mean

MOST_NESTED = 14
MOST_CONDITIONS = 500
MOST_VALUES = 10_000
MOST_CHARACTERS = 10_000
LONG_INTEGER = (
    "an integer of more than 64 bits, which would lose digits. Write it as text, or as a number"
    " with an exponent, such as 1e20."
)

Field = Literal["id", "label"] | tuple[str, ...]
"""`"id"`, `"label"`, or the path of a metadata entry, such as `("maker", "country")`."""

Op = Literal["=", "!=", "<", "<=", ">", ">="]
Joint = Literal["and", "or", "not"]
Value = str | int | float | bool | None
T = TypeVar("T")

OPS: tuple[Op, ...] = ("=", "!=", "<", "<=", ">", ">=")
# SQLite 3.40 cannot look up JSON names that need a backslash.
_UNSUPPORTED = re.compile(r'["\\\x00-\x1f]')


def keyword(word: str) -> str:
    """Return a pattern of a keyword in any case; `re.IGNORECASE` would take "ı" for "i", too."""
    return "".join(f"[{letter}{letter.upper()}]" for letter in word)


RESERVED = ("and", "or", "not", "in", "exists", "true", "false", "null")
PLAIN_NAME = rf"(?!(?:{'|'.join(map(keyword, RESERVED))})\b)[^\W\d]\w*"
_NAME = re.compile(r'"[^"]+"|[^."]+')
_FIELD = re.compile(rf"(?:{_NAME.pattern})(?:\.(?:{_NAME.pattern}))*")
_LOGIC = ("and", "or", "not", "exists")


class FilterSize(NamedTuple):
    """Size of a filter.

    Attributes:
        nested: levels of and, or and not.
        conditions: number of conditions.
        values: number of values in all conditions.
    """

    nested: int
    conditions: int
    values: int


@dataclass(frozen=True)
class _Node:
    size: FilterSize = dataclasses.field(init=False, repr=False, compare=False)

    def _set(self, size: FilterSize, **attributes: Any) -> None:
        """Set attributes of this frozen object; raise a `DataError` if the filter is too large."""
        if size.nested > MOST_NESTED:
            raise DataError(
                f"The filter nests and, or and not more than {MOST_NESTED} deep. Use fewer levels."
            )
        _check_count("conditions", size.conditions, MOST_CONDITIONS)
        _check_count("values", size.values, MOST_VALUES)
        for name, value in {"size": size, **attributes}.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class _Condition(_Node):
    field: Field
    # Types take part in `==`, because True == 1 in Python, but filters on True and 1 differ.
    _types: tuple[str, ...] = dataclasses.field(init=False, repr=False)

    def _check(self, *operands: Value, **attributes: Any) -> None:
        """Check the field, and set it, `attributes`, the operands' types and the size."""
        field = self.field
        if isinstance(field, list):
            field = tuple(field)
        if field not in ("id", "label"):
            if not (isinstance(field, tuple) and field and all(isinstance(n, str) for n in field)):
                raise DataError(
                    "A field is 'id', 'label' or a tuple of names such as ('maker', 'country'), not"
                    f" {_shown(field)}."
                )
            field = _checked_path(field)
        types = tuple(map(type_of, operands))
        unlike = [value for value in operands if type_of(value) != "text"]
        if isinstance(field, str) and unlike:
            raise DataError(
                f"`{field}` is text, which is never {_literal(unlike[0])}. Put the text in quotes,"
                f" or write exists({field}) to ask whether an item has one."
            )
        self._set(FilterSize(0, 1, len(operands)), field=field, _types=types, **attributes)


@dataclass(frozen=True)
class Compare(_Condition):
    """A field compared with one value.

    Args:
        field: `"id"`, `"label"` or a tuple of names.
        op: one of `=`, `!=`, `<`, `<=`, `>`, `>=`.
        value: text, a finite number, True, False or None; for `<`, `<=`, `>` and `>=` text or a
            number.

    Raises:
        DataError: an argument is invalid.
    """

    op: Op
    value: Value

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise DataError(f"{_shown(self.op)} is not a comparison. Use one of {', '.join(OPS)}.")
        value = _checked_value(self.value)
        if self.op not in ("=", "!=") and type_of(value) not in ("number", "text"):
            raise DataError(
                f"Only numbers and text have an order, so {self.op} cannot compare with"
                f" {_literal(value)}."
            )
        self._check(value, value=value)

    @property
    def values(self) -> tuple[Value, ...]:
        """The value as a tuple, like `In.values`."""
        return (self.value,)


@dataclass(frozen=True)
class In(_Condition):
    """A field that equals one of several values.

    Args:
        field: `"id"`, `"label"` or a tuple of names.
        values: one or more values: text, finite numbers, True, False or None.

    Raises:
        DataError: an argument is invalid, or there are more than 10,000 values.
    """

    values: tuple[Value, ...]
    op: ClassVar[Op] = "="

    def __post_init__(self) -> None:
        if not isinstance(self.values, list | tuple):
            raise DataError(f"`in` takes a list of values, not {_shown(self.values)}.")
        if not self.values:
            raise DataError("`in` needs at least one value.")
        _check_count("values", len(self.values), MOST_VALUES)
        values = tuple(map(_checked_value, self.values))
        self._check(*values, values=values)


@dataclass(frozen=True)
class Exists(_Condition):
    """A field that exists, even if it is null."""

    values: ClassVar[tuple[Value, ...]] = ()

    def __post_init__(self) -> None:
        self._check()


@dataclass(frozen=True)
class _Junction(_Node):
    joint: ClassVar[Joint]
    parts: tuple[Filter, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.parts, list | tuple) or len(self.parts) < 2:
            raise DataError(
                f"`{self.joint}` takes a list of two or more filters, not {_shown(self.parts)}."
            )
        _check_count("conditions", len(self.parts), MOST_CONDITIONS)
        for part in self.parts:
            if not isinstance(part, Filter):
                raise DataError(f"`{self.joint}` takes filters, not {_shown(part)}.")
        nested, conditions, values = zip(*(part.size for part in self.parts), strict=True)
        size = FilterSize(1 + max(nested), sum(conditions), sum(values))
        self._set(size, parts=tuple(self.parts))


class And(_Junction):
    """Matches if all of two or more filters match."""

    joint = "and"


class Or(_Junction):
    """Matches if at least one of two or more filters matches."""

    joint = "or"


@dataclass(frozen=True)
class Not(_Node):
    """Matches if `part` does not match."""

    joint: ClassVar[Joint] = "not"
    part: Filter

    def __post_init__(self) -> None:
        if not isinstance(self.part, Filter):
            raise DataError(f"`not` takes a filter, not {_shown(self.part)}.")
        self._set(self.part.size._replace(nested=1 + self.part.size.nested))

    @property
    def parts(self) -> tuple[Filter]:
        """The part as a tuple, like `And.parts`."""
        return (self.part,)


Condition = Compare | In | Exists
Filter = Condition | And | Or | Not


def fold(filter: Filter, of: Callable[[Condition], T], join: Callable[[Joint, list[T]], T]) -> T:
    """Return `of(filter)` for a condition, else `join(filter.joint, values of its parts)`."""
    if isinstance(filter, Condition):
        return of(filter)
    return join(filter.joint, [fold(part, of, join) for part in filter.parts])


def conditions(filter: Filter) -> list[Condition]:
    """Return the conditions of a filter."""
    return fold(filter, lambda condition: [condition], lambda _, parts: list(chain(*parts)))


def fields(filter: Filter) -> frozenset[str]:
    """Return the first name of each metadata path in a filter; excludes `id` and `label`."""
    paths = (condition.field for condition in conditions(filter))
    return frozenset(path[0] for path in paths if not isinstance(path, str))


def type_of(value: Value) -> str:
    """Return the type of a value: "null", "boolean", "text" or "number"."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "text"
    return "number"


def is_long(value: int | float) -> bool:
    """Return whether a number is an integer that SQLite would store as a float64."""
    return isinstance(value, int) and not -(2**63) <= value < 2**63


def field_of(names: tuple[str, ...]) -> Field:
    """Return the field for the names of a dotted path; a leading `metadata` is optional.

    Raises:
        DataError: the names are not a valid field.
    """
    first, *rest = names
    if first == "metadata":
        if not rest:
            raise DataError(
                "`metadata` alone is not a field. Write metadata.NAME (metadata.metadata for a"
                " metadata entry that is called metadata)."
            )
        return _checked_path(tuple(rest))
    if first not in ("id", "label"):
        return _checked_path(names)
    if rest:
        raise DataError(
            f"`{first}` has no parts. For the metadata entry {first}, write metadata.{first}."
        )
    if first == "id":
        return "id"
    return "label"


def _names_of(field: Field) -> tuple[str, ...]:
    """Return a field's names, preceded by `metadata` if the first one is ambiguous."""
    if isinstance(field, str):
        return (field,)
    if field[0] in ("id", "label", "metadata"):
        return ("metadata", *field)
    return field


def _checked_path(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if not name:
            raise DataError("A field's name must not be empty.")
        if _UNSUPPORTED.search(name) or has_surrogate(name):
            raise DataError(
                f"A filter cannot use the field {_shown(name)}, because double quotes, backslashes,"
                " control characters and lone surrogates are not allowed in a field's name. Rename"
                " the metadata entry."
            )
    return tuple(map(str.__str__, names))


def _checked_value(value: Any) -> Value:
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        if len(value) > MOST_CHARACTERS:
            raise DataError(
                f"Text in a filter has at most {MOST_CHARACTERS:,} characters, not {len(value):,}."
            )
        if "\0" in value or has_surrogate(value):
            raise DataError(
                f"The text {_shown(value)} has a NUL character or a lone surrogate, which no item"
                " can have."
            )
        return str.__str__(value)
    if not isinstance(value, numbers.Integral | float):
        raise DataError(
            f"A value must be text, a number, true, false or null, not {_shown(value)}."
        )
    if isinstance(value, float):
        plain = float(value)
    else:
        plain = int(value)
    if is_long(plain):
        raise DataError(f"The filter has {LONG_INTEGER}")
    if not math.isfinite(plain):
        raise DataError("A number in a filter must be finite and within the range of float64.")
    return plain


def _check_count(what: str, count: int, most: int) -> None:
    if count > most:
        raise DataError(f"The filter has {count:,} {what}; at most {most:,} are allowed.")


def has_surrogate(text: str) -> bool:
    """Return whether text contains a lone surrogate, half of a pair that encodes a character."""
    if text.isascii():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _shown(value: object) -> str:
    """Return a short description of any input, for error messages."""
    if isinstance(value, str):
        return ascii(value[:40]) + ("…" if len(value) > 40 else "")
    if value is not None:
        return f"a {type(value).__name__}"
    return "null"


def filter_to_text(filter: Filter) -> str:
    """Return a filter as text; `parse_filter` parses it again if it has up to 10,000 characters."""
    if not isinstance(filter, Condition):
        # Parts of these kinds bind more weakly, so they need brackets.
        weaker = Or if isinstance(filter, Or) else And | Or
        texts = [
            f"({filter_to_text(part)})" if isinstance(part, weaker) else filter_to_text(part)
            for part in filter.parts
        ]
        if filter.joint == "not":
            return f"not {texts[0]}"
        return f" {filter.joint} ".join(texts)
    field = ".".join(
        name if re.fullmatch(PLAIN_NAME, name) else f'"{name}"' for name in _names_of(filter.field)
    )
    if isinstance(filter, Exists):
        return f"exists({field})"
    if isinstance(filter, In):
        return f"{field} in ({', '.join(map(_literal, filter.values))})"
    return f"{field} {filter.op} {_literal(filter.value)}"


def _literal(value: Value) -> str:
    if value is None or isinstance(value, bool):
        if value is None:
            return "null"
        return str(value).lower()
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return repr(value)


def filter_to_json(filter: Filter) -> dict[str, Any]:
    """Return a filter as plain JSON; `filter_from_json` converts it back to an equal filter."""
    return fold(
        filter,
        _condition_to_json,
        lambda joint, parts: {joint: parts[0] if joint == "not" else parts},
    )


def _condition_to_json(filter: Condition) -> dict[str, Any]:
    names = _names_of(filter.field)
    quoted = len(names) == 1 and names[0] in _LOGIC
    field = ".".join(f'"{name}"' if quoted or "." in name else name for name in names)
    if isinstance(filter, Exists):
        return {"exists": field}
    if isinstance(filter, In):
        return {field: {"in": list(filter.values)}}
    return {field: filter.value if filter.op == "=" else {filter.op: filter.value}}


def filter_from_json(value: object, where: str = "The filter") -> Filter:
    """Return the filter for parsed JSON.

        {"label": "shoe"}                                       equal
        {"price": {">=": 5, "<": 20}, "label": {"in": [...]}}   all of these
        {"and": [...]}, {"or": [...]}, {"not": {...}}, {"exists": "maker.country"}

    A key is a field: names joined by dots. Put a name in double quotes if it contains a dot or is
    `and`, `or`, `not` or `exists`. Error messages call the value `where`.

    Raises:
        DataError: the value is not a filter or is too large; the message says where.
    """
    if not isinstance(value, Mapping):
        raise DataError(
            f'{where} must be an object such as {{"label": "shoe"}}, not {_shown(value)}.'
        )
    if not value:
        raise DataError(f"{where} is an empty object. Omit the filter to get all items.")
    return _joined(And, (_from_entry(key, entry, where) for key, entry in value.items()))


def _from_entry(key: object, value: object, where: str) -> Filter:
    if not isinstance(key, str):
        raise DataError(f"{where} has a key that is not text, but {_shown(key)}.")
    if key in ("and", "or"):
        if not isinstance(value, list | tuple) or not value:
            raise DataError(f'{where}: "{key}" takes a list of filters, not {_shown(value)}.')
        parts = (filter_from_json(part, f'Part {n} of "{key}"') for n, part in enumerate(value, 1))
        return _joined(And if key == "and" else Or, parts)
    if key == "not":
        return Not(filter_from_json(value, 'The value of "not"'))
    if key == "exists":
        if not isinstance(value, str):
            raise DataError(f'{where}: "exists" takes the name of a field, not {_shown(value)}.')
        return Exists(parse_field(value))
    field = parse_field(key)
    if isinstance(value, list | tuple) or value == {}:
        raise DataError(
            f"{where}: {_shown(key)} takes a value, or an object such as"
            ' {"<": 20} or {"in": [1, 2]}.'
        )
    if not isinstance(value, Mapping):
        value = {"=": value}
    try:
        return _joined(And, (_condition(field, op, operand) for op, operand in value.items()))
    except DataError as fault:
        raise DataError(f"The filter, at {_shown(key)}: {fault}") from None


def parse_field(text: str) -> Field:
    """Return the field of its text, such as `label`, `maker.country` or `"a.b"`.

    Raises:
        DataError: the text is not a field.
    """
    if not isinstance(text, str) or len(text) > MOST_CHARACTERS or not _FIELD.fullmatch(text):
        raise DataError(
            f"{_shown(text)} is not a field. Join names by dots, and put a name that has a dot in"
            " double quotes."
        )
    return field_of(tuple(name.strip('"') for name in _NAME.findall(text)))


def _condition(field: Field, op: object, value: Any) -> Filter:
    if op == "in":
        return In(field, value)
    if op not in OPS:
        if isinstance(op, str):
            hint = did_you_mean(op[:40], (*OPS, "in"))
        else:
            hint = ""
        raise DataError(f"{_shown(op)} is not one of {', '.join(OPS)} and in.{hint}")
    return Compare(field, op, value)


def _joined(kind: type[And | Or], parts: Iterable[Filter]) -> Filter:
    """Return the filter that joins parts, or the only part; stop reading at too many parts."""
    filters = list[Filter]()
    conditions = 0
    for part in parts:
        filters.append(part)
        conditions += part.size.conditions
        _check_count("conditions", conditions, MOST_CONDITIONS)
    if len(filters) > 1:
        return kind(tuple(filters))
    return filters[0]
