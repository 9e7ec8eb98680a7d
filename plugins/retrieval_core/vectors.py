"""Feature vectors from files: NumPy's .npz, Parquet tables, and folders of embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from retrieval.base.arrays import Array, Floats32
from retrieval.errors import DataError
from retrieval.helpers import is_missing_text, refuse, sides, usable_dataset
from retrieval.index.read_embeddings import in_memory
from retrieval.index.sources import collect, npz_file
from retrieval.plugin import ArrayDataset, Dataset

_COLUMNS = ("labels", "splits", "roles", "keys")


def features(file: Path) -> Dataset:
    """Read vectors from a `.npz` file, as `numpy.savez(file, features=…, labels=…)` writes it.

    The file has arrays `features` (N, F) of numbers and `labels` (N,) of text or integers. It may
    also have arrays of text (N,): `splits` ("train", "validation", "test"), `roles` ("query",
    "gallery", "") and `keys`.

    Args:
        file: the file. A relative path starts at the working directory.

    Raises:
        DataError: an array is missing, has a wrong type or length, or is not finite; a label is
            missing; or a key occurs twice. The message lists all problems.
    """
    if not file.exists():
        raise DataError(
            f"[data] file: {file} does not exist. Relative paths start at {Path.cwd()}."
        )
    used = ("features", *_COLUMNS)
    with npz_file(file, used) as archive:
        arrays = {name: np.asarray(archive[name]) for name in archive if name in used}
    problems = []
    for name in ("features", "labels"):
        if name not in arrays:
            problems.append(f"there is no array '{name}' (it has: {', '.join(arrays) or 'none'}).")
    if problems:
        refuse(str(file), problems)
    vectors, faults = _vectors(arrays["features"])
    problems += faults
    columns: dict[str, list[str]] = {}
    for name in _COLUMNS:
        if name in arrays:
            columns[name], faults = _texts(
                name, arrays[name], len(arrays["features"]) if arrays["features"].ndim else 0
            )
            problems += faults
    if problems:
        refuse(str(file), problems)
    # NumPy turns a missing value in an array of text into the text "nan".
    labels = ["" if is_missing_text(label) else label for label in columns["labels"]]
    dataset = ArrayDataset(
        vectors,
        labels,
        columns.get("keys"),
        kind="features",
        splits=sides(columns.get("splits")),
        roles=columns.get("roles"),
    )
    return usable_dataset(dataset, str(file))


def _vectors(values: Array) -> tuple[Floats32, list[str]]:
    """Return float32 vectors, and a list of problems."""
    empty = np.empty((0, 1), np.float32)
    if values.ndim != 2 or not values.size:
        return empty, [f"features must have the shape (N, F), not {values.shape}."]
    if values.dtype.kind not in "fiu":
        return empty, [f"features must be real numbers, not {values.dtype}."]
    # A float64 beyond float32 becomes infinite, which `usable_dataset` reports.
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(values, dtype=np.float32), []


def _texts(name: str, values: Array, count: int) -> tuple[list[str], list[str]]:
    """Return a column as text, and a list of problems."""
    if values.shape != (count,):
        return [], [f"{name} must have the shape ({count},) like the features, not {values.shape}."]
    if values.dtype.kind not in ("Uiu" if name in ("labels", "keys") else "U"):
        return [], [
            f"{name} must be text{' or whole numbers' if name in ('labels', 'keys') else ''}, not"
            f" {values.dtype}."
        ]
    listed = values.tolist()
    # The number -1 means no label, the text "-1" is one.
    if name == "labels":
        listed = ["" if value == -1 else value for value in listed]
    return [str(value) for value in listed], []


def parquet(path: Path, column: Literal["features", "vector"] | None = None) -> Dataset:
    """Read vectors from a Parquet table, or from a folder that `retrieval embed` wrote.

    A table has a column `features` or `vector` with lists of numbers, and a column `label`.
    Optional columns are `key` or `id`, `split` ("train", "validation", "test") and `role` ("query",
    "gallery", ""). All other columns are metadata. For a folder, `split` and `role` are read from
    the items' metadata.

    Args:
        path: the table or the folder. A relative path starts at the working directory.
        column: which vectors of a folder to read: "features" for the backbone's features, or
            "vector" for the embeddings. By default the features, or the embeddings if the folder
            has no features.

    Raises:
        DataError: the file cannot be read, a label is missing, a key occurs twice, or a vector is
            not finite.
    """
    if not path.exists():
        raise DataError(
            f"[data] path: {path} does not exist. Relative paths start at {Path.cwd()}."
        )
    if path.is_dir():
        if not any(path.glob("part-*.parquet")):
            raise DataError(
                f"{path} is not a folder of embeddings. Write one with 'retrieval embed', or name a"
                " Parquet table."
            )
        items, arrays = in_memory(path, column)
    elif column is not None:
        raise DataError(f"{path} is a table, which has one column of vectors. Remove 'column'.")
    else:
        sources = collect([path], "features")
        assert sources.features is not None
        items = sources.items
        arrays = sources.features
    metadata = [dict(item.metadata) for item in items]
    columns = {
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
        [item.id for item in items],
        kind="features",
        splits=sides(columns["split"]),
        roles=columns["role"],
        metadata=metadata,
    )
    return usable_dataset(dataset, str(path))
