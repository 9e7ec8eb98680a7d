"""What is searched: the rows of one moment of a generation, never changed once it is made."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import apsw
import numpy as np
from numpy.typing import NDArray

from retrieval.errors import RetrievalError, StoreError
from retrieval.serving.index.index_backend import checked_search
from retrieval.serving.store.arrays import Array, Sums, file_of
from retrieval.serving.store.items import FEATURES, VECTOR, Floats, Generation
from retrieval.serving.store.record import Record, ask, value
from retrieval.serving.store.search import nearest
from retrieval.serving.store.structure import Loaded, Structure, load

Mask = NDArray[np.bool_]
Numbers = NDArray[np.int64]

_TRIES = 20
_MARGIN = 16  # candidates beyond what is asked of a structure: for deleted items
_MOST = 4096  # candidates asked of a structure at once, before the rows are searched exactly
_RARE = 0.02  # share of rows that match a filter, up to which exact search of them is faster


class Runs:
    """The numbers of a generation's rows, ascending: runs of consecutive rows and numbers.

    Args:
        table: (row, number, count) of each run, in order.
    """

    def __init__(self, table: Sequence[tuple[int, ...]]) -> None:
        self.table = np.array(table, np.int64).reshape(-1, 3)
        self.rows, self.numbers, self.counts = np.ascontiguousarray(self.table.T)

    def with_rest(self, table: Sequence[tuple[int, ...]]) -> Runs:
        """Return them with other runs from the first row of the given ones on."""
        if not table:
            return self
        kept = np.searchsorted(self.rows, table[0][0])
        return Runs(np.concatenate([self.table[:kept], np.array(table, np.int64)]))  # type: ignore[arg-type]

    def numbers_of(self, rows: Numbers) -> Numbers:
        """Return the numbers of rows, of any shape; -1 stays."""
        run = self.rows.searchsorted(rows, "right") - 1 if len(self.rows) > 1 else 0
        numbers: Numbers = rows + (self.numbers[run] - self.rows[run])
        if rows.min(initial=0) < 0:
            numbers[rows < 0] = -1
        return numbers

    def rows_of(self, numbers: Numbers) -> Numbers:
        """Return the rows (n,) of numbers; -1 where there is none."""
        if not len(self.rows):
            return np.full(len(numbers), -1, np.int64)
        run = np.searchsorted(self.numbers, numbers, "right") - 1
        after = numbers - self.numbers[run]
        missing = (run < 0) | (after >= self.counts[run])
        return np.where(missing, -1, self.rows[run] + after)


@dataclass(frozen=True)
class Near:
    """What a search found.

    Attributes:
        numbers: (Q, n) of items; -1 for none.
        squared: (Q, n) squared distances within the only sub-space, ascending, equal ones by row;
            infinity for none. None where there are several sub-spaces.
    """

    numbers: Numbers
    squared: NDArray[np.float64] | None


@dataclass(frozen=True)
class View:
    """One moment of a generation.

    Attributes:
        seq: number of the record's last transaction.
        generation: whose rows these are.
        stem: of the names of its files.
        rows: how many.
        runs: their numbers.
        alive: (rows,), False where the item was deleted or changed; None: all are alive.
        dead: how many are not alive.
        arrays: its files, by name.
        structure: what speeds searches up.
        said: what the record says of its structure.
        matched: masks (rows,) of the items that match a filter, by filter.
    """

    seq: int
    generation: Generation
    stem: str
    rows: int
    runs: Runs
    alive: Mask | None
    dead: int
    arrays: Mapping[str, Array]
    structure: Loaded | None
    said: str | None
    matched: dict[Any, Mask] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Items with arrays."""
        return self.rows - self.dead

    def search(self, queries: Floats, count: int, only: Mask | None = None) -> Near:
        """Return the items among the `count` nearest of each query in a sub-space.

        Args:
            queries: (Q, P).
            count: how many in each sub-space.
            only: (rows,) which may be found; None: all that are alive.
        """
        if not self.count or not count:
            return Near(np.full((len(queries), 0), -1, np.int64), np.empty((len(queries), 0)))
        found = [
            self._nearest(space, queries, count, only)
            for space in range(len(self.generation.spans))
        ]
        if len(found) == 1:
            squared, rows = found[0]
            return Near(self.runs.numbers_of(rows), squared)
        rows = np.sort(np.hstack([rows for _, rows in found]), axis=1)
        rows[:, 1:][rows[:, 1:] == rows[:, :-1]] = -1  # proposed by two sub-spaces
        return Near(self.runs.numbers_of(rows), None)

    def _nearest(
        self, space: int, queries: Floats, count: int, only: Mask | None
    ) -> tuple[NDArray[np.float64], Numbers]:
        """Return squared distances and rows (Q, count) of the nearest in one sub-space."""
        vectors = self.arrays[VECTOR].rows(self.rows)
        span = self.generation.spans[space]
        keep = self.alive if only is None else only
        covered, parts = 0, []
        whole = span == (0, vectors.shape[1])
        if self.structure is not None:
            covered = self.structure.structure.rows
            near = None if keep is None else keep[:covered]
            companion = self.structure.companion
            if self.structure.backends:
                own = queries if whole else np.ascontiguousarray(queries[:, slice(*span)])
                rows = _proposed(self.structure, space, own, count, near, only)
                if rows is not None:
                    parts.append(_measured(queries, vectors, span, rows, count))
            elif companion is not None:
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
            rows[rows >= 0] += covered
            parts.append((squared, rows))
        if len(parts) == 1:
            return parts[0]
        squared, rows = (np.hstack(both) for both in zip(*parts, strict=True))
        return _nearest_first(squared, rows, count)

    def read(
        self, connection: apsw.Connection, numbers: Numbers, names: Sequence[str]
    ) -> tuple[dict[str, Floats], Mask]:
        """Return arrays (n, width) of items, and which items have them (n,).

        Args:
            connection: inside this moment.
            numbers: of the items.
            names: of the arrays.

        Raises:
            StoreError: features were altered, which are compared with their checksums here.
        """
        rows = self.runs.rows_of(numbers)
        there = rows >= 0
        out = {}
        for name in (name for name in names if name in self.generation.widths):
            array = self.arrays[name]
            if name == FEATURES:
                sums = sums_of(connection, self.generation.number, name)
                array.verify(self.rows, sums, rows[there])
            content = array.rows(self.rows)
            out[name] = np.zeros((len(numbers), array.width), np.float32)
            out[name][there] = content[rows[there]]
        return out, there


