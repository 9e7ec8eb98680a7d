"""The index that is served: it may be exchanged for another while requests use it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from retrieval.serving.index.base import Index


@dataclass(eq=False)
class _Held:
    index: Index
    users: int = 0
    retired: bool = False


class Current:
    """An opened index, which is closed once another took its place and nobody uses it any more.

    Args:
        index: the first one; closing the last one is the caller's.
    """

    def __init__(self, index: Index) -> None:
        self._held = _Held(index)
        self._lock = threading.Lock()

    @property
    def index(self) -> Index:
        """The index of this moment; to be read from within `use`."""
        return self._held.index

    @contextmanager
    def use(self) -> Iterator[Index]:
        """Give the index; it stays open until this ends. For a thread: the last user of an index that gave way closes it."""
        with self._lock:
            held = self._held
            held.users += 1
        try:
            yield held.index
        finally:
            with self._lock:
                held.users -= 1
                last = held.retired and not held.users
            if last:
                held.index.close()

    def exchange(self, index: Index) -> None:
        """Serve another index from now on."""
        with self._lock:
            old, self._held = self._held, _Held(index)
            old.retired = True
            unused = not old.users
        if unused:
            old.index.close()
