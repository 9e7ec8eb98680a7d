"""The row of an item in a database engine: the item as JSON, and its arrays."""

from __future__ import annotations

import base64
import json
import math
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from retrieval.store.filters import metadata_text
from retrieval.store.items import VECTOR, Floats, Generation, Item

# Bytes of an original or bundle per row. As base64 they are 60,000 characters, which fit into a
# text of Milvus.
PIECE_BYTES = 45_000
_FIELDS = ("id", "label", "stamp", "keep", "bytes", "width", "height")


def apart(generation: Generation) -> list[str]:
    """Return the names of the arrays that an engine stores beside the vectors of sub-spaces."""
    # A single sub-space is the vector.
    return [name for name in generation.widths if name != VECTOR or len(generation.spans) > 1]


@dataclass(frozen=True, slots=True)
class Row:
    """One item in the collection of a generation (the arrays of all items under one bundle).

    Attributes:
        record: the item without its arrays, as JSON, and the properties below.
        arrays: float32 arrays by name; empty if the item could not be embedded.
    """

    record: Mapping[str, Any]
    arrays: Mapping[str, Floats]

    @property
    def id(self) -> str:
        """Id of the item."""
        return str(self.record["id"])

    @property
    def version(self) -> str:
        """Text that changes with each write of the item."""
        return str(self.record["version"])

    @property
    def pieces(self) -> int | None:
        """Number of pieces of the stored original, or None without one."""
        pieces: int | None = self.record.get("pieces")
        return pieces

    @classmethod
    def of(cls, item: Item) -> Row:
        """Return the row of an item, with a new version."""
        # Exact searches read whole rows, so a row has only what its item has, and a label, for
        # which filters ask.
        record = {
            name: getattr(item, name)
            for name in _FIELDS
            if name == "label" or getattr(item, name) is not None
        }
        # The text turns NumPy's numbers into numbers of JSON.
        record["metadata"] = json.loads(metadata_text(item.metadata))
        record["version"] = uuid.uuid4().hex
        if item.path is not None:
            record["path"] = os.fspath(item.path)
        if item.original is not None:
            record["pieces"] = math.ceil(len(item.original) / PIECE_BYTES)
        arrays = {name: np.asarray(array, np.float32) for name, array in item.arrays.items()}
        return cls(record, arrays)

    def item(self) -> Item:
        """Return the item of the row."""
        plain: Any = {name: self.record.get(name) for name in (*_FIELDS, "metadata")}
        path = self.record.get("path")
        if path is not None:
            path = Path(path)
        return Item(**plain, path=path, arrays=self.arrays)

    def split(self, generation: Generation) -> tuple[dict[str, Any], list[Floats]]:
        """Return the record with arrays as base64, and the vector of each sub-space.

        With a single sub-space, the record does not repeat its vector.
        """
        if not self.arrays:
            return dict(self.record), []
        vectors = [self.arrays[VECTOR][start:stop] for start, stop in generation.spans]
        # Engines return vectors as lists of numbers; base64 is shorter and exact.
        texts = {
            name: base64.b64encode(self.arrays[name].astype("<f4").tobytes()).decode()
            for name in apart(generation)
        }
        record = dict(self.record)
        if texts:
            record["arrays"] = texts
        return record, vectors

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
        batch: list[tuple[dict[str, Any], list[Floats]]] = []
        size = 0
        for row in rows:
            record, vectors = row.split(generation)
            batch.append((record, vectors))
            # Milvus repeats the record for each sub-space.
            size += len(str(record)) * max(1, len(vectors))
            size += number_bytes * sum(map(len, vectors))
            if size > most_bytes:
                yield batch
                batch = []
                size = 0
        if batch:
            yield batch
