"""What the items of a dataset are, as a hash: changed content must change it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from retrieval.errors import DataError

if TYPE_CHECKING:
    from retrieval.model.contracts import Dataset


def dataset_identity(dataset: Dataset) -> str | None:
    """Return a hash of the items in their order; None where their content cannot be known without
    reading all.

    Arrays are hashed whole; files (`dataset.files`) by path, size and time of change, with the
    boxes that are cut from them.

    Raises:
        DataError: a file is gone.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{dataset.kind} {len(dataset)}\n".encode())
    if dataset.arrays is not None:
        array = dataset.arrays
        digest.update(f"{array.dtype.str} {array.shape}\n".encode())
        rows = max(
            1, (1 << 24) // max(1, array[:1].nbytes)
        )  # a mapped array need not fit in memory
        for start in range(0, len(array), rows):
            digest.update(np.ascontiguousarray(array[start : start + rows]).data.cast("B"))
        return digest.hexdigest()
    files = getattr(dataset, "files", None)
    if files is None:
        return None
    digest.update(files_identity(files).encode())
    if (boxes := getattr(dataset, "boxes", None)) is not None:
        digest.update(
            repr([None if box is None else tuple(map(float, box)) for box in boxes]).encode()
        )
    return digest.hexdigest()


def files_identity(files: Iterable[Path]) -> str:
    """Return a hash of files by path, size and time of change, in their order.

    Raises:
        DataError: a file is gone.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        try:
            state = file.stat()
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror or error}.") from error
        line = f"{file.absolute()}\0{state.st_size}\0{state.st_mtime_ns}\n"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
