"""The one writer of a local index: every change of what is in it is a transaction here."""

from __future__ import annotations

import itertools
import json
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import apsw
import numpy as np

from retrieval.errors import StoreError
from retrieval.serving.files.locks import hold
from retrieval.serving.filters import Filter
from retrieval.serving.local.acknowledged import Acknowledged
from retrieval.serving.local.answers import keep_answer
from retrieval.serving.local.conditions import condition_of, refuse_unknown
from retrieval.serving.local.generation_table import BUNDLES, all_of, served
from retrieval.serving.local.home import Home
from retrieval.serving.local.piece import SEGMENTS
from retrieval.serving.local.record import ask, value
from retrieval.serving.local.rows import to_row
from retrieval.serving.local.segment import Numbers, Segment, features_file, write_segment
from retrieval.serving.local.structures import Wanted
from retrieval.serving.local.view import ARRAYS
from retrieval.serving.stores.contract import Floats, Generation, Item, Superseded
from retrieval.serving.stores.items import checked, usable

_ROWS = 8192
FLUSH_ROWS = 4096
FLUSH_BYTES = 8 << 20
"""Fresh items that fill this many rows, or bytes, become a segment: until then they are read from the record, and searched exactly."""


class Writer:
    """Writes to a store; holds the index against other processes from the first write on.

    Args:
        home: whose record and folder it writes to.
    """

    def __init__(self, home: Home) -> None:
        self.home = home
        self.record = home.record
        self.folder = home.folder
        self.turn = threading.RLock()
        self._held = ExitStack()
        self._holding = False
        self._acknowledged: Acknowledged | None = None
        self._open: tuple[apsw.Connection, int] | None = (
            None  # the transaction under way, of whoever has the turn
        )

    def hold(self) -> None:
        """Hold the index against every other process and store.

        Raises:
            StoreError: another holds it (which one, since when), or it is read-only.
        """
        with self.turn:
            self.record.require_open()
            if self._holding:
                return
            if self.home.read_only:
                raise StoreError(f"The index {self.folder} is read-only here, and cannot be written to.")
            with ExitStack() as held:
                held.enter_context(hold(self.folder, "writing to this index", StoreError))
                if fault := self.record.replaced():  # from now on nobody can put another index in its place
                    raise StoreError(fault)
                self.record.settle()
                with self.record.faults("written"):
                    self._acknowledged = held.enter_context(Acknowledged(self.folder))
                    self.clean()
                self._held = held.pop_all()
            self._holding = True

    def clean(self) -> None:
        """Remove files of segments, and bundles, that the record does not name: an interrupted call left them."""
        with self.record.reading() as connection:
            named: set[str] = set()
            for file, structure in ask(connection, "select file, structure from segments"):
                named |= set(files_of(file, structure))
            bundles = {one.bundle[:16] for one in all_of(connection)}
        for path in (self.folder / BUNDLES).iterdir():
            if path.name not in bundles:
                shutil.rmtree(path, ignore_errors=True)
                if path.is_file():  # the lock of a copy that was killed
                    path.unlink()
        for path in (self.folder / SEGMENTS).iterdir():
            owner = path.with_suffix(".segment") if path == features_file(path) else path
            if owner.name not in named:
                path.unlink(missing_ok=True)

    @contextmanager
    def transaction(self, *, segments: bool = False) -> Iterator[tuple[apsw.Connection, int]]:
        """Give the record inside a transaction, and its number; `segments` says that the list of segments changes. Within another, it joins that."""
        with self.turn:
            self.hold()
            if self._open is not None:
                connection, seq = self._open
                if segments:
                    connection.execute("update state set value = value + 1 where key = 'epoch'")
                yield self._open
                return
            with self.record.writing() as connection:
                seq = int(value(connection, "select value from state where key = 'seq'")) + 1
                connection.execute("update state set value = ? where key = 'seq'", (seq,))
                if segments:
                    connection.execute("update state set value = value + 1 where key = 'epoch'")
                try:
                    self._open = connection, seq
                    yield self._open
                finally:
                    self._open = None
            if self._acknowledged is not None:
                self._acknowledged.write(seq)

    def once(self, key: str, request: str, write: Callable[[], bytes]) -> bytes:
        """See `Store.once`."""
        with self.transaction() as (connection, _):
            answer = write()
            keep_answer(connection, key, request, answer)
        return answer

    def upsert(self, items: Sequence[Item], bundle: str) -> int:
        """See `Store.upsert`."""
        with self.turn:
            self.hold()
            with self.record.reading() as connection:
                generation = served(connection)
            if generation.bundle != bundle:
                raise Superseded(
                    f"The index {self.folder} is served with another bundle by now. Embed the items again."
                )
            texts = checked(items, generation.widths)
            if not items:
                return 0
            large = _large(len(items), generation)
            with self.transaction(segments=large) as (connection, seq):
                old = _numbers_of(connection, [item.id for item in items])
                self._remove(connection, seq, old)
                numbers = self.insert(connection, items, texts)
                self.keep(connection, generation, np.array(numbers), items)
            return len(old)

    @staticmethod
    def insert(connection: apsw.Connection, items: Sequence[Item], texts: Sequence[str]) -> range:
        """Write items without their arrays inside a transaction; return their numbers.

        Args:
            connection: of the transaction.
            items: none of which is there.
            texts: their metadata, as `checked` gives them.
        """
        first = int(value(connection, "select seq from sqlite_sequence where name = 'items'") or 0) + 1
        numbers = range(first, first + len(items))
        connection.executemany(
            "insert into items values (?,?,?,?,?,?,?,?,?,?,?)", map(to_row, numbers, items, texts)
        )
        kept = (
            (n, item.original) for n, item in zip(numbers, items, strict=True) if item.original is not None
        )
        connection.executemany("insert into originals values (?, ?)", kept)
        names = sorted(set(itertools.chain.from_iterable(item.metadata for item in items)))
        connection.executemany("insert or ignore into fields values (?)", ((name,) for name in names))
        return numbers

    def keep(
        self, connection: apsw.Connection, generation: Generation, numbers: Numbers, items: Sequence[Item]
    ) -> None:
        """Write arrays inside a transaction: few as rows of the record, many as a segment at once."""
        if _large(len(items), generation):
            arrays = {
                name: [
                    np.array([item.arrays[name] for item in items[start : start + _ROWS]], np.float32)
                    for start in range(0, len(items), _ROWS)
                ]
                for name in generation.widths
            }
            self.add_segment(connection, generation, numbers, arrays)
            return
        rows = (
            (
                generation.number,
                int(n),
                *(_blob(item, name) if name in generation.widths else None for name in ARRAYS),
            )
            for n, item in zip(numbers, items, strict=True)
        )
        connection.executemany("insert into fresh (g, n, vector, code, features) values (?,?,?,?,?)", rows)

    def add_segment(
        self,
        connection: apsw.Connection,
        generation: Generation,
        numbers: Numbers,
        arrays: dict[str, list[Floats]],
    ) -> str:
        """Write a segment and have the record name it; return its file's name."""
        file = file_name(generation)
        path = self.folder / SEGMENTS / file
        sum_ = write_segment(path, numbers, arrays)
        connection.execute(
            "insert into segments (g, file, sum, count) values (?,?,?,?)",
            (generation.number, file, sum_, len(numbers)),
        )
        self.home.ready.wrote(file, Segment(path, sum_))
        return file

    def delete(self, ids: Sequence[str], where: Filter | None) -> int:
        """See `Store.delete`."""
        with self.turn:
            self.hold()
            with self.transaction() as (connection, seq):
                found = _numbers_of(connection, ids)
                if where is not None:
                    refuse_unknown(connection, where)
                    condition, values = condition_of(where)
                    found += [n for (n,) in ask(connection, f"select n from items where {condition}", values)]
                found = sorted(set(found))
                self._remove(connection, seq, found)
            return len(found)

    @staticmethod
    def _remove(connection: apsw.Connection, seq: int, numbers: Sequence[int]) -> None:
        if not numbers:
            return
        text = json.dumps(list(numbers))
        for table in ("items", "originals", "fresh"):
            indexed = "g in (select g from generations) and " if table == "fresh" else ""
            connection.execute(
                f"delete from {table} where {indexed}n in (select value from json_each(?))", (text,)
            )
        connection.execute("insert or ignore into removed select value, ? from json_each(?)", (seq, text))

    def restructure(self, wanted: Wanted) -> None:
        """Note which structure segments are to have."""
        wanted.of(1, 1, 1)
        if wanted.backend != "auto":
            self.home.make(wanted.backend, wanted.options or {})
        with self.transaction() as (connection, _):
            text = json.dumps({"backend": wanted.backend, "options": dict(wanted.options or {})})
            connection.execute("update state set value = ? where key = 'structure'", (text,))

    def keep_tuned(self, tuned: Mapping[str, Any]) -> None:
        """See `Store.keep_tuned`."""
        with self.transaction() as (connection, _):
            connection.execute("insert or replace into state values ('tuned', ?)", (json.dumps(tuned),))

    def close(self) -> None:
        """Let others write."""
        with self.turn:
            if self._holding:
                with suppress(StoreError):  # the next one that opens it does that
                    self.record.checkpoint()
            self._acknowledged = None
            self._held.close()
            self._holding = False


