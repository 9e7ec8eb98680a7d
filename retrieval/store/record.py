"""The record of a local index: a SQLite database with page checksums and a write-ahead log.

Any process may write; SQLite's lock serializes writers. `Record.writing` takes the lock at the
start of a transaction and raises `StoreUnavailable` if it does not get it in time.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import stat
import struct
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import apsw
import apsw.sqlite_extra
import numpy as np

from retrieval.base.files import sync
from retrieval.base.regular_files import FULL, out_of_files, read_plain
from retrieval.base.strict_json import strict_loads
from retrieval.errors import StoreError
from retrieval.store.contract import StoreUnavailable, TooSlow
from retrieval.store.items import Floats, Generation, Item, ItemColumns, stop_at, usable

RECORD_FILE = "items.sqlite"
ACKNOWLEDGED = "acknowledged"  # file with the number of the last committed transaction
# SQLite's checksum VFS verifies an 8-byte checksum per page on reading.
_VFS = "cksmvfs"
# The checksum of a page needs this room at its end.
_RESERVED_BYTES = 8
_BUSY_SECONDS = 30.0  # time that a transaction waits for the lock
_CHECKPOINT_MILLISECONDS = 500  # time that a checkpoint waits for readers
_ROW_BYTES = 200_000_000  # maximum size of a row
# A read transaction usually takes milliseconds; a hanging one would keep the log from being moved.
_READING_SECONDS = 60.0
# At this length, SQLite moves the write-ahead log into the file.
_CHECKPOINT_PAGES = 4000
_CACHE_KIB = 65_536  # page cache of a connection
_IDLE_CONNECTIONS = 16  # maximum number of connections that are kept for reuse
_FORK_SECONDS = 1.0  # time that a fork waits for connections in use
_ACKNOWLEDGED_FORMAT = struct.Struct("<8sQI")  # `_MAGIC`, number of the transaction, CRC-32
_MAGIC = b"retriev1"
_WAL_HEADER, _FRAME_HEADER = 32, 24  # bytes, as in SQLite's file format

_SCHEMA = """
create table state (key text primary key, value any) strict, without rowid;
create table generations (g integer primary key autoincrement, bundle text not null, variant text,
 widths text not null, spans text not null, state text not null, upto integer not null,
 created text not null, stem text not null, rows integer not null, structure text) strict;
create table items (n integer primary key autoincrement, id text not null unique, label text,
 metadata text not null, path blob, stamp text, keep text not null, bytes integer, width integer,
 height integer) strict;
create index items_label on items (label);
create table originals (n integer primary key, content blob not null) strict;
create table fields (name text primary key) strict, without rowid;
create table runs (g integer not null, row integer not null, n integer not null,
 count integer not null, primary key (g, row)) strict, without rowid;
create table sums (g integer not null, name text not null, block integer not null,
 sum integer not null, primary key (g, name, block)) strict, without rowid;
create table removed (n integer primary key, seq integer not null) strict;
create index removed_seq on removed (seq);
create table left_out (g integer not null, n integer not null, primary key (g, n))
 strict, without rowid;
create table unsynced (n integer primary key, file text not null, start integer not null,
 content blob not null) strict;
"""
"""SQL of the record's tables.

