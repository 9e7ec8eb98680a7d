"""Searches of a local index: a view's nearest rows, as items, with filters."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, cast

import apsw
import numpy as np

from retrieval.errors import StoreError
from retrieval.serving.filters import Filter, fields, to_sql
from retrieval.serving.stages import stage
from retrieval.serving.store.columns import Columns
from retrieval.serving.store.contract import Superseded
from retrieval.serving.store.items import (
    CODE,
    COLUMNS,
    VECTOR,
    Candidates,
    Floats,
    Item,
    check_queries,
    from_row,
    no_field,
)
from retrieval.serving.store.record import ask, value
from retrieval.serving.store.view import Mask, Near, Numbers, View, Views

_FIELDS = 1000  # names that are looked through for a likely one
_SMALL = 20_000  # items of which a filter is looked up in the record at once
_MASKS = 16  # filters whose matches a view keeps
_CACHE_BYTES = 256 << 20
_ITEM_BYTES = 1000  # of an item in memory, beside its metadata


class Searches:
    """Searches in the folder of a local store.

    Args:
        views: of the index.
    """

    def __init__(self, views: Views) -> None:
        self.views = views
        self.columns = Columns()
        self._items: dict[int, Item] = {}
        self._bytes = 0

    def propose(
        self, queries: Floats, count: int, bundle: str, where: Filter | None
    ) -> list[Candidates]:
        """Propose the nearest items; see `Store.propose`."""
        view = self.views.now()
        found: Near | None = None
        if view is not None:
            only = None if where is None else view.matched.get(where)
            if where is None or only is not None:
                self._check(view, queries, bundle)
                found = view.search(queries, min(count, view.count), only)
                if (known := self._candidates(view, found, None)) is not None:
                    return known
        with self.views.moment() as (connection, current):
            if found is None or current is not view:
                self._check(current, queries, bundle)
                refuse_unknown(connection, where)
                found = self._found(connection, current, queries, count, where)
            return cast(list[Candidates], self._candidates(current, found, connection))

    def _check(self, view: View, queries: Floats, bundle: str) -> None:
        """Refuse queries that are not of what is searched."""
        if view.generation.bundle != bundle:
            raise Superseded(
                f"The index {self.views.record.folder} is served with another bundle by now. "
                "Encode the query again."
            )
        check_queries(queries, view.generation)

    def _found(
        self,
        connection: apsw.Connection,
        view: View,
        queries: Floats,
        count: int,
        where: Filter | None,
    ) -> Near:
        """Return each query's nearest items that match."""
        count = min(count, view.count)
        if where is None:
            return view.search(queries, count)
        mask = view.matched.get(where)
        if mask is None and view.count > _SMALL:
            mask = self.columns.mask(connection, view, where)
        if mask is None:
            mask = self._asked(connection, view, where)
        while len(view.matched) >= _MASKS:
            view.matched.pop(next(iter(view.matched)), None)
        view.matched[where] = mask
        return view.search(queries, count, mask)

    @staticmethod
    def _asked(connection: apsw.Connection, view: View, where: Filter) -> Mask:
        """Return which rows of a view match, by a question to the record."""
        condition, values = to_sql(where)
        sql = f"select json_group_array(n) from (select n from items where {condition})"
        numbers = np.array(json.loads(value(connection, sql, values)), np.int64)
        mask = np.zeros(view.rows, bool)
        rows = view.runs.rows_of(numbers)
        mask[rows[rows >= 0]] = True
        return mask

    def _candidates(
        self, view: View, found: Near, connection: apsw.Connection | None
    ) -> list[Candidates] | None:
        """Return items and their arrays; None where one is not in memory and nothing can be read."""
        squared, shape = found.squared, found.numbers.shape
        if found.numbers.min(initial=0) < 0:
            there = found.numbers >= 0
            numbers = found.numbers[there]
            squared = None if squared is None else squared[there]
            ends = np.cumsum(there.sum(1)).tolist()
        else:
            numbers = found.numbers.ravel()
            ends = [shape[1] * (answer + 1) for answer in range(shape[0])]
        wanted = numbers.tolist()
        items = self._of(wanted, None)
        if items is None and connection is None:  # no stage of a search: it is asked again
            return None
        with stage("items", len(wanted)):
            items = items or self._of(wanted, connection)
        assert items is not None
        distances = None if squared is None else np.sqrt(squared.ravel())
        order = _order(items, distances, ends)
        if order is not None:
            items, numbers = [items[at] for at in order], numbers[order]
        rows = _Rows(view, numbers)
        return [
            Candidates(
                items[start:end],
                rows.part(start, end),
                None if distances is None else distances[start:end],
            )
            for start, end in zip([0, *ends], ends, strict=False)
        ]

    def _of(self, numbers: list[int], connection: apsw.Connection | None) -> list[Item] | None:
        """Return items by number, from memory where they are: what a number means never changes.

        None: one is not in memory, and there is no connection to read it by.
        """
        known = self._items
        try:
            return [known[number] for number in numbers]
        except KeyError:
            pass
        if connection is None:
            return None
        if self._bytes > _CACHE_BYTES:
            known, self._bytes = {}, 0
            self._items = known
        missing = list({number for number in numbers if number not in known})
        sql = f"select {COLUMNS} from items where n in (select value from json_each(?))"
        for row in ask(connection, sql, (json.dumps(missing),)):
            known[row[0]] = from_row(row)
            self._bytes += _ITEM_BYTES + 8 * len(row[3])
        try:
            return [known[number] for number in numbers]
        except KeyError:
            raise StoreError(
                f"The index {self.views.record.folder} is damaged: its record and its arrays "
                "differ. Restore a snapshot."
            ) from None

    def after_fork(self) -> None:
        """Have locks of its own, in a child."""
        self.columns = Columns()


