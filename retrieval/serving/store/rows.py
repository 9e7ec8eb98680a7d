"""Items as rows of the record: written, and read back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retrieval.errors import StoreError
from retrieval.serving.files.strict_json import strict_loads
from retrieval.serving.store.items import Floats, Item

COLUMNS = "n, id, label, metadata, path, stamp, keep, bytes, width, height, source"

Row = tuple[Any, ...]
_NONE = "{}"


def to_row(number: int, item: Item, metadata: str) -> Row:
    """Return an item as the record keeps it."""
    path = None if item.path is None else os.fsencode(item.path)  # not every file name is text
    return (
        number,
        item.id,
        item.label,
        metadata,
        path,
        item.stamp,
        item.keep,
        item.bytes,
        item.width,
        item.height,
        None if item.source is None else os.fsencode(item.source),
    )


def from_row(row: Row, arrays: Mapping[str, Floats] | None = None) -> Item:
    """Return a row, and its arrays, as an item.

    Raises:
        StoreError: it is not one that this package writes.
    """
    _, id, label, metadata, path, stamp, keep, size, width, height, source = row
    try:
        content = {} if metadata == _NONE else strict_loads(metadata)
        where = None if path is None else Path(os.fsdecode(path))
        address = None if source is None else os.fsdecode(source)
    except (ValueError, TypeError) as fault:
        raise StoreError(f"An item of this index is not what an index holds: {fault}.") from fault
    return Item(id, label, content, where, stamp, keep, None, size, width, height, arrays or {}, address)
