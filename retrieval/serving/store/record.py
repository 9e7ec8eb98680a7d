"""The record of a local index: a SQLite file whose pages have checksums, written ahead and synced.

Any process may write. SQLite's own lock orders writers: `Record.writing` takes it at once and says
so in a sentence when it cannot have it in time.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import threading
import time
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import apsw
import apsw.sqlite_extra
import numpy as np

from retrieval.errors import StoreError
from retrieval.host.files import sync
from retrieval.serving.files.plain import read_plain
from retrieval.serving.store.contract import StoreUnavailable, TooSlow, stop_at

FILE = "items.sqlite"
ACKNOWLEDGED = "acknowledged"
_VFS = "cksmvfs"  # SQLite's own: eight bytes of each page are its checksum, compared when read
_RESERVED_BYTES = 8
_BUSY_SECONDS = 30.0
_CHECKPOINT_MILLISECONDS = 500
_ROW_BYTES = 200_000_000
_READING_SECONDS = 60.0  # for one reading, which takes milliseconds
_CHECKPOINT_PAGES = 4000
_CACHE_KIB = 65_536
_IDLE_CONNECTIONS = 16
_FORK_SECONDS = 1.0
_ACKNOWLEDGED = struct.Struct("<8sQI")
_MAGIC = b"retriev1"
_WAL_HEADER, _FRAME_HEADER = 32, 24

TABLES = {
    "state": "create table state (key text primary key, value any) strict, without rowid",
    "generations": (
        "create table generations (g integer primary key autoincrement, bundle text not null,"
        " variant text, widths text not null, spans text not null, state text not null,"
        " upto integer not null, created text not null, stem text not null, rows integer not null,"
        " structure text) strict"
    ),
    "items": (
        "create table items (n integer primary key autoincrement, id text not null unique,"
        " label text, metadata text not null, path blob, stamp text, keep text not null,"
        " bytes integer, width integer, height integer, source blob) strict"
    ),
    "items_label": "create index items_label on items (label)",
    "originals": "create table originals (n integer primary key, content blob not null) strict",
    "fields": "create table fields (name text primary key) strict, without rowid",
    "runs": (
        "create table runs (g integer not null, row integer not null, n integer not null,"
        " count integer not null, primary key (g, row)) strict, without rowid"
    ),
    "sums": (
        "create table sums (g integer not null, name text not null, block integer not null,"
        " sum integer not null, primary key (g, name, block)) strict, without rowid"
    ),
    "removed": "create table removed (n integer primary key, seq integer not null) strict",
    "removed_seq": "create index removed_seq on removed (seq)",
    "left_out": (
        "create table left_out (g integer not null, n integer not null,"
        " primary key (g, n)) strict, without rowid"
    ),
    "claims": (
        "create table claims (work text primary key, owner text not null, until real not null,"
        " stem text not null) strict, without rowid"
    ),
}
"""An item that changes gets a new number `n`; the old one goes into `removed`.

