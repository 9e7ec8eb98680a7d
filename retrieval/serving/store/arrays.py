"""Append-only files of float32 rows: one for each array of a generation.

The record says how many rows are committed; bytes beyond them are nobody's. Files grow in steps, so
that a reader seldom has to map them anew. Each block of bytes has a checksum in the record, which
an append continues and a reader compares when it opens the file.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from retrieval.errors import StoreError
from retrieval.host.files import sync
from retrieval.serving.files.plain import open_plain
from retrieval.serving.store.items import Floats

ARRAYS = "arrays"
"""The folder of an index in which these files lie."""
BUNDLES = "bundles"
BLOCK = 1 << 20  # bytes under one checksum
_STEP = 1 << 16  # bytes by which a file grows at least

Sums = dict[int, int]
"""Checksums by number of the block."""


def file_of(folder: Path, stem: str, name: str) -> Path:
    """Return the file of one array of a generation, or of one part of its structure."""
    return folder / ARRAYS / f"{stem}.{name}"


def append(path: Path, row: int, width: int, chunks: Iterable[Floats], last: int = 0) -> Sums:
    """Write rows behind the first `row` rows of a file, and sync it.

    The caller is inside the record's transaction, or the record does not name the file yet.

    Args:
        path: the file; made where it is missing.
        row: committed rows; what lies behind them is overwritten.
        width: numbers of a row.
        chunks: (n, width) each.
        last: checksum of the block in which row `row` begins, if that has begun.

    Returns:
        New checksums of the blocks that were touched.

    Raises:
        OSError: the disk refuses; committed rows are as they were.
    """
    sums: Sums = {}
    at = row * width * 4
    crc = last if at % BLOCK else 0
    handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    try:
        size = os.fstat(handle).st_size
        if not size and hasattr(os, "geteuid") and os.geteuid() == 0:
            owner = path.parent.stat()  # who owns the index must be able to write what root makes
            os.fchown(handle, owner.st_uid, owner.st_gid)
        for chunk in chunks:
            data = np.ascontiguousarray(chunk, "<f4").data.cast("B")
            if at + len(data) > size:
                size = at + len(data) + max(_STEP, (at + len(data)) // 4)
                os.ftruncate(handle, size)
            while data:
                if at % BLOCK == 0:
                    crc = 0
                done = os.pwrite(handle, data[: BLOCK - at % BLOCK], at)
                sums[at // BLOCK] = crc = zlib.crc32(data[:done], crc)
                data, at = data[done:], at + done
        os.fsync(handle)
    finally:
        os.close(handle)
    return sums


class Array:
    """One array as a reader sees it: the file's committed rows, mapped.

    Args:
        path: the file.
        width: numbers of a row.
    """

    def __init__(self, path: Path, width: int) -> None:
        self.path, self.width = path, width
        self._mapped: Floats = np.empty((0, width), np.float32)
        self._verified = np.zeros(0, bool)

    def rows(self, count: int) -> Floats:
        """Return the first `count` rows, (count, width), mapped from the file.

        Raises:
            FileNotFoundError: it is gone: another process has compacted the generation.
            StoreError: it is shorter, or no regular file.
        """
        if count > len(self._mapped):
            try:
                with open_plain(self.path) as file:
                    capacity = os.fstat(file.fileno()).st_size // (4 * self.width)
                    if capacity < count:
                        raise damaged(self.path, "was cut short")
                    mapped = np.memmap(file, "<f4", "r", shape=(capacity, self.width))
            except FileNotFoundError:
                raise
            except OSError as fault:
                raise damaged(self.path, f"cannot be read: {fault.strerror or fault}") from None
            self._mapped = np.asarray(mapped)  # slices of a memmap cost more
        return self._mapped[:count]

    def verify(self, count: int, sums: Mapping[int, int], rows: np.ndarray | None = None) -> None:
        """Compare the blocks of the first `count` rows with their checksums, each block once.

        Args:
            count: committed rows.
            sums: of all their blocks, at the same moment.
            rows: only blocks that hold these rows; None: all.

        Raises:
            StoreError: one was altered.
        """
        content = self.rows(count).reshape(-1).view(np.uint8).data
        blocks = -(-len(content) // BLOCK)
        if len(self._verified) < blocks:
            more = np.zeros(blocks - len(self._verified), bool)
            self._verified = np.concatenate([self._verified, more])
        wanted = ~self._verified[:blocks]
        if rows is not None:
            size = 4 * self.width
            ends = np.concatenate([rows * size // BLOCK, (rows * size + size - 1) // BLOCK])
            chosen = np.zeros(blocks, bool)
            chosen[ends] = True
            wanted &= chosen
        for block in np.flatnonzero(wanted).tolist():
            if zlib.crc32(content[block * BLOCK : (block + 1) * BLOCK]) != sums.get(block):
                raise damaged(self.path, "was altered")
            self._verified[block] = True


def copy_rows(source: Path, target: Path, size: int) -> None:
    """Copy the first `size` bytes of a file to a new one, which is synced.

    Raises:
        OSError: the disk refuses.
        StoreError: the source is shorter.
    """
    with open_plain(source) as file, target.open("xb") as copy:
        left = size
        while left and (piece := file.read(min(left, BLOCK))):
            copy.write(piece)
            left -= len(piece)
    if left:
        raise damaged(source, "was cut short")
    sync(target)


def damaged(path: Path, fault: str) -> StoreError:
    """Return the error for a file that cannot be used."""
    return StoreError(
        f"The index {path.parent.parent} is damaged: {path.parent.name}/{path.name} {fault}. "
        "Run 'retrieval index check' on it, and restore a snapshot."
    )
