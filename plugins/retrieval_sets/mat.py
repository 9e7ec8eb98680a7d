"""Annotations in MATLAB's format 5, within bounds; what a file says is data only, and nothing of it
is run.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from retrieval.errors import DataError

_MOST_BYTES = 64 << 20
_MOST_UNPACKED = 256 << 20
_HEADER = 128
_COMPRESSED = 15


def read_annotations(path: Path, fields: tuple[str, ...]) -> list[tuple[Any, ...]]:
    """Return the rows of a file's variable `annotations`, a structure array: the values of its
    fields, text and numbers.

    Args:
        path: the file.
        fields: their names, in the order that they are wanted in.

    Raises:
        DataError: the file is missing, damaged, too large (also when unpacked), or holds something
            else.
    """
    from scipy.io import loadmat

    try:
        _check(path)
        # opened here, and unpacked with bounds before; objects of MATLAB's are kept as bytes
        with path.open("rb") as file:
            found = loadmat(
                file, variable_names=["annotations"], squeeze_me=True, chars_as_strings=True
            )
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    except Exception as error:  # SciPy's reader raises whatever a damaged file leads it to
        raise DataError(
            f"{path} is no MATLAB file of format 5, or it is damaged: {error}."
        ) from error
    table = found.get("annotations")
    if not isinstance(table, np.ndarray) or table.dtype.names is None:
        raise DataError(f"{path} holds no structure array 'annotations'.")
    if lacking := [name for name in fields if name not in table.dtype.names]:
        raise DataError(
            f"{path}: annotations have no {', '.join(lacking)} (they have:"
            f" {', '.join(table.dtype.names)})."
        )
    return [tuple(_plain(row[name]) for name in fields) for row in np.atleast_1d(table)]


def _plain(value: Any) -> Any:
    """Return a number or text of what a cell holds, None of anything else."""
    array: NDArray[Any] = np.asarray(value)
    if array.dtype == object and array.size == 1:
        array = np.asarray(array.ravel()[0])
    return array.ravel()[0].item() if array.size == 1 and array.dtype.kind in "iufU" else None


def _check(path: Path) -> None:
    """Walk through the file's elements, and refuse one that is too large as it lies or unpacked."""
    size = path.stat().st_size
    if size > _MOST_BYTES:
        raise DataError(f"{path} has {size:,} bytes; annotations have {_MOST_BYTES:,} at most.")
    data = path.read_bytes()
    if len(data) < _HEADER or data[126:128] not in (b"IM", b"MI"):
        raise DataError(f"{path} is no MATLAB file of format 5.")
    order = "<" if data[126:128] == b"IM" else ">"
    at, total = _HEADER, 0
    while at + 8 <= len(data):
        kind, length = struct.unpack_from(f"{order}II", data, at)
        if at + 8 + length > len(data):
            raise DataError(f"{path} is cut short: it has {len(data):,} bytes.")
        total += length
        if kind == _COMPRESSED:
            total += _unpacked(data[at + 8 : at + 8 + length], _MOST_UNPACKED - total, path)
        at += 8 + length
    if total > _MOST_UNPACKED:
        raise DataError(f"{path} unpacks to over {_MOST_UNPACKED:,} bytes; annotations have less.")


def _unpacked(data: bytes, most: int, path: Path) -> int:
    """Return how many bytes packed ones hold, or `most` + 1 where it is more."""
    unpack, count = zlib.decompressobj(), 0
    try:
        part = unpack.decompress(data, 1 << 20)
        while part and count <= most:
            count += len(part)
            part = unpack.decompress(unpack.unconsumed_tail, 1 << 20)
    except zlib.error as error:
        raise DataError(f"{path} is damaged: {error}.") from error
    return min(count, max(most, 0) + 1)
