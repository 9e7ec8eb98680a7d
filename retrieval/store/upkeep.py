"""Maintenance of a local index: compact generations and build search structures.

Compacting a generation rewrites its files without the rows of deleted or changed items. One process
at a time claims the work on an index. The work writes new files. Its last transaction makes the
index's SQLite record name these files.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import apsw
import numpy as np

from retrieval.base.arrays import Ints
from retrieval.base.files import sync
from retrieval.errors import RetrievalError, StoreError
from retrieval.store.backends import make_backend
from retrieval.store.contract import StoreUnavailable
from retrieval.store.index_backend import recall_at_10
from retrieval.store.items import VECTOR, Floats, Generation
from retrieval.store.record import Record, all_generations, ask, seq_of, value
from retrieval.store.search_structure import (
    ARRAYS,
    Structure,
    StructureChoice,
    adopt_structure,
    build_structure,
    load_structure,
)
from retrieval.store.snapshot_view import (
    ArrayFile,
    BlockChecksums,
    GenerationRows,
    Views,
    append,
    append_rows,
    damage_error,
    file_of,
    put_runs,
    put_sums,
    sums_of,
    sync_rows,
)
from retrieval.store.words import merge

log = logging.getLogger("retrieval.store")

BUNDLES = "bundles"
ReportProgress = Callable[[int, int], object]

_DEAD = 4  # a generation is compacted when more than 1/4 of its rows are dead
_MIN_DEAD_ROWS = 1000  # and more rows than this
_ROWS = 16_384  # number of rows that are copied at a time
_REST = 1.0  # seconds between two checks for work
_PAUSE = 1.0
_LONGEST_PAUSE = 600.0
"""Seconds until failed work is tried again: the pause doubles with each failure, up to the longest.
"""
_LOST = 0.01
"""A generation may take over another's structure if its recall at 10 is less by at most this."""
_LEAST = 0.98
"""Least recall at 10 of a structure that was taken over, however often."""
_WAIT = 600.0  # seconds that a command waits for another process's work
_READING_SECONDS = 7 * 86_400.0  # time limit of a read transaction that copies files


def new_stem() -> str:
    """Return a unique prefix for the names of files."""
    return uuid.uuid4().hex[:16]


def remove_leftovers(record: Record) -> None:
    """Remove files that the record does not name, which a killed or failed process has left.

    The record's lock keeps other processes from writing meanwhile. If another process has claimed
    the work on the index, the files of arrays and structures stay.
    """
    with record.locked() as connection:
        files: set[str] = set()
        for stem, widths, structure in ask(
            connection, "select stem, widths, structure from generations"
        ):
            files |= {f"{stem}.{name}" for name in json.loads(widths)} | set(
                Structure.names(structure)
            )
        bundles = {generation.bundle[:16] for generation in all_generations(connection)}
        handle = _locked(record.folder / ARRAYS, 0)
        if handle is not None:
            try:
                for path in (record.folder / ARRAYS).iterdir():
                    if path.name not in files:
                        path.unlink(missing_ok=True)
            finally:
                os.close(handle)
        for path in (record.folder / BUNDLES).iterdir():
            # This is the lock file of a process that was killed while it copied a bundle.
            if not path.is_dir():
                path.unlink(missing_ok=True)
            elif path.name not in bundles:
                shutil.rmtree(path, ignore_errors=True)


def _locked(folder: Path, wait: float) -> int | None:
    """Return a handle that locks a folder, or None if others hold the lock for `wait` seconds."""
    handle = os.open(folder, os.O_RDONLY)
    end = time.monotonic() + wait
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            if time.monotonic() > end:
                os.close(handle)
                return None
        time.sleep(0.2)


class WorkClaim:
    """Context manager that claims the work on an index's files; call it to report progress.

    The claim is a lock on the folder of these files, which the system releases when the process
    ends. On exit, files that the record does not name are removed.

    Args:
        record: record of the index.
        wait: seconds to wait if another process has the claim.
        report: called with the number of items done and the total.

    Raises:
        StoreUnavailable: another process had the claim for all that time.
    """

    def __init__(
        self, record: Record, wait: float, report: ReportProgress = lambda *_: None
    ) -> None:
        self.record = record
        self.stem = new_stem()
        self.total = 0
        self._wait = wait
        self._report = report
        self._done = 0

    def __enter__(self) -> WorkClaim:
        handle = _locked(self.record.folder / ARRAYS, self._wait)
        if handle is None:
            raise StoreUnavailable(
                f"Another process is compacting the index {self.record.folder}, or building its "
                "search structure. Try again when it is done."
            )
        self._handle = handle
        return self

    def __exit__(self, *error: object) -> None:
        # Unlocking also releases the lock in a child that was forked meanwhile.
        fcntl.flock(self._handle, fcntl.LOCK_UN)
        os.close(self._handle)
        with suppress(RetrievalError, OSError):
            remove_leftovers(self.record)

    def __call__(self, count: int) -> None:
        """Report that `count` more items are done."""
        self._done += count
        self._report(min(self._done, self.total), self.total)


