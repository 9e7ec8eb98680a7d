"""Vectors from files as an encoder; the model that made them is not run."""

from __future__ import annotations

import os
from pathlib import Path

from retrieval.base.arrays import Array, Ints
from retrieval.errors import DataError, some
from retrieval.index.read_embeddings import in_memory
from retrieval.index.sources import collect
from retrieval.plugin import Dataset


class Vectors:
    """Vectors that a file or folder holds: `vectors:FILE`.

    A file is `.npz` with `features` (or `vectors`) and optionally `keys`, or a Parquet table with a
    list column `features` or `vector` and optionally `key`. A folder holds such files, or is one
    that `retrieval embed` wrote. With keys, an item has the vector whose key is the item's key or
    its file's path; without keys, vectors are in the order of the data, one for each item.

    Args:
        address: the address.

    Raises:
        DataError: there is no such file, it cannot be read, or two vectors have one key.
    """

    def __init__(self, address: str) -> None:
        path = Path(address.partition(":")[2])
        if not path.exists():
            raise DataError(f"{path} does not exist. Relative paths start at {Path.cwd()}.")
        if any(path.glob("part-*.parquet")):
            sources, vectors = in_memory(path, "vector")
        else:
            files = [path]
            if path.is_dir():
                files = sorted([*path.glob("*.npz"), *path.glob("*.parquet")])
            collected = collect(files, "features")
            assert collected.features is not None
            sources, vectors = collected.items, collected.features
        self.path = path
        self.vectors = vectors
        self.rows = {source.id: row for row, source in enumerate(sources)}
        self.has_keys = any(
            source.has_id or not source.id.endswith(f"/{source.row}") for source in sources
        )
        if len(self.rows) < len(sources):
            raise DataError(f"{path} has two vectors of one key.")

    def __call__(self, dataset: Dataset, items: Ints) -> Array:
        """Return the vectors (N, D) of items by index (N,).

        Raises:
            DataError: the file lacks an item's vector.
        """
        numbers = items.tolist()
        names = [[dataset.keys[item] for item in numbers]]
        if dataset.files is not None:
            names.append([os.fspath(dataset.files[item]) for item in numbers])
        for keys in names:
            if all(key in self.rows for key in keys):
                return self.vectors[[self.rows[key] for key in keys]]
        if self.has_keys:
            missing = [key for key in names[0] if key not in self.rows]
            raise DataError(f"{self.path} has no vector with the key {some(missing, 3)}.")
        if len(self.vectors) != len(dataset):
            raise DataError(
                f"{self.path} has {len(self.vectors):,} vectors without keys, and the data"
                f" {len(dataset):,} items. Save one vector for each item in the data's order, or"
                " keys."
            )
        return self.vectors[items]
