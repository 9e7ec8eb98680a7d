"""The rows of a generation: append them to files, map the files, and search a consistent view.

A generation has one append-only file of float32 rows per array. The record holds the number of
committed rows; bytes behind them are unused. Files grow in steps, so that readers seldom have to
map them again. The record also holds a checksum of each block of bytes, which an append updates
and a reader verifies when it opens the file.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import apsw
import numpy as np
from numpy.typing import NDArray

from retrieval.errors import RetrievalError, StoreError
from retrieval.serving.files.plain import open_plain
from retrieval.serving.store.items import FEATURES, VECTOR, Floats, Generation
from retrieval.serving.store.record import Record, ask, seq_of, served, value
from retrieval.serving.store.search import nearest
from retrieval.serving.store.structure import ARRAYS, Loaded, Mask, Numbers, Structure, load

Distances = NDArray[np.float64]
Sums = dict[int, int]
"""Checksums by block number."""

BLOCK = 1 << 20  # bytes under one checksum
_STEP = 1 << 16  # minimum number of bytes by which a file grows
_SMALL_BYTES = 1 << 16
"""Rows of at most this size are synced with the record first, and with their files later."""
_UNSYNCED = 256  # small appends after which their files are synced
_TRIES = 20
# fdatasync syncs a file's content and size, but not its times.
sync_data = getattr(os, "fdatasync", os.fsync)


def file_of(folder: Path, stem: str, name: str) -> Path:
    """Return the file of one array of a generation."""
    return folder / ARRAYS / f"{stem}.{name}"


def damaged(path: Path, fault: str) -> StoreError:
    """Return the error for a damaged file of an index."""
    return StoreError(
        f"The index {path.parent.parent} is damaged: {path.parent.name}/{path.name} {fault}. "
        "Run 'retrieval index check' on it, and restore a snapshot."
    )


# Writing


def append(
    path: Path,
    row: int,
    width: int,
    chunks: Iterable[Floats],
    last: int = 0,
    *,
    synced: bool = True,
) -> Sums:
    """Write rows to a file after its first `row` rows and return the new checksums.

    The caller must be in a write transaction, unless the record does not name the file yet.
    """
    sums: Sums = {}
    start = row * width * 4
    crc = last if start % BLOCK else 0
    handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    try:
        size = os.fstat(handle).st_size
        if not size and hasattr(os, "geteuid") and os.geteuid() == 0:
            owner = path.parent.stat()  # the owner of the index must be able to write root's files
            os.fchown(handle, owner.st_uid, owner.st_gid)
        for chunk in chunks:
            data = np.ascontiguousarray(chunk, "<f4").data.cast("B")
            if start + len(data) > size:
                size = start + len(data) + max(_STEP, (start + len(data)) // 4)
                os.ftruncate(handle, size)
            while data:
                if start % BLOCK == 0:
                    crc = 0
                done = os.pwrite(handle, data[: BLOCK - start % BLOCK], start)
                sums[start // BLOCK] = crc = zlib.crc32(data[:done], crc)
                data, start = data[done:], start + done
        if synced:
            sync_data(handle)
    finally:
        os.close(handle)
    return sums


def sync_rows(connection: apsw.Connection, folder: Path) -> None:
    """Sync the files of rows that are only in the record for sure, and delete them there."""
    restore_rows(connection, folder, synced=True)
    connection.execute("delete from unsynced")


def restore_rows(connection: apsw.Connection, folder: Path, *, synced: bool = False) -> None:
    """Write the rows to their files again that a power cut has taken from them, or all and sync."""
    contents: dict[str, tuple[int, bytearray]] = {}  # of one file, they follow each other
    for name, start, content in ask(
        connection, "select file, start, content from unsynced order by n"
    ):
        contents.setdefault(name, (start, bytearray()))[1].extend(content)
    for name, (start, content) in contents.items():
        path = folder / ARRAYS / name
        if path.name != name:
            raise damaged(path, "is no name of a file")
        try:
            with open_plain(path) as file:
                if not synced and os.pread(file.fileno(), len(content), start) == content:
                    continue
            with path.open("r+b") as file:  # never makes it shorter: others may write behind
                file.seek(start)
                file.write(content)
                file.flush()
                if synced:
                    sync_data(file.fileno())
        except FileNotFoundError:  # compaction has replaced the file
            continue


def keep_rows(
    connection: apsw.Connection,
    folder: Path,
    generation: Generation,
    numbers: Numbers,
    arrays: Mapping[str, Iterable[Floats]],
) -> None:
    """Append rows to a generation's files and to the record."""
    if not len(numbers):
        return
    g = generation.number
    ((stem, rows),) = ask(connection, "select stem, rows from generations where g = ?", (g,))
    synced = 4 * len(numbers) * sum(generation.widths.values()) > _SMALL_BYTES
    if synced or (value(connection, "select max(n) from unsynced") or 0) >= _UNSYNCED:
        sync_rows(connection, folder)
    for name, width in generation.widths.items():
        block = rows * width * 4 // BLOCK
        sql = "select sum from sums where g = ? and name = ? and block = ?"
        last = value(connection, sql, (g, name, block)) or 0
        path = file_of(folder, stem, name)
        chunks = arrays[name]
        if not synced:
            chunks = [np.concatenate(list(chunks)).astype("<f4")]
            row = (path.name, rows * width * 4, chunks[0].tobytes())
            connection.execute("insert into unsynced values (null,?,?,?)", row)
        sums = append(path, rows, width, chunks, last, synced=synced)
        put_sums(connection, g, name, sums)
    put_runs(connection, g, rows, numbers)
    connection.execute("update generations set rows = rows + ? where g = ?", (len(numbers), g))