`runs` gives the numbers of a generation's rows, ascending: `count` rows from `row` on have the
numbers from `n` on. `sums` are checksums of blocks of its files.
"""


@cache
def _register() -> None:
    """Have SQLite know the file system that checks pages."""
    with apsw.Connection(":memory:") as connection:
        apsw.sqlite_extra.load(connection, _VFS.replace("cksm", "cksum"))


class Record:
    """The SQLite file of one index folder. Whoever reads or writes borrows a connection.

    Args:
        folder: of the index.
        read_only: the file system refuses writes: nothing beside the file is made.

    Raises:
        StoreError: it is missing, damaged, or not an index's.

    Attributes:
        turn: held by the thread that writes, so that threads queue without polling SQLite's lock.
    """

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        self.folder = folder
        self.path = folder / FILE
        self.read_only = read_only
        self.turn = threading.RLock()
        self._lending = threading.Condition()
        self._idle: list[tuple[apsw.Connection, object]] = []
        self._lent = 0
        self._watch = threading.Lock()
        self._watching: tuple[apsw.Connection, object] | None = None
        self._acknowledged: int | None = None
        self._closed: str | None = None
        _register()
        acknowledged = _acknowledged(folder)  # before the record, which may only be further
        for name in (FILE, f"{FILE}-wal", f"{FILE}-shm"):
            path = folder / name  # SQLite would wait for a pipe, and follow a link
            if name == FILE and not os.path.lexists(path):
                raise self._damaged(f"{FILE} is missing")
            if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
                raise StoreError(f"{path} is no regular file. Restore the index from a snapshot.")
        self._file = _file_id(self.path)
        with self.reading() as connection:
            if self._is_cut(connection):
                raise self._damaged(f"{FILE} was cut short")
            self._check_tables(connection)
            seq = int(value(connection, "select value from state where key = 'seq'"))
            if seq < acknowledged:
                raise self._damaged(
                    f"the last {acknowledged - seq:,} of {acknowledged:,} transactions are missing "
                    "from its record"
                )
        _RECORDS.add(self)

    @staticmethod
    def create(folder: Path) -> None:
        """Write an empty record."""
        _register()
        flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
        connection = _connect(folder / FILE, flags)
        try:
            reserved = ctypes.c_int(_RESERVED_BYTES)
            connection.file_control(
                "main", apsw.SQLITE_FCNTL_RESERVE_BYTES, ctypes.addressof(reserved)
            )
            connection.execute("pragma journal_mode = wal; pragma synchronous = full")
            connection.execute("begin")
            for sql in TABLES.values():
                connection.execute(sql)
            connection.execute("insert into state values ('seq', 0)")
            connection.execute("commit")
        finally:
            connection.close()

    def _damaged(self, fault: str) -> StoreError:
        return StoreError(f"The index {self.folder} is damaged: {fault}. Restore a snapshot.")

    def _is_cut(self, connection: apsw.Connection) -> bool:
        """Whether the file was cut short: beyond its end SQLite reads zeros without a checksum."""
        for _ in range(5):
            count, size = connection.pragma("page_count"), connection.pragma("page_size")
            there = self.path.stat().st_size // size
            wal = self.path.with_name(f"{FILE}-wal")
            if count <= there or set(range(there + 1, count + 1)) <= _wal_pages(wal):
                return False
            time.sleep(0.05)  # another process may be moving pages from the log into the file
        return True

    def _check_tables(self, connection: apsw.Connection) -> None:
        sql = "select name, sql from sqlite_master where sql is not null and name not like ?"
        found = {name: text.lower() for name, text in connection.execute(sql, ("sqlite_%",))}
        if found != TABLES:
            raise StoreError(
                f"{self.path} is not the record of an index as this version of retrieval writes "
                "it: its tables are others. If another version wrote it, open it with that "
                "version; or create the index anew, in another folder or with --replace."
            )
        if not connection.pragma("checksum_verification"):
            raise StoreError(f"{self.path} is no record of an index: its pages have no checksums.")

    def require_open(self) -> None:
        """Raise a `StoreError` once the record is closed."""
        if self._closed is not None:
            raise StoreError(self._closed)

    @contextmanager
    def connection(self) -> Iterator[apsw.Connection]:
        """Lend a connection; a new one where all are lent.

        Raises:
            StoreError: the record is closed, or another one stands in its place.
        """
        with self._lending:
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
            with self._lending:
                if connection is not None and len(self._idle) < _IDLE_CONNECTIONS:
                    self._idle.append((connection, moment))
                elif connection is not None:
                    connection.close()
                self._lent -= 1
                self._lending.notify_all()

    def _moment(self) -> object:
        """Return how long a read-only connection is good: it may miss a log that begins later."""
        if not self.read_only:
            return None
        known = self.path.stat()
        return self._has_log(), known.st_size, known.st_mtime_ns

    def _has_log(self) -> bool:
        """Whether something was written ahead."""
        try:
            return self.path.with_name(f"{FILE}-wal").stat().st_size > 0
        except OSError:
            return False

    def version(self) -> object:
        """Return a value that changes with every transaction of any process.

        Costs some microseconds, and no look at the disk.
        """
        with self._watch:
            self.require_open()
            if self._watching is not None and not self.read_only:
                connection = self._watching[0]
                return connection, connection.execute("pragma data_version").get
        with self.faults("read"), self._watch:
            self.require_open()
            moment = self._moment()
            if self._watching is not None and self._watching[1] != moment:
                self._watching[0].close()
                self._watching = None
            if self._watching is None:
                self._watching = self._open(), moment
            connection = self._watching[0]
            return connection, connection.execute("pragma data_version").get

    def replaced(self) -> str | None:
        """Return a sentence when another file stands where this record stood, or none does."""
        if _file_id(self.path) == self._file:
            return None
        return (
            f"The index {self.folder} was replaced or removed since it was opened. Open it again."
        )

    def _open(self) -> apsw.Connection:
        if self.read_only and not self._has_log():
            # Nobody writes here: readers need no files beside the record to agree.
            name = f"file:{quote(os.fsencode(self.path))}?immutable=1"
            connection = _connect(name, apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)
        elif self.read_only:
            connection = _connect(self.path, apsw.SQLITE_OPEN_READONLY)
        else:
            connection = _connect(self.path, apsw.SQLITE_OPEN_READWRITE)
        if fault := self.replaced():
            connection.close()  # another index's items would be mixed with this one's vectors
            raise StoreError(fault)
        connection.execute(
            f"pragma synchronous = full; pragma wal_autocheckpoint = {_CHECKPOINT_PAGES}"
        )
        return connection

    @contextmanager
    def reading(self, *, seconds: float = _READING_SECONDS) -> Iterator[apsw.Connection]:
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
    def writing(self) -> Iterator[tuple[apsw.Connection, int]]:
        """Give a connection inside an immediate transaction, and the transaction's number.

        It is on the disk when this ends, or has changed nothing.

        Raises:
            StoreUnavailable: another process has been writing for too long.
            StoreError: read-only, damaged, or the disk refuses.
        """
        with self.turn:
            with self.locked() as connection:
                seq = int(value(connection, "select value from state where key = 'seq'")) + 1
                connection.execute("update state set value = ? where key = 'seq'", (seq,))
                yield connection, seq
                connection.execute("commit")
            self._acknowledge(seq)

    @contextmanager
    def locked(self) -> Iterator[apsw.Connection]:
        """Keep every process from writing, without writing anything: a full disk is no matter.

        Raises:
            StoreUnavailable: another process has been writing for too long.
            StoreError: closed or read-only.
        """
        self.require_open()
        if self.read_only:
            raise StoreError(
                f"The index {self.folder} is read-only here, and cannot be written to."
            )
        with self.turn, self.faults("written"), self.connection() as connection:
            connection.execute("begin immediate")
            try:
                yield connection
            finally:
                if connection.in_transaction:
                    connection.execute("rollback")

    def _acknowledge(self, seq: int) -> None:
        """Note in a small file, without waiting for the disk, that a transaction was written.

        A log that was cut or altered in its last transaction looks to SQLite like one that a power
        cut has torn: it drops that transaction. This file says that there was one.
        """
        content = _MAGIC + struct.pack("<Q", seq)
        with suppress(OSError):
            if self._acknowledged is None:
                flags = os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
                self._acknowledged = os.open(self.folder / ACKNOWLEDGED, flags, 0o666)
            os.pwrite(self._acknowledged, content + struct.pack("<I", zlib.crc32(content)), 0)

    @contextmanager
    def faults(self, doing: str) -> Iterator[None]:
        """Turn what SQLite or the disk refuses into a sentence.

        Args:
            doing: "read" or "written".

        Raises:
            StoreUnavailable: another process has it for longer than one waits.
            StoreError: in place of SQLite's other errors and an OSError.
        """
        try:
            yield
        except FileNotFoundError:
            raise
        except apsw.InterruptError as fault:
            raise TooSlow(f"The index {self.folder} cannot be {doing}: {reason(fault)}") from fault
        except (apsw.Error, OSError) as fault:
            kind = StoreUnavailable if isinstance(fault, apsw.BusyError) else StoreError
            raise kind(f"The index {self.folder} cannot be {doing}: {reason(fault)}") from fault

    def settle(self) -> None:
        """Sync what is seen of the record, and its name.

        A process that was killed within a commit, or before the folder's name was synced, leaves
        what every process sees and a power cut still takes: nothing may build on it before this.
        """
        with self.faults("written"):
            with suppress(FileNotFoundError):
                sync(self.path.with_name(f"{FILE}-wal"))
            sync(self.folder)
            with suppress(PermissionError):  # a parent that may not be read: its writer synced it
                sync(self.folder.absolute().parent)

    def checkpoint(self) -> None:
        """Move what was written ahead into the file itself, as far as readers let it."""
        with self.faults("written"), self.connection() as connection:
            connection.set_busy_timeout(_CHECKPOINT_MILLISECONDS)
            try:
                with suppress(apsw.BusyError):
                    connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
            finally:
                connection.set_busy_timeout(int(_BUSY_SECONDS * 1000))

    def close(self) -> None:
        """Lend no connection any more, and close them once all are back."""
        with self._lending:
            if self._closed is None:
                self._closed = (
                    f"The index {self.folder} was closed. Open it again with retrieval.Index.open."
                )
            self._lending.wait_for(lambda: not self._lent)
        self._let_go()
        if self._acknowledged is not None:
            os.close(self._acknowledged)
            self._acknowledged = None

    def _let_go(self) -> None:
        """Close all connections that nobody has borrowed."""
        while self._idle:
            self._idle.pop()[0].close()
        with self._watch:
            if self._watching is not None:
                self._watching[0].close()
            self._watching = None

    def before_fork(self) -> None:
        """Close all connections: SQLite's locks do not go with a child, and its memory does."""
        self._lending.acquire()
        self._lending.wait_for(lambda: not self._lent, _FORK_SECONDS)
        self._let_go()

    def after_fork(self, *, child: bool) -> None:
        """Go on in the parent; in the child with locks of its own, or with a sentence."""
        if not child:
            self._lending.release()
            return
        self.turn, self._lending = threading.RLock(), threading.Condition()
        self._watch = threading.Lock()
        if self._lent and self._closed is None:
            self._closed = (
                f"The index {self.folder} was in use when this process was forked. Open it in the "
                "child, or fork before it is opened."
            )
        self._lent = 0


