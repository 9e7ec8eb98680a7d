"""The record of an index: a SQLite file whose every page has a checksum, written ahead and synced at each transaction."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import apsw
import apsw.sqlite_extra

from retrieval.errors import StoreError
from retrieval.host.files import sync
from retrieval.serving.local.log import altered, pages
from retrieval.serving.stores.contract import StoreUnavailable, TooSlow, stop_at

FILE = "items.sqlite"
_VFS = "cksmvfs"  # SQLite's own: eight bytes of each page are its checksum, compared whenever it is read
_RESERVED = 8
_BUSY = 10_000  # milliseconds
_PATIENCE = 500  # the same, of a checkpoint with readers
_ROW_BYTES = 200_000_000
_SECONDS = 60.0  # for one reading, which takes milliseconds
_CHECKPOINT = 4000  # pages
_LOOKS, _PAUSE = 5, 0.05  # seconds
_CACHE = -65_536  # KiB
_IDLE = 16  # connections that wait for the next question

SCHEMA = {
    "state": "create table state (key text primary key, value any) strict, without rowid",
    "generations": """create table generations (
        g integer primary key autoincrement, bundle text not null, variant text, widths text not null, spans text not null,
        state text not null, upto integer not null, created text not null) strict""",
    "items": """create table items (
        n integer primary key autoincrement, id text not null unique, label text, metadata text not null, path blob, stamp text,
        keep text not null, bytes integer, width integer, height integer, source blob) strict""",
    "items_label": "create index items_label on items (label)",
    "originals": "create table originals (n integer primary key, content blob not null) strict",
    "fields": "create table fields (name text primary key) strict, without rowid",
    "fresh": """create table fresh (
        k integer primary key autoincrement, g integer not null, n integer not null, vector blob, code blob, features blob) strict""",
    "fresh_item": "create unique index fresh_item on fresh (g, n)",
    "segments": """create table segments (
        s integer primary key autoincrement, g integer not null, file text not null, sum text not null, count integer not null,
        structure text) strict""",
    "removed": "create table removed (n integer primary key, seq integer not null) strict",
    "removed_seq": "create index removed_seq on removed (seq)",
    "left_out": "create table left_out (g integer not null, n integer not null, primary key (g, n)) strict, without rowid",
}
"""Every table, by name. An item that changes gets a new number `n`; the old one is `removed`, and is in no table but the segments' files."""

_PLAIN = {name: " ".join(sql.split()) for name, sql in SCHEMA.items()}

ANSWERS = "create table answers (key text primary key, request text not null, answer blob not null, made real not null) strict"
"""Answers that were given under a key; made by the first one: see `retrieval.serving.local.answers`."""


@cache
def _register() -> None:
    """Have SQLite know the file system that checks pages."""
    with apsw.Connection(":memory:") as connection:
        apsw.sqlite_extra.load(connection, _VFS.replace("cksm", "cksum"))


