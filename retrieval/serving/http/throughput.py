"""How much a queue may hold: as many as have their turn within some seconds, as measured, whatever each of them costs."""

from __future__ import annotations

import time

_KEPT = 0.98  # of what was noted before, each time
_ENOUGH = 20  # turns that say how long one takes
_MOST = 1000


class Throughput:
    """The work that is done in a second while more of it waits; for any thread: two that note at a time may lose one.

    Args:
        least: that a queue holds at any rate.
        seconds: within which the last one in a longer queue has its turn.
    """

    def __init__(self, least: int, seconds: float) -> None:
        self._least, self._seconds = least, seconds
        self._done = self._took = 0.0
        self._since: float | None = None

    def note(self, done: int, *, more: bool) -> None:
        """Count work that is done.

        Args:
            done: how many.
            more: whether others wait: only then the next ones tell how long their turns take.
        """
        now = time.monotonic()
        if self._since is not None:
            self._done = _KEPT * self._done + done
            self._took = _KEPT * self._took + now - self._since
        self._since = now if more else None

    @property
    def room(self) -> int:
        """How many a queue may hold now."""
        if self._done < _ENOUGH:
            return self._least
        return max(self._least, min(_MOST, int(self._seconds * self._done / max(self._took, 1e-6))))
