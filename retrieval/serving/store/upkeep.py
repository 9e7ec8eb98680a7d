"""Maintenance of a local index: compact generations and build search structures.

One process at a time claims the work on an index. The work writes new files, and one transaction at
its end makes the record name them.
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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import apsw
import numpy as np

from retrieval.errors import RetrievalError
from retrieval.host.files import sync
from retrieval.serving.store.contract import StoreUnavailable
from retrieval.serving.store.items import VECTOR, Floats, Generation
from retrieval.serving.store.record import Record, all_of, ask, seq_of, upto_of, value
from retrieval.serving.store.structure import (
    ARRAYS,
    Numbers,
    Structure,
    StructureChoice,
    build,
    load,
)
from retrieval.serving.store.view import (
    Array,
    Rows,
    Sums,
    Views,
    append,
    damaged,
    file_of,
    keep_rows,
    put_runs,
    put_sums,
    sums_of,
    sync_rows,
)

log = logging.getLogger("retrieval.serving.store")

BUNDLES = "bundles"
Report = Callable[[int, int], object]

_DEAD = 4  # a generation is compacted when more than 1/4 of its rows are dead
_MIN_DEAD_ROWS = 1000  # and more rows than this
_ROWS = 16_384  # rows that are copied at a time
_REST = 1.0  # seconds between two checks for work
_PAUSE, _LONGEST_PAUSE = 1.0, 600.0  # seconds until failed work is tried again
_WAIT = 600.0  # seconds that a command waits for another process's work
_READING_SECONDS = 7 * 86_400.0  # one read transaction lasts while files of any size are copied


def new_stem() -> str:
    """Return a unique prefix for the names of files."""
    return uuid.uuid4().hex[:16]


def tidy(record: Record, claim: Claim | None = None) -> None:
    """Remove files that the record does not name, which a killed or failed process has left.

    The record's lock keeps other processes from adding any meanwhile. While others compact or
    build, their files stay.
    """
    with record.locked() as connection:
        files: set[str] = set()
        for stem, widths, structure in ask(
            connection, "select stem, widths, structure from generations"
        ):
            files |= {f"{stem}.{name}" for name in json.loads(widths)} | set(
                Structure.names(structure)
            )
        bundles = {generation.bundle[:16] for generation in all_of(connection)}
        handle = None if claim is not None else _locked(record.folder / ARRAYS, 0)
        try:
            for path in (record.folder / ARRAYS).iterdir() if handle is not None or claim else ():
                if path.name not in files:
                    path.unlink(missing_ok=True)
        finally:
            if handle is not None:
                os.close(handle)
        for path in (record.folder / BUNDLES).iterdir():
            if not path.is_dir():  # lock file of a copy that was killed
                path.unlink(missing_ok=True)
            elif path.name not in bundles:
                shutil.rmtree(path, ignore_errors=True)


def _locked(folder: Path, wait: float) -> int | None:
    """Return a handle that locks a folder, or None if others hold the lock for `wait` seconds."""
    handle, end = os.open(folder, os.O_RDONLY), time.monotonic() + wait
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            if time.monotonic() > end:
                os.close(handle)
                return None
        time.sleep(0.2)


class Claim:
    """Context manager that claims the work on an index's files; call it to report progress.

    The claim is the system's lock on their folder, which ends with its process. Afterwards, files
    that the record does not name are removed.

    Args:
        record: record of the index.
        wait: seconds to wait for whoever has the claim.
        report: called with the number of items done and the total.

    Raises:
        StoreUnavailable: another one had the claim for all that time.
    """

    def __init__(self, record: Record, wait: float, report: Report | None = None) -> None:
        self.record, self.stem, self.total = record, new_stem(), 0
        self._wait, self._report, self._done = wait, report, 0

    def __enter__(self) -> Claim:
        handle = _locked(self.record.folder / ARRAYS, self._wait)
        if handle is None:
            raise StoreUnavailable(
                f"Another process is compacting the index {self.record.folder}, or building its "
                "search structure. Wait for it."
            )
        self._handle = handle
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(RetrievalError, OSError):
            tidy(self.record, self)
        fcntl.flock(self._handle, fcntl.LOCK_UN)  # also for a child that was forked meanwhile
        os.close(self._handle)

    def __call__(self, count: int) -> None:
        """Report that `count` more items are done."""
        self._done += count
        if self._report is not None:
            self._report(min(self._done, self.total), self.total)


@contextmanager
def _missing_files_named() -> Iterator[None]:
    """Report a missing file as damage, since no other process removes files of claimed work."""
    try:
        yield
    except FileNotFoundError as fault:
        raise damaged(Path(fault.filename), "is missing") from None


class Upkeep:
    """Maintenance of one open store, in a background thread or in the caller's."""

    def __init__(self, views: Views, *, background: bool) -> None:
        self.views, self.record = views, views.record
        self.background = background
        self._turn = threading.Lock()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._due = self._stop = False
        self._rows: dict[int, Rows] = {}

    # In the background

    def wake(self) -> None:
        """Make the thread check for work; start it if necessary."""
        if self.background and not self.record.read_only:
            with self._wake:
                self._due = True
                self._wake.notify()
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="upkeep", daemon=True)
                    self._thread.start()

    def _run(self) -> None:
        faults = 0
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._due or self._stop)
                self._due = False
            try:
                while not self._stop and self.step():
                    pass
                faults, pause = 0, _REST
            except (RetrievalError, OSError, apsw.Error) as fault:
                if self._stop:
                    return
                self._due = True
                faults += 1
                pause = min(_LONGEST_PAUSE, _PAUSE * 2**faults)
                # `StoreUnavailable` usually means that another process does the work.
                level = logging.DEBUG if isinstance(fault, StoreUnavailable) else logging.WARNING
                text = "Upkeep of the index %s failed: %s It is tried again in %g seconds."
                log.log(level, text, self.record.folder, fault, pause)
            with self._wake:  # many small writes in a row share one check
                if self._wake.wait_for(lambda: self._stop, pause):
                    return

    @_missing_files_named()
    def step(self) -> bool:
        """Do one piece of work that is due; return False if there was none."""
        for generation in self._generations():
            with self._turn:
                rows = self._current(generation)
                dead = rows is not None and rows.dead > max(_MIN_DEAD_ROWS, rows.rows // _DEAD)
                if rows is None or not (dead or self._lacks_structure(rows)):
                    continue
                with Claim(self.record, 0) as claim:
                    self._renew(generation, claim, compact=dead)
                return True
        return False

    def close(self) -> None:
        """Stop the thread after its current piece of work."""
        with self._wake:
            self._stop = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    def _generations(self) -> tuple[Generation, ...]:
        with self.record.reading() as connection:
            return all_of(connection)

    def _current(self, generation: Generation) -> Rows | None:
        """Return the current rows of a generation, or None if it was dropped or is incomplete."""
        with self.record.reading() as connection:
            known = {known.number: known for known in all_of(connection)}.get(generation.number)
            if known is None or not _is_filled(connection, known):
                return None
            rows = Rows.of(connection, known, self._rows.get(known.number))
            self._rows[known.number] = rows
            return rows

    def _lacks_structure(self, rows: Rows) -> bool:
        """Return whether rows need a structure, or another than they have."""
        choice = self._choice(rows.generation, rows.rows)
        if choice is None:
            return False
        if (
            rows.structure_text is None
            or self.views.loaded.get(rows.structure_text, "unknown") is None
        ):
            return True
        structure = Structure.parse(rows.structure_text)
        different = (structure.backend, structure.options) != choice
        return different or structure.outgrown(rows.rows)

    def _choice(self, generation: Generation, rows: int) -> tuple[str, dict[str, Any]] | None:
        """Return the back end and options for `rows` rows of a generation, or None."""
        with self.record.reading() as connection:
            sql = "select value from state where key = 'structure'"
            choice = StructureChoice.parse(value(connection, sql))
        return choice.of(rows, generation.widths[VECTOR], len(generation.spans))

    # In the caller's thread

    @_missing_files_named()
    def compact(self, report: Report = lambda done, total: None) -> None:
        """Rewrite all generations without dead rows, build structures and free disk space."""
        with self._turn:
            tidy(self.record)
            began: dict[int, int] = {}
            for generation in self._generations():
                with Claim(self.record, _WAIT, report) as claim:
                    began[generation.number] = self._renew(generation, claim, compact=True)
            with self.record.writing() as (connection, _):
                sync_rows(connection, self.record.folder)
                if {known.number for known in all_of(connection)} <= began.keys():
                    upto = min(began.values())
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
            if rows is not None and self._lacks_structure(rows):
                with Claim(self.record, _WAIT) as claim:
                    self._renew(generation, claim, compact=False)

    def _renew(self, generation: Generation, claim: Claim, *, compact: bool) -> int:
        """Drop dead rows and build the structure, as far as necessary.

        Returns:
            The transaction up to which a compacted generation has no dead rows.
        """
        folder, g, stem = self.record.folder, generation.number, claim.stem
        with self.record.reading(seconds=_READING_SECONDS) as connection:
            if g not in {known.number for known in all_of(connection)}:
                return seq_of(connection)
            old = Rows.of(connection, generation)
            sums = {name: sums_of(connection, g, name) for name in generation.widths}
            filled = _is_filled(connection, generation)
        kept, new = np.arange(old.rows), dict[str, Sums]()
        if compact and old.alive is not None:
            kept = np.flatnonzero(old.alive)
            claim.total = len(kept)
            with self.record.faults("written"):
                for name, width in generation.widths.items():
                    source = Array(file_of(folder, old.stem, name), width)
                    source.verify(old.rows, sums[name])  # new checksums would hide old damage
                    report = claim if name == VECTOR else None
                    chunks = _chunks(source.rows(old.rows), kept, report)
                    new[name] = append(file_of(folder, stem, name), 0, width, chunks)
                sync(folder / ARRAYS)
        text = None if new else old.structure_text
        if filled and self._is_stale(text, generation, len(kept)):
            text = self._built(generation, claim, stem if new else old.stem, len(kept))
        elif not new:
            return old.seq
        with self.record.writing() as (connection, _), self.record.faults("written"):
            current = value(connection, "select stem from generations where g = ?", (g,))
            if current != old.stem:
                return 0  # the generation was dropped
            connection.execute("update generations set structure = ? where g = ?", (text, g))
            if new:
                self._swap(connection, stem, old, kept, new)
        return old.seq

    def _swap(
        self, connection: apsw.Connection, stem: str, old: Rows, kept: Numbers, new: dict[str, Sums]
    ) -> None:
        """Make the record name the new files, and append the rows written since."""
        generation, g = old.generation, old.generation.number
        grown = Rows.of(connection, generation, old)
        later = np.arange(old.rows, grown.rows)
        later = later if grown.alive is None else later[grown.alive[later]]
        for table in ("runs", "sums"):
            connection.execute(f"delete from {table} where g = ?", (g,))
        for name, new_sums in new.items():
            put_sums(connection, g, name, new_sums)
        if len(kept):
            put_runs(connection, g, 0, old.runs.numbers_of(kept))
        sql = "update generations set stem = ?, rows = ? where g = ?"
        connection.execute(sql, (stem, len(kept), g))
        folder = self.record.folder
        chunks = {
            name: _chunks(Array(file_of(folder, old.stem, name), width).rows(grown.rows), later)
            for name, width in generation.widths.items()
        }
        keep_rows(connection, folder, generation, grown.runs.numbers_of(later), chunks)

    def _is_stale(self, text: str | None, generation: Generation, rows: int) -> bool:
        """Return whether `rows` rows need another structure than the one that `text` describes."""
        choice = self._choice(generation, rows)
        if text is None or choice is None:
            return (text is None) != (choice is None)
        present = Structure.parse(text)
        same = (present.backend, present.options, present.rows) == (*choice, rows)
        return not same or bool(present.damaged(self.record.folder))

    def _built(self, generation: Generation, claim: Claim, stem: str, rows: int) -> str | None:
        """Build and load a structure over a file's first rows; return its text for the record."""
        choice = self._choice(generation, rows)
        if choice is None:
            return None
        claim.total += rows
        folder, plugins, spans = self.record.folder, self.views.plugins, generation.spans
        vectors = Array(file_of(folder, stem, VECTOR), generation.widths[VECTOR]).rows(rows)
        with self.record.faults("written"):
            structure = build(folder, claim.stem, vectors, spans, *choice, plugins, claim)
            sync(folder / ARRAYS)
        if self.views.view is not None:
            self.views.loaded[structure.text()] = load(folder, structure, vectors, spans, plugins)
        return structure.text()


def _is_filled(connection: apsw.Connection, generation: Generation) -> bool:
    """Return whether a generation is past building, or has the arrays of all items."""
    upto = upto_of(connection, generation.number)
    behind = value(connection, "select 1 from items where n > ? limit 1", (upto,))
    return generation.state != "building" or not behind


def _chunks(
    content: Floats, rows: Numbers, report: Callable[[int], object] | None = None
) -> Iterator[Floats]:
    """Yield the chosen rows in chunks."""
    for start in range(0, len(rows), _ROWS):
        chosen = rows[start : start + _ROWS]
        yield content[chosen]
        if report is not None:
            report(len(chosen))
