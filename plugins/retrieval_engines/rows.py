"""The row of an item in a database engine: the item as JSON, and its arrays."""

from __future__ import annotations

import base64
import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from retrieval.store.filters import metadata_text
from retrieval.store.items import VECTOR, Floats, Generation, Item

PIECE_BYTES = 45_000  # bytes of an original or bundle per row: 60,000 characters of base64
_FIELDS = ("id", "label", "stamp", "keep", "bytes", "width", "height")


@dataclass(frozen=True, slots=True)
class Row:
    """One item in the collection of a generation (the arrays of all items under one bundle).

    Attributes:
        record: the item without its arrays, as JSON. It also has a "version", which changes with
            each write, and "pieces", the number of pieces of the stored original.
        arrays: float32 arrays by name; empty if the item could not be embedded.
    """

    record: Mapping[str, Any]
    arrays: Mapping[str, Floats]

    @classmethod
    def of(cls, item: Item) -> Row:
        """Return the row of an item, with a new version."""
        size = None if item.original is None else -(-len(item.original) // PIECE_BYTES)
        record = {
            **{name: getattr(item, name) for name in _FIELDS},
            "metadata": json.loads(metadata_text(item.metadata)),
            "path": None if item.path is None else os.fspath(item.path),
            "version": uuid.uuid4().hex,
            "pieces": size,
        }
        arrays = {name: np.asarray(array, np.float32) for name, array in item.arrays.items()}
        return cls(record, arrays)

    def item(self) -> Item:
        """Return the item of the row."""
        path = None if self.record["path"] is None else Path(self.record["path"])
        plain = {name: self.record[name] for name in _FIELDS}
        return Item(**plain, metadata=self.record["metadata"], path=path, arrays=self.arrays)

    def split(self, generation: Generation) -> tuple[dict[str, Any], list[Floats]]:
        """Return the record with arrays as base64, and the vector of each sub-space.

        With a single sub-space, the record does not repeat its vector.
        """
        if not self.arrays:
            return dict(self.record), []
        vectors = [self.arrays[VECTOR][start:stop] for start, stop in generation.spans]
        texts = {
            name: base64.b64encode(self.arrays[name].astype("<f4").tobytes()).decode()
            for name in generation.widths
            if name != VECTOR or len(vectors) > 1
        }
        return {**self.record, "arrays": texts}, vectors

    @classmethod
    def joined(cls, record: Mapping[str, Any], vector: Sequence[float] | None) -> Row:
        """Return the row from the record and, if it was read, the first vector of `split`."""
        plain = dict(record)
        arrays = {
            name: np.frombuffer(base64.b64decode(text), "<f4")
            for name, text in plain.pop("arrays", {}).items()
        }
        if vector is not None and VECTOR not in arrays:
            arrays[VECTOR] = np.asarray(vector, np.float32)
        return cls(plain, arrays)

    @staticmethod
    def batches(
        rows: Sequence[Row], generation: Generation, most_bytes: int, number_bytes: int
    ) -> Iterator[list[tuple[dict[str, Any], list[Floats]]]]:
        """Yield split rows in batches of about `most_bytes`.

        `number_bytes` is the size of one number of a vector in a request.
        """
        batch, size = [], 0
        for row in rows:
            record, vectors = row.split(generation)
            batch.append((record, vectors))
            size += len(str(record)) * max(1, len(vectors)) + number_bytes * sum(map(len, vectors))
            if size > most_bytes:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch
