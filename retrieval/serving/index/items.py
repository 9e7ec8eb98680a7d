"""What an index keeps of each item beside its vector, in SQLite: key, label, metadata, and the file it came from."""

from __future__ import annotations

import json
import mmap
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrieval.errors import StoreError
from retrieval.serving.files.strict_json import strict_loads

_SCHEMA = """
create table items (
    id integer primary key,
    key text not null,
    label text,
    metadata text not null,
    path blob,
    bytes integer,
    width integer,
    height integer
) strict
"""
_ROW_BYTES = 4_000_000
_SECONDS = 10.0  # for one question, which takes milliseconds
_MANY = 500  # SQLite's own limit on the values of one question is higher everywhere


@dataclass(frozen=True)
class Item:
    """One indexed item.

    Attributes:
        key: its name: the path as it was given, or the key in the features file.
        label: None when none was given.
        metadata: further columns.
        path: the original file, absolute; None for features.
        bytes: that file's size when it was indexed.
        width: of the original image, in pixels, upright.
        height: see `width`.
    """

    key: str
    label: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None
    bytes: int | None = None
    width: int | None = None
    height: int | None = None


def write_items(path: Path, items: Iterable[Item]) -> None:
    """Write items in order; an item's id is its position.

    Raises:
        sqlite3.Error: the disk refuses.
    """
    rows = (
        (
            number,
            item.key,
            item.label,
            json.dumps(dict(item.metadata), ensure_ascii=False, allow_nan=False),
            None if item.path is None else os.fsencode(item.path),  # not every file name is text
            item.bytes,
            item.width,
            item.height,
        )
        for number, item in enumerate(items)
    )
    connection = sqlite3.connect(path)
    try:
        connection.execute("pragma journal_mode = off")  # the folder appears whole or not at all
        connection.execute("pragma synchronous = off")  # and is synced before it does
        with connection:
            connection.execute(_SCHEMA)
            connection.executemany("insert into items values (?, ?, ?, ?, ?, ?, ?, ?)", rows)
    finally:
        connection.close()


class Items:
    """The items of an opened index, in memory and read only. Safe in threads.

    The file may be anyone's: nothing but the one plain table that `write_items` makes is asked, no row longer than
    4 MB is read, and no question takes longer than ten seconds.

    Args:
        content: of `items.sqlite`.

    Raises:
        StoreError: not such a file.
    """

    def __init__(self, content: bytes | mmap.mmap) -> None:
        self._lock = threading.Lock()
        self._end = 0.0
        self._connection = sqlite3.connect(":memory:", check_same_thread=False)
        try:
            self._connection.deserialize(content)
            self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _ROW_BYTES)
            self._connection.set_progress_handler(lambda: int(time.monotonic() > self._end), 10_000)
            for pragma in ("trusted_schema = off", "cell_size_check = on", "query_only = on"):
                self._ask(f"pragma {pragma}")
            found = self._ask("select type, name, sql from sqlite_master limit 2")
            if [(kind, name, _plain(sql)) for kind, name, sql in found] != [
                ("table", "items", _plain(_SCHEMA))
            ]:
                raise StoreError("it does not hold the one table that an index has")
            (first, last) = self._ask("select min(id), max(id) from items")[0]
        except (sqlite3.Error, MemoryError, OverflowError) as fault:
            self._connection.close()
            raise StoreError(str(fault)) from fault
        except StoreError:
            self._connection.close()
            raise
        self.count = last + 1 if first == 0 else 0

    def _ask(self, question: str, values: Sequence[int] = ()) -> list[Any]:
        with self._lock:
            self._end = time.monotonic() + _SECONDS
            return self._connection.execute(question, values).fetchall()

    def get(self, ids: Sequence[int]) -> dict[int, Item]:
        """Return items by id; unknown ids are left out.

        Raises:
            StoreError: an item is not what an index holds.
        """
        found = {}
        wanted = list(dict.fromkeys(ids))
        for start in range(0, len(wanted), _MANY):
            part = wanted[start : start + _MANY]
            marks = ",".join("?" * len(part))
            try:
                rows = self._ask(f"select * from items where id in ({marks})", part)
            except (sqlite3.Error, OverflowError, MemoryError) as fault:
                raise StoreError(f"The index's items cannot be read: {fault}.") from fault
            for number, *columns in rows:
                try:
                    found[number] = _item(*columns)
                except (ValueError, TypeError) as fault:
                    raise StoreError(
                        f"Item {number} of this index is not what an index holds: {fault}."
                    ) from fault
        return found

    def close(self) -> None:
        """Let go of the memory."""
        with self._lock:
            self._connection.close()


def _plain(sql: object) -> str:
    return " ".join(str(sql).split()).lower()


def _item(
    key: object, label: object, metadata: object, path: object, size: object, width: object, height: object
) -> Item:
    """Return a row as an item.

    Raises:
        ValueError: it has other types, or metadata that is not a plain JSON object.
    """
    texts = isinstance(key, str) and isinstance(label, str | None) and isinstance(metadata, str)
    numbers = all(value is None or (isinstance(value, int) and value >= 0) for value in (size, width, height))
    if not texts or not numbers or not isinstance(path, bytes | None) or (path is not None and b"\0" in path):
        raise ValueError("a column has another type than it should")
    content = strict_loads(str(metadata))
    if not isinstance(content, dict):
        raise ValueError("its metadata are no JSON object")
    where = None if path is None else Path(os.fsdecode(path))
    return Item(key, label, content, where, size, width, height)  # type: ignore[arg-type]
