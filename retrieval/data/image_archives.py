"""What readers of published data sets share: the binary files of MNIST and CIFAR, and counts.

An idx file of the MNIST family, plain or gzipped, is a big-endian header, then bytes. A record of
CIFAR is one or two label bytes, then red, green and blue planes. `differing` compares a data set's
numbers of images and classes with the published ones.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from retrieval.base.arrays import Pixels
from retrieval.errors import DataError, quantity

_UNSIGNED_BYTE = 0x08
_MAX_BYTES = 1 << 31
SIDE = 32
_MAX_RECORDS = 1_000_000  # of a file; CIFAR has at most 50,000

Counts = Literal["published", "any"]
"""Whether a data set must have the published numbers of images and classes."""


class Count(NamedTuple):
    """Number of images and of their classes (None if not published)."""

    images: int
    classes: int | None = None

    def __str__(self) -> str:
        images = quantity(self.images, "image")
        if self.classes is None:
            return images
        return f"{images} of {quantity(self.classes, 'class', 'classes')}"


def differing(
    published: Mapping[str, Sequence[Count]], labels: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return a sentence for each side whose numbers differ from all published ones.

    By side ("" for data without sides), `published` holds the counts of each release or paper, and
    `labels` the label of each image that is present.
    """
    problems = []
    for side in dict.fromkeys([*published, *labels]):
        present = labels.get(side, ())
        count = Count(len(present), len(set(present)))
        releases = published.get(side, ())
        # Some releases state no number of classes.
        if {count, count._replace(classes=None)} & set(releases):
            continue
        counts = " or ".join(str(release) for release in releases) or "no image"
        problems.append(
            f"as published {f'its {side} side' if side else 'it'} has {counts}; here it has"
            f' {count}. Complete it, or set counts = "any" and do not compare its metrics with'
            " published ones."
        )
    return problems


def read_idx(path: Path, dimensions: int) -> Pixels:
    """Return the array in an idx file of unsigned bytes; `.gz` files are decompressed.

    The header consists of two zero bytes, the code of the numbers' type, the number of dimensions,
    and the length of each dimension as 32 bits (Y. LeCun's MNIST page).

    Raises:
        DataError: the file is missing, damaged, cut short, or of another type or number of
            dimensions.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            header = file.read(4)
            if len(header) < 4 or header[:2] != b"\0\0":
                raise DataError(f"{path} is not an idx file.")
            if header[2] != _UNSIGNED_BYTE or header[3] != dimensions:
                raise DataError(
                    f"{path} has {header[3]} dimensions and numbers of type 0x{header[2]:02x}; it"
                    f" should have {dimensions} dimensions and unsigned bytes (0x08)."
                )
            lengths = file.read(4 * dimensions)
            if len(lengths) < 4 * dimensions:
                raise DataError(f"{path} is cut short within its header.")
            shape = struct.unpack(f">{dimensions}I", lengths)
            size = math.prod(shape)
            # A damaged header could ask for more memory than there is.
            if size > _MAX_BYTES:
                raise DataError(
                    f"{path} should hold {size:,} bytes by its header; the limit is {_MAX_BYTES:,}."
                )
            # One more byte, to notice a file that is too long.
            content = file.read(size + 1)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise DataError(f"{path} cannot be read: {reason}.") from error
    if len(content) != size:
        count = "more" if len(content) > size else f"{len(content):,}"
        raise DataError(f"{path} should hold {size:,} bytes after its header, but holds {count}.")
    # A bytearray, because an array on bytes could not be written to.
    return np.frombuffer(bytearray(content), dtype=np.uint8).reshape(shape)


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
    planes = records[:, label_bytes:].reshape(-1, 3, SIDE, SIDE)
    pixels = np.ascontiguousarray(planes.transpose(0, 2, 3, 1))
    return pixels, records[:, :label_bytes]
