"""Searches of a local store: each is of one moment, and reads the record only for what is not in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

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
from retrieval.serving.local.view import Matches, View
from retrieval.serving.stages import stage
from retrieval.serving.stores.contract import CODE, VECTOR, Candidates, Floats, Superseded
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
        self, view: View, found: Sequence[Numbers], connection: apsw.Connection | None = None
    ) -> list[Candidates] | None:
        """Return items by their numbers, and their arrays; None where one is not in memory and there is no record to ask."""
        if not found:
            return []
        every = found[0] if len(found) == 1 else np.unique(np.concatenate(found))
        numbers = every.tolist()
        with stage("items", len(numbers)):
            items = self._remembered.find(numbers)
            if missing := [n for n in numbers if n not in items] if len(items) < len(numbers) else []:
                if connection is None:
                    return None
                sql = f"select {COLUMNS} from items where n in (select value from json_each(?))"
                items |= self._remembered.keep(ask(connection, sql, (json.dumps(missing),)))
                if len(items) != len(numbers):
                    raise StoreError(
                        f"The index {self.home.folder} is damaged: its record and its segments differ. Restore a snapshot."
                    )
        # each is looked up once, however many queries found it: a place among all is its place among a query's own
        by_id = sorted(range(len(numbers)), key=lambda at: items[numbers[at]].id)
        held = [items[numbers[at]] for at in by_id]
        arrays, _ = view.rows(every[by_id], (VECTOR, CODE))
        if len(found) == 1:
            return [Candidates(held, arrays)]
        places = np.empty(len(numbers), np.int64)
        places[by_id] = np.arange(len(numbers))
        answers = []
        for one in found:
            own = np.sort(places[np.searchsorted(every, one)])
            rows = {name: array[own] for name, array in arrays.items()}
            answers.append(Candidates([held[at] for at in own.tolist()], rows))
        return answers

    def _found(
        self, connection: apsw.Connection, view: View, queries: Floats, count: int, where: Filter | None
    ) -> list[Numbers]:
        """Return the numbers of each query's nearest items that match, ascending."""
        if not count:
            return [np.empty(0, np.int64)] * len(queries)
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
    ) -> list[Numbers] | None:
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
            numbers = np.unique(np.concatenate(found))
            sql = "select n, id, label, metadata from items where n in (select value from json_each(?))"
            good = matching(ask(connection, sql, (json.dumps(numbers.tolist()),)), where)
            chosen = [one[[n in good for n in one.tolist()]] for one in found]
            fewest = min(map(len, chosen))
            if fewest >= count:
                return chosen
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
