"""The number of the last transaction that a writer was told is written, in a small file beside the record.

A write-ahead log that was cut off, or altered in its last transaction, looks to SQLite like one whose last write a power cut has torn:
it drops that transaction. This file says that there was one. It is written when the transaction is on the disk already,
without waiting for the disk, so that it costs a commit some microseconds and is never ahead of the record; after a power cut it may be
behind, and then says less. A number that cannot be read says nothing.
"""

from __future__ import annotations

import os
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from retrieval.serving.files.plain import read_plain

FILE = "acknowledged"
_FORM = struct.Struct("<8sQI")
_MAGIC = b"retriev1"


class Acknowledged:
    """The open file of a writer.

    Args:
        folder: of the index.
    """

    def __init__(self, folder: Path) -> None:
        self._handle = os.open(folder / FILE, os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)

    def write(self, number: int) -> None:
        """Note a transaction; where the disk refuses, what is there says less than it could."""
        head = _MAGIC + struct.pack("<Q", number)
        with suppress(OSError):
            os.pwrite(self._handle, _FORM.pack(_MAGIC, number, zlib.crc32(head)), 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._handle)


def acknowledged(folder: Path) -> int:
    """Return the number of a transaction that the record of an index must hold; 0 where that is not known."""
    try:
        content = read_plain(folder / FILE, _FORM.size)
    except OSError:
        return 0
    if len(content) != _FORM.size:
        return 0
    magic, number, sum_ = _FORM.unpack(content)
    return int(number) if magic == _MAGIC and sum_ == zlib.crc32(content[:-4]) else 0
