"""Items to index, and the files that hold their content."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from retrieval.base.photos import address_of, remote_state
from retrieval.base.places import StrPath
from retrieval.errors import DataError
from retrieval.store.items import Floats, Item, Keep

PLAN = "embedding.json"
"""File that marks a folder of embeddings and describes it; see `embedded.EmbeddingPlan`."""


def paths_of(paths: StrPath | Iterable[StrPath]) -> list[StrPath]:
    """Return one or more paths as a list."""
    if isinstance(paths, str | os.PathLike):
        return [paths]
    return list(paths)


def is_table(name: str) -> bool:
    """Return whether a file's name is that of a Parquet table."""
    return name.lower().endswith((".parquet", ".pq"))


def is_embedding(place: object) -> bool:
    """Return whether a path is a folder written by `retrieval embed`."""
    return isinstance(place, str | os.PathLike) and (Path(place) / PLAN).is_file()


def path_text(path: str | os.PathLike[str]) -> str:
    """Return a path or an address as valid UTF-8 text; bytes that are not UTF-8 are escaped."""
    return os.fsencode(address_of(path) or path).decode("utf-8", "backslashreplace")


def state_of(path: Path) -> str:
    """Return text that changes when a file changes, or "missing".

    The text begins with the size. Programs can set a file's modification time, but neither its
    change time (ctime) nor its inode.
    """
    if address_of(path):
        return remote_state(path)
    try:
        status = path.stat()
    except OSError:
        return "missing"
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"


def digest_of(content: bytes) -> str:
    """Return the SHA-256 of an original, with which its item's stamp begins."""
    return hashlib.sha256(content).hexdigest()


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
        path: path of the image, or of the file that holds the features. `None` for an item of a
            folder of embeddings that has no file of its own.
        metadata: further columns of a CSV manifest or a Parquet table.
        row: row of the item in `Sources.features`. `None` for an image.
        recorded: stamp that a folder of embeddings stores; see `Item.stamp`. `None` for an image
            or a row of features.
        has_id: whether a table gives the id in a column of its own.
    """

    key: str
    label: str | None
    path: Path | None
    metadata: dict[str, Any] = field(default_factory=dict)
    row: int | None = None
    recorded: str | None = None
    has_id: bool = False

    @property
    def name(self) -> str:
        """Path of the item's file, for messages."""
        return path_text(str(self.path))

    def item(self, keep: Keep = "reference") -> Item:
        """Return the item to store, without its arrays and the sizes of its original.

        The stamp of an image lacks the hash of its content, which has yet to be read.
        """
        stamp = self.recorded
        if stamp is None and self.row is None:
            assert self.path is not None  # only embedded items lack a path
            stamp = state_of(self.path)
        if keep == "nothing" or self.row is not None:
            path = None
        else:
            path = self.path
        return Item(self.key, self.label, self.metadata, path=path, stamp=stamp, keep=keep)


@dataclass(frozen=True)
class Sources:
    """The items to encode, in order.

    Attributes:
        items: the items.
        features: features (N, F), or `None` for images.
        repeated: number of repeated items in the sources: the same file, and no other id.
        left_out: one sentence per reason why files or columns were left out.
    """

    items: list[Source]
    features: Floats | None = None
    repeated: int = 0
    left_out: tuple[str, ...] = ()