_RECORDS: weakref.WeakSet[Record] = weakref.WeakSet()


def _before_fork() -> None:
    for record in list(_RECORDS):
        record.before_fork()


def _after_fork(*, child: bool) -> None:
    for record in list(_RECORDS):
        record.after_fork(child=child)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=lambda: _after_fork(child=False),
        after_in_child=lambda: _after_fork(child=True),
    )


def _file_id(path: Path) -> tuple[int, int] | None:
    """Return what tells a file from every other that is there; None where there is none."""
    try:
        known = path.stat()
    except OSError:
        return None
    return known.st_dev, known.st_ino


def _acknowledged(folder: Path) -> int:
    """Return the transaction that the record of an index must hold; 0 where that is not known."""
    try:
        content = read_plain(folder / ACKNOWLEDGED, _ACKNOWLEDGED.size)
    except OSError:
        return 0
    if len(content) != _ACKNOWLEDGED.size:
        return 0
    magic, number, sum_ = _ACKNOWLEDGED.unpack(content)
    return int(number) if magic == _MAGIC and sum_ == zlib.crc32(content[:-4]) else 0


def _wal_pages(path: Path) -> set[int]:
    """Return the numbers of the pages that a write-ahead log holds."""
    try:
        content = read_plain(path)
    except OSError:
        return set()
    if len(content) <= _WAL_HEADER:
        return set()
    frame = _FRAME_HEADER + struct.unpack(">I", content[8:12])[0]
    count = (len(content) - _WAL_HEADER) // frame
    frames = np.frombuffer(content, np.uint8, count * frame, _WAL_HEADER).reshape(count, frame)
    heads = np.ascontiguousarray(frames[:, :16]).view(">u4")  # page, pages after commit, two salts
    own = (heads[:, 2:] == np.frombuffer(content, ">u4", 2, 16)).all(axis=1)
    return set(heads[own, 0].tolist())


