"""Read the idx files of the MNIST family, plain or gzipped: a big-endian header, then bytes."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from retrieval.base.arrays import Pixels
from retrieval.errors import DataError

_UNSIGNED_BYTE = 0x08
_MAX_BYTES = 1 << 31


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
            if size > _MAX_BYTES:
                raise DataError(
                    f"{path} should hold {size:,} bytes by its header; the limit is {_MAX_BYTES:,}."
                )
            content = file.read(size + 1)  # one more byte, to notice a file that is too long
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise DataError(f"{path} cannot be read: {reason}.") from error
    if len(content) != size:
        if len(content) > size:
            more = "more"
        else:
            more = f"{len(content):,}"
        raise DataError(f"{path} should hold {size:,} bytes after its header, but holds {more}.")
    return np.frombuffer(bytearray(content), dtype=np.uint8).reshape(shape)
