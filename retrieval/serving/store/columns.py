"""Fields that were filtered by, in memory: a filter on a million items is a few passes over arrays.

A column has one number for each row: which of the field's different values it has. So a filter
looks at each different value once, with the very function that says when a filter is true.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator
from typing import Any

import apsw
import numpy as np
from numpy.typing import NDArray

from retrieval.serving.files.strict_json import strict_loads
from retrieval.serving.filters import And, Compare, Exists, Filter, In, Not, Or, matches
from retrieval.serving.store.record import ask
from retrieval.serving.store.view import Mask, View

_PAGE = 50_000  # items that are read at a time
_COLUMNS = 8
_TEXTS = 1 << 16  # different values that are no plain numbers
_NUMBERS = 1 << 24  # different values
_CHARACTERS = 16 << 20  # of all different values of a column
_EXACT = 1 << 53
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}

Leaf = Compare | In | Exists
Name = tuple[str, ...] | str


class _Unfit(Exception):
    """A field with too many different values for a column."""


class _Column:
    """One field: a code for each row, and the value of each code; code 0 is none."""

    def __init__(self, name: Name) -> None:
        self.name = name
        self.last = 0  # number of the last item
        self._codes: NDArray[np.int32] = np.zeros(0, np.int32)
        self._known: dict[str | None, int] = {None: 0}
        self._numbers: NDArray[np.float64] = np.full(1, np.nan)  # of each code that is a number
        self._others: dict[int, Any] = {}  # the other values, by code
        self._characters = 0

    def extend(self, connection: apsw.Connection, view: View) -> None:
        """Read the items that are new, at a view's moment."""
        if len(self._codes) < view.rows:
            more = np.zeros(view.rows - len(self._codes), np.int32)
            self._codes = np.concatenate([self._codes, more])
        label = isinstance(self.name, str)
        path = () if label else ("$" + "".join(f'."{part}"' for part in self.name),)
        value = "iif(label is null, null, json_quote(label))" if label else "metadata -> ?"
        sql = f"select n, {value} from items where n > ? order by n limit ?"
        while page := ask(connection, sql, (*path, self.last, _PAGE)):
            self.last = page[-1][0]
            known = self._known
            codes = np.fromiter((known.setdefault(text, len(known)) for _, text in page), np.int32)
            rows = view.runs.rows_of(np.fromiter((n for n, _ in page), np.int64))
            self._codes[rows[rows >= 0]] = codes[rows >= 0]
            self._decode()

    def _decode(self) -> None:
        """Read the values that are new."""
        first = len(self._numbers)
        new = list(self._known)[first:] if len(self._known) > first else []
        self._characters += sum(map(len, new))  # type: ignore[arg-type]
        numbers = np.full(len(new), np.nan)
        for at, text in enumerate(new):
            assert text is not None
            found = strict_loads(text)
            plain = type(found) is float or (type(found) is int and -_EXACT < found < _EXACT)
            if plain:
                numbers[at] = found
            else:
                self._others[first + at] = found
        self._numbers = np.concatenate([self._numbers, numbers])
        if (
            len(self._others) > _TEXTS
            or len(self._known) > _NUMBERS
            or self._characters > _CHARACTERS
        ):
            raise _Unfit

    def true(self, leaf: Leaf, rows: int) -> Mask:
        """Return of which of the first `rows` rows a condition is true."""
        table = np.zeros(len(self._numbers), bool)
        plain = ~np.isnan(self._numbers)
        if isinstance(leaf, Exists):
            table[plain] = True
        else:
            values = leaf.values if isinstance(leaf, In) else (leaf.value,)
            op = "=" if isinstance(leaf, In) or leaf.op == "!=" else leaf.op
            for value in values:
                if isinstance(value, int | float) and not isinstance(value, bool):
                    table |= _COMPARE[op](self._numbers, float(value))
            if isinstance(leaf, Compare) and leaf.op == "!=":
                table = plain & ~table
        for code, value in self._others.items():
            if isinstance(self.name, str):
                table[code] = matches(leaf, "", value, {})
                continue
            metadata: Any = value
            for part in reversed(self.name):
                metadata = {part: metadata}
            table[code] = matches(leaf, "", None, metadata)
        out: Mask = table[self._codes[:rows]]
        return out


class Columns:
    """The columns of an index, which all searches share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stem = ""
        self._seq = 0
        self._columns: dict[Name, _Column] = {}
        self._unfit: set[Name] = set()

    def mask(self, connection: apsw.Connection, view: View, where: Filter) -> Mask | None:
        """Return which rows of a view match and are alive; None where columns cannot tell.

        Args:
            connection: inside the view's moment.
            view: whose rows.
            where: the filter.
        """
        leaves = list(_leaves(where))
        names = {leaf.field for leaf in leaves}
        with self._lock:
            if view.stem != self._stem:
                self._stem, self._seq, self._columns, self._unfit = view.stem, 0, {}, set()
            exact = all(map(_is_exact, leaves))
            if not exact or "id" in names or len(names) > _COLUMNS or names & self._unfit:
                return None
            if view.seq < self._seq:
                return None  # a later moment was read, which lacks what was deleted in between
            self._seq = view.seq
            for name in sorted(names, key=str):
                column = self._columns.pop(name, None) or _Column(name)
                try:
                    column.extend(connection, view)
                except (_Unfit, ValueError):
                    self._unfit.add(name)
                    return None
                self._columns[name] = column
            mask = self._true(where, view.rows)
            while len(self._columns) > _COLUMNS:
                del self._columns[next(iter(self._columns))]  # the one that was used first
        return mask if view.alive is None else mask & view.alive

    def _true(self, where: Filter, rows: int) -> Mask:
        """Return of which rows a filter is true."""
        if isinstance(where, And | Or):
            join = np.logical_and if isinstance(where, And) else np.logical_or
            return join.reduce([self._true(part, rows) for part in where.parts])  # type: ignore[no-any-return]
        if isinstance(where, Not):
            return ~self._true(where.part, rows)
        return self._columns[where.field].true(where, rows)


def _leaves(where: Filter) -> Iterator[Leaf]:
    """Give the conditions of a filter."""
    if isinstance(where, And | Or):
        for part in where.parts:
            yield from _leaves(part)
    elif isinstance(where, Not):
        yield from _leaves(where.part)
    else:
        yield where


def _is_exact(leaf: Leaf) -> bool:
    """Whether float64 holds the numbers that a condition compares with."""
    values = (
        leaf.values if isinstance(leaf, In) else () if isinstance(leaf, Exists) else (leaf.value,)
    )
    return all(not isinstance(one, int) or -_EXACT < one < _EXACT for one in values)
