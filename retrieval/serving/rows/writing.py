"""What is written to an engine's rows: a call is one moment."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from retrieval.errors import StoreError
from retrieval.serving.bundle import Bundle
from retrieval.serving.filters import Filter
from retrieval.serving.rows.bodies import PIECE_BYTES, body_of, pieces, split, widths
from retrieval.serving.rows.engine import (
    ALIVE,
    FIELD,
    ITEM,
    PIECE,
    RECORDS,
    Between,
    Engine,
    Every,
    OneOf,
    Row,
    table_of,
)
from retrieval.serving.rows.head import Head
from retrieval.serving.rows.lease import Lease
from retrieval.serving.rows.reading import RowReader
from retrieval.serving.rows.terms import LOOSE, digest_of, indexed, key_of, part_of
from retrieval.serving.store.bundles import bundle_pieces
from retrieval.serving.store.contract import Generation, Item, spans_of
from retrieval.serving.store.items import checked, usable

SWEPT_AFTER = 300.0
"""Seconds for which dead rows stay, for readers that began before they died; `compact` waits for a fifth of that."""
WINDOW = 4000  # numbers of rows that are compared at once


@dataclass
class Change:
    """What a call writes.

    Attributes:
        head: what the index was.
        next: what it will be; `moment` is that of the call.
    """

    head: Head
    next: Head

    def numbers(self, count: int) -> range:
        """Return numbers for new rows."""
        first = self.next.numbers + 1
        self.next = replace(self.next, numbers=self.next.numbers + count)
        return range(first, first + count)


class RowWriter(RowReader):
    """The writing half of a store over an engine, without its generations.

    Args:
        engine: keeps the rows.
        address: what sentences call the index.
        wait: seconds that another process that writes is waited for.
    """

    def __init__(self, engine: Engine, address: str, wait: float = 60.0) -> None:
        self.turn = threading.RLock()
        self._lease = Lease(engine, address, wait)
        self.untidy = True  # rows may be there of a moment that never came
        super().__init__(engine, address)

    # A call that writes

    @contextmanager
    def change(self) -> Iterator[Change]:
        """Take the turn to write."""
        with self.open_still(), self.turn:
            self.untidy = self._lease.hold() or self.untidy
            try:
                head = self.head()
                yield Change(head, replace(head, moment=head.moment + 1))
            finally:
                self._lease.rest()

    def tidy(self, head: Head) -> None:
        """Remove what a writer left that was stopped in its midst; afterwards this call may leave something."""
        if self.untidy:
            later = Between("born", head.moment + 1, ALIVE)
            for table in self._tables(head):
                if self.engine.count(table, later, seen=0):
                    self.engine.erase(table, later, seen=0)
                ended = Between("died", head.moment + 1, ALIVE - 1)
                if self.engine.count(table, ended, seen=0):
                    self.engine.end(table, ended, ALIVE, seen=0)
        self.untidy = True

    def _tables(self, head: Head) -> list[str]:
        return [RECORDS, *(table_of(one.number) for one in head.generations)]

    def put(self, change: Change, table: str, rows: Sequence[Row]) -> None:
        """Write rows of the moment to come."""
        self._lease.check()
        change.next = replace(
            change.next, seen=max(change.next.seen, self.engine.put(table, rows) if rows else 0)
        )

    def _end(self, change: Change, numbers: Iterable[int]) -> None:
        """Let the rows of some numbers die, in every table."""
        wanted = list(numbers)
        for table in self._tables(change.head):
            for start in range(0, len(wanted), WINDOW):
                self._lease.check()
                where = Every(
                    (OneOf("number", tuple(wanted[start : start + WINDOW])), Between("died", ALIVE, ALIVE))
                )
                seen = self.engine.end(table, where, change.next.moment, seen=change.head.seen)
                change.next = replace(change.next, seen=max(change.next.seen, seen))

    def commit(self, change: Change) -> None:
        """Let the moment come: from now on what was written counts."""
        self._lease.check()
        times = (*change.next.times, (change.next.moment, time.time()))
        # of many moments close together one is enough
        kept = tuple(one for at, one in enumerate(times) if at + 1 == len(times) or times[at + 1][1] - one[1] > 10 or at == 0)  # fmt: skip
        self.engine.keep(replace(change.next, times=kept).text())
        self.untidy = False
        self.sweep(SWEPT_AFTER)

    def sweep(self, age: float) -> None:
        """Delete rows that have been dead for some seconds, and that no reader of this process is at."""
        head, now = self.head(), time.time()
        old = [moment for moment, at in head.times if now - at > age]
        until = min([max(old, default=0), *self._moments])
        if until <= head.swept:
            return
        self.engine.keep(replace(head, swept=until).text())
        dead = Between("died", 0, until)
        gone = self.engine.fetch(RECORDS, Every((OneOf("kind", (ITEM,)), dead)), seen=head.seen)
        owners = [digest_of("piece", what, row.number) for row in gone for what in ("original", "body") if self._has_pieces(row)]  # fmt: skip
        for start in range(0, len(owners), WINDOW):
            self.engine.erase(RECORDS, Every((OneOf("kind", (PIECE,)), OneOf("digest", tuple(owners[start : start + WINDOW])))), seen=head.seen)  # fmt: skip
        for table in reversed(self._tables(head)):
            self.engine.erase(table, dead, seen=head.seen)

    @staticmethod
    def _has_pieces(row: Row) -> bool:
        body = json.loads(row.body)
        return "long" in body or bool(body["original"])

    # Items

    def upsert(self, items: Sequence[Item], bundle: str) -> int:
        """Add items; see `Store`."""
        with self.change() as change:
            served = change.head.served()
            if served.bundle != bundle:
                raise self.superseded()
            texts = checked(items, served.widths)
            if not items:
                return 0
            self.tidy(change.head)
            old = self.rows(RECORDS, "digest", (digest_of(item.id) for item in items), self.alive(change.head), change.head)  # fmt: skip
            self._write(change, items, texts, served)
            self._end(change, (row.number for row in old))
            change.next = replace(change.next, count=change.head.count + len(items) - len(old))
            self.commit(change)
            self._fields |= {name for item in items for name in item.metadata}
            return len(old)

    def _write(self, change: Change, items: Sequence[Item], texts: Sequence[str], served: Generation) -> None:
        """Write new rows of items: what they are, what is kept of their originals, and their vectors."""
        for start in range(0, len(items), 1000):
            rows, vectors = [], []
            some = items[start : start + 1000]
            for number, item, text in zip(
                change.numbers(len(some)), some, texts[start : start + 1000], strict=True
            ):
                body = body_of(item, text)
                terms, orders = indexed(item.id, item.label, body["metadata"], self.engine.most_terms)
                if terms == (LOOSE,):
                    change.next = replace(change.next, loose=True)
                digest, key = digest_of(item.id), key_of(item.id)
                part = part_of(body["metadata"], self.engine.partition)
                row = Row(number, ITEM, change.next.moment, ALIVE, digest, key, terms, orders, part=part)
                rows.append(self._with_body(change, row, body))
                vectors.append(self.embedded(change, row, body, item, served))
                if item.original is not None:
                    self._pieces(change, "original", number, [item.original])
            self.put(change, RECORDS, rows)
            self.put(change, table_of(served.number), vectors)
        known = sorted({name for item in items for name in item.metadata} - self._fields)
        there = {
            json.loads(row.body)
            for row in self.rows(
                RECORDS,
                "digest",
                (digest_of("field", name) for name in known),
                self.alive(change.head, FIELD),
                change.head,
            )
        }
        new = [name for name in known if name not in there]
        named = zip(change.numbers(len(new)), new, strict=True)
        moment = change.next.moment
        self.put(
            change,
            RECORDS,
            [
                Row(
                    number,
                    FIELD,
                    moment,
                    ALIVE,
                    digest_of("field", name),
                    f"{number:016x}",
                    body=json.dumps(name),
                )
                for number, name in named
            ],
        )

    def _with_body(self, change: Change, row: Row, body: Mapping[str, Any]) -> Row:
        """Return a row with a body; one that is longer than the engine takes is kept in pieces."""
        text = json.dumps(body, ensure_ascii=False)
        most = self.engine.text_bytes
        if most is not None and len(text) * 4 > most and len(text.encode()) > most:
            owner = row.number if "arrays" not in body else f"{row.number} {table_of(body['generation'])}"
            self._pieces(change, "body", owner, [text.encode()])
            text = json.dumps({"long": owner})
        return replace(row, body=text)

    def embedded(
        self, change: Change, row: Row, body: Mapping[str, Any], item: Item, generation: Generation
    ) -> Row:
        """Return the row of an item in a generation."""
        vectors, arrays = split(item, generation)
        full = {**body, "arrays": arrays, "generation": generation.number}
        return self._with_body(change, replace(row, vectors=vectors), full)

    def _pieces(self, change: Change, what: str, owner: str | int, content: Iterable[bytes]) -> None:
        waiting: list[Row] = []
        for row in pieces(what, owner, content):
            (number,) = change.numbers(1)
            waiting.append(replace(row, number=number, born=change.next.moment))
            if len(waiting) * PIECE_BYTES > 4 << 20:
                self.put(change, RECORDS, waiting)
                waiting = []
        self.put(change, RECORDS, waiting)

    def delete(self, ids: Iterable[str] = (), *, where: Filter | None = None) -> int:
        """Delete items; see `Store`."""
        wanted = [digest_of(id) for id in usable(ids)]
        with self.change() as change:
            head = change.head
            found = {row.number for row in self.rows(RECORDS, "digest", wanted, self.alive(head), head)}
            if where is not None:
                for chosen in self.chosen(where, head):
                    found |= {row.number for row in self.engine.fetch(RECORDS, chosen, seen=head.seen)}
            if found:
                self.tidy(head)
                self._end(change, found)
                change.next = replace(change.next, count=head.count - len(found))
                self.commit(change)
            return len(found)

    # Generations

    def add_generation(
        self, change: Change, bundle: Bundle, kept: Mapping[str, int], state: Any
    ) -> Generation:
        """Make the table of a new generation, and keep its bundle."""
        head = change.next
        made = Generation(head.begun + 1, bundle.sha256, bundle.variant, dict(kept), spans_of(bundle), state)
        self.engine.make_table(table_of(made.number), widths(made), *head.structure)
        if made.bundle not in {one.bundle for one in head.generations}:
            self._pieces(change, "bundle", made.bundle, bundle_pieces(bundle, PIECE_BYTES))
        change.next = replace(change.next, begun=made.number, generations=(*head.generations, made))
        return made

    def make(self, bundle: Bundle, kept: Mapping[str, int], identity: str) -> None:
        """Make the index, which is there once its head is.

        Raises:
            StoreError: there is one.
        """
        with self.open_still(), self.turn:
            self._lease.hold()
            try:
                if self.engine.head() is not None:
                    raise StoreError(f"{self.address} exists already. Choose another name.")
                self.engine.make()
                fresh = Head(identity)
                change = Change(fresh, replace(fresh, moment=1))
                self.add_generation(change, bundle, kept, "served")
                self.engine.keep(change.next.text())
                self.untidy = False
            finally:
                self._lease.rest()
