"""Fields that were filtered by, as arrays in memory: a filter on a million items is then a few passes over arrays, not over JSON.

An item's number is never given again, and an item that changes gets a new one: what a column says of a number stays true. So columns are read from
the record once, grow by what is new, and need not forget what was deleted, which searches mask anyway.
"""

from __future__ import annotations

import json
import operator
import threading
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import apsw
import numpy as np
from numpy.typing import NDArray

from retrieval.serving.filters import And, Compare, Exists, Filter, In, Not, Or, to_sql
from retrieval.serving.local.piece import Mask
from retrieval.serving.local.record import ask, value
from retrieval.serving.local.segment import Numbers

_STEP = 20_000  # items that are read at a time
_COLUMNS = 8
_BYTES = 256 << 20  # of all columns
_TEXTS = 1 << 16  # different texts of a column
_CHARACTERS = 16 << 20  # of them together
_EXACT = 2**53
_MOMENTS = 64
_TAIL = 20_000  # items that the record may be asked about beside the columns
_SAMPLE = 4096  # items that tell about how many match
_SINGLY = 4  # texts that are looked for one after the other

ABSENT, OTHER, NULL, FALSE, TRUE, NUMBER, TEXT = range(-1, 6)
_PLAIN = {None: NULL, False: FALSE, True: TRUE}
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
_ABSENT = object()

Path = tuple[str, ...] | str


class Unfit(Exception):
    """A field that no column can hold: whole numbers beyond 2⁵³, or too many or too long texts."""