def _proposed(
    loaded: Loaded,
    space: int,
    queries: Floats,
    count: int,
    keep: Mask | None,
    only: Mask | None,
) -> Numbers | None:
    """Return rows (Q, k) that a structure proposes, -1 for none; None: better search exactly."""
    backend, name, size = loaded.backends[space], loaded.structure.backend, loaded.structure.rows
    wanted = min(count * backend.expand, size)
    if keep is None:
        return checked_search(backend, name, queries, wanted, size)
    if only is not None:
        there = int(np.count_nonzero(keep))
        if there <= max(_MOST, _RARE * size) or not backend.selective:
            return None
        rows = checked_search(backend, name, queries, wanted, size, keep)
        return rows if (rows >= 0).sum(axis=1).min() >= min(count, there) else None
    wanted += _MARGIN
    while wanted <= min(_MOST, size):
        rows = checked_search(backend, name, queries, wanted, size)
        rows = np.where((rows >= 0) & keep[rows], rows, -1)
        if (rows >= 0).sum(axis=1).min() >= count:
            return rows
        wanted *= 4
    return None


def _measured(
    queries: Floats, vectors: Floats, span: tuple[int, int], rows: Numbers, count: int
) -> tuple[NDArray[np.float64], Numbers]:
    """Return squared distances and rows (Q, count) of proposed rows, nearest first.

    They are measured as `serving.merging.merged` does: in float64, from the vectors themselves.
    """
    columns = slice(*span)
    near = vectors[rows][..., columns]  # row -1, for none, is masked below
    apart = near - queries[:, None, columns].astype(np.float64)
    flat = apart.reshape(-1, apart.shape[-1])
    squared = np.einsum("ij,ij->i", flat, flat).reshape(rows.shape)
    if rows.min(initial=0) < 0:
        squared[rows < 0] = np.inf
    return _nearest_first(squared, rows, count)


def _nearest_first(
    squared: NDArray[np.float64], rows: Numbers, count: int
) -> tuple[NDArray[np.float64], Numbers]:
    """Return the `count` smallest of each line, ascending, and their rows."""
    order = squared.argsort(axis=1, kind="stable")[:, :count]
    if len(rows) == 1:  # `take` costs a third of indexing by two arrays
        return squared.take(order), rows.take(order)
    line = np.arange(len(rows))[:, None]
    return squared[line, order], rows[line, order]


