"""Items of recent answers, in memory: most searches find again what others found."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

from retrieval.serving.local.rows import Row, from_row
from retrieval.serving.stores.contract import Item

_BYTES = 32 << 20
_ITEM, _CHARACTER = (
    1000,
    24,
)  # bytes at most of an item, and of each character of its texts: "[]," becomes a list


class Remembered:
    """Items as the record has them, without arrays, by number; those that were asked for last. Safe in threads.

    The record never changes a row and never gives a number again: what is known of a number stays true, whichever process writes. Whether there is
    still such an item, the view of the moment says.

    Args:
        most: bytes that they may take.
    """

    def __init__(self, most: int = _BYTES) -> None:
        self._most = most
        self._bytes = 0
        self._items: OrderedDict[int, tuple[Item, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._items)

    def find(self, numbers: Iterable[int]) -> dict[int, Item]:
        """Return those that are remembered."""
        found, items = {}, self._items
        with self._lock:
            for number in numbers:
                if (known := items.get(number)) is not None:
                    items.move_to_end(number)
                    found[number] = known[0]
        return found

    def keep(self, rows: Iterable[Row]) -> dict[int, Item]:
        """Return rows of the record as items, and remember them.

        Raises:
            StoreError: one is not what this package writes.
        """
        found = {row[0]: from_row(row) for row in rows}
        sizes = {
            row[0]: _ITEM + _CHARACTER * sum(len(one) for one in row if isinstance(one, str | bytes))
            for row in rows
        }
        with self._lock:
            for number, item in found.items():
                _, before = self._items.pop(number, (item, 0))
                self._items[number] = item, sizes[number]
                self._bytes += sizes[number] - before
            while self._bytes > self._most:
                self._bytes -= self._items.popitem(last=False)[1][1]
        return found
