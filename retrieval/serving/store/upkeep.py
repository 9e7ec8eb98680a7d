"""Work on a local index that takes long: compacting, building structures, applying a head.

A generation's work is claimed, so that one process does it. What it makes are new files; one
transaction at the end has the record name them.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import apsw
import numpy as np

from retrieval.errors import RetrievalError, StoreError
from retrieval.host.files import sync
from retrieval.serving.store.arrays import ARRAYS, Array, append, damaged, file_of
from retrieval.serving.store.contract import StoreUnavailable
from retrieval.serving.store.items import FEATURES, VECTOR, Floats, Generation
from retrieval.serving.store.record import Record, ask, value
from retrieval.serving.store.structure import (
    GROWTH,
    LEAST,
    Structure,
    Wanted,
    build,
    is_whole,
    leaving_a_core,
    load,
)
from retrieval.serving.store.view import Numbers, View, Views, all_of, sums_of
from retrieval.serving.store.writing import (
    claimed,
    is_mine,
    keep_rows,
    put_runs,
    put_sums,
    renew,
    tidy,
)

log = logging.getLogger("retrieval.serving.store")

Report = Callable[[int, int], object]

_DEAD = 4  # a generation is compacted when more than one in so many of its rows is dead
_LEAST_DEAD = 1000
_ROWS = 16_384  # rows that are copied at a time
_REST = 1.0  # seconds between two looks for work
_PAUSE, _LONGEST_PAUSE = 1.0, 600.0  # seconds before what failed is tried again
_WAIT = 600.0  # seconds that a command waits for another process's work
_RENEW = 30.0  # seconds


@contextmanager
def _missing_files_named() -> Iterator[None]:
    """Say which file is missing: nobody else removes files of work that is claimed."""
    try:
        yield
    except FileNotFoundError as fault:
        raise damaged(Path(fault.filename), "is missing") from None


class Upkeep:
    """The long work of one opened store, in a thread of its own or for a caller who waits.

    Args:
        views: of the index.
        background: whether `wake` starts a thread that tends the index.
    """

    def __init__(self, views: Views, *, background: bool) -> None:
        self.views, self.record = views, views.record
        self.background = background
        self._turn = threading.Lock()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._asked = self._stop = False

    # In the background

    def wake(self) -> None:
        """Have the thread look whether there is work."""
        if self.background and not self.record.read_only:
            with self._wake:
                self._asked = True
                self._wake.notify()
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="upkeep", daemon=True)
                    self._thread.start()

    def _run(self) -> None:
        faults = 0
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._asked or self._stop)
                self._asked = False
            try:
                while not self._stop and self.step():
                    pass
                faults, pause = 0, _REST
            except (RetrievalError, OSError, apsw.Error) as fault:
                if self._stop:
                    return
                self._asked = True
                faults += 1
                pause = min(_LONGEST_PAUSE, _PAUSE * 2**faults)
                others_work = isinstance(
                    fault, StoreUnavailable
                )  # another process tends it just now
                log.log(
                    logging.DEBUG if others_work else logging.WARNING,
                    "The index %s cannot be tended: %s It is tried again in %g seconds.",
                    self.record.folder,
                    fault,
                    pause,
                )
            with self._wake:  # many small writes in a row share one look
                if self._wake.wait_for(lambda: self._stop, pause):
                    return

    @_missing_files_named()
    def step(self) -> bool:
        """Do one thing that is due; return whether there was one."""
        for generation in self._generations():
            with self._turn:
                view = self._view(generation)
                if view is None or not self._is_due(view):
                    continue
                dead = view.dead > max(_LEAST_DEAD, view.rows // _DEAD)
                with claimed(self.record, generation.number, 0) as stem:
                    (self._compact if dead else self._structure)(generation, stem, lambda *_: None)
                return True
        return False

    def close(self) -> None:
        """Stop the thread, when it has done what it does."""
        with self._wake:
            self._stop = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    def after_fork(self) -> None:
        """Have locks of its own, and no thread, in a child."""
        self._turn, self._wake, self._thread = threading.Lock(), threading.Condition(), None

    def _generations(self) -> tuple[Generation, ...]:
        with self.record.reading() as connection:
            return all_of(connection)

    def _view(self, generation: Generation) -> View | None:
        """Return a generation's rows as they are now; None: it was dropped, or is being filled."""
        with self.record.reading() as connection:
            known = {one.number: one for one in all_of(connection)}.get(generation.number)
            if known is None:
                return None
            if known.state == "building":
                sql = "select upto from generations where g = ?"
                upto = value(connection, sql, (generation.number,))
                if value(connection, "select 1 from items where n > ? limit 1", (upto,)):
                    return None
            return self.views.counted(connection, known)

    def _is_due(self, view: View) -> bool:
        if view.dead > max(_LEAST_DEAD, view.rows // _DEAD):
            return True
        wanted = self._wanted(view.generation, view.count)
        structure = Structure.parse(view.said)
        if wanted is None:
            return False
        if structure is None or (structure.backend, structure.options) != wanted:
            return True
        if self.views.failed(view.said):
            return True
        return (view.rows - structure.rows) * GROWTH > max(LEAST, structure.rows)

    def _wanted(self, generation: Generation, count: int) -> tuple[str, dict[str, Any]] | None:
        """Return the back end and options that so many vectors of a generation are to have."""
        with self.record.reading() as connection:
            sql = "select value from state where key = 'structure'"
            wanted = Wanted.parse(value(connection, sql))
        return wanted.of(count, generation.widths[VECTOR], len(generation.spans))

    # For who waits

    @_missing_files_named()
    def compact(self, report: Report = lambda done, total: None) -> None:
        """Write every generation anew without dead rows, build structures, give back room.

        Raises:
            StoreError: another process does so for too long, or the disk refuses.
        """
        with self._turn:
            tidy(self.record)
            began: dict[int, int] = {}
            for generation in self._generations():
                with claimed(self.record, generation.number, _WAIT) as stem:
                    began[generation.number] = self._compact(generation, stem, report)
            with self.record.writing() as (connection, _):
                if {one.number for one in all_of(connection)} <= began.keys():
                    upto = min(began.values())
                    connection.execute("delete from removed where seq <= ?", (upto,))
            with self.record.turn, self.record.faults("written"):
                with self.record.connection() as connection, suppress(apsw.BusyError):
                    connection.execute("vacuum")
                self.record.checkpoint()

    def structured(self, generation: Generation) -> None:
        """Build the structure of a generation that is about to be served, where it lacks one."""
        with self._turn:
            view = self._view(generation)
            if view is not None and self._is_due(view):
                with claimed(self.record, generation.number, _WAIT) as stem:
                    self._structure(generation, stem, lambda *_: None)

    def _compact(self, generation: Generation, stem: str, report: Report) -> int:
        """Compact one generation; return the transaction up to which it has no dead rows."""
        with self.record.reading(seconds=7 * 86_400.0) as connection:
            seq = int(value(connection, "select value from state where key = 'seq'"))
            known = {one.number: one for one in all_of(connection)}.get(generation.number)
            if known is None:
                return seq
            view = self.views.of(connection, known, seq, structure=False)
            if not view.dead:
                self._structure(generation, stem, report)
                return seq
            sums = {name: sums_of(connection, known.number, name) for name in known.widths}
        rows = np.flatnonzero(view.alive) if view.alive is not None else np.arange(view.rows)
        renewing = _Renewing(self.record, stem, report, 2 * len(rows))
        new = {}
        with self.record.faults("written"):
            for name, width in known.widths.items():
                source = Array(view.arrays[name].path, width)  # compared anew: copies get new sums
                source.verify(view.rows, sums[name])
                new[name] = append(
                    file_of(self.record.folder, stem, name),
                    0,
                    width,
                    _chunks(source.rows(view.rows), rows, renewing if name == VECTOR else None),
                )
            sync(self.record.folder / ARRAYS)
        structure = self._built(known, stem, len(rows), renewing)
        g = known.number
        with self.record.writing() as (connection, now), self.record.faults("written"):
            current = value(connection, "select stem from generations where g = ?", (g,))
            if current != view.stem or not is_mine(connection, stem):
                return 0  # dropped meanwhile, or another process took the work over
            grown = self.views.of(connection, known, now, view, structure=False)
            later = np.arange(view.rows, grown.rows)
            later = later if grown.alive is None else later[grown.alive[later]]
            for table in ("runs", "sums"):
                connection.execute(f"delete from {table} where g = ?", (g,))
            for name, new_sums in new.items():
                put_sums(connection, g, name, new_sums)
            if len(rows):
                put_runs(connection, g, 0, view.runs.numbers_of(rows))
            sql = "update generations set stem = ?, rows = ?, structure = ? where g = ?"
            text = None if structure is None else structure.text()
            connection.execute(sql, (stem, len(rows), text, g))
            arrays = {
                name: _chunks(Array(array.path, array.width).rows(grown.rows), later, None)
                for name, array in view.arrays.items()
            }
            keep_rows(connection, self.record.folder, known, grown.runs.numbers_of(later), arrays)
        tidy(self.record)
        return seq

    def _structure(self, generation: Generation, stem: str, report: Report) -> None:
        """Build the structure of a generation over all its rows, if it is due."""
        view = self._view(generation)
        if view is None:
            return
        present = Structure.parse(view.said)
        wanted = self._wanted(view.generation, view.count)
        if wanted is None and present is None:
            return
        if present is not None and wanted is not None and present.rows == view.rows:
            whole = all(
                is_whole(self.record.folder / ARRAYS / name, sum_) for name, sum_ in present.files
            )
            if whole and (present.backend, present.options) == wanted:
                return
        renewing = _Renewing(self.record, stem, report, view.rows)
        made = self._built(generation, stem, view.rows, renewing, of=view.stem)
        with self.record.writing() as (connection, _):
            sql = "select stem from generations where g = ?"
            same = value(connection, sql, (generation.number,)) == view.stem
            if same and is_mine(connection, stem):
                connection.execute(
                    "update generations set structure = ? where g = ?",
                    (None if made is None else made.text(), generation.number),
                )
        tidy(self.record)

    def _built(
        self, generation: Generation, stem: str, rows: int, report: _Renewing, of: str | None = None
    ) -> Structure | None:
        """Build a structure over the first rows of a file, with files of a stem, and load it."""
        width = generation.widths[VECTOR]
        wanted = self._wanted(generation, rows)
        if wanted is None or not rows:
            return None
        folder, plugins = self.record.folder, self.views.plugins
        vectors = Array(file_of(folder, of or stem, VECTOR), width).rows(rows)
        with self.record.faults("written"), leaving_a_core():
            made = build(folder, stem, vectors, generation.spans, *wanted, plugins, report)
            sync(folder / ARRAYS)
        if self.views.view is not None:
            self.views.take(made.text(), load(folder, made, vectors, generation.spans, plugins))
        return made

    # Heads

    @_missing_files_named()
    def derive(
        self,
        source: Generation,
        target: Generation,
        apply: Callable[[Floats], Mapping[str, Floats]],
        report: Callable[[int], object],
    ) -> int:
        """Give a generation arrays from the features of another; see `Store.derive`."""
        count, sql = 0, "select upto from generations where g = ?"
        while True:
            with self.record.reading() as connection:
                _require_served(connection, source, target)
                view = self.views.of(connection, source, -1, structure=False)
                upto = int(value(connection, sql, (target.number,)))
                numbers = view.runs.numbers_of(np.arange(view.rows))
                rows = np.flatnonzero(numbers > upto)
                rows = rows if view.alive is None else rows[view.alive[rows]]
                rows = rows[:_ROWS]
                arrays, _ = view.read(connection, numbers[rows], [FEATURES])
            made: dict[str, Floats] = {}
            if len(rows):
                made = {FEATURES: arrays[FEATURES], **apply(arrays[FEATURES])}
            with self.record.writing() as (connection, _), self.record.faults("written"):
                _require_served(connection, source, target)
                if int(value(connection, sql, (target.number,))) != upto:
                    continue  # another process does the same
                last = int(numbers[rows[-1]]) if len(rows) else upto
                held = "select rows from generations where g = ?"
                if not len(rows) and value(connection, held, (source.number,)) == view.rows:
                    newest = "select seq from sqlite_sequence where name = 'items'"
                    last = max(upto, int(value(connection, newest) or 0))
                text = json.dumps(numbers[rows].tolist())
                alive = "select n from items where n in (select value from json_each(?))"
                left = np.isin(numbers[rows], [n for (n,) in ask(connection, alive, (text,))])
                chunks = {name: [array[left]] for name, array in made.items()}
                keep_rows(connection, self.record.folder, target, numbers[rows][left], chunks)
                connection.execute(
                    "insert or ignore into left_out select ?, n from left_out"
                    " where g = ? and n > ? and n <= ?",
                    (target.number, source.number, upto, last),
                )
                connection.execute(
                    "update generations set upto = ? where g = ?", (last, target.number)
                )
            if not len(rows):
                return count
            count += len(rows)
            report(len(rows))


class _Renewing:
    """Reports progress, and renews a claim now and then."""

    def __init__(self, record: Record, stem: str, report: Report, total: int) -> None:
        self._record, self._stem, self._report, self._total = record, stem, report, total
        self._done, self._renewed = 0, time.monotonic()

    def __call__(self, count: int) -> None:
        self._done += count
        self._report(min(self._done, self._total), self._total)
        if time.monotonic() - self._renewed > _RENEW:
            self._renewed = time.monotonic()
            renew(self._record, self._stem)


def _chunks(
    content: Floats, rows: Numbers, report: Callable[[int], object] | None
) -> Iterator[Floats]:
    """Give chosen rows, some at a time."""
    for start in range(0, len(rows), _ROWS):
        chosen = rows[start : start + _ROWS]
        yield content[chosen]
        if report is not None:
            report(len(chosen))


def _require_served(connection: apsw.Connection, source: Generation, target: Generation) -> None:
    """Refuse to go on where another generation is served by now."""
    states = {one.number: one.state for one in all_of(connection)}
    if states.get(source.number) != "served" or states.get(target.number) in (None, "served"):
        raise StoreError("Another generation is served by now. Run the command again.")
