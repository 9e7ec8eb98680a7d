"""The index that is served: it may be exchanged for another while requests use it."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from retrieval.serving.index.index import Index


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

    def use(self) -> _Use:
        """Give the index inside a block; it stays open until that ends. For a thread: the last user of an index that gave way closes it."""
        return _Use(self)

    def hold(self) -> _Held:
        """Count a user in."""
        with self._lock:
            self._held.users += 1
            return self._held

    def let_go(self, held: _Held) -> None:
        """Count a user out."""
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


class _Use:
    """A block that uses the index of its beginning."""

    __slots__ = ("_current", "_held")

    def __init__(self, current: Current) -> None:
        self._current = current

    def __enter__(self) -> Index:
        self._held = self._current.hold()
        return self._held.index

    def __exit__(self, *_: object) -> None:
        self._current.let_go(self._held)