An item that changes gets a new number `n`; `removed` holds the old number. `g` is the number of a
generation, the arrays of all items under one bundle. `runs` gives the item numbers of a
generation's rows, which ascend: the `count` rows from `row` on have the consecutive numbers from
`n` on. `sums` holds checksums of the blocks of a generation's files. `unsynced` holds copies of
small pieces that were written to these files since they were last synced.
"""


@cache
def _register() -> None:
    """Register the checksum VFS with SQLite."""
    with apsw.Connection(":memory:") as connection:
        apsw.sqlite_extra.load(connection, _VFS.replace("cksm", "cksum"))


def create_database(path: Path, schema: str) -> None:
    """Write a new database with page checksums and a write-ahead log, and sync it.

    Args:
        path: the new file.
        schema: SQL that creates the tables.
    """
    flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
    connection = connect(path, flags)
    try:
        reserved = ctypes.c_int(_RESERVED_BYTES)
        connection.file_control("main", apsw.SQLITE_FCNTL_RESERVE_BYTES, ctypes.addressof(reserved))
        connection.execute("pragma journal_mode = wal").fetchall()
        connection.execute(f"pragma synchronous = full; begin; {schema}; commit")
    finally:
        connection.close()


def is_writable(folder: Path) -> bool:
    """Return whether this process may write to an index: to its folder and its record."""
    return all(os.access(path, os.W_OK) for path in (folder, folder / RECORD_FILE))


class Record:
    """The SQLite database of one index folder, with a pool of connections."""

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        self.folder = folder
        self.path = folder / RECORD_FILE
        self.read_only = read_only
        self.file = file_id(self.path)
        self.turn = threading.RLock()  # one write of this process at a time
        self.closed: str | None = None  # why the record is closed
        self.lent = 0  # number of connections in use
        self._lending = threading.Condition()
        self._idle: list[apsw.Connection] = []
        self._watch_lock = threading.Lock()
        self._watching: apsw.Connection | None = None

    @classmethod
    @contextmanager
    def opened(cls, folder: Path) -> Iterator[Record]:
        """Context manager that opens and checks the record of a folder, and closes it."""
        record = cls(folder)
        try:
            record.check()
            yield record
        finally:
            record.close()

    @staticmethod
    def create(folder: Path) -> None:
        """Write an empty record."""
        create_database(folder / RECORD_FILE, f"{_SCHEMA}insert into state values ('seq', 0)")

    def check(self) -> None:
        """Raise a `StoreError` unless the record's files are complete."""
        # Read this number first: the record can then only be newer.
        acknowledged = _acknowledged_seq(self.folder)
        for name in (RECORD_FILE, f"{RECORD_FILE}-wal", f"{RECORD_FILE}-shm"):
            # SQLite would wait for a pipe, and follow a link.
            path = self.folder / name
            if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
                raise StoreError(f"{path} is not a regular file. Restore a snapshot of the index.")
        if self.file is None:
            raise self._damage_error(f"{RECORD_FILE} is missing")
        with self.reading() as connection:
            if is_cut(connection, self.path):
                raise self._damage_error(f"{RECORD_FILE} was cut short")
            if not connection.pragma("checksum_verification"):
                raise self._damage_error(f"the pages of {RECORD_FILE} have no checksums")
            if (seq := seq_of(connection)) < acknowledged:
                raise self._damage_error(
                    f"the last {acknowledged - seq:,} of {acknowledged:,} transactions are missing "
                    "from its record"
                )

    def _damage_error(self, fault: str) -> StoreError:
        return StoreError(f"The index {self.folder} is damaged: {fault}. Restore a snapshot.")

    @property
    def _log(self) -> Path:
        """Path of the write-ahead log."""
        return self.path.with_name(f"{RECORD_FILE}-wal")

    def require_open(self) -> None:
        """Raise a `StoreError` once the record is closed."""
        if self.closed is not None:
            raise StoreError(self.closed)

    def changed(self) -> str | None:
        """Return a sentence if the index was replaced, removed or made writable, else None."""
        if self.read_only and is_writable(self.folder):
            return f"The index {self.folder} was read-only when it was opened. Open it again."
        return self.replaced()

    def replaced(self) -> str | None:
        """Return a sentence if the record's file was replaced or removed, else None."""
        if file_id(self.path) == self.file:
            return None
        return (
            f"The index {self.folder} was replaced or removed since it was opened. Open it again."
        )

    # Connections

    @contextmanager
    def connection(self) -> Iterator[apsw.Connection]:
        """Context manager that lends an idle connection, or a new one.

        Read-only connections are not reused: they could miss a write-ahead log that begins later.
        """
        with self._lending:
            self.require_open()
            if self._idle:
                connection = self._idle.pop()
            else:
                connection = None
            self.lent += 1
        try:
            connection = connection or self._open()
            yield connection
        finally:
            with self._lending:
                if connection is not None:
                    if self.read_only or len(self._idle) >= _IDLE_CONNECTIONS:
                        connection.close()
                    else:
                        self._idle.append(connection)
                self.lent -= 1
                self._lending.notify_all()

    def _open(self) -> apsw.Connection:
        if not self.read_only:
            connection = connect(self.path, apsw.SQLITE_OPEN_READWRITE)
        elif self._has_log():
            connection = connect(self.path, apsw.SQLITE_OPEN_READONLY)
        else:
            # No writer is active: SQLite needs no lock or log file.
            name = f"file:{quote(os.fsencode(self.path))}?immutable=1"
            connection = connect(name, apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)
        if fault := self.replaced():
            # The new file does not match the vectors that this index has open.
            connection.close()
            raise StoreError(fault)
        connection.execute(
            f"pragma synchronous = full; pragma wal_autocheckpoint = {_CHECKPOINT_PAGES}"
        )
        return connection

    def _has_log(self) -> bool:
        """Return whether the write-ahead log holds anything."""
        try:
            return self._log.stat().st_size > 0
        except OSError:
            return False

    def version(self) -> object:
        """Return a value that changes with every transaction of any process.

        This takes microseconds. It needs no disk access, unless the index is read-only.
        """
        try:
            with self._watch_lock:
                self.require_open()
                if self.read_only:
                    status = self.path.stat()
                    if self._has_log():
                        return object()
                    return (status.st_size, status.st_mtime_ns)
                if self._watching is None:
                    self._watching = self._open()
                return self._watching, self._watching.execute("pragma data_version").get
        except (apsw.Error, OSError):
            with self.faults("read"):
                raise

    def close(self) -> None:
        """Refuse new connections, wait for those in use, and close all."""
        with self._lending:
            self.closed = self.closed or (
                f"The index {self.folder} was closed. Open it again with retrieval.Index.open."
            )
            self._lending.wait_for(lambda: not self.lent)
        self._close_idle()

    def _close_idle(self) -> None:
        """Close all idle connections."""
        while self._idle:
            self._idle.pop().close()
        with self._watch_lock:
            if self._watching is not None:
                self._watching.close()
            self._watching = None

    def before_fork(self) -> None:
        """Close idle connections: a child inherits SQLite's memory, but not its locks."""
        self._lending.acquire()
        self._lending.wait_for(lambda: not self.lent, _FORK_SECONDS)
        self._close_idle()

    def after_fork(self) -> None:
        """Allow connections again in the parent."""
        self._lending.release()

    # Transactions

    @contextmanager
    def reading(self, *, seconds: float = _READING_SECONDS) -> Iterator[apsw.Connection]:
        """Context manager that yields a connection in a read transaction: it sees a fixed state."""
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
        """Context manager of a write transaction that yields its connection and its number.

        On exit the transaction is committed and synced. After an error it is rolled back.
        """
        with self.locked() as connection:
            sql = "update state set value = value + 1 where key = 'seq' returning value"
            seq = value(connection, sql)
            yield connection, seq
            connection.execute("commit")
            self._acknowledge(seq)

    @contextmanager
    def locked(self) -> Iterator[apsw.Connection]:
        """Context manager that yields a connection with the write lock.

        Taking the lock needs no disk space.
        """
        self.require_open()
        if self.read_only:
            raise StoreError(
                f"The index {self.folder} is read-only here, and cannot be written to."
            )
        with self.turn, self.faults("written"), self.connection() as connection:
            connection.execute("begin immediate")
            try:
                # A write to removed files would be lost without an error.
                if fault := self.replaced():
                    raise StoreError(fault)
                yield connection
            finally:
                if connection.in_transaction:
                    connection.execute("rollback")

    def _acknowledge(self, seq: int) -> None:
        """Write a transaction's number to a small file, without syncing it.

        If the last transaction in the write-ahead log is truncated or altered, SQLite drops it, as
        it does after a power cut. This file lets `check` detect the loss.
        """
        content = _MAGIC + struct.pack("<Q", seq)
        content += struct.pack("<I", zlib.crc32(content))
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
        with suppress(OSError):
            handle = os.open(self.folder / ACKNOWLEDGED, flags, 0o666)
            try:
                os.write(handle, content)
            finally:
                os.close(handle)

    @contextmanager
    def faults(self, action: str) -> Iterator[None]:
        """Context manager that turns errors of SQLite and the disk into a `StoreError`.

        Args:
            action: completes "The index cannot be …": "read" or "written".
        """
        try:
            yield
        except FileNotFoundError:
            # Compaction has removed the file: callers try again.
            raise
        except (apsw.Error, OSError) as fault:
            kind = StoreError
            if isinstance(fault, apsw.InterruptError):
                kind = TooSlow
            elif isinstance(fault, apsw.BusyError) or out_of_files(fault):
                kind = StoreUnavailable
            raise kind(
                f"The index {self.folder} cannot be {action}: {reason_and_advice(fault)}"
            ) from fault

    def settle(self) -> None:
        """Sync the record and the names of its files and folder.

        A process that was killed within a commit may leave changes that all processes see, but that
        a power cut would undo. These changes must be synced before a write builds on them.
        """
        if fault := self.replaced():
            raise StoreError(fault)
        with self.faults("written"):
            with suppress(FileNotFoundError):
                sync(self._log)
            sync(self.folder)
            # Another user created the index, and synced its parent.
            with suppress(PermissionError):
                sync(self.folder.absolute().parent)

    def checkpoint(self) -> None:
        """Move the write-ahead log into the database file, as far as readers permit."""
        with self.faults("written"), self.connection() as connection:
            connection.set_busy_timeout(_CHECKPOINT_MILLISECONDS)
            try:
                with suppress(apsw.BusyError):
                    connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
            finally:
                connection.set_busy_timeout(int(_BUSY_SECONDS * 1000))


