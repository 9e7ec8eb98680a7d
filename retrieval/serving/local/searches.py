"""Searches of a local store: each is of one moment, and reads the record only for what is not in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import cached_property
from typing import Any, cast

import apsw
import numpy as np

from retrieval.errors import StoreError
from retrieval.serving.filters import Filter
from retrieval.serving.local.conditions import condition_of, matching, refuse_unknown
from retrieval.serving.local.home import Home
from retrieval.serving.local.record import ask, value
from retrieval.serving.local.remembered import Remembered
from retrieval.serving.local.rows import COLUMNS
from retrieval.serving.local.segment import Numbers
from retrieval.serving.local.view import Matches, Near, View
from retrieval.serving.stages import stage
from retrieval.serving.stores.contract import CODE, VECTOR, Candidates, Floats, Item, Superseded
from retrieval.serving.stores.items import check_queries

_OVER, _FAR = 8, 128  # times as many as asked for, at first and at most, before all items are looked at
_SURE = 2  # times as many matches as asked for are expected among those
_SMALL = 20_000  # items, of which a filter is looked up at once
_KEPT = 16  # filters whose matches a view keeps


class Searches:
    """Searches in the folder of a local store.

    Args:
        home: the folder.
    """

    def __init__(self, home: Home) -> None:
        self.home = home
        self._remembered = Remembered()

    def propose(self, queries: Floats, count: int, bundle: str, where: Filter | None) -> list[Candidates]:
        """See `Store.propose`."""
        before, found = self.home.now(), None
        only = None if before is None or where is None else before.matched.get(where)
        if before is not None and (where is None or only is not None):
            self._check(before, queries, bundle)
            found = before.search(queries, min(count, before.count), only)
            if (known := self._candidates(before, found)) is not None:
                return known
        with self.home.moment() as (connection, view):
            assert view is not None
            if found is None or view is not before:
                self._check(view, queries, bundle)
                refuse_unknown(connection, where)
                found = self._found(connection, view, queries, min(count, view.count), where)
            candidates = self._candidates(view, found, connection)
            assert candidates is not None
            return candidates

    def _check(self, view: View, queries: Floats, bundle: str) -> None:
        """Refuse queries that are not of what is searched, and segments that were altered."""
        if view.generation.bundle != bundle:
            raise Superseded(
                f"The index {self.home.folder} is served with another bundle by now. Encode the query again."
            )
        check_queries(queries, view.generation)
        view.verify()

    def _candidates(
        self, view: View, found: Near, connection: apsw.Connection | None = None
    ) -> list[Candidates] | None:
        """Return items by their numbers, and their arrays; None where one is not in memory and there is no record to ask."""
        there = found.numbers >= 0
        numbers = found.numbers.ravel() if there.all() else found.numbers[there]
        with stage("items", len(numbers)):
            items = self._items(numbers.tolist(), connection)
        if items is None:
            return None
        ends = np.cumsum(there.sum(1)).tolist()
        distances = None if found.squared is None else np.sqrt(found.squared[there])
        order = _order(items, distances, ends)
        if order is not None:
            items, numbers = (
                [items[at] for at in order],
                numbers[order],
            )  # equal distances stay where they are
        rows = Rows(view, numbers)
        return [
            Candidates(
                items[start:end], rows.part(start, end), None if distances is None else distances[start:end]
            )
            for start, end in zip([0, *ends], ends, strict=False)
        ]

    def _items(self, numbers: list[int], connection: apsw.Connection | None) -> list[Item] | None:
        """Return the items of numbers; None where one is not in memory and there is no record to ask."""
        items = self._remembered.find(numbers)
        if not all(items):
            if connection is None:
                return None
            missing = {number for number, item in zip(numbers, items, strict=True) if item is None}
            sql = f"select {COLUMNS} from items where n in (select value from json_each(?))"
            known = self._remembered.keep(ask(connection, sql, (json.dumps(list(missing)),)))
            if len(known) != len(missing):
                raise StoreError(
                    f"The index {self.home.folder} is damaged: its record and its segments differ. Restore a snapshot."
                )
            items = [
                known[number] if item is None else item for number, item in zip(numbers, items, strict=True)
            ]
        return cast(list[Item], items)

    def _found(
        self, connection: apsw.Connection, view: View, queries: Floats, count: int, where: Filter | None
    ) -> Near:
        """Return each query's nearest items that match."""
        if not count:
            return Near(np.full((len(queries), 0), -1, np.int64), np.empty((len(queries), 0)))
        if where is None:
            return view.search(queries, count)
        known, columns = view.matched.get(where), self.home.columns
        if known is None and view.count > _SMALL:
            chosen = self._walked(connection, view, queries, count, where)
            if chosen is not None:
                return chosen
            known = self._known(view, where, columns.matching(connection, where, view.seq))
        if known is None:
            condition, values = condition_of(where)
            text = value(
                connection,
                f"select json_group_array(n) from (select n from items where {condition} order by n)",
                values,
            )
            known = self._known(view, where, np.array(json.loads(text), np.int64))
        return view.search(queries, count, known)

    def _walked(
        self, connection: apsw.Connection, view: View, queries: Floats, count: int, where: Filter
    ) -> Near | None:
        """Return the matches among more of the nearest than asked for: the nearest matches, where there are enough.

        Returns:
            None where there are not, or where to look at all items is likely to be the faster.
        """
        if len(view.generation.spans) > 1:
            return None
        share, over = self.home.columns.share(where), _OVER
        if share is not None:  # in memory: to look at all items costs less than a second search
            if share * _OVER < _SURE:
                return None
            over = math.ceil(_SURE / share)
        while over * count * len(queries) <= min(_SMALL, view.count):
            found = view.search(queries, over * count)
            numbers = np.unique(found.numbers[found.numbers >= 0])
            sql = "select n, id, label, metadata from items where n in (select value from json_each(?))"
            good = matching(ask(connection, sql, (json.dumps(numbers.tolist()),)), where)
            chosen = np.isin(found.numbers, np.fromiter(good, np.int64, len(good)))
            fewest = int(chosen.sum(1).min())
            if fewest >= count:
                chosen &= chosen.cumsum(1) <= count
                return Near(np.where(chosen, found.numbers, -1), np.where(chosen, found.squared, np.inf))
            if share is not None or over >= _FAR:
                return None
            over = min(_FAR, max(2 * over, math.ceil(_SURE * over * count / fewest) if fewest else _FAR))
        return None

    @staticmethod
    def _known(view: View, where: Filter, numbers: Numbers | None) -> Matches | None:
        """Have a view keep what matches a filter."""
        if numbers is None:
            return None
        while len(view.matched) >= _KEPT:
            view.matched.pop(next(iter(view.matched)), None)
        view.matched[where] = found = Matches(numbers)
        return found