class Record:
    """The SQLite file of one index folder. Whoever reads or writes has a connection to itself for that long.

    Args:
        folder: of the index.
        read_only: the file system refuses writes: nothing beside the file is made.

    Raises:
        StoreError: it is missing, damaged, or not an index's.
    """

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        self.folder = folder
        self.path = folder / FILE
        self.read_only = read_only
        self._turn = threading.Condition()
        self._idle: list[tuple[apsw.Connection, object]] = []
        self._lent = 0
        self._watch = threading.Lock()
        self._watching: tuple[apsw.Connection, object] | None = None
        self._closed = False
        _register()
        if not os.path.lexists(self.path):
            raise StoreError(f"The index {folder} is damaged: {FILE} is missing. Restore it from a snapshot.")
        for name in (FILE, f"{FILE}-wal", f"{FILE}-shm"):  # SQLite would wait for a pipe, and follow a link
            if os.path.lexists(path := folder / name) and not stat.S_ISREG(path.lstat().st_mode):
                raise StoreError(f"{path} is not a regular file. Restore the index from a snapshot.")
        self._file = _file(self.path)
        if fault := altered(self.path.with_name(f"{FILE}-wal")):
            raise StoreError(
                f"The index {folder} is damaged: {FILE}-wal {fault}. Restore it from a snapshot."
            )
        self._check_length()
        self._check_schema()

    @staticmethod
    def create(folder: Path) -> None:
        """Write an empty record."""
        _register()
        connection = _connect(folder / FILE, apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE)
        try:
            reserved = ctypes.c_int(_RESERVED)
            connection.file_control("main", apsw.SQLITE_FCNTL_RESERVE_BYTES, ctypes.addressof(reserved))
            connection.execute("pragma journal_mode = wal; pragma synchronous = full")
            connection.execute("begin")
            for sql in _PLAIN.values():
                connection.execute(sql)
            connection.execute("commit")
        finally:
            connection.close()

    def _check_length(self) -> None:
        """Refuse a file that was cut short: beyond its end SQLite reads zeros, which have no checksum."""
        for _ in range(_LOOKS):
            with self.reading() as connection:
                count, size = connection.pragma("page_count"), connection.pragma("page_size")
            there = self.path.stat().st_size // size
            if count <= there or set(range(there + 1, count + 1)) <= pages(
                self.path.with_name(f"{FILE}-wal")
            ):
                return
            time.sleep(_PAUSE)  # another process may be moving pages from the log into the file
        raise StoreError(
            f"The index {self.folder} is damaged: {FILE} was cut short. Restore it from a snapshot."
        )

    def _check_schema(self) -> None:
        with self.reading() as connection:
            found = dict(
                connection.execute(
                    "select name, sql from sqlite_master where sql is not null and name not like 'sqlite@_%' escape '@'"
                )
            )
            checked = connection.pragma("checksum_verification")
        wanted = _PLAIN | ({"answers": ANSWERS} if "answers" in found else {})
        if {name: " ".join(str(sql).split()).lower() for name, sql in found.items()} != {
            name: sql.lower() for name, sql in wanted.items()
        }:
            raise StoreError(
                f"{self.path} is not the record of an index as this version of retrieval writes it: its tables are others. If another "
                "version wrote it, open it with that version; or create the index anew, in another folder or with --replace."
            )
        if not checked:
            raise StoreError(f"{self.path} is not the record of an index: its pages have no checksums.")

    def require_open(self) -> None:
        """Raise a `StoreError` once the record is closed."""
        if self._closed:
            raise StoreError(f"The index {self.folder} was closed. Open it again.")

    @contextmanager
    def connection(self) -> Iterator[apsw.Connection]:
        """Lend a connection; a new one where all are lent.

        Raises:
            StoreError: the record is closed, or another one stands in its place.
        """
        with self._turn:
            self.require_open()
            connection, moment = self._idle.pop() if self._idle else (None, None)
            self._lent += 1
        try:
            if connection is not None and moment != self._moment():
                connection.close()
                connection = None
            if connection is None:
                moment = self._moment()
                connection = self._open()
            yield connection
        finally:
            with self._turn:
                if connection is not None and len(self._idle) < _IDLE:
                    self._idle.append((connection, moment))
                elif connection is not None:
                    connection.close()
                self._lent -= 1
                self._turn.notify_all()

    def _moment(self) -> object:
        """Return what a connection that is read-only is good for: it may look past a log that another user's process has begun since."""
        if not self.read_only:
            return None
        known = self.path.stat()
        return self._waiting(), known.st_size, known.st_mtime_ns

    def _waiting(self) -> bool:
        """Whether something was written ahead."""
        try:
            return self.path.with_name(f"{FILE}-wal").stat().st_size > 0
        except OSError:
            return False

    def version(self) -> object:
        """Return what is another after every transaction, whichever process made it; costs some microseconds, and no look at the disk."""
        with self.faults("read"), self._watch:
            self.require_open()
            moment = self._moment()
            if self._watching is not None and self._watching[1] != moment:
                self._watching[0].close()
                self._watching = None
            if self._watching is None:
                self._watching = self._open(), moment
            connection = self._watching[0]
            return connection, value(connection, "pragma data_version")  # which is one connection's own

    def replaced(self) -> str | None:
        """Return a sentence when another file stands where this record stood, or none does."""
        if _file(self.path) == self._file:
            return None
        return f"The index {self.folder} was replaced or removed since it was opened. Open it again."

    def _open(self) -> apsw.Connection:
        if self.read_only and not self._waiting():
            # nobody writes here: SQLite needs no files beside it for readers to agree
            name = f"file:{quote(os.fsencode(self.path))}?immutable=1"
            connection = _connect(name, apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)
        elif self.read_only:
            connection = _connect(self.path, apsw.SQLITE_OPEN_READONLY)
        else:
            connection = _connect(self.path, apsw.SQLITE_OPEN_READWRITE)
        if (
            fault := self.replaced()
        ):  # a connection to another index would mix its items with this one's vectors
            connection.close()
            raise StoreError(fault)
        connection.execute(f"pragma synchronous = full; pragma wal_autocheckpoint = {_CHECKPOINT}")
        return connection

    @contextmanager
    def reading(self, *, seconds: float = _SECONDS) -> Iterator[apsw.Connection]:
        """Give a connection inside one moment of the record, which no write changes.

        Raises:
            TooSlow: a question takes longer than `seconds`, or than `patience` allows.
            StoreError: damaged.
        """
        with self.faults("read"), self.connection() as connection:
            end = min(time.monotonic() + seconds, stop_at())
            connection.set_progress_handler(lambda: time.monotonic() > end, 100_000)
            connection.execute("begin")
            try:
                yield connection
            finally:
                connection.set_progress_handler(None)
                if connection.in_transaction:
                    connection.execute("rollback")

    @contextmanager
    def writing(self) -> Iterator[apsw.Connection]:
        """Give a connection inside a transaction, which is on the disk when this ends, or has changed nothing.

        Raises:
            StoreError: damaged, the disk refuses, or another process writes.
        """
        with self.faults("written"), self.connection() as connection:
            connection.execute("begin immediate")
            try:
                yield connection
                connection.execute("commit")
            finally:
                if connection.in_transaction:
                    connection.execute("rollback")

    @contextmanager
    def faults(self, doing: str) -> Iterator[None]:
        """Turn what SQLite or the disk refuses into a sentence; `doing` is "read" or "written".

        Raises:
            StoreUnavailable: another process has it for longer than one waits.
            StoreError: in place of SQLite's other errors and an OSError.
        """
        try:
            yield
        except apsw.InterruptError as fault:
            raise TooSlow(f"The index {self.folder} cannot be {doing}: {reason(fault)}") from fault
        except (apsw.Error, OSError) as fault:
            kind = StoreUnavailable if isinstance(fault, apsw.BusyError) else StoreError
            raise kind(f"The index {self.folder} cannot be {doing}: {reason(fault)}") from fault

    def settle(self) -> None:
        """Have on the disk what is seen of the record, and its name.

        A process that was killed within a commit, or before the folder's name was synced, leaves what every process sees and a power cut
        still takes: nothing may be removed or acknowledged that builds on it.
        """
        with self.faults("written"):
            with suppress(FileNotFoundError):
                sync(self.path.with_name(f"{FILE}-wal"))
            sync(self.folder)
            with suppress(PermissionError):  # a parent that may not be read: its own writer has synced it
                sync(self.folder.absolute().parent)

    def checkpoint(self) -> None:
        """Move what was written ahead into the file itself; what a reader still needs where it is, the next one moves."""
        with self.faults("written"), self.connection() as connection:
            connection.set_busy_timeout(_PATIENCE)
            try:
                with suppress(apsw.BusyError):
                    connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
            finally:
                connection.set_busy_timeout(_BUSY)

    def close(self) -> None:
        """Lend no connection any more, and close them once all are back."""
        with self._turn:
            self._closed = True
            self._turn.wait_for(lambda: not self._lent)
            while self._idle:
                self._idle.pop()[0].close()
        with self._watch:
            if self._watching is not None:
                self._watching[0].close()


