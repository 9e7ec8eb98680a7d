"""What is read of an engine's rows: each answer is of one moment."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from retrieval.errors import DataError, StoreError
from retrieval.serving.filters import Filter, fields, matches
from retrieval.serving.rows.bodies import bytes_of, item_of, joined, spaces
from retrieval.serving.rows.conditions import condition
from retrieval.serving.rows.engine import (
    ALIVE,
    FIELD,
    ITEM,
    OUT,
    PIECE,
    RECORDS,
    Between,
    Condition,
    Either,
    Engine,
    Every,
    Has,
    OneOf,
    Row,
    table_of,
)
from retrieval.serving.rows.head import Head
from retrieval.serving.rows.terms import LOOSE, digest_of, key_of
from retrieval.serving.store.contract import (
    Floats,
    Generation,
    Item,
    Store,
    StoreUnavailable,
    Superseded,
    TooSlow,
    stop_at,
)
from retrieval.serving.store.items import check_queries, no_field, usable

T = TypeVar("T")

TOGETHER = 1000
"""Rows that an engine is asked for by name at once."""
NUMBERS = 8000
"""Numbers that one condition names."""
UNSAFE = 30.0
"""Seconds after which a reader asks whether rows were swept."""
_MORE = 8  # rows beyond those asked for: the engine measures in float32, and the last ones may lie as far as others


class RowReader(Store):
    """The reading half of a store over an engine.

    Args:
        engine: keeps the rows.
        address: what sentences call the index.
    """

    def __init__(self, engine: Engine, address: str) -> None:
        self.engine, self.address = engine, address
        self._state = threading.Condition()
        self._inside = 0
        self._closed = False
        self._still = threading.local()
        self._moments: list[int] = []  # that readers of this process are at
        self._fields: set[str] = set()
        self._identity: str | None = None

    # A moment

    def find(self) -> None:
        """Look which index there is.

        Raises:
            StoreError: there is none, or it is damaged or of another format.
        """
        self._identity = self.head().identity

    def head(self) -> Head:
        """Return what the index is now; in a thread that takes a snapshot, what it was when that began."""
        if (still := getattr(self._still, "head", None)) is not None:
            return still  # type: ignore[no-any-return]
        if (text := self.engine.head()) is None:
            raise StoreError(f"There is no index at {self.address}.")
        return Head.parse(text, self.address)

    @contextmanager
    def open_still(self) -> Iterator[None]:
        """Keep `close` waiting."""
        with self._state:
            if self._closed:
                raise StoreError(f"The index {self.address} was closed. Open it again.")
            self._inside += 1
        try:
            yield
        finally:
            with self._state:
                self._inside -= 1
                self._state.notify_all()

    def read(self, ask: Callable[[Head], T]) -> T:
        """Return what a question says of one moment."""
        with self.open_still():
            for _ in range(5):
                head, began = self.head(), time.monotonic()
                self._moments.append(head.moment)
                try:
                    found = ask(head)
                except (StoreUnavailable, Superseded, TooSlow):
                    raise
                except StoreError:
                    if self.head() == head:
                        raise
                    continue  # a table is gone that was there
                finally:
                    self._moments.remove(head.moment)
                if time.monotonic() - began < UNSAFE or self.head().swept <= head.moment:
                    return found
        raise StoreError(f"{self.address} changes faster than it can be read. Try again.")

    def alive(self, head: Head, *kinds: str) -> Condition:
        """Return what is true of the rows of a moment."""
        there = (Between("born", 0, head.moment), Between("died", head.moment + 1, ALIVE))
        return Every((OneOf("kind", kinds or (ITEM,)), *there))

    # Items

    def bodies(self, rows: Sequence[Row], head: Head) -> list[dict[str, Any]]:
        """Return the bodies of rows as JSON; long ones are put together."""
        found = [json.loads(row.body) for row in rows]
        for at, body in enumerate(found):
            if "long" in body:
                found[at] = json.loads(self.held("body", body["long"], head))
        return found

    def held(self, what: str, owner: str | int, head: Head) -> bytes:
        """Return the bytes that are kept of an owner."""
        where = Every((OneOf("kind", (PIECE,)), OneOf("digest", (digest_of("piece", what, owner),))))
        return bytes_of(self.engine.fetch(RECORDS, where, seen=head.seen))

    def items(self, rows: Sequence[Row], head: Head) -> list[Item]:
        """Return the items of rows, with their arrays where the rows have vectors."""
        bodies = self.bodies(rows, head)
        return [item_of(body, joined(row, body)) for row, body in zip(rows, bodies, strict=True)]

    def rows(
        self, table: str, column: Any, values: Iterable[Any], among: Condition, head: Head, **more: Any
    ) -> list[Row]:
        """Return the rows with some values of a column."""
        wanted, found = list(dict.fromkeys(values)), []
        for start in range(0, len(wanted), TOGETHER):
            self.in_time()
            where = Every((among, OneOf(column, tuple(wanted[start : start + TOGETHER]))))
            found += self.engine.fetch(table, where, seen=head.seen, **more)
        return found

    def in_time(self) -> None:
        """Raise `TooSlow` when a question has taken longer than it may."""
        if time.monotonic() > stop_at():
            raise TooSlow(f"Reading {self.address} takes too long. Ask for less.")

    def get(self, ids: Iterable[str], *, arrays: bool = False) -> dict[str, Item]:
        """Return items by id; see `Store`."""
        wanted = {digest_of(id) for id in usable(ids)}

        def ask(head: Head) -> dict[str, Item]:
            among = self.alive(head)
            found = {
                one.id: one for one in self.items(self.rows(RECORDS, "digest", wanted, among, head), head)
            }
            if arrays and found:
                table = table_of(head.served().number)
                rows = self.rows(table, "digest", wanted, among, head, vectors=True)
                found |= {one.id: one for one in self.items(rows, head)}
            return found

        return self.read(ask)

    def original(self, id: str) -> bytes | None:
        """Return the bytes that are kept; see `Store`."""
        wanted = [digest_of(one) for one in usable([id])]

        def ask(head: Head) -> bytes | None:
            for row in self.rows(RECORDS, "digest", wanted, self.alive(head), head):
                if self.bodies([row], head)[0]["original"]:
                    return self.held("original", row.number, head)
            return None

        return self.read(ask)

    # Filters

    def refuse_fields(self, where: Filter | None, head: Head) -> None:
        """Refuse a filter on what no item has ever had."""
        unknown = sorted(fields(where) - self._fields) if where is not None else []
        if not unknown:
            return
        known = {json.loads(row.body) for row in self.rows(RECORDS, "digest", (digest_of("field", name) for name in unknown), self.alive(head, FIELD), head)}  # fmt: skip
        self._fields |= known
        if missing := [name for name in unknown if name not in known]:
            raise no_field(missing[0], self.fields(head))

    def fields(self, head: Head) -> list[str]:
        """Return the names of metadata that items have had."""
        return sorted(
            json.loads(row.body)
            for row in self.engine.fetch(RECORDS, self.alive(head, FIELD), seen=head.seen)
        )

    def chosen(self, where: Filter | None, head: Head) -> list[Condition]:
        """Return conditions that together are true of the rows of items that match, each row fulfilling one of them.

        What the engine cannot say of a filter is found out item by item.
        """
        self.refuse_fields(where, head)
        among = self.alive(head)
        if where is None:
            return [among]
        native, exact = condition(where, self.engine.orders_text)
        if exact and not head.loose:
            return [Every((among, native))]
        by_hand: Condition = Has((LOOSE,)) if exact else Either((Has((LOOSE,)), native))
        numbers = []
        for row in self.engine.fetch(RECORDS, Every((among, by_hand)), seen=head.seen):
            self.in_time()
            (body,) = self.bodies([row], head)
            if matches(where, body["id"], body["label"], body["metadata"]):
                numbers.append(row.number)
        named: list[Condition] = [
            Every((among, OneOf("number", tuple(numbers[start : start + NUMBERS]))))
            for start in range(0, len(numbers), NUMBERS)
        ]
        return [Every((among, Has((LOOSE,), True), native)), *named] if exact else named

    def scan(self, where: Filter | None = None, *, after: str | None = None, limit: int = 1000) -> list[Item]:
        """Return a page of items; see `Store`."""
        if after and not usable([after]):
            raise DataError("There is no such id: nothing can begin behind it.")
        behind = key_of(after) if after else ""

        def ask(head: Head) -> list[Item]:
            found: list[Row] = []
            for chosen in self.chosen(where, head):
                found += self.engine.page(RECORDS, chosen, behind, limit, seen=head.seen)
            return self.items(sorted(found, key=lambda row: row.key)[:limit], head)

        return self.read(ask)

    def count(self, where: Filter | None = None) -> int:
        """Return how many items match; see `Store`."""

        def ask(head: Head) -> int:
            if where is None:
                return head.count
            return sum(self.engine.count(RECORDS, one, seen=head.seen) for one in self.chosen(where, head))

        return self.read(ask)

    def search(
        self, queries: Floats, count: int, bundle: str, *, where: Filter | None = None
    ) -> list[list[Item]]:
        """Propose items; see `Store`."""
        return self.read(
            lambda head: self._search(np.asarray(queries, np.float32), count, bundle, where, head)
        )

    def _search(
        self, queries: Floats, count: int, bundle: str, where: Filter | None, head: Head
    ) -> list[list[Item]]:
        served = head.served()
        if served.bundle != bundle:
            raise self.superseded()
        check_queries(queries, served)
        chosen, table = self.chosen(where, head), table_of(served.number)
        most = min(count, head.count)
        if most > self.engine.most_found:
            raise StoreError(
                f"{self.address} finds at most {self.engine.most_found:,} items at once. Ask for fewer."
            )
        if not len(queries) or not most:
            return [[] for _ in queries]
        asked = min(most + _MORE, self.engine.most_found)
        near: list[dict[str, list[int]]] = [{} for _ in queries]
        for name, (start, stop) in spaces(served).items():
            for one in chosen:
                self.in_time()
                part = np.ascontiguousarray(queries[:, start:stop])
                found = self.engine.nearest(
                    table, name, part, asked, one, seen=head.seen, options=head.structure[1]
                )
                for at, numbers in enumerate(found):
                    near[at].setdefault(name, []).extend(numbers)
        wanted = (number for one in near for numbers in one.values() for number in numbers)
        rows = self.rows(table, "number", wanted, OneOf("kind", (ITEM,)), head, vectors=True)
        items = dict(zip([row.number for row in rows], self.items(rows, head), strict=True))
        return [self._best(query, one, items, served, most) for query, one in zip(queries, near, strict=True)]

    def _best(
        self,
        query: Floats,
        near: Mapping[str, Sequence[int]],
        items: Mapping[int, Item],
        served: Generation,
        count: int,
    ) -> list[Item]:
        """Return the nearest in each sub-space, by float64."""
        best: dict[int, Item] = {}
        for name, (start, stop) in spaces(served).items():
            numbers = [number for number in dict.fromkeys(near.get(name, ())) if number in items]
            if numbers:
                vectors = np.stack([items[number].vector[start:stop] for number in numbers]).astype(
                    np.float64
                )
                distances = np.square(vectors - query[start:stop].astype(np.float64)).sum(1)
                order = np.argsort(distances, kind="stable")[:count]
                best |= {numbers[at]: items[numbers[at]] for at in order}
        return list(best.values())

    def superseded(self) -> Superseded:
        """Return the error for a bundle that is not served."""
        return Superseded(f"The index {self.address} is served with another bundle by now.")

    def without(self, head: Head, generation: Generation) -> int:
        """Return how many items a generation has no row of."""
        there = self.engine.count(table_of(generation.number), self.alive(head, ITEM, OUT), seen=head.seen)
        return head.count - there