class Views:
    """The newest view of an index, made anew when another transaction was committed.

    Args:
        record: of the index.
        plugins: files or modules of third-party back ends that are not installed.
    """

    def __init__(self, record: Record, plugins: Sequence[str] = ()) -> None:
        self.record, self.plugins = record, tuple(plugins)
        self.view: View | None = None
        self._known: tuple[object, int] | None = None
        self._refresh = threading.RLock()
        self._arrays: dict[tuple[str, str], Array] = {}
        self._structures: dict[str, Loaded | None] = {}
        self._loading: set[str] = set()
        self._counted: dict[int, View] = {}

    def now(self) -> View | None:
        """Return the view of this moment, if nothing was written since it was made."""
        known, view = self._known, self.view
        if known is None or view is None or view.seq != known[1]:
            return None
        return view if self.record.version() == known[0] else None

    @contextmanager
    def moment(self) -> Iterator[tuple[apsw.Connection, View]]:
        """Give one moment of the record, and what is searched of it.

        Raises:
            StoreError: a file is missing, or was altered.
        """
        missing = ""
        for _ in range(_TRIES):
            version = self.record.version()  # of this moment, or an earlier one
            with self.record.reading() as connection:
                try:
                    view = self._seen(connection)
                except FileNotFoundError as fault:  # compacted just now: the moment is over
                    missing = fault.filename
                    continue
                if view is None:
                    continue
                self._known = version, view.seq
                yield connection, view
                return
        raise StoreError(
            f"The index {self.record.folder} is damaged: a file that its record names is missing: "
            f"{missing}. Restore a snapshot."
        )

    def _seen(self, connection: apsw.Connection) -> View | None:
        """Return the view of a connection's moment; None where a later one was made already."""
        seq = int(value(connection, "select value from state where key = 'seq'"))
        view = self.view
        if view is not None and view.seq == seq:
            return view
        with self._refresh:
            view = self.view
            if view is not None and view.seq == seq:
                return view
            if view is not None and view.seq > seq:
                return None
            self.view = self.of(connection, served(connection), seq, view)
            self._forget(self.view)
            return self.view

    def of(
        self,
        connection: apsw.Connection,
        generation: Generation,
        seq: int,
        old: View | None = None,
        *,
        files: bool = True,
        structure: bool = True,
    ) -> View:
        """Return the view of a generation at a moment, from an older one if there is one.

        Args:
            connection: inside that moment.
            generation: served or not.
            seq: of that moment.
            old: an earlier view.
            files: whether its files are opened, and compared with their checksums.
            structure: whether its structure is loaded.

        Raises:
            FileNotFoundError: a file is gone: another process compacts.
            StoreError: a file was altered.
        """
        sql = "select stem, rows, structure from generations where g = ?"
        known = ask(connection, sql, (generation.number,))
        if not known:
            raise StoreError("This generation is not there any more.")
        ((stem, rows, said),) = known
        sql = "select row, n, count from runs where g = ? and row >= ? order by row"
        if old is not None and old.stem == stem:  # it has grown, at most
            last = int(old.runs.rows[-1]) if old.rows else 0
            runs = old.runs
            if rows > old.rows:
                runs = runs.with_rest(ask(connection, sql, (generation.number, last)))
            alive, dead = old.alive, old.dead
            gone = ask(connection, "select n from removed where seq > ?", (old.seq,))
            arrays = old.arrays
            for array in (
                arrays.values()
            ):  # mapped here, where a file that a compaction has removed is expected
                array.rows(rows)
        else:
            runs, alive, dead = Runs(ask(connection, sql, (generation.number, 0))), None, 0
            gone = ask(connection, "select n from removed")
            arrays = self._open(connection, generation, stem, rows) if files else {}
        alive, dead = _without(runs, rows, alive, dead, gone)
        view = View(seq, generation, stem, rows, runs, alive, dead, arrays, None, said)
        if said is None or not structure:
            return view
        return replace(view, structure=self._structure(view, said, old))

    def _open(
        self, connection: apsw.Connection, generation: Generation, stem: str, rows: int
    ) -> Mapping[str, Array]:
        """Return the files of a generation; all but features are compared with their checksums."""
        arrays = {}
        for name, width in generation.widths.items():
            array = self._arrays.get((stem, name))
            if array is None:
                array = Array(file_of(self.record.folder, stem, name), width)
            if name != FEATURES:
                array.verify(rows, sums_of(connection, generation.number, name))
            arrays[name] = self._arrays[stem, name] = array
        return arrays

    def _structure(self, view: View, said: str, old: View | None) -> Loaded | None:
        """Return a structure; while it loads in the background, an older one stands in."""
        if said in self._structures:
            return self._structures[said]
        structure = Structure.parse(said)
        assert structure is not None
        vectors, spans = view.arrays[VECTOR].rows(view.rows), view.generation.spans

        def loaded() -> None:
            made = load(self.record.folder, structure, vectors, spans, self.plugins)
            with self._refresh:
                self._structures[said] = made
                self._loading.discard(said)
                if self.view is not None and self.view.said == said:
                    self.view = replace(self.view, structure=made)

        if old is None:
            loaded()
            return self._structures[said]
        if said not in self._loading:
            self._loading.add(said)
            threading.Thread(target=loaded, name="loading", daemon=True).start()
        return old.structure if old.stem == view.stem else None

    def prepare(self, generation: Generation) -> None:
        """Open, verify and load what is about to be served, where somebody searches."""
        if self.view is None:
            return
        with suppress(RetrievalError, OSError), self.record.reading() as connection:
            self.of(connection, generation, -1)

    def counted(self, connection: apsw.Connection, generation: Generation) -> View:
        """Return a generation's rows at a moment, without its files."""
        seq = int(value(connection, "select value from state where key = 'seq'"))
        old = self._counted.get(generation.number)
        old = None if old is None or old.seq > seq else old
        view = self.of(connection, generation, seq, old, files=False, structure=False)
        self._counted[generation.number] = view
        return view

    def failed(self, said: str | None) -> bool:
        """Whether a structure could not be loaded."""
        return said is not None and self._structures.get(said, ()) is None

    def take(self, said: str, loaded: Loaded | None) -> None:
        """Have a structure that this process has just built."""
        with self._refresh:
            self._structures[said] = loaded

    def _forget(self, view: View) -> None:
        """Let go of files and structures that no generation of now has."""
        if len(self._arrays) > 3 * len(view.arrays):
            self._arrays = {(view.stem, name): array for name, array in view.arrays.items()}
        if len(self._structures) > 3:
            self._structures = {
                said: loaded for said, loaded in self._structures.items() if said == view.said
            }

    def after_fork(self) -> None:
        """Have locks of its own, in a child."""
        self._refresh, self._known = threading.RLock(), None
        self._loading.clear()