def file_id(path: Path) -> tuple[int, int] | None:
    """Return a file's device and inode, or None if it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _acknowledged_seq(folder: Path) -> int:
    """Return the number of the last transaction that the record must hold, or 0 if unknown."""
    try:
        content = read_plain(folder / ACKNOWLEDGED, _ACKNOWLEDGED_FORMAT.size)
    except OSError:
        return 0
    if len(content) != _ACKNOWLEDGED_FORMAT.size:
        return 0
    magic, number, checksum = _ACKNOWLEDGED_FORMAT.unpack(content)
    if magic == _MAGIC and checksum == zlib.crc32(content[:-4]):
        return int(number)
    return 0


def _wal_pages(path: Path) -> set[int]:
    """Return the numbers of the pages in a write-ahead log, in SQLite's file format."""
    # No plainer test sees the same cuts: SQLite reads zeros past the file's end, and its page count
    # includes pages that are only in the log.
    try:
        content = read_plain(path)
    except OSError:
        return set()
    if len(content) <= _WAL_HEADER:
        return set()
    frame = _FRAME_HEADER + struct.unpack(">I", content[8:12])[0]
    count = (len(content) - _WAL_HEADER) // frame
    frames = np.frombuffer(content, np.uint8, count * frame, _WAL_HEADER).reshape(count, frame)
    # The columns are page, pages after commit and two salts.
    heads = np.ascontiguousarray(frames[:, :16]).view(">u4")
    # Frames with other salts than the header's are left over from an earlier log.
    current = (heads[:, 2:] == np.frombuffer(content, ">u4", 2, 16)).all(axis=1)
    return set(heads[current, 0].tolist())


