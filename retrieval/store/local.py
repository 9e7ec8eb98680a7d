"""The local store: one folder, written and read by any number of processes.

A generation holds the arrays of all items under one bundle, in one append-only file per array
(`view.py`). A SQLite database, the record, holds the items (`record.py`). A write appends rows,
then commits items, number of rows and checksums in one transaction. A delete masks a row. Searches
read a consistent view and never wait for a writer.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, cast, get_args

import apsw
import numpy as np

from retrieval.base.arrays import Bools, Floats64, Ints
from retrieval.base.timing import stage
from retrieval.bundle.bundle import Bundle
from retrieval.errors import DataError, StoreError, printable
from retrieval.store.backends import make_backend
from retrieval.store.contract import (
    MARGIN,
    Capability,
    Store,
    Superseded,
    TooSlow,
    stop_at,
    superseded_source,
)
from retrieval.store.exact_search import check_queries
from retrieval.store.filters import Filter
from retrieval.store.folder import (
    INDEX_FILE,
    add_generation,
    bytes_of,
    identity_of,
    index_text,
    write_snapshot,
)
from retrieval.store.index_backend import recall_at_10
from retrieval.store.item_rows import (
    nearest_candidates,
    renumber,
    selected_numbers,
    with_arrays,
)
from retrieval.store.items import (
    FEATURES,
    VECTOR,
    Candidates,
    Floats,
    Generation,
    Item,
    Stats,
    check_arrays,
    check_embedded,
    checked_columns,
    usable,
)
from retrieval.store.masks import Masks, sql_of
from retrieval.store.record import (
    ITEM_COLUMNS,
    Record,
    all_generations,
    ask,
    expected_generation,
    from_row,
    has_notes,
    is_writable,
    last_number,
    numbers_of,
    remove,
    served_generation,
    upto_of,
    value,
)
from retrieval.store.search_structure import MIN_ROWS, StructureChoice
from retrieval.store.snapshot_view import (
    GenerationRows,
    View,
    Views,
    append_rows,
    dropped_error,
    restore_rows,
)
from retrieval.store.upkeep import BUNDLES, Upkeep, remove_leftovers
from retrieval.store.words import are_kept, best_items, insert_items, read_block

_NOTICE_SECONDS = 7.0
"""Seconds between the announcement of a generation and the switch to it; servers look every 5 s."""
_FIELDS = 1000  # maximum number of field names that `settings` returns
_ROWS = 8192  # number of items whose arrays are copied at a time
_CACHE_BYTES = 256 << 20  # estimated size at which the cache of items is emptied
_CHANGED_AT_ONCE = 256  # items whose metadata, each up to a megabyte, an update holds at a time
_DERIVED_BYTES = 32 << 20  # size of the arrays that `derive` reads and computes at a time
_ITEM_BYTES = 1000  # estimated memory of an item without its metadata


class LocalStore(Store):
    """The store of an index in a local folder.

    Args:
        folder: folder of the index.
        plugins: files or modules of index back ends that are not installed.
        upkeep: whether a background thread compacts and builds structures after writes.

    Raises:
        StoreError: the index is missing, damaged or of another format.
    """

    capabilities: ClassVar[frozenset[Capability]] = frozenset(get_args(Capability))

    def __init__(self, folder: Path, *, plugins: Sequence[str] = (), upkeep: bool = True) -> None:
        self.folder = folder
        self._plugins = plugins
        self._background = upkeep
        self._pending: dict[int, dict[str, int]] = {}
        self._tidied = False
        # This raises if this version cannot read the format, before anything else is opened.
        identity_of(folder)
        self._start()
        try:
            self.record.check()
            with self.record.reading() as connection:
                restore_rows(connection, folder)
                served_generation(connection)
                recorded_hash = value(connection, "select value from state where key = 'index'")
            if hashlib.sha256(index_text(folder)).hexdigest() != recorded_hash:
                raise StoreError(
                    f"The index {folder} is damaged: {INDEX_FILE} was altered. Restore a snapshot."
                )
        except BaseException:
            self.record.close()
            raise
        _STORES.add(self)

    def _start(self) -> None:
        """Create the connections, locks and caches of this process."""
        self.record = Record(self.folder, read_only=not is_writable(self.folder))
        self.views = Views(self.record, self._plugins)
        self.masks = Masks()
        self.upkeep = Upkeep(self.views, background=self._background)
        self._items = dict[int, Item]()
        self._bytes = 0
        self._written_to: Generation | None = None

    # Items

    def upsert(self, items: Sequence[Item], bundle: str) -> int:
        """Add items; see `Store`."""
        self._begin_to_write()
        # The items are checked before the lock keeps others from writing.
        expected_generation = self._written_to
        if not items or expected_generation is None or expected_generation.bundle != bundle:
            with self.record.reading() as connection:
                expected_generation = self._served_with(connection, bundle)
        columns = checked_columns(items, expected_generation.widths)
        if not items:
            return 0
        with self.record.writing() as (connection, seq):
            generation = self._served_with(connection, bundle)
            self._written_to = generation
            if generation.number != expected_generation.number:
                columns = checked_columns(items, generation.widths)
            old = numbers_of(connection, columns.ids)
            remove(connection, seq, old)
            numbers = np.array(insert_items(connection, columns))
            chunks = {name: [columns.arrays[name]] for name in generation.widths}
            append_rows(connection, self.folder, generation, numbers, chunks)
        self.upkeep.wake()
        return len(old)

    def update(
        self,
        ids: Iterable[str],
        changes: Mapping[str, Any],
        bundle: str,
        *,
        filter: Filter | None = None,
    ) -> int:
        """Change items; see `Store`."""
        self._begin_to_write()
        # The arrays are mapped and verified before the lock keeps others from writing.
        with self.views.moment():
            pass
        # No other write can come between the view and this transaction, which has the lock.
        with self.record.writing() as (connection, seq), self.views.moment() as (_, view):
            generation = self._served_with(connection, bundle)
            old = np.array(selected_numbers(connection, ids, filter), np.int64)
            new = last_number(connection) + 1 + np.arange(len(old))
            for start in range(0, len(old), _CHANGED_AT_ONCE):
                if time.monotonic() > stop_at():
                    raise TooSlow(
                        f"The change of {len(old):,} items takes too long. Nothing was changed:"
                        " change fewer items at a time."
                    )
                block = slice(start, start + _CHANGED_AT_ONCE)
                renumber(connection, seq, old[block].tolist(), new[block].tolist(), changes)
            has_arrays = view.runs.rows_of(old) >= 0
            embedded = old[has_arrays]

            def chunks(name: str) -> Iterator[Floats]:
                for start in range(0, len(embedded), _ROWS):
                    yield view.read(connection, embedded[start : start + _ROWS], [name])[0][name]

            arrays = {name: chunks(name) for name in generation.widths}
            append_rows(connection, self.folder, generation, new[has_arrays], arrays)
            left_out = [(generation.number, n) for n in new[~has_arrays].tolist()]
            connection.executemany("insert into left_out values (?, ?)", left_out)
        self.upkeep.wake()
        return len(old)

    def _served_with(self, connection: apsw.Connection, bundle: str) -> Generation:
        """Return the served generation; raise `Superseded` if it has another bundle."""
        generation = served_generation(connection)
        if generation.bundle != bundle:
            raise self._superseded("Embed the items again.")
        return generation

    def _superseded(self, advice: str) -> Superseded:
        return Superseded(f"The index {self.folder} is now served with another bundle. {advice}")

    def delete(self, ids: Iterable[str] = (), *, filter: Filter | None = None) -> int:
        """Delete items; see `Store`."""
        self._begin_to_write()
        with self.record.writing() as (connection, seq):
            numbers = selected_numbers(connection, ids, filter)
            remove(connection, seq, numbers)
        self.upkeep.wake()
        return len(numbers)

    def _begin_to_write(self) -> None:
        """Before the first write, sync and remove what a killed process may have left."""
        self.record.require_open()
        if not self._tidied and not self.record.read_only:
            self.record.settle()
            remove_leftovers(self.record)
            self._tidied = True

    def get(self, ids: Iterable[str], *, arrays: bool = False) -> dict[str, Item]:
        """Return items by id; see `Store`."""
        sql = f"select {ITEM_COLUMNS} from items where id in (select value from json_each(?))"
        names = (json.dumps(usable(ids), ensure_ascii=False),)
        if not arrays:
            with self.record.reading() as connection:
                return {item.id: item for item in map(from_row, ask(connection, sql, names))}
        with self.views.moment() as (connection, view):
            rows = ask(connection, sql, names)
            return {item.id: item for item in with_arrays(connection, rows, view)}

    def original(self, id: str) -> bytes | None:
        """Return the stored bytes of an original; see `Store`."""
        sql = "select content from originals where n = ?"
        with self.record.reading() as connection:
            contents = [value(connection, sql, (n,)) for n in numbers_of(connection, [id])]
        return cast(bytes | None, contents[0] if contents else None)

    def scan(
        self, filter: Filter | None = None, *, after: str | None = None, limit: int = 1000
    ) -> list[Item]:
        """Return a page of items; see `Store`."""
        if after and not usable([after]):
            raise DataError(
                f"{printable(after)!r} is not an id that an item can have, so no page begins after "
                "it. Pass the id of the last item of a page."
            )
        with self.record.reading() as connection:
            condition, values = sql_of(connection, filter)
            sql = (
                f"select {ITEM_COLUMNS} from items where id > ? and ({condition})"
                " order by id limit ?"
            )
            return list(map(from_row, ask(connection, sql, (after or "", *values, limit))))

    def newest(
        self, filter: Filter | None = None, *, before: int | None = None, limit: int = 1000
    ) -> list[tuple[int, Item]]:
        """Return a page of items, the newest first; see `Store`."""
        with self.record.reading() as connection:
            condition, values = sql_of(connection, filter)
            sql = (
                f"select {ITEM_COLUMNS} from items where n < ? and ({condition})"
                " order by n desc limit ?"
            )
            if before is None:
                before = last_number(connection) + 1
            rows = ask(connection, sql, (before, *values, limit))
            pairs = [(row[0], from_row(row)) for row in rows]
        if not pairs:
            self.refuse_impossible(filter)
        return pairs

    def count(self, filter: Filter | None = None) -> int:
        """Return the number of items; see `Store`."""
        with self.record.reading() as connection:
            condition, values = sql_of(connection, filter)
            return int(value(connection, f"select count(*) from items where {condition}", values))

    # Searches

    def search(
        self, queries: Floats, count: int, bundle: str, *, filter: Filter | None = None
    ) -> list[list[Item]]:
        """Propose the nearest items; see `Store`."""
        answers = []
        for proposed in self._proposed(queries, count, 0, bundle, filter):
            items = []
            for position, item in enumerate(proposed.items):
                arrays = {name: rows[position] for name, rows in proposed.arrays.items()}
                items.append(replace(item, metadata=deepcopy(item.metadata), arrays=arrays))
            answers.append(sorted(items, key=lambda item: item.id))
        return answers

    def propose(
        self,
        queries: Floats,
        count: int,
        bundle: str,
        *,
        filter: Filter | None = None,
        arrays: bool = True,
    ) -> list[Candidates]:
        """Propose the nearest items with their distances; see `Store`."""
        return self._proposed(queries, count, MARGIN, bundle, filter, arrays)

    def _proposed(
        self,
        queries: Floats,
        count: int,
        margin: int,
        bundle: str,
        filter: Filter | None,
        arrays: bool = True,
    ) -> list[Candidates]:
        """Return what `propose` does; search `margin` more rows, as they may tie with the last."""

        def nearest(view: View, only: Bools | None) -> tuple[Floats64 | None, Ints]:
            if view.generation.bundle != bundle:
                raise self._superseded("Encode the query again.")
            check_queries(queries, view.generation)
            return view.search(queries, min(count + margin, view.count), only)

        view = self.views.now()
        hits = None
        only = None if view is None else view.matched.get(filter)
        if view is not None and (filter is None or only is not None):
            hits = nearest(view, only)
            if (answers := self._candidates(view, *hits, count, arrays, None)) is not None:
                return answers
        with self.views.moment() as (connection, current):
            if hits is None or current is not view:
                only = None if filter is None else self.masks.of(connection, current, filter)
                hits = nearest(current, only)
            answers = self._candidates(current, *hits, count, arrays, connection)
            return cast(list[Candidates], answers)

    def _candidates(
        self,
        view: View,
        squared: Floats64 | None,
        rows: Ints,
        count: int,
        arrays: bool,
        connection: apsw.Connection | None,
    ) -> list[Candidates] | None:
        """Return the items of rows (Q, n), per query; see `propose`.

        Rows with squared distances are cut to the nearest `count`. Without a connection, return
        None if an item is not in memory.
        """
        distances = squared
        distinct = False
        if squared is not None:
            distances = np.sqrt(squared)
            # Without a tie at the end, the items beyond it need not be read.
            wide = distances[:, : count + 1]
            distinct = bool((wide[:, 1:] > wide[:, :-1]).all())
            if distinct:
                rows = rows[:, :count]
                distances = wide[:, :count]
        numbers = view.runs.numbers_of(rows)
        # -1 marks an unused place.
        used = rows >= 0
        if used.all():
            groups = numbers.tolist()
        else:
            distinct = False
            groups = [group[mask].tolist() for group, mask in zip(numbers, used, strict=True)]
        answers = self._items_of(groups, connection)
        if answers is None:
            return None
        if distinct and distances is not None and not arrays:
            pairs = zip(answers, distances, strict=True)
            return [Candidates(items, {}, apart) for items, apart in pairs]
        columns = [None] * len(rows) if distances is None else distances
        return [
            nearest_candidates(view, items, group[mask], apart, count, arrays)
            for items, group, mask, apart in zip(answers, rows, used, columns, strict=True)
        ]

    def _items_of(
        self, numbers: Sequence[Sequence[int]], connection: apsw.Connection | None
    ) -> list[list[Item]] | None:
        """Return items by number, per query, and keep them in memory.

        Without a connection, return None if an item is not in memory.
        """
        if self._bytes > _CACHE_BYTES:
            self._items = {}
            self._bytes = 0
        # The cache is never stale, since an item that changes gets a new number.
        cached = self._items
        try:
            answers = [list(map(cached.__getitem__, group)) for group in numbers]
        except KeyError:
            if connection is None:
                return None
            answers = None
        sql = f"select {ITEM_COLUMNS} from items where n in (select value from json_each(?))"
        try:
            # Every search has this stage, so that its count equals that of searches.
            with stage("items", sum(map(len, numbers))):
                if answers is None and connection is not None:
                    missing = list(set(chain(*numbers)).difference(cached))
                    for row in ask(connection, sql, (json.dumps(missing),)):
                        cached[row[0]] = from_row(row)
                        self._bytes += _ITEM_BYTES + 8 * len(row[3])
                    answers = [list(map(cached.__getitem__, group)) for group in numbers]
            return answers
        except KeyError:
            raise StoreError(
                f"The index {self.folder} is damaged: its record lacks an item that its arrays"
                " have. Restore a snapshot."
            ) from None

    def keep_words(self, report: Callable[[int], object] = lambda count: None) -> None:
        """Keep the words of all items from now on; see `Store`."""
        self._begin_to_write()
        while not self.keeps_words():
            with self.record.writing() as (connection, _):
                count = read_block(connection)
            report(count)

    def keeps_words(self) -> bool:
        """Return whether the index has the words of all items."""
        with self.record.reading() as connection:
            return are_kept(connection)

    def search_words(
        self, text: str, count: int, *, filter: Filter | None = None, also: Sequence[str] = ()
    ) -> list[tuple[str, float]]:
        """Return the items that fit the words of a text best; see `Store`."""
        with self.record.reading() as connection:
            return best_items(connection, text, count, filter, also)

    # Generations. A generation that is not served has arrays of the items up to number `upto`.

    def generations(self) -> tuple[Generation, ...]:
        """Return all generations; see `Store`."""
        with self.record.reading() as connection:
            return all_generations(connection)

    def bundle(self, generation: Generation) -> Path:
        """Return the folder of a generation's bundle."""
        if generation.number not in {existing.number for existing in self.generations()}:
            raise dropped_error()
        return self.folder / BUNDLES / generation.bundle[:16]

    def begin(self, bundle: Bundle, widths: Mapping[str, int]) -> Generation:
        """Begin a generation; see `Store`."""
        self._begin_to_write()
        properties = (bundle.sha256, bundle.variant, dict(widths))
        with self.record.writing() as (connection, _):
            for existing in all_generations(connection):
                if (existing.bundle, existing.variant, dict(existing.widths)) == properties:
                    return existing
            add_generation(connection, self.folder, bundle, widths, "building")
            return all_generations(connection)[-1]  # the newest

    def pending(self, generation: Generation, limit: int) -> list[Item]:
        """Return items that a generation has no arrays of; see `Store`."""
        with self.views.moment() as (connection, view):
            if _is_served(connection, generation):
                return []
            sql = f"select {ITEM_COLUMNS} from items where n > ? order by n limit ?"
            rows = ask(connection, sql, (upto_of(connection, generation.number), limit))
            self._pending[generation.number] = {row[1]: row[0] for row in rows}
            return with_arrays(connection, rows, view, (FEATURES,))

    def embed(
        self, generation: Generation, items: Sequence[Item], left_out: Sequence[str] = ()
    ) -> None:
        """Add arrays to a generation; see `Store`."""
        self._begin_to_write()
        numbers = self._pending.get(generation.number, {})
        columns = check_embedded(items, left_out, numbers, generation.widths)
        embedded = {id: row for row, id in enumerate(columns.ids)}
        if not numbers:
            return
        with self.record.writing() as (connection, _):
            if _is_served(connection, generation):
                raise StoreError("The generation is complete: it is served by now.")
            # Another process may have embedded some of the pending items meanwhile.
            upto = upto_of(connection, generation.number)
            sql = "select n, id from items where n in (select value from json_each(?))"
            text = json.dumps([n for n in numbers.values() if n > upto])
            alive = [(n, embedded.get(id)) for n, id in sorted(ask(connection, sql, (text,)))]
            chosen = np.array([pair for pair in alive if None not in pair], np.int64).reshape(-1, 2)
            chunks = {name: [columns.arrays[name][chosen[:, 1]]] for name in generation.widths}
            append_rows(connection, self.folder, generation, chosen[:, 0], chunks)
            out = [(generation.number, n) for n, row in alive if row is None]
            connection.executemany("insert or ignore into left_out values (?, ?)", out)
            sql = "update generations set upto = max(upto, ?) where g = ?"
            connection.execute(sql, (max(numbers.values()), generation.number))
        self._pending.pop(generation.number, None)

    def derive(
        self,
        generation: Generation,
        source: Generation,
        names: Sequence[str],
        compute: Callable[[Mapping[str, Floats]], Mapping[str, Floats]],
        report: Callable[[int], object] = lambda count: None,
    ) -> int:
        """Embed all pending items from their stored arrays; see `Store`."""
        self._begin_to_write()
        numbers_in_row = sum(generation.widths.values()) + sum(source.widths.values())
        size = max(1, _DERIVED_BYTES // (4 * numbers_in_row))
        count = 0
        while True:
            with self.views.moment() as (connection, view):
                if _is_served(connection, generation):
                    return count
                upto = upto_of(connection, generation.number)
                last = last_number(connection)
                numbers = view.live_numbers()
            if last <= upto:
                return count
            numbers = numbers[numbers > upto]
            # The last block, which may be empty, also covers the items without arrays after it.
            for start in range(0, len(numbers) + 1, size):
                block = numbers[start : start + size]
                end = last
                if len(block) == size:
                    end = int(block[-1])
                count += self._derive_block(generation, source, names, compute, block, end)
                report(len(block))

    def _derive_block(
        self,
        generation: Generation,
        source: Generation,
        names: Sequence[str],
        compute: Callable[[Mapping[str, Floats]], Mapping[str, Floats]],
        numbers: Ints,
        end: int,
    ) -> int:
        """Embed the items of `numbers` (n,), the next up to number `end` that have arrays."""
        # Other writers wait only while rows are appended, not while they are computed.
        with self.views.moment() as (connection, view):
            if view.generation.number != source.number:
                raise superseded_source()
            arrays, _ = view.read(connection, numbers, names)
        computed: Mapping[str, Floats] = {}
        if len(numbers):
            computed = compute(arrays)
            check_arrays(computed, len(numbers), generation.widths)
        with self.record.writing() as (connection, _):
            if _is_served(connection, generation) or not _is_served(connection, source):
                raise superseded_source()
            upto = upto_of(connection, generation.number)
            # Items may have been deleted since, or derived by another process.
            kept = GenerationRows.of(connection, source, view).has(numbers) & (numbers > upto)
            chunks = {name: [array[kept]] for name, array in computed.items()}
            append_rows(connection, self.folder, generation, numbers[kept], chunks)
            connection.execute(
                "insert or ignore into left_out select ?, n from left_out where g = ? and n > ?"
                " and n <= ?",
                (generation.number, source.number, upto, end),
            )
            sql = "update generations set upto = max(upto, ?) where g = ?"
            connection.execute(sql, (end, generation.number))
        return int(np.count_nonzero(kept))

    def switch(self, generation: Generation) -> bool:
        """Serve another generation; see `Store`."""
        self._begin_to_write()
        self.upkeep.structured(generation)
        ready = time.monotonic() + self._announce(generation)
        self.views.prepare(generation)
        time.sleep(max(0.0, ready - time.monotonic()))
        with self.record.writing() as (connection, _):
            if _is_served(connection, generation):
                return True
            upto = upto_of(connection, generation.number)
            if value(connection, "select 1 from items where n > ? limit 1", (upto,)):
                return False
            sql = "update generations set state = 'kept', upto = ? where state = 'served'"
            connection.execute(sql, (last_number(connection),))
            sql = "update generations set state = 'served' where g = ?"
            connection.execute(sql, (generation.number,))
            connection.execute("delete from state where key = 'expected'")
            return True

    def _announce(self, generation: Generation) -> float:
        """Announce a large generation; return how many seconds other processes need to load it."""
        with self.record.reading() as connection:
            sql = "select rows from generations where g = ?"
            rows = value(connection, sql, (generation.number,))
            # Once: at the next attempt they need only load what was written meanwhile.
            is_known = expected_generation(connection) == generation.number
            if _is_served(connection, generation) or is_known or rows < MIN_ROWS:
                return 0.0
        with self.record.writing() as (connection, _):
            row = ("expected", generation.number)
            connection.execute("insert or replace into state values (?, ?)", row)
        return _NOTICE_SECONDS

    def expected(self) -> Generation | None:
        """Return the generation that is about to be served; see `Store`."""
        with self.record.reading() as connection:
            number = expected_generation(connection)
            generations = all_generations(connection)
        return next((entry for entry in generations if entry.number == number), None)

    def propose_staged(
        self, generation: Generation, queries: Floats, count: int
    ) -> list[Candidates]:
        """Propose items of a generation that is not served yet; see `Store`."""
        self.upkeep.structured(generation)
        with self.record.reading() as connection:
            view = self.views.staged(connection, generation)
            check_queries(queries, generation)
            hits = view.search(queries, min(count + MARGIN, view.count))
            return cast(list[Candidates], self._candidates(view, *hits, count, True, connection))

    def drop(self, generation: Generation) -> None:
        """Delete a generation; see `Store`."""
        self._begin_to_write()
        with self.record.writing() as (connection, _):
            if _is_served(connection, generation):
                raise StoreError(
                    "The served generation cannot be dropped. First switch to another."
                )
            tables = ["runs", "sums", "left_out", "generations"]
            if has_notes(connection):
                tables.append("notes")
            for table in tables:
                connection.execute(f"delete from {table} where g = ?", (generation.number,))
        remove_leftovers(self.record)

    def note(self, generation: Generation, name: str) -> bytes | None:
        """Return a note of a generation; see `Store`."""
        with self.record.reading() as connection:
            _is_served(connection, generation)
            if not has_notes(connection):
                return None
            sql = "select content from notes where g = ? and name = ?"
            content: bytes | None = value(connection, sql, (generation.number, name))
            return content

    def set_note(self, generation: Generation, name: str, content: bytes) -> None:
        """Keep a note of a generation; see `Store`."""
        self._begin_to_write()
        with self.record.writing() as (connection, _):
            _is_served(connection, generation)
            # Indexes of earlier versions have no such table.
            connection.execute(
                "create table if not exists notes (g integer not null, name text not null,"
                " content blob not null, primary key (g, name)) strict"
            )
            row = (generation.number, name, content)
            connection.execute("insert or replace into notes values (?, ?, ?)", row)

    # The index as a whole

    def identity(self) -> str:
        """Return the index's id; see `Store`."""
        self.record.require_open()
        return identity_of(self.folder)

    def compact(self, report: Callable[[int, int], object] = lambda done, total: None) -> None:
        """Drop dead rows, build structures and free disk space; see `Store`."""
        self._begin_to_write()
        self.upkeep.compact(report)

    def take_structure(self, backend: str, options: Mapping[str, Any]) -> None:
        """Choose another search structure, which `compact` or the upkeep thread builds.

        Args:
            backend: name of a back end; "auto" chooses by the size of the index.
            options: parameters of the back end.
        """
        if backend != "auto":
            make_backend(backend, options, self.views.plugins)
        self._begin_to_write()
        choice = StructureChoice(backend, dict(options)).text()
        with self.record.writing() as (connection, _):
            connection.execute("update state set value = ? where key = 'structure'", (choice,))
        self.upkeep.wake()

    def chosen_structure(self) -> StructureChoice:
        """Return the structure that the index is configured to have."""
        return self.upkeep.choice()

    def recall(self) -> tuple[str, float | None]:
        """Return the name of the back end and its recall at 10, which is None if it is exact."""
        with self.views.moment() as (_, view):
            loaded = view.structure
        # A companion only speeds up exact search.
        if loaded is None or not loaded.backends:
            return "flat", None
        name = loaded.structure.backend
        rows = loaded.structure.rows
        parts = zip(loaded.backends, view.generation.spans, strict=True)
        with view.arrays[VECTOR].reading(rows) as vectors:
            shares = [
                recall_at_10(backend, name, np.ascontiguousarray(vectors[:, start:stop]))
                for backend, (start, stop) in parts
            ]
        return name, min(shares, default=None)

    def snapshot(self, target: Path) -> None:
        """Write a consistent copy; see `Store`."""
        write_snapshot(self.record, target)

    def stats(self) -> Stats:
        """Return the size and state of the store; see `Store`."""
        with self.views.moment() as (connection, view):
            structure = view.structure and view.structure.structure
            details: dict[str, Any] = {
                "rows": view.rows,
                "deleted": view.dead,
                "structure": structure and structure.backend,
                "covered": structure.rows if structure else 0,
                "transactions": view.seq,
            }
            count = int(value(connection, "select count(*) from items"))
            generations = all_generations(connection)
        return Stats(count, generations, bytes_of(self.folder), details)

    def settings(self) -> Mapping[str, Any]:
        """Return the configuration of the index; see `Store`."""
        with self.record.reading() as connection:
            sql = "select name from fields order by name limit ?"
            names = [name for (name,) in ask(connection, sql, (_FIELDS,))]
            state = dict(ask(connection, "select key, value from state"))
            words = are_kept(connection)
        structure = json.loads(state["structure"])
        return {"structure": structure, "keep": state["keep"], "words": words, "fields": names}

    def changed(self) -> str | None:
        """Return a sentence if the folder was replaced, removed or made writable; see `Store`."""
        return self.record.changed()

    def close(self) -> None:
        """Close the store; see `Store`."""
        self.upkeep.close()
        if self._tidied:
            # If this fails, the next process that closes the index moves the log.
            with suppress(StoreError):
                self.record.checkpoint()
        self.record.close()
        self.views.view = None

    def after_fork(self) -> None:
        """Reset the store in a forked child; if the index was in use, close it with a message."""
        old = self.record
        self._start()
        self.record.file = old.file
        self.record.closed = old.closed
        if old.lent and old.closed is None:
            self.record.closed = (
                f"The index {self.folder} was in use when this process was forked. Open it in the "
                "child, or fork before you open it."
            )


def _is_served(connection: apsw.Connection, generation: Generation) -> bool:
    """Return whether a generation is served; raise if it was dropped."""
    sql = "select state from generations where g = ?"
    state = value(connection, sql, (generation.number,))
    if state is None:
        raise dropped_error()
    return bool(state == "served")


_STORES: weakref.WeakSet[LocalStore] = weakref.WeakSet()


def _before_fork() -> None:
    for store in list(_STORES):
        store.record.before_fork()


def _after_fork_in_parent() -> None:
    for store in list(_STORES):
        store.record.after_fork()


def _after_fork_in_child() -> None:
    for store in list(_STORES):
        store.after_fork()
    if (faiss := sys.modules.get("faiss")) is not None:
        # With several threads, OpenMP in a forked child waits forever for the parent's threads.
        faiss.omp_set_num_threads(1)


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
