"""Items to index, and the location of their content: a file, or a row of a Parquet table."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from retrieval.errors import DataError
from retrieval.serving.files.places import StrPath
from retrieval.serving.store.items import Floats, Item, Keep

PLAN = "embedding.json"
"""File that marks a folder of embeddings and describes it; see `embedded.Plan`."""


def paths_of(paths: StrPath | Iterable[StrPath]) -> list[StrPath]:
    """Return one or more paths as a list."""
    return [paths] if isinstance(paths, str | os.PathLike) else list(paths)


def is_table(name: str) -> bool:
    """Return whether a file's name is that of a Parquet table."""
    return name.lower().endswith((".parquet", ".pq"))


def is_embedding(place: object) -> bool:
    """Return whether a path is a folder written by `retrieval embed`."""
    return isinstance(place, str | os.PathLike) and (Path(place) / PLAN).is_file()


def shown(path: str | os.PathLike[str]) -> str:
    """Return a path as valid UTF-8 text; bytes that are not UTF-8 are escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def stamp_of(path: Path) -> str:
    """Return text that changes when a file changes: its size and time, or "missing"."""
    try:
        status = path.stat()
    except OSError:
        return "missing"
    return f"{status.st_size} {status.st_mtime_ns}"


@dataclass(frozen=True, slots=True)
class Origin:
    """A row of a Parquet table that holds an item's original, the content to embed.

    Attributes:
        table: path of the table.
        row: number of the row, as text.
        table_stamp: result of `stamp_of` for the table when the item was collected.
    """

    table: Path
    row: str
    table_stamp: str

    @property
    def address(self) -> str:
        """Table and row joined by '#'; `recorded` splits them again."""
        return f"{self.table}#{self.row}"

    def stamp(self) -> str:
        """Return text that changes when the original changes."""
        return f"{os.fsencode(self.address)!r} {self.table_stamp}"

    @classmethod
    def recorded(cls, address: str, stamp: str | None) -> Origin:
        """Return the origin for an `address` and a `stamp` that an index stored."""
        table, _, row = address.rpartition("#")
        head = f"{os.fsencode(address)!r} "
        return cls(Path(table), row, (stamp or "").removeprefix(head))


Original: TypeAlias = "Path | bytes | Floats | DataError"
"""What an item is embedded from: its file's path, its bytes, or finite features (F,).

A `DataError` says why the content is missing.
"""


@dataclass(frozen=True, slots=True)
class Source:
    """One item to encode: an image, or a row of the collected features.

    Attributes:
        key: id of the item.
        label: label of the item, or `None`.
        path: path of the image or `.npz` file. `None` if the item has an `origin`.
        metadata: further columns of a CSV manifest or a Parquet table.
        row: row of the item in `Sources.features`. `None` for an image.
        origin: row of the Parquet table that holds the item's content. `None` if it has a file.
        recorded: stamp that was stored when the item was embedded. `None` if it is not embedded.
    """

    key: str
    label: str | None
    path: Path | None
    metadata: dict[str, Any] = field(default_factory=dict)
    row: int | None = None
    origin: Origin | None = None
    recorded: str | None = None

    @property
    def name(self) -> str:
        """Path of the item's file, or address of its table row, for messages."""
        return shown(self.origin.address if self.path is None and self.origin else str(self.path))

    def stamp(self) -> str:
        """Return text that changes when the item's content changes.

        It holds the path of the file, the row, and the size and time of the file.
        """
        if self.recorded is not None:
            return self.recorded
        if self.path is None:
            assert self.origin is not None
            return self.origin.stamp()
        return f"{os.fsencode(self.path)!r} {self.row} {stamp_of(self.path)}"

    def item(self, keep: Keep = "reference") -> Item:
        """Return the item to store, without its arrays and the sizes of its original."""
        keeps_location = keep != "nothing" and self.row is None
        return Item(
            id=self.key,
            label=self.label,
            metadata=self.metadata,
            path=self.path if keeps_location else None,
            stamp=self.stamp(),
            keep=keep,
            source=self.origin.address if keeps_location and self.origin else None,
        )


@dataclass(frozen=True)
class Sources:
    """The items to encode, in order.

    Attributes:
        items: the items.
        features: features (N, F), or `None` for images.
        repeated: number of repeated files in the sources; a file is used once.
        left_out: one sentence per reason why files or columns were left out.
    """

    items: list[Source]
    features: Floats | None = None
    repeated: int = 0
    left_out: tuple[str, ...] = ()