def is_cut(connection: apsw.Connection, path: Path) -> bool:
    """Return whether a database's file was truncated: SQLite itself reads zeros past its end."""
    for _ in range(5):
        count = connection.pragma("page_count")
        size = connection.pragma("page_size")
        in_file = path.stat().st_size // size
        log = path.with_name(f"{path.name}-wal")
        if count <= in_file or set(range(in_file + 1, count + 1)) <= _wal_pages(log):
            return False
        # Another process may be moving pages from the log into the file.
        time.sleep(0.05)
    return True


def connect(path: Path | str, flags: int) -> apsw.Connection:
    """Open a database whose pages have checksums."""
    _register()
    connection = apsw.Connection(str(path), flags=flags, vfs=_VFS)
    connection.set_busy_timeout(int(_BUSY_SECONDS * 1000))
    connection.limit(apsw.SQLITE_LIMIT_LENGTH, _ROW_BYTES)
    connection.execute(
        "pragma trusted_schema = off; pragma cell_size_check = on; pragma cache_size ="
        f" -{_CACHE_KIB}"
    )
    return connection


def reason_and_advice(
    fault: apsw.Error | OSError,
    name: str = RECORD_FILE,
    repair: str = "Run 'retrieval index check', and restore a snapshot.",
) -> str:
    """Return the cause of an error and what to do about it, to follow a colon.

    Args:
        fault: the error.
        name: the file.
        repair: sentence that says what to do if the file is damaged.
    """
    if no_room(fault):
        return (
            "the disk is full (or a quota or limit on file sizes is reached). Nothing was changed."
            " Free some space and try again."
        )
    if out_of_files(fault):
        return f"{FULL}. Nothing was changed."
    if isinstance(fault, OSError):
        return f"{fault.strerror or fault}. Nothing was changed."
    if isinstance(fault, apsw.ReadOnlyError | apsw.CantOpenError):
        return "its folder or files are read-only or cannot be opened. Check their permissions."
    if isinstance(fault, apsw.BusyError):
        return f"others have been writing to it for {_BUSY_SECONDS:g} seconds. Try again."
    if isinstance(fault, apsw.InterruptError):
        return "the query took too long. Ask for fewer items, or use a simpler filter."
    if isinstance(fault, apsw.IOError | apsw.CorruptError | apsw.NotADBError):
        return f"{name} is damaged, or the disk fails ({fault}). {repair}"
    return f"{fault}."


