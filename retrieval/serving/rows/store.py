"""A store over an engine: its generations, and the whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.errors import DataError, StoreError
from retrieval.serving.bundle import Bundle
from retrieval.serving.rows.bodies import widths
from retrieval.serving.rows.engine import ITEM, OUT, RECORDS, Between, Engine, Every, OneOf, Row, table_of
from retrieval.serving.rows.head import Head
from retrieval.serving.rows.terms import digest_of
from retrieval.serving.rows.writing import SWEPT_AFTER, WINDOW, Change, RowWriter
from retrieval.serving.store.bundles import kept_bundle
from retrieval.serving.store.contract import FEATURES, Generation, Item, Stats
from retrieval.serving.store.items import checked
from retrieval.serving.store.local import write_copy


class RowStore(RowWriter):
    """A store over an engine; see `retrieval.serving.rows`.

    Args:
        engine: keeps the rows.
        address: what sentences call the index.
        wait: seconds that another process that writes is waited for.
    """

    def __init__(self, engine: Engine, address: str, wait: float = 60.0) -> None:
        super().__init__(engine, address, wait)
        self.structures = engine.structures  # type: ignore[misc]
        self._asked: dict[int, dict[str, Row]] = {}  # what `pending` gave last
        self._done: dict[int, int] = {}  # up to which number a generation lacks nothing

    # Generations

    def generations(self) -> tuple[Generation, ...]:
        """Return all generations; see `Store`."""
        return self.read(lambda head: head.generations)

    def known(self, generation: Generation, head: Head) -> Generation:
        """Return a generation as it is now."""
        for one in head.generations:
            if one.number == generation.number:
                return one
        raise StoreError("This generation is not there any more.")

    def bundle(self, generation: Generation) -> Path:
        """Return the folder of a generation's bundle; see `Store`."""

        def ask(head: Head) -> Path:
            sha256 = self.known(generation, head).bundle
            return kept_bundle(sha256, lambda: [self.held("bundle", sha256, head)])

        return self.read(ask)

    def begin(self, bundle: Bundle, widths: Mapping[str, int]) -> Generation:
        """Begin a generation; see `Store`."""
        with self.change() as change:
            for one in change.head.generations:
                if (one.bundle, one.variant, dict(one.widths)) == (bundle.sha256, bundle.variant, dict(widths)):  # fmt: skip
                    return one
            self.tidy(change.head)
            made = self.add_generation(change, bundle, widths, "building")
            self.commit(change)
            return made

    def _lacking(self, generation: Generation, head: Head, limit: int) -> list[Row]:
        """Return rows of items that a generation has none of, the oldest first."""
        found: list[Row] = []
        table, among = table_of(generation.number), self.alive(head)
        start = self._done.get(generation.number, 0)
        while start < head.numbers and len(found) < limit:
            window = Between("number", start + 1, start + WINDOW)
            rows = self.engine.fetch(RECORDS, Every((among, window)), seen=head.seen)
            there = (
                {row.number for row in self.engine.fetch(table, window, seen=head.seen)} if rows else set()
            )
            found += sorted((row for row in rows if row.number not in there), key=lambda row: row.number)
            start += WINDOW
            if not found:
                self._done[generation.number] = min(start, head.numbers)
        return found[:limit]

    def pending(self, generation: Generation, limit: int) -> list[Item]:
        """Return items without a row of a generation; see `Store`."""

        def ask(head: Head) -> list[Item]:
            known = self.known(generation, head)
            rows = self._lacking(known, head, limit)
            items = self.items(rows, head)
            served = head.served()
            if FEATURES in served.widths and rows:
                numbers = [row.number for row in rows]
                kept = self.rows(table_of(served.number), "number", numbers, OneOf("kind", (ITEM,)), head, vectors=True)  # fmt: skip
                held = {one.id: {FEATURES: one.arrays[FEATURES]} for one in self.items(kept, head)}
                items = [replace(one, arrays=held.get(one.id, {})) for one in items]
            self._asked[known.number] = {item.id: row for item, row in zip(items, rows, strict=True)}
            return items

        with self.turn:
            return self.read(ask)

    def embed(self, generation: Generation, items: Sequence[Item], left_out: Sequence[str] = ()) -> None:
        """Give a generation arrays; see `Store`."""
        with self.change() as change:
            known = self.known(generation, change.head)
            asked = self._asked.get(known.number, {})
            checked(items, known.widths)
            given = {item.id for item in items}
            faults = [f"{id} was not pending." for id in sorted(given - asked.keys())]
            faults += [
                f"{id} is neither embedded nor left out." for id in sorted(asked.keys() - given - {*left_out})
            ]
            if faults:
                raise DataError("\n".join(faults))
            numbers = [row.number for row in asked.values()]
            alive = {row.number: row for row in self.rows(RECORDS, "number", numbers, self.alive(change.head), change.head)}  # fmt: skip
            mine = [item for item in items if asked[item.id].number in alive]
            out = [asked[id] for id in left_out if id in asked and asked[id].number in alive]
            if mine or out:
                self.tidy(change.head)
                self._embed(change, known, [(item, alive[asked[item.id].number]) for item in mine], out)
                self.commit(change)
            self._asked.pop(known.number, None)

    def _embed(
        self, change: Change, generation: Generation, given: Sequence[tuple[Item, Row]], out: Sequence[Row]
    ) -> None:
        bodies = self.bodies([row for _, row in given], change.head)
        rows = [
            self.embedded(change, replace(row, born=change.next.moment), body, item, generation)
            for (item, row), body in zip(given, bodies, strict=True)
        ]
        nothing = {name: np.zeros(width, np.float32) for name, width in widths(generation).items()}
        rows += [
            replace(row, kind=OUT, born=change.next.moment, body="{}", terms=(), orders={}, vectors=nothing)
            for row in out
        ]
        for start in range(0, len(rows), 1000):
            self.put(change, table_of(generation.number), rows[start : start + 1000])

    def switch(self, generation: Generation) -> bool:
        """Serve another generation; see `Store`."""
        with self.change() as change:
            known = self.known(generation, change.head)
            if self.without(change.head, known):
                return False
            if known.state != "served":
                states = {known.number: "served", change.head.served().number: "kept"}
                changed = tuple(replace(one, state=states.get(one.number, one.state)) for one in change.head.generations)  # type: ignore[arg-type]  # fmt: skip
                change.next = replace(change.next, generations=changed)
                self.tidy(change.head)
                self.commit(change)
            return True

    def drop(self, generation: Generation) -> None:
        """Delete a generation; see `Store`."""
        with self.change() as change:
            known = self.known(generation, change.head)
            if known.state == "served":
                raise StoreError("The generation that is served cannot be dropped.")
            self.tidy(change.head)
            left = tuple(one for one in change.head.generations if one.number != known.number)
            change.next = replace(change.next, generations=left)
            self.commit(change)
            self.engine.drop_table(table_of(known.number))
            if known.bundle not in {one.bundle for one in left}:
                self.engine.erase(
                    RECORDS,
                    OneOf("digest", (digest_of("piece", "bundle", known.bundle),)),
                    seen=change.next.seen,
                )

    # The whole

    def identity(self) -> str:
        """Return the index's own id; see `Store`."""
        return self.read(lambda head: head.identity)

    def compact(self, report: Callable[[int, int], object] = lambda done, total: None) -> None:
        """Delete rows that died more than a minute ago; see `Store`."""
        with self.change() as change:
            self.tidy(change.head)
            self.untidy = False
            self.sweep(SWEPT_AFTER / 5)

    def take_structure(
        self,
        backend: str,
        options: Mapping[str, Any],
        report: Callable[[int, int], object] = lambda done, total: None,
    ) -> None:
        """Search with another structure from now on; see `Store`."""
        if backend not in self.structures:
            return super().take_structure(backend, options, report)
        with self.change() as change:
            self.tidy(change.head)
            for one in change.head.generations:
                self.engine.restructure(table_of(one.number), widths(one), backend, options)
            change.next = replace(change.next, structure=(backend, dict(options)))
            self.commit(change)

    def keep_tuned(self, tuned: Mapping[str, Any]) -> None:
        """Keep what was measured; see `Store`."""
        with self.change() as change:
            self.tidy(change.head)
            change.next = replace(change.next, tuned=dict(tuned))
            self.commit(change)

    def snapshot(self, target: Path) -> None:
        """Write a copy of one moment; see `Store`."""

        def ask(head: Head) -> None:
            self._still.head = head
            try:
                write_copy(self, target)
            finally:
                self._still.head = None
            if (now := self.head()).swept > head.moment:
                shutil.rmtree(target)
                raise StoreError(
                    f"{self.address} was swept up to moment {now.swept} while it was copied. Try again."
                )

        with self.open_still():
            ask_head = self.head()
            self._moments.append(ask_head.moment)
            try:
                ask(ask_head)
            finally:
                self._moments.remove(ask_head.moment)

    def stats(self) -> Stats:
        """Return what the store holds; see `Store`."""

        def ask(head: Head) -> Stats:
            details: dict[str, Any] = {"moment": head.moment, "backend": head.structure[0]}
            if head.tuned is not None:
                details["tuned"] = head.tuned
            return Stats(head.count, head.generations, None, details)

        return self.read(ask)

    def settings(self) -> Mapping[str, Any]:
        """Return how the index is set up; see `Store`."""
        return self.read(lambda head: {"fields": self.fields(head), "backend": head.structure[0]})

    def changed(self) -> str | None:
        """Return a sentence when the index was deleted or replaced; see `Store`."""
        with self.open_still():
            text = self.engine.head()
        if text is not None and Head.parse(text, self.address).identity == self._identity:
            return None
        return f"{self.address} was deleted, or another index stands in its place."

    def close(self) -> None:
        """Let go of the engine once those that read and write are done; see `Store`."""
        with self._state:
            if self._closed:
                return
            self._closed = True
            self._state.wait_for(lambda: not self._inside)
        self._lease.give_back()
        self.engine.close()
