"""What an index keeps of each item beside its vector, in SQLite: key, label, metadata, and the file it came from."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrieval.errors import StoreError

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
    """The items of an opened index, read only. Safe in threads."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        try:
            # `immutable`: never a lock, a journal or a change, so it works on a read-only disk
            uri = path.resolve().as_uri() + "?mode=ro&immutable=1"
            self._connection = sqlite3.connect(uri, uri=True, check_same_thread=False)
            self.count = int(self._connection.execute("select count(*) from items").fetchone()[0])
        except sqlite3.Error as fault:
            raise StoreError(f"{path} cannot be read: {fault}. Build the index again.") from fault

    def get(self, ids: Sequence[int]) -> dict[int, Item]:
        """Return items by id; unknown ids are left out.

        Raises:
            StoreError: the file was changed after it was opened.
        """
        found = {}
        wanted = list(dict.fromkeys(ids))
        for start in range(0, len(wanted), _MANY):
            part = wanted[start : start + _MANY]
            marks = ",".join("?" * len(part))
            try:
                with self._lock:
                    rows = self._connection.execute(
                        f"select * from items where id in ({marks})", part
                    ).fetchall()
            except (sqlite3.Error, OverflowError) as fault:
                raise StoreError(f"The index's items cannot be read: {fault}.") from fault
            for number, key, label, metadata, path, size, width, height in rows:
                where = None if path is None else Path(os.fsdecode(path))
                found[number] = Item(key, label, json.loads(metadata), where, size, width, height)
        return found

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()