class Rows:
    """Vectors and codes of items, read together when those of the first answer are asked for: most answers need none.

    Args:
        view: whose items they are.
        numbers: (n,) of the items.
    """

    def __init__(self, view: View, numbers: Numbers) -> None:
        self._view, self._numbers = view, numbers

    @cached_property
    def arrays(self) -> dict[str, Floats]:
        """All rows of each array, by name."""
        return self._view.rows(self._numbers, (VECTOR, CODE))[0]

    def part(self, start: int, end: int) -> Mapping[str, Floats]:
        """Return the rows of one answer, by name."""
        return _Part(self, slice(start, end), self._view.generation.widths.keys() & {VECTOR, CODE})


class _Part(Mapping[str, Floats]):
    """Some of the rows."""

    def __init__(self, rows: Rows, part: slice, names: Set[str]) -> None:
        self._rows, self._part, self._names = rows, part, names

    def __getitem__(self, name: str) -> Floats:
        return self._rows.arrays[name][self._part]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _order(items: Sequence[Item], distances: Any, ends: Sequence[int]) -> list[int] | None:
    """Return in which order (n,) answers that lie side by side have their items: by id, of those that are equally far or have no distance; None: as they are."""
    if distances is None:
        mixed = range(len(ends))
    else:
        equal = np.flatnonzero(distances[1:] == distances[:-1])
        if not len(equal):
            return None
        mixed = np.unique(np.searchsorted(ends, equal, "right")).tolist()
    order = list(range(len(items)))
    for one in mixed:
        start, end = ends[one - 1] if one else 0, ends[one]
        if distances is None:
            order[start:end] = sorted(order[start:end], key=lambda at: items[at].id)
        else:
            order[start:end] = sorted(order[start:end], key=lambda at: (distances[at], items[at].id))
    return order