def _large(count: int, generation: Generation) -> bool:
    return count >= FLUSH_ROWS or 4 * count * sum(generation.widths.values()) >= FLUSH_BYTES


def _numbers_of(connection: apsw.Connection, ids: Sequence[str]) -> list[int]:
    text = json.dumps(usable(ids), ensure_ascii=False)
    return [
        n
        for (n,) in ask(
            connection, "select n from items where id in (select value from json_each(?))", (text,)
        )
    ]


def _blob(item: Item, name: str) -> bytes:
    return np.ascontiguousarray(item.arrays[name], "<f4").tobytes()


def file_name(generation: Generation, how: str = "written") -> str:
    """Return a name for a segment's file that none has had before: whoever gives one up removes only his own."""
    return f"{generation.number}-{how}-{secrets.token_hex(8)}.segment"


def files_of(file: str, structure: str | None) -> list[str]:
    """Return the names of a segment's files, from the record's columns."""
    return [file, *(name for name, _ in json.loads(structure)["files"])] if structure else [file]


def remove_files(folder: Path, names: Iterable[str]) -> None:
    """Remove files of segments that the record names no more; readers that have them open keep them."""
    for name in names:
        path = folder / SEGMENTS / name
        path.unlink(missing_ok=True)
        if path.suffix == ".segment":
            features_file(path).unlink(missing_ok=True)
