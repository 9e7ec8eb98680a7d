"""Read originals that are not local files of their own: containers in one pass, without holding more than is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import TypeVar

from retrieval.errors import DataError
from retrieval.serving.index.locations import Location
from retrieval.serving.index.origins import Container, Origin
from retrieval.serving.index.shards import ShardImages, is_shard
from retrieval.serving.index.table_contents import TableImages
from retrieval.serving.index.tables import is_table

T = TypeVar("T")


class Readers:
    """Reads originals, one after another; the container of the last one stays open for the next. Not for several threads."""

    def __init__(self) -> None:
        self._open: tuple[Location, Container] | None = None

    def read(self, origin: Origin, most: int) -> bytes:
        """Return an original of `most` bytes at most.

        Raises:
            DataError: its file has changed since it was found, cannot be read or is damaged; or the original is too large.
        """
        if origin.part is None:
            return origin.read(most)
        if self._open is None or self._open[0] != origin.location:
            self.close()
            if origin.location.stamp() != origin.file_stamp:
                raise DataError(
                    f"{origin.location.name} is gone, or has changed since its items were found. Add it again."
                )
            self._open = origin.location, _container(origin.location)
        return self._open[1].read(origin.part, most)

    def close(self) -> None:
        """Close what is open."""
        if self._open is not None:
            self._open[1].close()
            self._open = None


def _container(location: Location) -> Container:
    if is_table(location.file_name):
        return TableImages(location)
    if is_shard(location.file_name):
        return ShardImages(location)
    raise DataError(f"{location.name} is no file that holds images.")


def contents(
    items: Iterable[tuple[T, Origin | None]], most: int
) -> Iterator[tuple[T, bytes | DataError | None]]:
    """Give items with their originals, or why there is none; None for what is a file of its own, which others read.

    Args:
        items: each with its origin; those of one file one after another.
        most: bytes of one original.
    """
    with closing(Readers()) as readers:
        for item, origin in items:
            content: bytes | DataError | None = None
            if origin is not None and origin.part is not None:
                try:
                    content = readers.read(origin, most)
                except DataError as fault:
                    content = fault
            yield item, content