def no_room(fault: apsw.Error | OSError) -> bool:
    """Return whether an error means that the disk is full or a limit on file sizes is reached."""
    if isinstance(fault, OSError):
        return fault.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return isinstance(fault, apsw.FullError) or getattr(fault, "extendedresult", 0) in (
        apsw.SQLITE_IOERR_WRITE,
        apsw.SQLITE_IOERR_FSYNC,
        apsw.SQLITE_IOERR_TRUNCATE,
        apsw.SQLITE_IOERR_SHMSIZE,
    )


# Queries


def value(connection: apsw.Connection, sql: str, bindings: Any = ()) -> Any:
    """Return the single value of a query, or None if it has no row."""
    return connection.execute(sql, bindings).get


def ask(connection: apsw.Connection, sql: str, bindings: Any = ()) -> list[tuple[Any, ...]]:
    """Return all rows of a query."""
    return cast(list[tuple[Any, ...]], connection.execute(sql, bindings).fetchall())


def backup(connection: apsw.Connection, target: Path) -> None:
    """Copy to a new file the state that a connection sees, including page checksums."""
    copy = connect(target, apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE)
    try:
        with copy.backup("main", connection, "main") as work:
            while not work.done:
                work.step(10_000)
    finally:
        copy.close()


def seq_of(connection: apsw.Connection) -> int:
    """Return the number of the last transaction."""
    return int(value(connection, "select value from state where key = 'seq'"))


def all_generations(connection: apsw.Connection) -> tuple[Generation, ...]:
    """Return all generations, oldest first."""
    sql = "select g, bundle, variant, widths, spans, state from generations order by g"
    return tuple(
        Generation(
            g, bundle, variant, json.loads(widths), tuple(map(tuple, json.loads(spans))), state
        )
        for g, bundle, variant, widths, spans, state in ask(connection, sql)
    )