def put_sums(connection: apsw.Connection, g: int, name: str, sums: Mapping[int, int]) -> None:
    """Write checksums of one array of a generation."""
    rows = [(g, name, block, checksum) for block, checksum in sums.items()]
    connection.executemany("insert or replace into sums values (?,?,?,?)", rows)


def sums_of(connection: apsw.Connection, g: int, name: str) -> Sums:
    """Return the checksums of one array of a generation."""
    sql = "select block, sum from sums where g = ? and name = ?"
    return dict(ask(connection, sql, (g, name)))


def put_runs(connection: apsw.Connection, g: int, rows: int, numbers: Numbers) -> None:
    """Record the item numbers of the rows from `rows` on."""
    starts = np.concatenate([[0], np.flatnonzero(np.diff(numbers) != 1) + 1])
    counts = np.diff(np.concatenate([starts, [len(numbers)]]))
    runs = [
        (g, rows + start, int(numbers[start]), count)
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True)
    ]
    sql = "select row, n + count, count from runs where g = ? order by row desc limit 1"
    for row, following, count in ask(connection, sql, (g,)):
        if following == runs[0][2]:  # the first new run continues the last one recorded
            more = count + runs.pop(0)[3]
            connection.execute("update runs set count = ? where g = ? and row = ?", (more, g, row))
    connection.executemany("insert into runs values (?,?,?,?)", runs)


# Reading