class _Growing:
    """An array that grows at its end; what was given out stays as it is."""

    def __init__(self, kind: Any) -> None:
        self._held = np.empty(1024, kind)
        self._count = 0

    def extend(self, more: Any) -> None:
        end = self._count + len(more)
        if end > len(self._held):
            held = np.empty(max(end, len(self._held) * 3 // 2), self._held.dtype)
            held[: self._count] = self._held[: self._count]
            self._held = held
        self._held[self._count : end] = more
        self._count = end

    @property
    def array(self) -> NDArray[Any]:
        return self._held[: self._count]

    @property
    def bytes(self) -> int:
        return self._held.nbytes


class Column:
    """One field of all items up to some number: of each item whether it is there, and of each of its values the item, kind and value.

    A list has as many values as elements, anything else one. A number is its own value, a text the number of its text in `texts`.
    Until a list comes, values lie in the order of the items, one each, of kind `ABSENT` where the field is not there.

    Args:
        since: the transaction from which on it holds what it should.
    """

    def __init__(self, since: int) -> None:
        self.since = since
        self.used = 0
        self.single = True
        self._there = _Growing(np.bool_)
        self._rows, self._kinds, self._values = _Growing(np.int32), _Growing(np.int8), _Growing(np.float64)
        self._texts: dict[str, int] = {}
        self._characters = 0

    @property
    def bytes(self) -> int:
        """What it takes of memory."""
        parts = (self._there, self._rows, self._kinds, self._values)
        return sum(part.bytes for part in parts) + 100 * len(self._texts) + self._characters

    def extend(self, count: int, rows: Numbers, found: Sequence[Any]) -> None:
        """Add items.

        Args:
            count: how many.
            rows: (n,) which of them the record still has.
            found: (n,) what the field is, as `json.loads` gives it; `_ABSENT` where it is not there.
        """
        first = len(self._there.array)
        types = set(map(type, found))
        if object in types:
            rows = rows[[one is not _ABSENT for one in found]]
            found = [one for one in found if one is not _ABSENT]
        there = np.zeros(count, bool)
        there[rows] = True
        if list in types:
            self.single = False
            each = [(row, one) for row, held in zip(rows.tolist(), found, strict=True) for one in (held if type(held) is list else (held,))]  # fmt: skip
            of = np.array([row for row, _ in each], np.int64)
            kinds, values = self._coded([one for _, one in each])
        else:
            of, kinds, values = np.arange(count), np.full(count, ABSENT, np.int8), np.zeros(count)
            kinds[rows], values[rows] = self._coded(found)
        self._there.extend(there)
        self._rows.extend(of + first)
        self._kinds.extend(kinds)
        self._values.extend(values)
        if self.bytes > _BYTES:
            raise Unfit

    def _coded(self, found: Sequence[Any]) -> tuple[Any, Any]:
        """Return kinds and values (n,)."""
        types = set(map(type, found))
        if types == {str}:
            for text in set(found) - self._texts.keys():
                self._code(text)
            return np.full(len(found), TEXT), np.fromiter(map(self._texts.__getitem__, found), np.float64)
        if types == {float}:
            return np.full(len(found), NUMBER), found
        if types == {int} and min(found) >= -_EXACT and max(found) <= _EXACT:
            return np.full(len(found), NUMBER), found
        coded = [self._code(one) for one in found]
        return [kind for kind, _ in coded], [code for _, code in coded]

    def _code(self, one: Any) -> tuple[int, float]:
        kind = type(one)
        if kind is str:
            code = self._texts.get(one)
            if code is None:
                self._characters += len(one)
                if len(self._texts) >= _TEXTS or self._characters > _CHARACTERS:
                    raise Unfit
                code = self._texts[one] = len(self._texts)
            return TEXT, code
        if kind is float or (kind is int and -_EXACT <= one <= _EXACT):
            return NUMBER, one
        if kind is int:
            raise Unfit
        return (_PLAIN[one], 0.0) if one is None or kind is bool else (OTHER, 0.0)

    def exists(self, part: slice) -> Mask:
        """Return which of some items have the field."""
        return self._there.array[part].copy()

    def some(self, op: str, wanted: Sequence[Any], part: slice) -> Mask:
        """Return of which of some items one value is in a relation to one of those wanted; of "!=", to none of them equal."""
        own = part if self.single else slice(None)
        kinds, values = self._kinds.array[own], self._values.array[own]
        good = np.zeros(len(kinds), bool)
        for one in wanted:
            if one is None or isinstance(one, bool):
                good |= kinds == _PLAIN[one]
            elif isinstance(one, str):
                holds = _COMPARE["=" if op == "!=" else op]
                codes = [code for text, code in self._texts.items() if holds(text, one)] if op not in ("=", "!=") else [self._texts[one]] if one in self._texts else []  # fmt: skip
                if len(codes) <= _SINGLY:
                    for code in codes:
                        good |= (kinds == TEXT) & (values == code)
                else:
                    told = np.zeros(len(self._texts), bool)
                    told[codes] = True
                    text = np.flatnonzero(kinds == TEXT)
                    good[text] |= told[values[text].astype(np.int64)]
            else:
                good |= (kinds == NUMBER) & _COMPARE["=" if op == "!=" else op](values, float(one))
        if op == "!=":
            good = ~good & (kinds != ABSENT)
        if self.single:
            return good
        out = np.zeros(len(self._there.array), bool)
        out[self._rows.array[good]] = True
        return out[part]


class Columns:
    """The columns of an index, which all searches share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = _Growing(np.int64)
        self._moments: list[tuple[int, int]] = []  # a transaction, and how many numbers there were
        self._columns: dict[Path, Column] = {}
        self._unfit: set[Path] = set()
        self._clock = 0

    def share(self, where: Filter) -> float | None:
        """Return about which part of the items match, of a sample of them; None where a field is not in memory."""
        names = _fields(where)
        if not all(name in self._columns for name in names):
            return None
        with self._lock:
            columns = [self._columns.get(name) for name in names]
            count = len(self._numbers.array)
            if not count or not _exact(where) or not all(one is not None and one.single for one in columns):
                return 0.0
            return float(self._true(where, slice(0, count, -(-count // _SAMPLE))).mean())

    def matching(self, connection: apsw.Connection, where: Filter, seq: int) -> Numbers | None:
        """Return the numbers of the items that match, and maybe of some that are gone; None where columns can't tell.

        Args:
            connection: inside a moment of the record.
            where: the filter.
            seq: number of that moment's last transaction.
        """
        names = _fields(where)
        with self._lock:
            if "id" in names or len(names) > _COLUMNS or names & self._unfit or not _exact(where):
                return None
            count = self._counted(connection, seq, names)
            if count is None or not self._ready(connection, names, seq, count):
                return None
            known = self._numbers.array
            numbers: Numbers = known[np.flatnonzero(self._true(where, slice(0, count)))]
        last = int(known[count - 1]) if count else 0
        if value(connection, "select count(*) from (select 1 from items where n > ? limit ?)", (last, _TAIL)) >= _TAIL:  # fmt: skip
            return None
        condition, values = to_sql(where)
        rows = ask(connection, f"select n from items where n > ? and ({condition}) order by n", (last, *values))  # fmt: skip
        return np.concatenate([numbers, np.array([n for (n,) in rows], np.int64)]) if rows else numbers

    def _counted(self, connection: apsw.Connection, seq: int, names: Set[Path]) -> int | None:
        """Return how many of the numbers tell all that a moment holds up to there, after reading those that are new to everyone.

        Another search may have read a later moment, which lacks what was deleted in between: then an earlier count is the right one.
        """
        if not self._moments or self._moments[-1][0] <= seq:
            self._extend(connection, seq, names)
        return next((count for then, count in reversed(self._moments) if then <= seq), None)

    def _extend(self, connection: apsw.Connection, seq: int, names: Set[Path]) -> None:
        """Read the numbers that are new, and of them the columns that there are; the first time, those of some fields."""
        held = self._numbers.array
        last = int(held[-1]) if len(held) else 0
        newest = value(connection, "select max(n) from items")
        if newest is None or newest <= last:
            return
        columns, self._columns = self._columns, {}  # where they cannot be read on, all are read again
        left = dict(columns) if len(held) else {name: Column(seq) for name in sorted(names, key=str)}
        columns, more = dict(left), list[Numbers]()
        while not more or len(more[-1]) == _STEP:
            source = "(select n, label, metadata from items where n > ? order by n limit ?)"
            part, texts = _asked(connection, left, source, (last, _STEP))
            _fill(left, len(part), np.arange(len(part)), texts)
            more.append(part)
            last = int(part[-1]) if len(part) else last
        self._unfit |= columns.keys() - left.keys()
        self._columns = left
        self._numbers.extend(np.concatenate(more))
        self._moments = [*self._moments[1 - _MOMENTS :], (seq, len(self._numbers.array))]

    def _ready(self, connection: apsw.Connection, names: Set[Path], seq: int, count: int) -> bool:
        """Have the columns of fields in memory; False where one holds what came later than a moment, or does not fit."""
        missing = sorted(names - self._columns.keys(), key=str)
        if missing:
            if self._moments[-1][1] != count or names & self._unfit:
                return False
            self._columns |= self._read(
                connection, {name: Column(seq) for name in missing}, self._numbers.array
            )
        self._clock += 1
        for name in names & self._columns.keys():
            self._columns[name].used = self._clock
        while len(self._columns) > _COLUMNS or sum(one.bytes for one in self._columns.values()) > _BYTES:
            del self._columns[min(self._columns, key=lambda one: self._columns[one].used)]
        return all(name in self._columns and self._columns[name].since <= seq for name in names)

    def _read(
        self, connection: apsw.Connection, columns: dict[Path, Column], numbers: Numbers
    ) -> dict[Path, Column]:
        """Read fields of items from the record into their columns, many items at a time; return the columns of those that fit."""
        left = dict(columns)
        for start in range(0, len(numbers), _STEP):
            if not left:
                break
            part = numbers[start : start + _STEP]
            there, texts = _asked(connection, left, "items where n >= ? and n <= ?", (int(part[0]), int(part[-1])))  # fmt: skip
            _fill(left, len(part), np.searchsorted(part, there), texts)
        self._unfit |= columns.keys() - left.keys()
        return left

    def _true(self, where: Filter, part: slice) -> Mask:
        """Return of which of some numbers a filter is true."""
        if isinstance(where, And | Or):
            join = np.logical_and if isinstance(where, And) else np.logical_or
            out: Mask = self._true(where.parts[0], part)
            for one in where.parts[1:]:
                join(out, self._true(one, part), out=out)
            return out
        if isinstance(where, Not):
            return ~self._true(where.part, part)
        column = self._columns[where.field]
        if isinstance(where, Exists):
            return column.exists(part)
        if isinstance(where, In):
            return column.some("=", where.values, part)
        return column.some(where.op, [where.value], part)


def _asked(
    connection: apsw.Connection, left: dict[Path, Column], source: str, bindings: tuple[int, ...]
) -> tuple[Numbers, dict[Path, str | None]]:
    """Return items' numbers (n,) and, of each field, its values as JSON; where those are too long for an answer, no columns are left."""
    said, values = [], []
    for name in left:
        if isinstance(name, str):
            said.append("group_concat(case when label is null then 'NaN' else json_quote(label) end)")
        else:
            said.append("group_concat(ifnull(metadata -> ?, 'NaN'))")  # which no JSON of an item holds
            values.append("$" + "".join(f'."{part}"' for part in name))
    sql = f"select {', '.join(['json_group_array(n)', *said])} from {source}"
    try:
        ((there, *texts),) = ask(connection, sql, (*values, *bindings))
    except apsw.TooBigError:
        left.clear()
        return _asked(connection, left, source, bindings)
    return np.array(json.loads(there), np.int64), dict(zip(left, texts, strict=True))


def _fill(left: dict[Path, Column], count: int, rows: Numbers, texts: dict[Path, str | None]) -> None:
    """Add items to columns; drop those that do not fit."""
    for name, text in texts.items():
        found = json.loads(f"[{text or ''}]", parse_constant=lambda word: _ABSENT)
        try:
            left[name].extend(count, rows, found)
        except Unfit:
            del left[name]


def _fields(where: Filter) -> set[Path]:
    return {one.field for one in _leaves(where)}


def _leaves(where: Filter) -> Iterable[Compare | In | Exists]:
    if isinstance(where, And | Or):
        for part in where.parts:
            yield from _leaves(part)
    elif isinstance(where, Not):
        yield from _leaves(where.part)
    else:
        yield where


def _exact(where: Filter) -> bool:
    """Whether float64 holds all numbers of a filter, and its lists are short enough to be looked through one by one."""
    for one in _leaves(where):
        values = one.values if isinstance(one, In) else (one.value,) if isinstance(one, Compare) else ()
        if len(values) > 100 or any(isinstance(each, int) and abs(each) > _EXACT for each in values):
            return False
    return True
