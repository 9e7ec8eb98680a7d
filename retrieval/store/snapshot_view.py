"""Append the rows of a generation to files, map the files, and search a consistent view.

A generation holds the arrays of all items under one bundle: an item is a row of each array
("vector", "code", "base", "features"). Each array has an append-only file of float32 rows. The
index's SQLite record holds the number of committed rows; any bytes after them are unused. Files
grow in steps, so that readers seldom have to map them again. The record also holds a checksum of
each block of a file. An append updates the checksums. A reader verifies vectors and codes when it
opens their files, and other arrays when it reads them.
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

from retrieval.base.arrays import Bools, Floats64, Ints
from retrieval.base.memory_map import FileMap
from retrieval.base.regular_files import FULL, open_plain, out_of_files
from retrieval.errors import RetrievalError, StoreError
from retrieval.store.contract import StoreUnavailable
from retrieval.store.exact_search import candidate_distances, nearest, nearest_first
from retrieval.store.items import NOT_SEARCHED, VECTOR, Floats, Generation
from retrieval.store.record import (
    Record,
    all_generations,
    ask,
    expected_generation,
    seq_of,
    served_generation,
    value,
)
from retrieval.store.search_structure import ARRAYS, Loaded, Structure, load_structure

BlockChecksums = dict[int, int]
"""CRC-32 of each block of a file, by block number."""

BLOCK = 1 << 20  # bytes per checksum
_STEP = 1 << 16  # minimum number of bytes by which a file grows
_SMALL_BYTES = 1 << 16
"""An append of at most this size does not sync the files: the record keeps a copy of the bytes."""
# An append syncs the files once the record has this many copies, so that restoring stays short.
_UNSYNCED = 256
# Compaction may replace the files of a state while it is read, so reading it is tried again.
_TRIES = 20
# fdatasync syncs a file's content and size, but not its times.
sync_data = getattr(os, "fdatasync", os.fsync)


def file_of(folder: Path, stem: str, name: str) -> Path:
    """Return the file of one array of a generation."""
    return folder / ARRAYS / f"{stem}.{name}"


def damage_error(path: Path, fault: str) -> StoreError:
    """Return the error for a damaged file of an index."""
    return StoreError(
        f"The index {path.parent.parent} is damaged: {path.parent.name}/{path.name} {fault}. "
        "Run 'retrieval index check' on it, and restore a snapshot."
    )


# Writing


def append(
    path: Path,
    first_row: int,
    width: int,
    chunks: Iterable[Floats],
    last_checksum: int = 0,
    *,
    sync: bool = True,
) -> BlockChecksums:
    """Write rows to a file and return the new checksums.

    The caller must be in a write transaction if the record already names the file.

    Args:
        path: the file; created if it is missing.
        first_row: number of committed rows, after which the new ones are written.
        width: number of columns.
        chunks: the new rows, in arrays (n, width).
        last_checksum: checksum of the committed part of the block in which the new rows begin.
        sync: whether to sync the file.
    """
    sums: BlockChecksums = {}
    start = first_row * width * 4
    if start % BLOCK:
        crc = last_checksum
    else:
        crc = 0
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        size = os.fstat(handle).st_size
        if not size and os.geteuid() == 0:
            # The owner of the index must be able to write root's files.
            owner = path.parent.stat()
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
                data = data[done:]
                start += done
        if sync:
            sync_data(handle)
    finally:
        os.close(handle)
    return sums


def sync_rows(connection: apsw.Connection, folder: Path) -> None:
    """Sync the files of unsynced rows, and delete the copies of these rows from the record."""
    restore_rows(connection, folder, sync=True)
    connection.execute("delete from unsynced")


def restore_rows(connection: apsw.Connection, folder: Path, *, sync: bool = False) -> None:
    """Rewrite the rows that files lost in a power cut, from their copies in the record.

    With `sync`, rewrite all rows that have a copy, and sync their files.
    """
    # The pieces of a file are contiguous.
    contents: dict[str, tuple[int, bytearray]] = {}
    for name, start, content in ask(
        connection, "select file, start, content from unsynced order by n"
    ):
        contents.setdefault(name, (start, bytearray()))[1].extend(content)
    for name, (start, content) in contents.items():
        path = folder / ARRAYS / name
        if path.name != name:
            raise damage_error(path, "is not the name of a file")
        try:
            with open_plain(path) as file:
                if not sync and os.pread(file.fileno(), len(content), start) == content:
                    continue
            # This mode keeps rows that others append meanwhile.
            with path.open("r+b") as file:
                file.seek(start)
                file.write(content)
                file.flush()
                if sync:
                    sync_data(file.fileno())
        except FileNotFoundError:
            # Compaction has replaced the file.
            continue


def append_rows(
    connection: apsw.Connection,
    folder: Path,
    generation: Generation,
    numbers: Ints,
    arrays: Mapping[str, Iterable[Floats]],
) -> None:
    """Append rows to a generation's files, in a write transaction that records them.

    Args:
        connection: connection in the transaction.
        folder: folder of the index.
        generation: the generation.
        numbers: item numbers (n,) of the rows, ascending.
        arrays: the rows of each array, by name, in chunks.
    """
    if not len(numbers):
        return
    g = generation.number
    ((stem, rows),) = ask(connection, "select stem, rows from generations where g = ?", (g,))
    # With a sync of the files, a write of one item is 1.4 to 1.8 times as dear: 5.3 against 3.8 ms
    # at best, and 27 against 15 ms at the median of a busy machine.
    sync = 4 * len(numbers) * sum(generation.widths.values()) > _SMALL_BYTES
    # A large append syncs the files anyway, so the copies of earlier rows can go.
    if sync or (value(connection, "select max(n) from unsynced") or 0) >= _UNSYNCED:
        sync_rows(connection, folder)
    for name, width in generation.widths.items():
        block = rows * width * 4 // BLOCK
        sql = "select sum from sums where g = ? and name = ? and block = ?"
        last_checksum = value(connection, sql, (g, name, block)) or 0
        path = file_of(folder, stem, name)
        chunks = arrays[name]
        if not sync:
            chunks = [np.concatenate(list(chunks)).astype("<f4")]
            piece = (path.name, rows * width * 4, chunks[0].tobytes())
            connection.execute("insert into unsynced values (null,?,?,?)", piece)
        sums = append(path, rows, width, chunks, last_checksum, sync=sync)
        put_sums(connection, g, name, sums)
    put_runs(connection, g, rows, numbers)
    connection.execute("update generations set rows = rows + ? where g = ?", (len(numbers), g))


def put_sums(connection: apsw.Connection, g: int, name: str, sums: Mapping[int, int]) -> None:
    """Record checksums of the array `name` of generation number `g`."""
    rows = [(g, name, block, checksum) for block, checksum in sums.items()]
    connection.executemany("insert or replace into sums values (?,?,?,?)", rows)


def sums_of(connection: apsw.Connection, g: int, name: str) -> BlockChecksums:
    """Return the checksums of the array `name` of generation number `g`."""
    sql = "select block, sum from sums where g = ? and name = ?"
    return dict(ask(connection, sql, (g, name)))


def put_runs(connection: apsw.Connection, g: int, first_row: int, numbers: Ints) -> None:
    """Record the item numbers of a generation's rows from `first_row` on; see `NumberRuns`."""
    starts = np.concatenate([[0], np.flatnonzero(np.diff(numbers) != 1) + 1])
    counts = np.diff(np.concatenate([starts, [len(numbers)]]))
    runs = [
        (g, first_row + start, int(numbers[start]), count)
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True)
    ]
    sql = "select row, n + count, count from runs where g = ? order by row desc limit 1"
    for row, following, count in ask(connection, sql, (g,)):
        # The first new run continues the last one recorded.
        if following == runs[0][2]:
            total = count + runs.pop(0)[3]
            connection.execute("update runs set count = ? where g = ? and row = ?", (total, g, row))
    connection.executemany("insert into runs values (?,?,?,?)", runs)


