"""What rows of Parquet tables hold: images, read one after another, and features, kept in a file while they are encoded."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import DataError
from retrieval.serving.index.locations import Location
from retrieval.serving.index.origins import Container
from retrieval.serving.index.tables import Table, list_lengths, sentences

_IMAGES = 4
"""Images that are in memory together."""
_WIDTH = 1_000_000


class TableImages(Container):
    """The images of a table; a part is the number of a row.

    Args:
        location: of the table.
    """

    def __init__(self, location: Location) -> None:
        self._location = location
        self._table = Table(location, "image")
        self._starts = self._table.starts()
        self._group = -1
        self._batches: Iterator[Any] = iter(())
        self._first = 0
        self._batch: Any = None

    def read(self, part: str, most: int) -> bytes:
        """Return the image of a row; see `Container.read`."""
        if not part.isascii() or not part.isdigit() or not int(part) < self._starts[-1]:
            raise DataError(f"{self._location.name} has no row '{part[:40]}'.")
        row = int(part)
        name = f"{self._location.name}, row {row},"
        self._go_to(row)
        column = self._batch.column(0)
        with sentences(self._location):
            if self._table.content == "image.bytes":
                column = column.field("bytes") if column[row - self._first].is_valid else column
            value = column[row - self._first]
            if not value.is_valid:
                raise DataError(f"{name} holds no image.")
            content = value.as_buffer()
            if content.size > most:
                raise DataError(
                    f"{name} has {content.size:,} bytes; the limit is {most:,}. Save it smaller, or raise the limit."
                )
            return bytes(content)

    def _go_to(self, row: int) -> None:
        """Have the batch that holds a row."""
        group = bisect.bisect_right(self._starts, row) - 1
        if group != self._group or row < self._first:
            assert self._table.content is not None
            self._group, self._batch = group, None
            self._first = self._starts[group]
            self._batches = self._table.batches([self._table.content], _IMAGES, group)
        while self._batch is None or row >= self._first + self._batch.num_rows:
            self._first += 0 if self._batch is None else self._batch.num_rows
            self._batch = next(self._batches, None)
            if self._batch is None:
                self._group = -1
                raise DataError(f"{self._location.name} is damaged: it ends before row {row}.")

    def close(self) -> None:
        """Close the table."""
        self._batch, self._batches = None, iter(())
        self._table.close()


class Spooled:
    """Vectors (N, F) of any number of tables, in a file until they are encoded.

    Args:
        file: an empty one, open for reading and writing.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._first: Location | None = None
        self._width = 0
        self.count = 0

    def take(self, location: Location, row: int, column: Any) -> None:
        """Take a column of lists of numbers, the first of which is of a row.

        Raises:
            DataError: a row has no list, or one of another length than all before.
        """
        count = len(column)
        with sentences(location):
            if column.null_count:
                empty = next(at for at in range(count) if not column[at].is_valid)
                raise DataError(f"{location.name}: row {row + empty} has no vector.")
            values = column.flatten()
            lengths = list_lengths(column)
        if not count:
            return
        if not self._width:
            self._first, self._width = location, int(lengths[0])
            if not 0 < self._width <= _WIDTH:
                raise DataError(
                    f"{location.name}: a vector of {self._width:,} numbers; 1 to {_WIDTH:,} are read."
                )
        if (lengths != self._width).any():
            at = int(np.argmax(lengths != self._width))
            first = "" if location == self._first or self._first is None else f" of {self._first.name}"
            raise DataError(
                f"{location.name}: row {row + at} has a vector of {int(lengths[at]):,} numbers, the first{first} has {self._width:,}: "
                "one index takes one width."
            )
        with np.errstate(over="ignore"):
            self._file.write(values.to_numpy(zero_copy_only=False).astype("<f4").tobytes())
        self.count += count

    def add(self, location: Location, vectors: NDArray[np.float32]) -> None:
        """Take the vectors (N, F) of a file that is no table; see `take`."""
        if self._width and vectors.shape[1] != self._width:
            raise DataError(
                f"{location.name} holds vectors of {vectors.shape[1]} numbers, others of {self._width}: one index takes one width."
            )
        self._first, self._width = self._first or location, vectors.shape[1]
        self._file.write(np.ascontiguousarray(vectors, "<f4").tobytes())
        self.count += len(vectors)

    def array(self) -> NDArray[np.float32]:
        """Return all vectors, read from the file as they are needed."""
        self._file.flush()
        return np.memmap(self._file, "<f4", "r", shape=(self.count, self._width))