@contextmanager
def _missing_files_named() -> Iterator[None]:
    """Turn a missing file into a damage error: nobody else removes files while work is claimed."""
    try:
        yield
    except FileNotFoundError as fault:
        raise damage_error(Path(fault.filename), "is missing") from None


class Upkeep:
    """Maintenance of one open store, in a background thread or in the caller's."""

    def __init__(self, views: Views, *, background: bool) -> None:
        self.views = views
        self.record = views.record
        self.background = background
        self._turn = threading.Lock()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._due = threading.Event()
        self._stop = threading.Event()
        self._rows: dict[int, GenerationRows] = {}

    # In the background

    def wake(self) -> None:
        """Make the thread check for work; start it if necessary."""
        if self.background and not self.record.read_only:
            self._due.set()
            with self._starting:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="upkeep", daemon=True)
                    self._thread.start()

    def _run(self) -> None:
        pause = _PAUSE
        while True:
            self._due.wait()
            self._due.clear()
            # Many small writes in a row share one check.
            rest = _REST
            try:
                while not self._stop.is_set() and self.step():
                    pass
                pause = _PAUSE
            except (RetrievalError, OSError, apsw.Error) as fault:
                if self._stop.is_set():
                    return
                self._due.set()
                rest = pause = min(_LONGEST_PAUSE, 2 * pause)
                # `StoreUnavailable` usually means that another process does the work.
                if isinstance(fault, StoreUnavailable):
                    level = logging.DEBUG
                else:
                    level = logging.WARNING
                text = "Upkeep of the index %s failed: %s It is tried again in %g seconds."
                log.log(level, text, self.record.folder, fault, pause)
            if self._stop.wait(rest):
                return

    @_missing_files_named()
    def step(self) -> bool:
        """Do one piece of work that is due; return False if there was none."""
        with self.record.reading() as connection:
            generations = all_generations(connection)
        for generation in generations:
            with self._turn:
                rows = self._current(generation)
                if rows is None:
                    continue
                dead = rows.dead > max(_MIN_DEAD_ROWS, rows.rows // _DEAD)
                text = rows.structure_text
                if not dead and not self._needs_structure(text, generation, rows.rows):
                    continue
                with WorkClaim(self.record, 0) as claim:
                    self._renew(generation, claim, compact=dead)
                return True
        return False

    def close(self) -> None:
        """Stop the thread after its current piece of work."""
        self._stop.set()
        self._due.set()
        if self._thread is not None:
            self._thread.join()

    def _current(self, generation: Generation) -> GenerationRows | None:
        """Return the current rows of a generation, or None if it was dropped or is incomplete."""
        g = generation.number
        with self.record.reading() as connection:
            if not _is_filled(connection, g):
                return None
            self._rows[g] = GenerationRows.of(connection, generation, self._rows.get(g))
            return self._rows[g]

    def choice(self) -> StructureChoice:
        """Return the structure that the index is configured to have."""
        with self.record.reading() as connection:
            sql = "select value from state where key = 'structure'"
            return StructureChoice.parse(value(connection, sql))

    def _chosen(self, generation: Generation, count: int) -> tuple[str, dict[str, Any]] | None:
        """Return the back end and options for `count` rows of a generation, or None."""
        return self.choice().of(count, generation.widths[VECTOR], len(generation.spans))

    def _needs_structure(
        self, text: str | None, generation: Generation, count: int, *, exactly: bool = False
    ) -> bool:
        """Return whether `count` rows need another structure than the one that `text` describes.

        With `exactly`, the structure must cover all rows, and its files are verified. Otherwise it
        may cover somewhat fewer.
        """
        choice = self._chosen(generation, count)
        if text is None or choice is None:
            return (text is None) != (choice is None)
        structure = Structure.parse(text)
        # The entry is None if the structure could not be loaded.
        loaded = self.views.loaded.get(text, structure)
        if loaded is None or not self._is_of(structure, choice):
            return True
        if exactly:
            return (
                structure.options != choice[1]
                or structure.rows != count
                or bool(structure.damaged(self.record.folder))
            )
        return structure.outgrown(count)

    def _wider(self, choice: tuple[str, dict[str, Any]]) -> dict[str, Any]:
        """Return the options with which a structure that was taken over may be searched."""
        name, options = choice
        return {**options, **make_backend(name, options, self.views.plugins).wider}

    def _is_of(self, structure: Structure, choice: tuple[str, dict[str, Any]]) -> bool:
        """Return whether a structure has a back end and its options, or the wider ones."""
        if structure.backend != choice[0]:
            return False
        return structure.options == choice[1] or structure.options == self._wider(choice)

    # In the caller's thread

    @_missing_files_named()
    def compact(self, report: ReportProgress = lambda done, total: None) -> None:
        """Remove the dead rows of all generations, build structures and free disk space."""
        with self._turn:
            remove_leftovers(self.record)
            compacted_at: dict[int, int] = {}
            with self.record.reading() as connection:
                generations = all_generations(connection)
            for generation in generations:
                with WorkClaim(self.record, _WAIT, report) as claim:
                    compacted_at[generation.number] = self._renew(generation, claim, compact=True)
            with self.record.writing() as (connection, _):
                sync_rows(connection, self.record.folder)
                merge(connection)
                existing = {generation.number for generation in all_generations(connection)}
                if existing <= compacted_at.keys():
                    upto = min(compacted_at.values())
                    connection.execute("delete from removed where seq <= ?", (upto,))
            with self.record.turn, self.record.faults("written"):
                with self.record.connection() as connection, suppress(apsw.BusyError):
                    connection.execute("vacuum")
                self.record.checkpoint()

    @_missing_files_named()
    def structured(self, generation: Generation) -> None:
        """Build the structure of a generation that is about to be served, if it lacks one."""
        with self._turn:
            rows = self._current(generation)
            if rows is None:
                return
            if self._needs_structure(rows.structure_text, generation, rows.rows):
                with WorkClaim(self.record, _WAIT) as claim:
                    if not self._adopt(generation, rows, claim.stem):
                        self._renew(generation, claim, compact=False)

    def _adopt(self, generation: Generation, rows: GenerationRows, stem: str) -> bool:
        """Give a generation the links of the served one's structure, if they serve it as well.

        Returns:
            Whether this was possible, and a search finds nearly as many of the nearest.
        """
        folder = self.record.folder
        plugins = self.views.plugins
        with self.views.moment() as (_, view):
            old = view.structure
        choice = self._chosen(generation, rows.rows)
        if old is None or len(old.backends) != 1 or len(generation.spans) != 1:
            return False
        if choice is None or not self._is_of(old.structure, choice):
            return False
        name, options = choice
        old_rows = view.runs.rows_of(rows.runs.numbers_of(np.arange(rows.rows)))
        is_linked = (old_rows >= 0) & (old_rows < old.structure.rows)
        count = len(old_rows)
        if not is_linked.all():
            count = int(is_linked.argmin())
        if Structure(name, options, count, ()).outgrown(rows.rows):
            return False
        array = ArrayFile(file_of(folder, rows.stem, VECTOR), generation.widths[VECTOR])
        with array.reading(count) as vectors, self.record.faults("written"):
            links = adopt_structure(
                folder, stem, vectors, old, old_rows[:count], name, options, plugins
            )
            if links is None:
                return False
            sync(folder / ARRAYS)
            with view.arrays[VECTOR].reading(old.structure.rows) as old_vectors:
                before = recall_at_10(old.backends[0], name, old_vectors)
            # Of other vectors, the same links may need a wider search.
            for structure in (links, replace(links, options=self._wider(choice))):
                loaded = load_structure(folder, structure, vectors, generation.spans, plugins)
                if loaded is None:
                    return False
                recall = recall_at_10(loaded.backends[0], name, vectors)
                if recall >= max(before - _LOST, _LEAST):
                    break
            else:
                return False
        text = structure.text()
        with self.record.writing() as (connection, _):
            sql = "update generations set structure = ? where g = ? and stem = ?"
            connection.execute(sql, (text, generation.number, rows.stem))
        self.views.loaded[text] = loaded
        return True

    def _renew(self, generation: Generation, claim: WorkClaim, *, compact: bool) -> int:
        """Build a generation's structure if necessary; with `compact`, drop its dead rows first.

        Returns:
            Number of the transaction up to which a compacted generation has no dead rows.
        """
        folder = self.record.folder
        g = generation.number
        stem = claim.stem
        with self.record.reading(seconds=_READING_SECONDS) as connection:
            if g not in {existing.number for existing in all_generations(connection)}:
                return seq_of(connection)
            old = GenerationRows.of(connection, generation)
            sums = {name: sums_of(connection, g, name) for name in generation.widths}
            filled = _is_filled(connection, g)
        copied_rows = np.arange(old.rows)
        new_sums = dict[str, BlockChecksums]()
        if compact and old.alive is not None:
            copied_rows = np.flatnonzero(old.alive)
            claim.total = len(copied_rows)
            with self.record.faults("written"):
                for name, width in generation.widths.items():
                    source = ArrayFile(file_of(folder, old.stem, name), width)
                    # New checksums would hide old damage.
                    source.verify(old.rows, sums[name])
                    if name == VECTOR:
                        report = claim
                    else:
                        report = None
                    with source.reading(old.rows) as content:
                        chunks = _chunks(content, copied_rows, report)
                        new_sums[name] = append(file_of(folder, stem, name), 0, width, chunks)
                sync(folder / ARRAYS)
        if new_sums:
            text = None
        else:
            text = old.structure_text
        if filled and self._needs_structure(text, generation, len(copied_rows), exactly=True):
            text = self._built(generation, claim, stem if new_sums else old.stem, len(copied_rows))
        elif not new_sums:
            return old.seq
        with self.record.writing() as (connection, _), self.record.faults("written"):
            current = value(connection, "select stem from generations where g = ?", (g,))
            if current != old.stem:
                # The generation was dropped meanwhile.
                return 0
            connection.execute("update generations set structure = ? where g = ?", (text, g))
            if new_sums:
                self._swap(connection, stem, old, copied_rows, new_sums)
        return old.seq

    def _swap(
        self,
        connection: apsw.Connection,
        stem: str,
        old: GenerationRows,
        copied_rows: Ints,
        new_sums: dict[str, BlockChecksums],
    ) -> None:
        """Make the record name the new files; append the rows written since `old`.

        Args:
            connection: connection in a write transaction.
            stem: prefix of the names of the new files.
            old: the rows that were copied from.
            copied_rows: old numbers of the rows that were copied.
            new_sums: checksums of the new files, by name of the array.
        """
        generation = old.generation
        g = old.generation.number
        grown = GenerationRows.of(connection, generation, old)
        later = np.arange(old.rows, grown.rows)
        later = later if grown.alive is None else later[grown.alive[later]]
        for table in ("runs", "sums"):
            connection.execute(f"delete from {table} where g = ?", (g,))
        for name, sums in new_sums.items():
            put_sums(connection, g, name, sums)
        if len(copied_rows):
            put_runs(connection, g, 0, old.runs.numbers_of(copied_rows))
        sql = "update generations set stem = ?, rows = ? where g = ?"
        connection.execute(sql, (stem, len(copied_rows), g))
        # The files of another generation may still have dead rows.
        if len(all_generations(connection)) == 1:
            connection.execute("delete from removed where seq <= ?", (old.seq,))
        folder = self.record.folder
        with ExitStack() as stack:
            chunks = {}
            for name, width in generation.widths.items():
                source = ArrayFile(file_of(folder, old.stem, name), width)
                chunks[name] = _chunks(stack.enter_context(source.reading(grown.rows)), later)
            append_rows(connection, folder, generation, grown.runs.numbers_of(later), chunks)

    def _built(self, generation: Generation, claim: WorkClaim, stem: str, count: int) -> str | None:
        """Build and load a structure over the first `count` rows; return its JSON text."""
        choice = self._chosen(generation, count)
        if choice is None:
            return None
        claim.total += count
        folder = self.record.folder
        plugins = self.views.plugins
        spans = generation.spans
        array = ArrayFile(file_of(folder, stem, VECTOR), generation.widths[VECTOR])
        with array.reading(count) as vectors, self.record.faults("written"):
            structure = build_structure(folder, claim.stem, vectors, spans, *choice, plugins, claim)
            sync(folder / ARRAYS)
        if self.views.view is not None:
            loaded = load_structure(folder, structure, vectors, spans, plugins)
            # The thread would build the structure again at once; after an error it makes a pause.
            if loaded is None and threading.current_thread() is self._thread:
                raise StoreError(f"The new structure of {folder} cannot be used. The log says why.")
            self.views.loaded[structure.text()] = loaded
        return structure.text()


def _is_filled(connection: apsw.Connection, g: int) -> bool:
    """Return whether a generation exists and has been served, or has arrays of all items."""
    sql = (
        "select state != 'building' or not exists (select 1 from items where n > upto)"
        " from generations where g = ?"
    )
    return bool(value(connection, sql, (g,)))


def _chunks(
    content: Floats, rows: Ints, report: Callable[[int], object] | None = None
) -> Iterator[Floats]:
    """Yield rows of `content` (N, width) in chunks; report the number of rows of each."""
    for start in range(0, len(rows), _ROWS):
        chunk_rows = rows[start : start + _ROWS]
        yield content[chunk_rows]
        if report is not None:
            report(len(chunk_rows))