def served_generation(connection: apsw.Connection) -> Generation:
    """Return the served generation."""
    generations = [entry for entry in all_generations(connection) if entry.state == "served"]
    if len(generations) != 1:
        raise StoreError(
            "The index is damaged: its record must have one served generation. Restore a snapshot."
        )
    return generations[0]


def upto_of(connection: apsw.Connection, g: int) -> int:
    """Return the item number up to which generation `g` has the arrays of every item."""
    return int(value(connection, "select upto from generations where g = ?", (g,)))


def expected_generation(connection: apsw.Connection) -> int | None:
    """Return the number of the generation that is about to be served, if one was announced."""
    number: int | None = value(connection, "select value from state where key = 'expected'")
    return number


def last_number(connection: apsw.Connection) -> int:
    """Return the highest number that an item has ever had."""
    return int(value(connection, "select seq from sqlite_sequence where name = 'items'") or 0)


def numbers_of(connection: apsw.Connection, ids: Iterable[object]) -> list[int]:
    """Return the item numbers of the ids that exist."""
    text = json.dumps(usable(ids), ensure_ascii=False)
    sql = "select n from items where id in (select value from json_each(?))"
    return [n for (n,) in ask(connection, sql, (text,))]


ITEM_COLUMNS = "n, id, label, metadata, path, stamp, keep, bytes, width, height"
"""Columns of the table `items`, in the order of `from_row`."""


def from_row(row: Sequence[Any], arrays: Mapping[str, Floats] | None = None) -> Item:
    """Return the item of a row of `ITEM_COLUMNS`, with the arrays if given.

    Raises:
        StoreError: the row is damaged.
    """
    _, id, label, metadata, path, stamp, keep, size, width, height = row
    try:
        if metadata == "{}":
            content = {}
        else:
            content = strict_loads(metadata)
        if path is None:
            file = None
        else:
            file = Path(os.fsdecode(path))
    except (ValueError, TypeError) as fault:
        raise StoreError(
            f"An item of this index cannot be read: {fault}. Run 'retrieval index check' on the"
            " index, and restore a snapshot."
        ) from fault
    return Item(id, label, content, file, stamp, keep, None, size, width, height, arrays or {})


def insert(connection: apsw.Connection, items: ItemColumns) -> range:
    """Write new items without their arrays, in a write transaction; return their numbers."""
    first = last_number(connection) + 1
    numbers = range(first, first + len(items))
    # A path need not be Unicode, so it is stored as bytes.
    paths = [None if path is None else os.fsencode(path) for path in items.paths]
    sizes = zip(*items.sizes, strict=True)
    columns = (items.ids, items.labels, items.texts, paths, items.stamps, items.keeps, *sizes)
    sql = "insert into items values (?,?,?,?,?,?,?,?,?,?)"
    connection.executemany(sql, zip(numbers, *columns, strict=True))
    originals = [
        (n, original)
        for n, original in zip(numbers, items.originals, strict=True)
        if original is not None
    ]
    connection.executemany("insert into originals values (?, ?)", originals)
    names = ((name,) for name in sorted(items.fields))
    connection.executemany("insert or ignore into fields values (?)", names)
    return numbers


def remove(connection: apsw.Connection, seq: int, numbers: Sequence[int]) -> None:
    """Delete items by number. From transaction `seq` on, searches skip their rows."""
    if not numbers:
        return
    text = json.dumps(list(numbers))
    for table in ("items", "originals"):
        connection.execute(
            f"delete from {table} where n in (select value from json_each(?))", (text,)
        )
    sql = "insert or ignore into removed select value, ? from json_each(?)"
    connection.execute(sql, (seq, text))


def has_notes(connection: apsw.Connection) -> bool:
    """Return whether a note was ever written to the index."""
    sql = "select 1 from sqlite_master where name = 'notes'"
    return value(connection, sql) is not None