def _file(path: Path) -> tuple[int, int] | None:
    """Return what tells a file from every other that is there; None where there is none."""
    try:
        known = path.stat()
    except OSError:
        return None
    return known.st_dev, known.st_ino


def _connect(path: Path | str, flags: int) -> apsw.Connection:
    connection = apsw.Connection(str(path), flags=flags, vfs=_VFS)
    connection.set_busy_timeout(_BUSY)
    connection.limit(apsw.SQLITE_LIMIT_LENGTH, _ROW_BYTES)
    connection.execute(
        f"pragma trusted_schema = off; pragma cell_size_check = on; pragma cache_size = {_CACHE}"
    )
    return connection


def reason(fault: apsw.Error | OSError) -> str:
    """Return why the disk or SQLite refuses, and what to do, as the end of a sentence."""
    if no_room(fault):
        return _FULL
    if isinstance(fault, OSError):
        return f"{fault.strerror or fault}. Nothing was changed."
    if isinstance(fault, apsw.ReadOnlyError | apsw.CantOpenError):
        return "it, or the folder it lies in, is read-only or its files may not be opened."
    if isinstance(fault, apsw.BusyError):
        return "another process is writing to it. Try again."
    if isinstance(fault, apsw.InterruptError):
        return "the question took too long. Ask for less."
    if isinstance(fault, apsw.IOError | apsw.CorruptError | apsw.NotADBError):
        return f"{FILE} is damaged, or the disk fails ({fault}). Run 'retrieval index check', and restore a snapshot."
    return f"{fault}."


_FULL = "the disk is full (or a quota or limit on file sizes is reached). Nothing was changed. Free some space and try again."


def no_room(fault: apsw.Error | OSError) -> bool:
    """Whether an error is one of a disk or a file that may not grow. SQLite has other names for some of them; a reader, too, needs memory beside the file."""
    if isinstance(fault, OSError):
        return fault.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return isinstance(fault, apsw.FullError) or getattr(fault, "extendedresult", 0) in (
        apsw.SQLITE_IOERR_WRITE,
        apsw.SQLITE_IOERR_FSYNC,
        apsw.SQLITE_IOERR_TRUNCATE,
        apsw.SQLITE_IOERR_SHMSIZE,
    )


def value(connection: apsw.Connection, sql: str, bindings: Any = ()) -> Any:
    """Return the one value that a question has for an answer; None without any row."""
    return connection.execute(sql, bindings).get


def ask(connection: apsw.Connection, sql: str, bindings: Any = ()) -> list[tuple[Any, ...]]:
    """Return all rows that a question has for an answer."""
    return cast(list[tuple[Any, ...]], connection.execute(sql, bindings).fetchall())


def backup(connection: apsw.Connection, target: Path) -> None:
    """Copy the moment that a connection sees to a new file, page by page, checksums included."""
    copy = _connect(target, apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE)
    try:
        with copy.backup("main", connection, "main") as work:
            while not work.done:
                work.step(10_000)
    finally:
        copy.close()
