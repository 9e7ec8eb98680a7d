"""Items of recent answers, in memory: most searches find again what others found."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from retrieval.serving.local.rows import Row, from_row
from retrieval.serving.stores.contract import Item

_BYTES = 32 << 20
_ITEM = 1000  # bytes at most of an item without its texts
_TEXT, _PATH, _JSON = 4, 16, 24
"""The same of each character of its texts; of its path, which is kept whole and in parts; of its metadata: "[]," becomes a list."""


class Remembered:
    """Items as the record has them, without arrays, by number; those that were asked for last. Safe in threads.

    The record never changes a row and never gives a number again: what is known of a number stays true, whichever process writes. Whether there is
    still such an item, the view of the moment says.

    Two halves: what is new, or found in the old half, goes to the young one; when that is full, it becomes the old one, and what
    the old one still has is forgotten. So to find an item again moves nothing, most of the time, and needs no lock.

    Args:
        most: bytes that they may take.
    """

    def __init__(self, most: int = _BYTES) -> None:
        self._half = most // 2
        self._young: dict[int, Item] = {}
        self._old: dict[int, Item] = {}
        self._sizes: dict[int, int] = {}  # of the young ones
        self._old_sizes: dict[int, int] = {}
        self._bytes = self._old_bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    @property
    def bytes(self) -> int:
        """How many they take."""
        return self._bytes + self._old_bytes

    def find(self, numbers: Sequence[int]) -> list[Item | None]:
        """Return the item of each number; None where it is not remembered."""
        found = list(map(self._young.get, numbers))
        if not all(found):
            with self._lock:
                for at, number in enumerate(numbers):
                    if found[at] is None:
                        found[at] = self._young.get(number) or self._again(number)
        return found

    def _again(self, number: int) -> Item | None:
        """Return an item of the old half, which becomes young."""
        item = self._old.pop(number, None)
        if item is not None:
            size = self._old_sizes.pop(number)
            self._old_bytes -= size
            self._add(number, item, size)
        return item

    def _add(self, number: int, item: Item, size: int) -> None:
        if self._bytes + size > self._half:
            self._old, self._old_sizes, self._old_bytes = self._young, self._sizes, self._bytes
            self._young, self._sizes, self._bytes = {}, {}, 0
        self._young[number], self._sizes[number] = item, size
        self._bytes += size

    def keep(self, rows: Iterable[Row]) -> dict[int, Item]:
        """Return rows of the record as items, and remember them.

        Raises:
            StoreError: one is not what this package writes.
        """
        found = {row[0]: from_row(row) for row in rows}
        sizes = {row[0]: _size(row) for row in rows}
        with self._lock:
            for number, item in found.items():
                known = number in self._young or self._again(number) is not None
                if not known and sizes[number] <= self._half:
                    self._add(number, item, sizes[number])
        return found


def _size(row: Row) -> int:
    """Return how many bytes an item takes at most."""
    _, id, label, metadata, path, stamp, keep, _, _, _, source = row
    texts = len(id) + len(label or "") + len(stamp or "") + len(keep) + len(source or "")
    return _ITEM + _TEXT * texts + _PATH * len(path or "") + _JSON * len(metadata)
