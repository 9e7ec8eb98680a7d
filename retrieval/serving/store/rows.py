"""The row of an item in a remote engine: its record as JSON, and its arrays."""

from __future__ import annotations

import base64
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.serving.store.items import VECTOR, Floats, Generation, Item

PIECE_BYTES = 45_000  # bytes of an original or bundle per row: 60,000 characters of base64
_PLAIN = ("id", "label", "stamp", "keep", "bytes", "width", "height", "source")


@dataclass(frozen=True, slots=True)
class Row:
    """One item in a generation's collection.

    Attributes:
        record: the item without its arrays, as JSON, with its "version" and the number of
            "pieces" of its original.
        arrays: float32 arrays by name; empty if the generation lacks the item.
    """

    record: Mapping[str, Any]
    arrays: Mapping[str, Floats]

    @classmethod
    def of(cls, item: Item) -> Row:
        """Return an item as a row with a new version."""
        size = None if item.original is None else -(-len(item.original) // PIECE_BYTES)
        record = {
            **{name: getattr(item, name) for name in _PLAIN},
            "metadata": item.metadata,
            "path": None if item.path is None else os.fspath(item.path),
            "version": uuid.uuid4().hex,
            "pieces": size,
        }
        arrays = {name: np.asarray(array, np.float32) for name, array in item.arrays.items()}
        return cls(record, arrays)

    def item(self) -> Item:
        """Return the row as an item."""
        path = None if self.record["path"] is None else Path(self.record["path"])
        plain = {name: self.record[name] for name in _PLAIN}
        return Item(**plain, metadata=self.record["metadata"], path=path, arrays=self.arrays)

    def split(self, generation: Generation) -> tuple[dict[str, Any], list[Floats]]:
        """Return one vector per sub-space, and the record with all other arrays as base64."""
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
        """Return the row that `split` took apart, from its record and, if read, first vector."""
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
        """Yield split rows in batches of about `most_bytes`, at `number_bytes` per number."""
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
