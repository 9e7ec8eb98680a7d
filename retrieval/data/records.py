"""CIFAR's binary records: one or two label bytes, then red, green and blue planes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from retrieval.base.arrays import Pixels
from retrieval.errors import DataError

SIDE = 32
_MAX_RECORDS = 1_000_000  # of a file; CIFAR has at most 50,000


def read_records(path: Path, classes: Sequence[int], name: str) -> tuple[Pixels, Pixels]:
    """Return images, uint8 (N, 32, 32, 3), and labels (N, label bytes).

    Args:
        path: the file.
        classes: number of classes of each label byte.
        name: name of the data set, for messages.

    Raises:
        DataError: the file is missing, is empty, ends within a record, or has too large a label.
    """
    label_bytes = len(classes)
    length = label_bytes + 3 * SIDE * SIDE
    try:
        size = path.stat().st_size
        if not size or size % length or size // length > _MAX_RECORDS:
            raise DataError(
                f"{path} has {size:,} bytes; a file of {name}'s binary version holds 1 to"
                f" {_MAX_RECORDS:,} whole records of {length:,} bytes."
            )
        records = np.fromfile(path, dtype=np.uint8).reshape(-1, length)
    except OSError as fault:
        raise DataError(f"{path} cannot be read: {fault.strerror}.") from fault
    for position, count in enumerate(classes):
        column = records[:, position]
        if column.max() >= count:
            raise DataError(
                f"{path}: record {int(column.argmax())} has the label {int(column.max())}; labels"
                f" go from 0 to {count - 1}."
            )
    pixels = np.ascontiguousarray(
        records[:, label_bytes:].reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
    )
    return pixels, records[:, :label_bytes]