def _connect(path: Path | str, flags: int) -> apsw.Connection:
    connection = apsw.Connection(str(path), flags=flags, vfs=_VFS)
    connection.set_busy_timeout(int(_BUSY_SECONDS * 1000))
    connection.limit(apsw.SQLITE_LIMIT_LENGTH, _ROW_BYTES)
    connection.execute(
        "pragma trusted_schema = off; pragma cell_size_check = on; pragma cache_size ="
        f" -{_CACHE_KIB}"
    )
    return connection


def reason(fault: apsw.Error | OSError) -> str:
    """Return why the disk or SQLite refuses, and what to do, as the end of a sentence."""
    if no_room(fault):
        return (
            "the disk is full (or a quota or limit on file sizes is reached). Nothing was changed."
            " Free some space and try again."
        )
    if isinstance(fault, OSError):
        return f"{fault.strerror or fault}. Nothing was changed."
    if isinstance(fault, apsw.ReadOnlyError | apsw.CantOpenError):
        return "it, or the folder it lies in, is read-only or its files may not be opened."
    if isinstance(fault, apsw.BusyError):
        return f"others have been writing to it for {_BUSY_SECONDS:g} seconds. Try again."
    if isinstance(fault, apsw.InterruptError):
        return "the question took too long. Ask for less."
    if isinstance(fault, apsw.IOError | apsw.CorruptError | apsw.NotADBError):
        return (
            f"{FILE} is damaged, or the disk fails ({fault}). Run 'retrieval index check', and "
            "restore a snapshot."
        )
    return f"{fault}."


def no_room(fault: apsw.Error | OSError) -> bool:
    """Whether a disk or a file may not grow; SQLite has other names for some of these errors."""
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
