"""What the parts of a local store share: its folder and record, and what is searched of it at this moment."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import apsw

from retrieval.errors import RetrievalError, StoreError
from retrieval.serving.files.plain import read_plain
from retrieval.serving.files.strict_json import parse_json, strict_loads
from retrieval.serving.index.backends import make_backend
from retrieval.serving.local.acknowledged import acknowledged
from retrieval.serving.local.columns import Columns
from retrieval.serving.local.generation_table import served
from retrieval.serving.local.ready import Ready, Row
from retrieval.serving.local.record import FILE, Record, ask, value
from retrieval.serving.local.structures import Wanted
from retrieval.serving.local.view import View, refreshed
from retrieval.serving.stores.contract import Generation

INDEX = "index.json"
_TRIES = 20
_BYTES = 1_000_000


class Home:
    """The folder of a local store, opened.

    Args:
        folder: of the index.
        plugins: files or modules of third-party back ends that are not installed.

    Raises:
        StoreError: missing, damaged, or of another format.

    Attributes:
        folder: see above.
        record: the SQLite file.
        read_only: nothing can be written here.
        view: the newest one that was taken; None before the first.
        columns: fields that were filtered by.
    """

    def __init__(self, folder: Path, plugins: Sequence[str] = ()) -> None:
        self.folder = folder
        self.plugins = tuple(plugins)
        self.read_only = not os.access(folder, os.W_OK) or not os.access(folder / FILE, os.W_OK)
        said = acknowledged(folder)  # before the record, which may only be further
        self.record = Record(folder, read_only=self.read_only)
        self.view: View | None = None
        self._known: tuple[object, int] | None = None
        self._refresh = threading.Lock()
        self.columns = Columns()
        self.ready = Ready(folder, self.make, self.renew)
        try:
            with self.record.reading() as connection:
                served(connection)
                seq = int(value(connection, "select value from state where key = 'seq'"))
                name = value(connection, "select value from state where key = 'index'")
            if hashlib.sha256(_content(folder / INDEX)).hexdigest() != name:
                raise StoreError(
                    f"The index {folder} is damaged: {INDEX} was altered. Restore it from a snapshot."
                )
            if seq < said:
                raise StoreError(
                    f"The index {folder} is damaged: the last {said - seq:,} of {said:,} transactions are missing from its record. "
                    "Restore a snapshot."
                )
        except StoreError:
            self.record.close()
            raise

    def now(self) -> View | None:
        """Return what is searched at this moment, where nothing was written since a moment that was looked at; None where the record is to be asked."""
        known, view = self._known, self.view
        if known is None or view is None or view.seq != known[1] or self.record.version() != known[0]:
            return None
        return view

    @contextmanager
    def moment(
        self, arrays: bool = True, *, whole: bool = False
    ) -> Iterator[tuple[apsw.Connection, View | None]]:
        """Give one moment of the record, and what is searched of it.

        Args:
            arrays: whether a view is wanted at all.
            whole: of the very segments and structures that the record names, ready or not.
        """
        for _ in range(_TRIES):
            version = self.record.version() if arrays else None  # of this moment, or an earlier one
            with self.record.reading() as connection:
                view = None
                if arrays:
                    try:
                        view = self._seen(connection, whole=whole)
                    except FileNotFoundError:  # merged away just now: the moment is over
                        continue
                    if view is None:
                        continue
                    self._known = version, view.seq
                yield connection, view
                return
        raise StoreError(
            f"The index {self.folder} is damaged: a segment that its record names is missing. Restore a snapshot."
        )

    def _seen(self, connection: apsw.Connection, *, whole: bool = False, anew: bool = False) -> View | None:
        """Return the view of a connection's moment; None where a later one was taken already.

        Args:
            connection: inside that moment.
            whole: see `moment`.
            anew: something that was waited for is ready.
        """
        sql = "select (select value from state where key = 'seq'), (select value from state where key = 'epoch')"
        ((seq, epoch),) = ask(connection, sql)

        def good(view: View | None) -> bool:
            return view is not None and view.seq == seq and not (view.waits and (whole or anew))

        view = self.view
        if good(view):
            return view
        with self._refresh:
            view = self.view
            if good(view) or (view is not None and view.seq > seq):
                return view if good(view) else None
            view = self.view = refreshed(
                connection, self.ready, view, served(connection), seq, epoch, whole=whole, anew=anew
            )
            return view

    def prepare(self, generation: Generation) -> None:
        """Open, verify and load the segments of a generation that is about to be served, where somebody searches: no search has to wait for that."""
        if self.view is None:
            return
        sql = "select s, file, sum, count, structure from segments where g = ? order by s"
        with self.record.reading() as connection:
            rows = [Row(*row) for row in ask(connection, sql, (generation.number,))]
        for row in rows:
            with suppress(RetrievalError, OSError):  # what a search then meets, it says
                segment = self.ready.open(row, generation)
                segment.verify()
                self.ready.wrote_structure(row, segment, generation)

    def renew(self) -> None:
        """Take what is ready into the view, where somebody searches; otherwise a search does, and others wait for that one."""
        if self.view is None:
            return
        with suppress(RetrievalError):  # what a search then meets, it says
            for _ in range(_TRIES):
                with self.record.reading() as connection, suppress(FileNotFoundError):
                    if self._seen(connection, anew=True) is not None:
                        return

    def make(self, name: str, options: Mapping[str, Any]) -> Any:
        """Build a back end."""
        return make_backend(name, options, self.plugins)

    def structure(self) -> Wanted:
        """Return which structure segments are to have."""
        with self.record.reading() as connection:
            said = json.loads(value(connection, "select value from state where key = 'structure'"))
        return Wanted(said["backend"], said["options"])

    def tuned(self, connection: apsw.Connection) -> Any:
        """Return what was measured when the structure was chosen; None where nothing was.

        Raises:
            StoreError: it is no JSON.
        """
        sql = "select value from state where key = 'tuned' and length(value) <= ?"
        text = value(connection, sql, (_BYTES,))
        try:
            return None if text is None else strict_loads(text)
        except (TypeError, ValueError) as fault:
            raise StoreError(
                f"What the index {self.folder} keeps of its tuning is damaged: {fault}."
            ) from fault

    def close(self) -> None:
        """Let go of everything."""
        self.ready.close()
        self.view = None
        self.record.close()


def identity(folder: Path) -> str:
    """Return the id that an index got when it was created.

    Raises:
        StoreError: its `index.json` is missing or altered.
    """
    path = folder / INDEX
    said: Mapping[str, Any] = parse_json(_content(path), path, "index", StoreError, frozenset({2}))
    return str(said["id"])


def _content(path: Path) -> bytes:
    """Return what a small file holds, at most so much of it that it is seen to be another."""
    try:
        return read_plain(path, _BYTES)
    except OSError as fault:
        raise StoreError(f"{path} cannot be read: {fault.strerror or fault}.") from None
