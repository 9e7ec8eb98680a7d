"""The embedded store: one folder, one writer, any number of readers in threads and processes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.errors import DataError, printable
from retrieval.serving.bundle import Bundle
from retrieval.serving.filters import Filter
from retrieval.serving.index.recall import recall_at_10
from retrieval.serving.local.answers import answered
from retrieval.serving.local.conditions import condition_of, refuse_unknown
from retrieval.serving.local.derive import derive
from retrieval.serving.local.generation_table import BUNDLES, all_of
from retrieval.serving.local.generations import Generations, gone
from retrieval.serving.local.home import Home, identity
from retrieval.serving.local.record import ask, value
from retrieval.serving.local.rows import COLUMNS, from_row
from retrieval.serving.local.searches import Searches
from retrieval.serving.local.snapshot import write_snapshot
from retrieval.serving.local.structures import Structure, Wanted
from retrieval.serving.local.upkeep import Upkeep
from retrieval.serving.local.view import ARRAYS, View
from retrieval.serving.local.writer import Writer
from retrieval.serving.stores.contract import (
    FEATURES,
    VECTOR,
    Candidates,
    Floats,
    Generation,
    Item,
    Stats,
    Store,
)
from retrieval.serving.stores.items import own, usable

_FIELDS = 1000  # names that `settings` gives


class LocalStore(Store):
    """The store in a folder; see `retrieval.serving.local`.

    Args:
        folder: of the index.
        plugins: files or modules of third-party back ends that are not installed.
        upkeep: whether a writing store merges segments in the background.

    Raises:
        StoreError: missing, damaged, or of another format.
    """

    def __init__(self, folder: Path, *, plugins: Sequence[str] = (), upkeep: bool = True) -> None:
        self.home = Home(folder, plugins)
        self.folder = folder
        self.writer = Writer(self.home)
        self._generations = Generations(self.writer)
        self._searches = Searches(self.home)
        self._upkeep = Upkeep(self.home, self.writer) if upkeep else None

    # Writing

    def upsert(self, items: Sequence[Item], bundle: str) -> int:
        """Add items; see `Store`."""
        replaced = self.writer.upsert(items, bundle)
        self._tend()
        return replaced

    def delete(self, ids: Iterable[str] = (), *, where: Filter | None = None) -> int:
        """Delete items; see `Store`."""
        count = self.writer.delete(list(ids), where)
        self._tend()
        return count

    def answered(self, key: str) -> tuple[str, bytes] | None:
        """Return what is kept under a key; see `Store`."""
        with self.home.record.reading() as connection:
            return answered(connection, key)

    def once(self, key: str, request: str, write: Callable[[], bytes]) -> bytes:
        """Write, and keep the answer; see `Store`."""
        return self.writer.once(key, request, write)

    def _tend(self) -> None:
        if self._upkeep is not None:
            self._upkeep.wake()

    @property
    def merges(self) -> int:
        """How many segments the background has made of several, since this store was opened."""
        return 0 if self._upkeep is None else self._upkeep.merges

    def compact(self, report: Callable[[int, int], object] = lambda done, total: None) -> None:
        """Merge all segments of every generation into one each, drop what was deleted, and give the room back."""
        (self._upkeep or Upkeep(self.home, self.writer, thread=False)).compact(report)

    # Reading

    def get(self, ids: Iterable[str], *, arrays: bool = False) -> dict[str, Item]:
        """Return items by id; see `Store`."""
        wanted = json.dumps(usable(ids), ensure_ascii=False)
        sql = f"select {COLUMNS} from items where id in (select value from json_each(?))"
        with self.home.moment(arrays) as (connection, view):
            rows = ask(connection, sql, (wanted,))
            return {item.id: item for item in self._items(rows, view, ARRAYS)}

    def original(self, id: str) -> bytes | None:
        """Return the bytes that are kept; see `Store`."""
        with self.home.record.reading() as connection:
            sql = "select content from originals where n = (select n from items where id = ?)"
            found = [value(connection, sql, (one,)) for one in usable([id])]
        return bytes(found[0]) if found and found[0] is not None else None

    def scan(self, where: Filter | None = None, *, after: str | None = None, limit: int = 1000) -> list[Item]:
        """Return a page of items; see `Store`."""
        if after and not usable([after]):
            raise DataError(
                f"{printable(after)!r} is no id that an item can have: nothing can begin behind it."
            )
        condition, values = condition_of(where)
        sql = f"select {COLUMNS} from items where id > ? and ({condition}) order by id limit ?"
        with self.home.record.reading() as connection:
            refuse_unknown(connection, where)
            return [from_row(row) for row in ask(connection, sql, (after or "", *values, limit))]

    def count(self, where: Filter | None = None) -> int:
        """Return how many items there are, or match; see `Store`."""
        condition, values = condition_of(where)
        with self.home.record.reading() as connection:
            refuse_unknown(connection, where)
            return int(value(connection, f"select count(*) from items where {condition}", values))

    def search(
        self, queries: Floats, count: int, bundle: str, *, where: Filter | None = None
    ) -> list[list[Item]]:
        """Propose the nearest; see `Store`."""
        answers = []
        for found in self.propose(queries, count, bundle, where=where):
            arrays = dict(found.arrays)
            items = [
                replace(
                    item,
                    metadata=own(item.metadata),
                    arrays={name: rows[at] for name, rows in arrays.items()},
                )
                for at, item in enumerate(found.items)
            ]
            answers.append(sorted(items, key=lambda item: item.id))
        return answers

    def propose(
        self, queries: Floats, count: int, bundle: str, *, where: Filter | None = None
    ) -> list[Candidates]:
        """Propose the nearest as arrays; see `Store`."""
        return self._searches.propose(queries, count, bundle, where)

    @staticmethod
    def _items(rows: Sequence[Any], view: View | None, names: Sequence[str]) -> list[Item]:
        if view is None or not rows:
            return [from_row(row) for row in rows]
        view.verify()
        arrays, there = view.rows(np.array([row[0] for row in rows], np.int64), names)
        return [
            from_row(row, {name: array[at] for name, array in arrays.items()} if here else {})
            for at, (row, here) in enumerate(zip(rows, there.tolist(), strict=True))
        ]

    # Generations

    def generations(self) -> tuple[Generation, ...]:
        """Return all generations; see `Store`."""
        with self.home.record.reading() as connection:
            return all_of(connection)

    def bundle(self, generation: Generation) -> Path:
        """Return the folder of a generation's bundle."""
        if generation.number not in {one.number for one in self.generations()}:
            raise gone()
        return self.folder / BUNDLES / generation.bundle[:16]

    def begin(self, bundle: Bundle, widths: Mapping[str, int]) -> Generation:
        """Begin a generation; see `Store`."""
        return self._generations.begin(bundle, widths)

    def pending(self, generation: Generation, limit: int) -> list[Item]:
        """Return items without arrays of a generation; see `Store`."""
        with self.home.moment() as (connection, view):
            rows = self._generations.pending(connection, generation, limit)
            return self._items(rows, view, [FEATURES])

    def embed(self, generation: Generation, items: Sequence[Item], left_out: Sequence[str] = ()) -> None:
        """Give a generation arrays; see `Store`."""
        self._generations.embed(generation, items, left_out)

    def derive(
        self,
        source: Generation,
        generation: Generation,
        apply: Callable[[Floats], Mapping[str, Floats]],
        report: Callable[[int], object] = lambda count: None,
    ) -> int:
        """Apply a head to features that are kept; see `Store`."""
        Upkeep(self.home, self.writer, thread=False).flush(source)
        count = derive(self.home, self.writer, source, generation, apply, report)
        self._tend()
        return count

    def switch(self, generation: Generation) -> bool:
        """Serve another generation; see `Store`."""
        self.home.prepare(generation)
        done = self._generations.switch(generation)
        self.home.renew()
        return done

    def drop(self, generation: Generation) -> None:
        """Delete a generation; see `Store`."""
        self._generations.drop(generation)

    # The whole

    def identity(self) -> str:
        """Return the index's id; see `Store`."""
        self.home.record.require_open()
        return identity(self.folder)

    structures = ("flat", "sq8", "hnsw", "ivf", "ivfpq", "rabitq")

    def take_structure(
        self,
        backend: str,
        options: Mapping[str, Any],
        report: Callable[[int, int], object] = lambda done, total: None,
    ) -> None:
        """Search with another structure; see `Store`."""
        self.restructure(Wanted(backend, dict(options)))
        self.compact(report)

    def snapshot(self, target: Path) -> None:
        """Write a copy of one moment; see `Store`."""
        write_snapshot(self.home.record, self.folder, target)

    def restructure(self, wanted: Wanted) -> None:
        """Have segments searched with another structure from now on; those that are there get it in the background, or by `compact`."""
        self.writer.restructure(wanted)
        self._tend()

    def keep_tuned(self, tuned: Mapping[str, Any]) -> None:
        """Keep what was measured; see `Store`."""
        self.writer.keep_tuned(tuned)

    def recall(self) -> tuple[str, float | None]:
        """Return the back end of the largest segment, and how often it finds the ten nearest; "flat" and None where search is exact."""
        with self.home.moment(whole=True) as (_, view):
            assert view is not None
            pieces = [piece for piece in view.pieces if piece.structure is not None]
        if not pieces:
            return "flat", None
        largest = max(pieces, key=lambda piece: len(piece.segment))
        assert largest.structure is not None
        said = Structure.parse(largest.said)
        assert said is not None
        vectors = largest.segment.arrays[VECTOR]
        found = [
            recall_at_10(backend, said.backend, np.ascontiguousarray(vectors[:, start:stop]))
            for backend, (start, stop) in zip(largest.structure, view.generation.spans, strict=True)
            if not backend.exact
        ]
        return said.backend, min(found, default=None)

    def stats(self) -> Stats:
        """Return what the store holds; see `Store`."""
        with self.home.moment(whole=True) as (connection, view):
            assert view is not None
            details: dict[str, Any] = {
                "segments": [
                    {
                        "file": piece.segment.path.name,
                        "items": len(piece.segment),
                        "deleted": piece.dead,
                        "structure": None if piece.said is None else json.loads(piece.said)["backend"],
                    }
                    for piece in view.pieces
                ],
                "fresh": len(view.numbers),
                "transactions": view.seq,
            }
            if (tuned := self.home.tuned(connection)) is not None:
                details["tuned"] = tuned
            count = int(value(connection, "select count(*) from items"))
            all_ = all_of(connection)
        return Stats(count, all_, _bytes_of(self.folder), details)

    def settings(self) -> Mapping[str, Any]:
        """Return how the index is set up; see `Store`."""
        with self.home.record.reading() as connection:
            fields = ask(connection, "select name from fields order by name limit ?", (_FIELDS,))
            said = dict(ask(connection, "select key, value from state where key in ('structure', 'keep')"))
        return {
            "structure": json.loads(said["structure"]),
            "keep": said["keep"],
            "fields": [name for (name,) in fields],
        }

    def changed(self) -> str | None:
        """Return a sentence when the folder was replaced or removed; see `Store`."""
        return self.home.record.replaced()

    def close(self) -> None:
        """Let go of everything; see `Store`."""
        if self._upkeep is not None:
            self._upkeep.close()
        self.writer.close()
        self.home.close()


def _bytes_of(folder: Path) -> int:
    """Return the bytes of a folder's files, each counted once; of those that others remove meanwhile, none."""
    sizes = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                one = Path(parent, name).stat()
                sizes[one.st_dev, one.st_ino] = one.st_size
    return sum(sizes.values())