class _Rows:
    """Vectors and codes of items, read when those of the first answer are asked for.

    Args:
        view: whose items they are.
        numbers: (n,) of the items.
    """

    def __init__(self, view: View, numbers: Numbers) -> None:
        self._view, self._numbers = view, numbers
        self.names = [name for name in (VECTOR, CODE) if name in view.generation.widths]

    @cached_property
    def arrays(self) -> dict[str, Floats]:
        """All rows of each array, by name."""
        rows = self._view.runs.rows_of(self._numbers)
        return {name: self._view.arrays[name].rows(self._view.rows)[rows] for name in self.names}

    def part(self, start: int, end: int) -> Mapping[str, Floats]:
        """Return the rows of one answer, by name."""
        return _Part(self, slice(start, end))


class _Part(Mapping[str, Floats]):
    """Some of the rows."""

    def __init__(self, rows: _Rows, part: slice) -> None:
        self._rows, self._part = rows, part

    def __getitem__(self, name: str) -> Floats:
        return self._rows.arrays[name][self._part]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows.names)

    def __len__(self) -> int:
        return len(self._rows.names)


def _order(items: Sequence[Item], distances: Any, ends: Sequence[int]) -> list[int] | None:
    """Return an order (n,) of answers side by side in which equally far items are by id.

    None: they are in it already. Items without distances are ordered by id alone.
    """
    if distances is None:
        mixed = range(len(ends))
    else:
        same = distances[1:] == distances[:-1]
        if not same.any():
            return None
        equal = same.nonzero()[0]
        mixed = np.unique(np.searchsorted(ends, equal, "right")).tolist()
    order = list(range(len(items)))
    for answer in mixed:
        start, end = ends[answer - 1] if answer else 0, ends[answer]
        if distances is None:
            order[start:end] = sorted(order[start:end], key=lambda at: items[at].id)
        else:
            order[start:end] = sorted(
                order[start:end], key=lambda at: (distances[at], items[at].id)
            )
    return order


def refuse_unknown(connection: apsw.Connection, where: Filter | None) -> None:
    """Refuse a filter on what no item has ever had.

    A field stays known when the last item that has it goes: a filter that was good yesterday does
    not become an error because of that.

    Raises:
        DataError: naming it.
    """
    for name in sorted(fields(where)) if where is not None else ():
        if not value(connection, "select 1 from fields where name = ?", (name,)):
            sql = "select name from fields order by name limit ?"
            raise no_field(name, [known for (known,) in ask(connection, sql, (_FIELDS,))])
