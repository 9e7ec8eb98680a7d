"""Vectors from Parquet: tables, and folders of embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from retrieval.data.datasets import ArrayDataset
from retrieval.data.gate import usable
from retrieval.data.splits import sides
from retrieval.errors import DataError
from retrieval.plugin import Dataset
from retrieval.serving.index.embedded import in_memory
from retrieval.serving.index.locations import is_embedding
from retrieval.serving.index.sources import collect


def parquet(path: Path, column: Literal["features", "vector"] | None = None) -> Dataset:
    """Read vectors from a Parquet table, or from a folder that `retrieval embed` wrote.

    A table has a list of numbers `features` or `vector`, and `label`; optionally `key` or `id`,
    `split` ("train", "validation", "test") and `role` ("query", "gallery", ""). All other columns
    are metadata. Of a folder, `split` and `role` are looked for in the items' metadata.

    Args:
        path: the table or the folder; a relative path starts where the command runs.
        column: of a folder, the backbone's features or the vector; by default the features where
            there are any.

    Raises:
        DataError: it cannot be read, an item has no label or the key of another, or a vector is not
            finite.
    """
    if not path.exists():
        raise DataError(
            f"[data] path: {path} does not exist. Relative paths start at {Path.cwd()}."
        )
    if path.is_dir() and not is_embedding(path):
        raise DataError(
            f"{path} is no folder of embeddings. Write one with 'retrieval embed', or name a"
            " Parquet table."
        )
    if path.is_dir():
        items, arrays = in_memory(path, column)
    elif column is not None:
        raise DataError(f"{path} is a table, which has one column of vectors: leave 'column' out.")
    else:
        found = collect([path], "features")
        assert found.features is not None
        items, arrays = found.items, found.features
    metadata = [dict(item.metadata) for item in items]
    taken = {
        name: (
            [str(row.pop(name) or "") for row in metadata]
            if all(name in row for row in metadata)
            else None
        )
        for name in ("split", "role")
    }
    dataset = ArrayDataset(
        arrays,
        [item.label or "" for item in items],
        [item.key for item in items],
        kind="features",
        splits=sides(taken["split"]),
        roles=taken["role"],
        metadata=metadata,
    )
    return usable(dataset, str(path))