class Array:
    """One array of a generation: the committed rows of a file, memory-mapped."""

    def __init__(self, path: Path, width: int) -> None:
        self.path, self.width = path, width
        self._mapped: Floats = np.empty((0, width), np.float32)
        self._verified: set[int] = set()

    def rows(self, count: int) -> Floats:
        """Return the first `count` rows, (count, width), mapped from the file."""
        if count > len(self._mapped):
            try:
                with open_plain(self.path) as file:
                    capacity = os.fstat(file.fileno()).st_size // (4 * self.width)
                    if capacity < count:
                        raise damaged(self.path, "was cut short")
                    mapped = np.memmap(file, "<f4", "r", shape=(capacity, self.width))
            except FileNotFoundError:
                raise
            except OSError as fault:
                raise damaged(self.path, f"cannot be read: {fault.strerror or fault}") from None
            self._mapped = np.asarray(mapped)  # slices of a memmap cost more
        return self._mapped[:count]

    def verify(self, count: int, sums: Mapping[int, int], rows: Numbers | None = None) -> None:
        """Compare the blocks of the first `count` rows with their checksums, each block once."""
        content = self.rows(count).reshape(-1).view(np.uint8).data
        blocks = set(range(-(-len(content) // BLOCK)))
        if rows is not None:
            size = 4 * self.width
            ends = np.concatenate([rows * size // BLOCK, (rows * size + size - 1) // BLOCK])
            blocks &= set(ends.tolist())
        for block in sorted(blocks - self._verified):
            if zlib.crc32(content[block * BLOCK : (block + 1) * BLOCK]) != sums.get(block):
                raise damaged(self.path, "was altered")
            self._verified.add(block)


class Runs:
    """The ascending item numbers of a generation's rows, as runs of consecutive numbers."""

    def __init__(self, table: Any) -> None:
        self.table = np.array(table, np.int64).reshape(-1, 3)
        self.rows, self.numbers, self.counts = np.ascontiguousarray(self.table.T)

    def numbers_of(self, rows: Numbers) -> Numbers:
        """Return the item numbers of rows; the array may have any shape."""
        if not rows.size:
            return rows
        run = self.rows.searchsorted(rows, "right") - 1 if len(self.rows) > 1 else 0
        numbers: Numbers = rows + (self.numbers[run] - self.rows[run])
        return numbers

    def rows_of(self, numbers: Numbers) -> Numbers:
        """Return the rows (n,) of item numbers, or -1 for a number without a row."""
        if not len(self.rows):
            return np.full(len(numbers), -1, np.int64)
        run = np.searchsorted(self.numbers, numbers, "right") - 1
        after = numbers - self.numbers[run]
        return np.where((run < 0) | (after >= self.counts[run]), -1, self.rows[run] + after)


@dataclass(frozen=True)
class Rows:
    """The rows of a generation as of one transaction of the record.

    Attributes:
        seq: number of that transaction.
        generation: the generation.
        stem: prefix of the names of its files.
        rows: number of rows.
        runs: item numbers of the rows.
        alive: mask (rows,), False for items that were deleted or changed; None if all are alive.
        dead: number of rows that are not alive.
        structure_text: description of its structure in the record, or None.
    """

    seq: int
    generation: Generation
    stem: str
    rows: int
    runs: Runs
    alive: Mask | None
    dead: int
    structure_text: str | None

    @property
    def count(self) -> int:
        """Number of items with arrays."""
        return self.rows - self.dead

    @staticmethod
    def of(connection: apsw.Connection, generation: Generation, old: Rows | None = None) -> Rows:
        """Return the rows that a read transaction sees; `old` ones save reading everything."""
        sql = "select stem, rows, structure from generations where g = ?"
        if not (known := ask(connection, sql, (generation.number,))):
            raise gone()
        ((stem, rows, structure_text),) = known
        seq = seq_of(connection)
        if old is None or old.stem != stem or old.seq > seq:
            old = Rows(0, generation, stem, 0, Runs([]), None, 0, None)
        runs, alive, dead = old.runs, old.alive, old.dead
        if rows > old.rows:
            sql = "select row, n, count from runs where g = ? and row >= ? order by row"
            last = runs.table[:-1]  # the last may have grown
            first = int(runs.rows[-1]) if len(runs.rows) else 0
            table = ask(connection, sql, (generation.number, first))
            runs = Runs(np.concatenate([last, np.array(table, np.int64).reshape(-1, 3)]))
            if alive is not None:
                alive = np.concatenate([alive, np.ones(rows - old.rows, bool)])
        removed = ask(connection, "select n from removed where seq > ?", (old.seq,))
        present = runs.rows_of(np.fromiter((n for (n,) in removed), np.int64, len(removed)))
        present = present[present >= 0]
        if len(present):
            alive = np.ones(rows, bool) if alive is None else alive.copy()
            alive[present] = False
            dead = rows - int(np.count_nonzero(alive))
        return Rows(seq, generation, stem, rows, runs, alive, dead, structure_text)


@dataclass(frozen=True)
class View(Rows):
    """The rows of one transaction with their files, ready to be searched. Immutable.

    Attributes:
        arrays: files of the generation, by name of the array.
        structure: the search structure, or None.
        matched: cache of the masks (rows,) of filters.
    """

    arrays: Mapping[str, Array]
    structure: Loaded | None = None
    matched: dict[Any, Mask] = field(default_factory=dict)

    def search(
        self, queries: Floats, count: int, only: Mask | None = None
    ) -> tuple[Distances | None, Numbers]:
        """Return the rows (Q, n) among the `count` nearest in any sub-space, padded with -1.

        With a single sub-space, rows are sorted by distance and then row, and come with squared
        distances (Q, n), padded with infinity.
        """
        if not self.count or not count:
            return np.empty((len(queries), 0)), np.full((len(queries), 0), -1, np.int64)
        spaces = range(len(self.generation.spans))
        answers = [self._nearest(space, queries, count, only) for space in spaces]
        if len(answers) == 1:
            return answers[0]
        rows = np.sort(np.hstack([rows for _, rows in answers]), axis=1)
        rows[:, 1:][rows[:, 1:] == rows[:, :-1]] = -1  # near in more than one sub-space
        return None, rows

    def _nearest(
        self, space: int, queries: Floats, count: int, only: Mask | None
    ) -> tuple[Distances, Numbers]:
        """Return squared distances and rows (Q, count) of the nearest in one sub-space."""
        vectors = self.arrays[VECTOR].rows(self.rows)
        span = self.generation.spans[space]
        keep = self.alive if only is None else only
        covered, parts = 0, []
        whole = span == (0, vectors.shape[1])
        if self.structure is not None:
            covered = self.structure.structure.rows
            near = None if keep is None else keep[:covered]
            if self.structure.backends:
                own = queries if whole else np.ascontiguousarray(queries[:, slice(*span)])
                rows = self.structure.propose(space, own, count, near, filtered=only is not None)
                if rows is not None:
                    parts.append(_measured(queries, vectors, span, rows, count))
            elif (companion := self.structure.companion) is not None:
                part = vectors[:covered]
                parts.append(nearest(queries, part, count, keep=near, companion=companion))
            covered = covered if parts else 0
        if covered < self.rows:
            squared, rows = nearest(
                queries,
                vectors[covered:],
                count,
                keep=None if keep is None else keep[covered:],
                span=None if whole else span,
            )
            if covered:
                rows[rows >= 0] += covered
            parts.append((squared, rows))
        if len(parts) == 1:
            return parts[0]
        squared, rows = (np.hstack(both) for both in zip(*parts, strict=True))
        return _nearest_first(squared, rows, count)

    def read(
        self, connection: apsw.Connection, numbers: Numbers, names: Sequence[str]
    ) -> tuple[dict[str, Floats], Mask]:
        """Return arrays (n, width) of items by name, and the mask (n,) of items that have them."""
        rows = self.runs.rows_of(numbers)
        present = rows >= 0
        arrays = {}
        for name in (name for name in names if name in self.generation.widths):
            array = self.arrays[name]
            if name == FEATURES:
                sums = sums_of(connection, self.generation.number, name)
                array.verify(self.rows, sums, rows[present])
            content = array.rows(self.rows)
            arrays[name] = np.zeros((len(numbers), array.width), np.float32)
            arrays[name][present] = content[rows[present]]
        return arrays, present


def _measured(
    queries: Floats, vectors: Floats, span: tuple[int, int], rows: Numbers, count: int
) -> tuple[Distances, Numbers]:
    """Return squared distances and rows (Q, count) of candidate rows, nearest first.

    Distances are computed in float64 from the vectors, exactly as in `serving.merging.merged`.
    """
    columns = slice(*span)
    near = vectors.take(rows, axis=0, mode="clip")[..., columns]  # padding (-1) is masked below
    apart = near - queries[:, None, columns].astype(np.float64)
    squared = np.einsum("qij,qij->qi", apart, apart)
    if rows.size and rows.min() < 0:
        squared[rows < 0] = np.inf
    return _nearest_first(squared, rows, count)


def _nearest_first(squared: Distances, rows: Numbers, count: int) -> tuple[Distances, Numbers]:
    """Return the `count` smallest distances per query, ascending, and their rows."""
    order = squared.argsort(axis=1, kind="stable")[:, :count]
    if len(rows) > 1:
        order += rows.shape[1] * np.arange(len(rows))[:, None]
    return squared.take(order), rows.take(order)  # three times as fast as two index arrays


class Views:
    """Provides the current view of an index, which changes with every transaction."""

    def __init__(self, record: Record, plugins: Sequence[str] = ()) -> None:
        self.record, self.plugins = record, tuple(plugins)
        self.view: View | None = None
        self.loaded: dict[str, Loaded | None] = {}
        self._known: tuple[object, int] | None = None
        self._prepared: View | None = None
        self._refresh = threading.RLock()
        self._loading: set[str] = set()

    def now(self) -> View | None:
        """Return the cached view, or None if something was written since."""
        known, view = self._known, self.view
        if known is None or view is None or view.seq != known[1]:
            return None
        return view if self.record.version() == known[0] else None

    @contextmanager
    def moment(self) -> Iterator[tuple[apsw.Connection, View]]:
        """Context manager that yields a read transaction and the view that belongs to it."""
        missing = ""
        for _ in range(_TRIES):
            version = self.record.version()  # of this transaction or an earlier one
            with self.record.reading() as connection:
                try:
                    view = self._seen(connection)
                except FileNotFoundError as fault:  # another process has just compacted: try again
                    missing = fault.filename
                    continue
                if view is None:
                    continue
                self._known = version, view.seq
                yield connection, view
                return
        raise missing_file(self.record.folder, missing)

    def _seen(self, connection: apsw.Connection) -> View | None:
        """Return the view of a read transaction, or None if a newer view exists already."""
        seq = seq_of(connection)
        with self._refresh:
            view = self.view
            if view is not None and view.seq >= seq:
                return view if view.seq == seq else None
            self.view = self._of(connection, served(connection), wait=view is None)
            if len(self.loaded) > 3:
                structure_text = self.view.structure_text
                self.loaded = {
                    text: part for text, part in self.loaded.items() if text == structure_text
                }
            return self.view

    def prepare(self, generation: Generation) -> None:
        """Load a generation that is about to be served, if this process searches the index."""
        if self.view is not None:
            with suppress(RetrievalError, OSError), self.record.reading() as connection:
                self._prepared = self._of(connection, generation, wait=True)

    def _of(self, connection: apsw.Connection, generation: Generation, *, wait: bool) -> View:
        """Return the view of a generation in a read transaction, reusing an older view."""
        olds = [old for old in (self.view, self._prepared) if old is not None]
        old = next((old for old in olds if old.generation.number == generation.number), None)
        rows = Rows.of(connection, generation, old)
        if old is not None and old.stem == rows.stem:
            arrays = old.arrays
            for array in arrays.values():  # map here, where a missing file is handled
                array.rows(rows.rows)
        else:
            arrays = {}
            for name, width in generation.widths.items():
                path = file_of(self.record.folder, rows.stem, name)
                array = arrays[name] = Array(path, width)
                array.rows(rows.rows)
                if name != FEATURES:  # features are verified when they are read
                    array.verify(rows.rows, sums_of(connection, generation.number, name))
        view = View(**vars(rows), arrays=arrays)
        structure = (
            self._structure(view, rows.structure_text, wait)
            if rows.structure_text is not None
            else None
        )
        return replace(view, structure=structure)

    def _structure(self, view: View, structure_text: str, wait: bool) -> Loaded | None:
        """Return a structure, or the previous one while it loads in the background."""
        if structure_text in self.loaded:
            return self.loaded[structure_text]
        vectors, spans = view.arrays[VECTOR].rows(view.rows), view.generation.spans

        def loading() -> None:
            structure = Structure.parse(structure_text)
            loaded = load(self.record.folder, structure, vectors, spans, self.plugins)
            with self._refresh:
                self.loaded[structure_text] = loaded
                self._loading.discard(structure_text)
                if self.view is not None and self.view.structure_text == structure_text:
                    self.view = replace(self.view, structure=loaded)

        if wait:
            loading()
            return self.loaded[structure_text]
        if structure_text not in self._loading:
            self._loading.add(structure_text)
            threading.Thread(target=loading, name="loading", daemon=True).start()
        old = self.view
        return old.structure if old is not None and old.stem == view.stem else None


def missing_file(folder: Path, name: str) -> StoreError:
    """Return the error for a file that is still missing after several tries."""
    return StoreError(
        f"The index {folder} is damaged: a file that its record names is missing: {name}. "
        "Restore a snapshot."
    )


def gone() -> StoreError:
    """Return the error for a generation that was dropped."""
    return StoreError("This generation does not exist any more.")