# Reading


class ArrayFile:
    """The file of one array of a generation, memory-mapped."""

    def __init__(self, path: Path, width: int) -> None:
        self.path = path
        self.width = width
        self._map: FileMap | None = None
        self._mapped: Floats = np.empty((0, width), np.float32)
        self._verified: set[int] = set()

    def rows(self, count: int) -> Floats:
        """Return the first `count` rows, (count, width), mapped from the file.

        The file may be cut short while they are read; see `reading`.
        """
        if count > len(self._mapped):
            try:
                with open_plain(self.path) as file:
                    capacity = os.fstat(file.fileno()).st_size // (4 * self.width)
                    if capacity < count:
                        raise damage_error(self.path, "was cut short")
                    self._map = FileMap(file)
            except FileNotFoundError:
                # Compaction has removed the file: callers try again.
                raise
            except OSError as fault:
                if out_of_files(fault):
                    raise StoreUnavailable(f"{self.path} cannot be read: {FULL}.") from None
                raise damage_error(
                    self.path, f"cannot be read: {fault.strerror or fault}"
                ) from None
            self._mapped = self._map.floats((capacity, self.width))
        return self._mapped[:count]

    def intact(self, count: int) -> bool:
        """Return whether the file has kept its first `count` rows since they were mapped."""
        return self._map is None or self._map.intact(4 * self.width * count)

    @contextmanager
    def reading(self, count: int) -> Iterator[Floats]:
        """Context manager that yields what `rows` returns.

        Raises:
            StoreError: at the end, if the file was cut short meanwhile.
        """
        try:
            yield self.rows(count)
        finally:
            if not self.intact(count):
                raise damage_error(self.path, "was cut short")

    def verify(self, count: int, sums: Mapping[int, int], rows: Ints | None = None) -> None:
        """Compare the blocks of the first `count` rows with their checksums.

        A block is verified only once. If `rows` (n,) are given, only their blocks are verified.
        """
        size = 4 * self.width
        blocks = set(range(-(-count * size // BLOCK)))
        if rows is not None:
            offsets = np.append(np.arange(0, size, BLOCK), size - 1)
            blocks &= set(((rows[:, None] * size + offsets) // BLOCK).ravel().tolist())
        with self.reading(count) as mapped:
            content = mapped.reshape(-1).view(np.uint8).data
            for block in sorted(blocks - self._verified):
                if zlib.crc32(content[block * BLOCK : (block + 1) * BLOCK]) != sums.get(block):
                    raise damage_error(self.path, "was altered")
                self._verified.add(block)


class NumberRuns:
    """The item numbers of a generation's rows, which ascend.

    A run is a series of rows with consecutive item numbers. The table (n, 3) has the first row, the
    first item number and the number of rows of each run.
    """

    def __init__(self, table: Any) -> None:
        self.table = np.array(table, np.int64).reshape(-1, 3)
        self.rows, self.numbers, self.counts = np.ascontiguousarray(self.table.T)

    def numbers_of(self, rows: Ints) -> Ints:
        """Return the item numbers of rows, an array of any shape."""
        if not rows.size:
            return rows
        if len(self.rows) == 1:
            consecutive: Ints = rows + (self.numbers[0] - self.rows[0])
            return consecutive
        run = self.rows.searchsorted(rows, "right") - 1
        numbers: Ints = rows + (self.numbers[run] - self.rows[run])
        return numbers

    def rows_of(self, numbers: Ints) -> Ints:
        """Return the rows (n,) of item numbers, or -1 for a number without a row."""
        if not len(self.rows):
            return np.full(len(numbers), -1, np.int64)
        run = np.searchsorted(self.numbers, numbers, "right") - 1
        offset = numbers - self.numbers[run]
        return np.where((run < 0) | (offset >= self.counts[run]), -1, self.rows[run] + offset)


@dataclass(frozen=True)
class GenerationRows:
    """The rows of a generation as of one transaction of the record.

    Attributes:
        seq: number of that transaction.
        generation: the generation.
        stem: prefix of the names of the generation's files. Compaction writes files with a new stem
            and renumbers their rows.
        rows: number of rows.
        runs: item numbers of the rows.
        alive: mask (rows,), False for rows of items that have been deleted or changed since; None
            if all rows are alive.
        dead: number of rows that are not alive.
        structure_text: the record's description of the search structure (`structure.Structure`),
            or None.
    """

    seq: int
    generation: Generation
    stem: str
    rows: int
    runs: NumberRuns
    alive: Bools | None
    dead: int
    structure_text: str | None

    @property
    def count(self) -> int:
        """Number of rows that are alive."""
        return self.rows - self.dead

    def live_numbers(self) -> Ints:
        """Return the item numbers of the rows that are alive, ascending."""
        rows = np.arange(self.rows)
        if self.alive is not None:
            rows = rows[self.alive]
        return self.runs.numbers_of(rows)

    def has(self, numbers: Ints) -> Bools:
        """Return a mask (n,) of the item numbers that have a row that is alive."""
        rows = self.runs.rows_of(numbers)
        present = rows >= 0
        if self.alive is not None:
            present &= self.alive[rows]
        return present

    @staticmethod
    def of(
        connection: apsw.Connection, generation: Generation, old: GenerationRows | None = None
    ) -> GenerationRows:
        """Return the rows that a read transaction sees; with `old`, read only what has changed."""
        sql = "select stem, rows, structure from generations where g = ?"
        if not (entries := ask(connection, sql, (generation.number,))):
            raise dropped_error()
        ((stem, rows, structure_text),) = entries
        seq = seq_of(connection)
        if old is None or old.stem != stem or old.seq > seq:
            old = GenerationRows(0, generation, stem, 0, NumberRuns([]), None, 0, None)
        runs = old.runs
        alive = old.alive
        dead = old.dead
        if rows > old.rows:
            sql = "select row, n, count from runs where g = ? and row >= ? order by row"
            # The last run may have grown and is read again.
            complete = runs.table[:-1]
            if len(runs.rows):
                first = int(runs.rows[-1])
            else:
                first = 0
            table = ask(connection, sql, (generation.number, first))
            runs = NumberRuns(np.concatenate([complete, np.array(table, np.int64).reshape(-1, 3)]))
            if alive is not None:
                alive = np.concatenate([alive, np.ones(rows - old.rows, bool)])
        removed = ask(connection, "select n from removed where seq > ?", (old.seq,))
        dead_rows = runs.rows_of(np.fromiter((n for (n,) in removed), np.int64, len(removed)))
        dead_rows = dead_rows[dead_rows >= 0]
        if len(dead_rows):
            if alive is None:
                alive = np.ones(rows, bool)
            else:
                alive = alive.copy()
            alive[dead_rows] = False
            dead = rows - int(np.count_nonzero(alive))
        return GenerationRows(seq, generation, stem, rows, runs, alive, dead, structure_text)


@dataclass(frozen=True)
class View(GenerationRows):
    """The rows of a generation as of one transaction with their files, ready to be searched.

    Attributes:
        arrays: files of the generation, by name of the array.
        structure: the search structure, or None.
        matched: masks (rows,) of the live rows that filters match, by filter; `Masks` fills it.
    """

    arrays: Mapping[str, ArrayFile]
    structure: Loaded | None = None
    matched: dict[Any, Bools] = field(default_factory=dict)

    def intact(self) -> bool:
        """Return whether all mapped files have kept their content."""
        arrays = all(array.intact(self.rows) for array in self.arrays.values())
        return arrays and (self.structure is None or self.structure.intact())

    def search(
        self, queries: Floats, count: int, only: Bools | None = None
    ) -> tuple[Floats64 | None, Ints]:
        """Return the nearest live rows.

        A vector has one or more sub-spaces: column ranges that are searched separately.

        Args:
            queries: (Q, P).
            count: number of rows per query and sub-space.
            only: mask (rows,) of the live rows to search; None searches all live rows.

        Returns:
            With a single sub-space, squared distances (Q, n), padded with infinity, and rows
            (Q, n), padded with -1, sorted by distance and then row. With several, None and the rows
            (Q, n) that are among the nearest in any sub-space, with -1 in unused places.
        """
        if not self.count or not count:
            return np.empty((len(queries), 0)), np.full((len(queries), 0), -1, np.int64)
        spaces = range(len(self.generation.spans))
        with self.arrays[VECTOR].reading(self.rows) as vectors:
            answers = [self._nearest(vectors, space, queries, count, only) for space in spaces]
        if len(answers) == 1:
            return answers[0]
        rows = np.sort(np.hstack([rows for _, rows in answers]), axis=1)
        # A row may be near in more than one sub-space.
        rows[:, 1:][rows[:, 1:] == rows[:, :-1]] = -1
        return None, rows

    def _nearest(
        self, vectors: Floats, space: int, queries: Floats, count: int, only: Bools | None
    ) -> tuple[Floats64, Ints]:
        """Return squared distances and rows (Q, count) of the nearest rows in one sub-space."""
        span = self.generation.spans[space]
        if only is None:
            keep = self.alive
        else:
            keep = only
        covered = 0
        answers = []
        whole = span == (0, vectors.shape[1])
        if self.structure is not None:
            covered = self.structure.structure.rows
            if keep is None:
                mask = None
            else:
                mask = keep[:covered]
            if self.structure.backends:
                if whole:
                    columns = queries
                else:
                    columns = np.ascontiguousarray(queries[:, slice(*span)])
                rows = self.structure.propose(
                    space, columns, count, mask, filtered=only is not None
                )
                if rows is not None and self.structure.intact():
                    answers.append(_measured(queries, vectors, span, rows, count))
            elif (companion := self.structure.companion) is not None:
                head = vectors[:covered]
                answer = nearest(queries, head, count, keep=mask, companion=companion)
                if self.structure.intact():
                    answers.append(answer)
            covered = covered if answers else 0
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
            answers.append((squared, rows))
        if len(answers) == 1:
            return answers[0]
        squared, rows = (np.hstack(both) for both in zip(*answers, strict=True))
        return nearest_first(squared, rows, count)

    def read(
        self, connection: apsw.Connection, numbers: Ints, names: Sequence[str]
    ) -> tuple[dict[str, Floats], Bools]:
        """Return the named arrays (n, width) of items, and a mask (n,) of the items that have them.

        Rows of other items are zero. Rows of arrays that are not searched are verified first.
        """
        rows = self.runs.rows_of(numbers)
        present = rows >= 0
        arrays = {}
        for name in (name for name in names if name in self.generation.widths):
            array = self.arrays[name]
            if name in NOT_SEARCHED:
                sums = sums_of(connection, self.generation.number, name)
                array.verify(self.rows, sums, rows[present])
            arrays[name] = np.zeros((len(numbers), array.width), np.float32)
            with array.reading(self.rows) as content:
                arrays[name][present] = content[rows[present]]
        return arrays, present


def _measured(
    queries: Floats, vectors: Floats, span: tuple[int, int], rows: Ints, count: int
) -> tuple[Floats64, Ints]:
    """Measure candidate rows (Q, n): return the `count` nearest squared distances and rows.

    Distances are computed in float64 from the vectors, exactly as by
    `bundle.distances.merged_distances`.
    """
    columns = slice(*span)
    exact = queries[:, columns].astype(np.float64)
    squared = candidate_distances(exact, vectors, rows, columns)
    squared[rows < 0] = np.inf
    return nearest_first(squared, rows, count)


class Views:
    """The current view of an index, renewed when a transaction of any process has changed it."""

    def __init__(self, record: Record, plugins: Sequence[str] = ()) -> None:
        self.record = record
        self.plugins = tuple(plugins)
        self.view: View | None = None
        self.loaded: dict[str, Loaded | None] = {}
        # `Record.version` and number of the transaction when `view` was last found to be current
        self._checked_state: tuple[object, int] | None = None
        self._prepared: View | None = None
        self._expected: int | None = None
        self._refresh = threading.RLock()
        self._loading: set[str] = set()

    def now(self) -> View | None:
        """Return the cached view, or None if any process has written to the index since.

        A view whose files were cut short is not returned either: `moment` maps them again.
        """
        checked_state = self._checked_state
        view = self.view
        if checked_state is None or view is None or view.seq != checked_state[1]:
            return None
        if view.intact() and self.record.version() == checked_state[0]:
            return view
        return None

    @contextmanager
    def moment(self) -> Iterator[tuple[apsw.Connection, View]]:
        """Context manager that yields a read transaction and the view of its state."""
        missing = ""
        for _ in range(_TRIES):
            # Read the version first: it must never be newer than the state.
            version = self.record.version()
            with self.record.reading() as connection:
                try:
                    view = self._current(connection)
                except FileNotFoundError as fault:
                    # Another process has just compacted: its new files have other names.
                    missing = fault.filename
                    continue
                if view is None:
                    continue
                self._checked_state = version, view.seq
                yield connection, view
                return
        raise missing_file(self.record.folder, missing)

    def _current(self, connection: apsw.Connection) -> View | None:
        """Return the view of a read transaction, or None if a newer view exists already."""
        seq = seq_of(connection)
        with self._refresh:
            if self.view is not None and not self.view.intact():
                self.view = None
                self._prepared = None
                self.loaded = {}
            view = self.view
            if view is not None and view.seq >= seq:
                if view.seq == seq:
                    return view
                return None
            self.view = self._of(connection, served_generation(connection), wait=view is None)
            self._expect(connection)
            # Others than the current one are seldom needed again.
            if len(self.loaded) > 3:
                structure_text = self.view.structure_text
                self.loaded = {
                    text: loaded for text, loaded in self.loaded.items() if text == structure_text
                }
            return self.view

    def _expect(self, connection: apsw.Connection) -> None:
        """Load an announced generation in the background, so that a switch interrupts no search."""
        number = expected_generation(connection)
        if number == self._expected:
            return
        self._expected = number
        for generation in all_generations(connection):
            if generation.number == number and generation.state != "served":
                threading.Thread(
                    target=self.prepare, args=(generation,), name="loading", daemon=True
                ).start()

    def prepare(self, generation: Generation) -> None:
        """Load a generation that is about to be served, if this process searches the index."""
        if self.view is not None:
            with suppress(RetrievalError, OSError), self.record.reading() as connection:
                self.staged(connection, generation)

    def staged(self, connection: apsw.Connection, generation: Generation) -> View:
        """Return the view of a generation that is not served yet."""
        view = self._prepared = self._of(connection, generation, wait=True)
        return view

    def _of(self, connection: apsw.Connection, generation: Generation, *, wait: bool) -> View:
        """Return the view of a generation in a read transaction; reuse parts of an older view."""
        views = [view for view in (self.view, self._prepared) if view is not None]
        old = next((view for view in views if view.generation.number == generation.number), None)
        rows = GenerationRows.of(connection, generation, old)
        if old is not None and old.stem == rows.stem:
            arrays = old.arrays
            # Map the files now, because only this caller handles a missing file.
            for array in arrays.values():
                array.rows(rows.rows)
        else:
            arrays = {}
            for name, width in generation.widths.items():
                path = file_of(self.record.folder, rows.stem, name)
                array = arrays[name] = ArrayFile(path, width)
                array.rows(rows.rows)
                if name not in NOT_SEARCHED:
                    array.verify(rows.rows, sums_of(connection, generation.number, name))
        view = View(**vars(rows), arrays=arrays)
        return replace(view, structure=self._structure(view, wait))

    def _structure(self, view: View, wait: bool) -> Loaded | None:
        """Return the structure of a view, or None if it has none or the structure is damaged.

        Unless `wait`, a structure that is not in memory is loaded in the background, and the
        previous one is returned meanwhile.
        """
        structure_text = view.structure_text
        if structure_text is None:
            return None
        if structure_text in self.loaded:
            return self.loaded[structure_text]
        vectors = view.arrays[VECTOR].rows(view.rows)
        spans = view.generation.spans

        def loading() -> None:
            structure = Structure.parse(structure_text)
            loaded = load_structure(self.record.folder, structure, vectors, spans, self.plugins)
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
        if old is not None and old.stem == view.stem:
            return old.structure
        return None


def missing_file(folder: Path, name: str) -> StoreError:
    """Return the error for a file that is still missing after several tries."""
    return StoreError(
        f"The index {folder} is damaged: its file {name} is missing. Restore a snapshot."
    )


def dropped_error() -> StoreError:
    """Return the error for a generation that was dropped."""
    return StoreError("This generation no longer exists: it was dropped.")