def _without(
    runs: Runs, rows: int, alive: Mask | None, dead: int, gone: Sequence[tuple[int, ...]]
) -> tuple[Mask | None, int]:
    """Return a mask of so many rows after items were removed, and how many are dead."""
    if alive is not None and len(alive) < rows:
        alive = np.concatenate([alive, np.ones(rows - len(alive), bool)])
    there = runs.rows_of(np.fromiter((n for (n,) in gone), np.int64, len(gone)))
    there = there[there >= 0]
    if len(there):
        alive = np.ones(rows, bool) if alive is None else alive.copy()
        alive[there] = False
        dead = rows - int(np.count_nonzero(alive))
    return alive, dead


def sums_of(connection: apsw.Connection, number: int, name: str) -> Sums:
    """Return the checksums of one array of a generation."""
    sql = "select block, sum from sums where g = ? and name = ?"
    return {int(block): int(sum_) for block, sum_ in ask(connection, sql, (number, name))}


def all_of(connection: apsw.Connection) -> tuple[Generation, ...]:
    """Return all generations of a record, oldest first."""
    sql = "select g, bundle, variant, widths, spans, state from generations order by g"
    return tuple(
        Generation(
            g,
            bundle,
            variant,
            json.loads(widths),
            tuple((start, stop) for start, stop in json.loads(spans)),
            state,
        )
        for g, bundle, variant, widths, spans, state in ask(connection, sql)
    )


def served(connection: apsw.Connection) -> Generation:
    """Return the generation that is served.

    Raises:
        StoreError: there is not exactly one.
    """
    found = [one for one in all_of(connection) if one.state == "served"]
    if len(found) != 1:
        raise StoreError(
            "The index is damaged: its record serves no generation. Restore a snapshot."
        )
    return found[0]
