"""A limit on how long a task's work may take."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from types import TracebackType

_LENGTHS = 16  # of limits that are remembered: a server has a few


class Limit:
    """A block of a task that is cancelled after some seconds, and then ends in `TimeoutError`: `asyncio.timeout` at a tenth of its cost.

    Args:
        seconds: that it may take; infinite for as long as it does.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._cancelled = False
        self._row: _Row | None = None

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._before = task, task.cancelling()
        self._loop = task.get_loop()
        if self._seconds < math.inf:
            self._row = _row(self._loop, self._seconds)
            self._row.add(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._row is not None:
            self._row.remove(self)
        if self._cancelled and self._task.uncancel() <= self._before and kind is asyncio.CancelledError:
            raise self._reason() from None

    def over(self) -> None:
        """Act on the time that has passed."""
        self._cancel()

    def _cancel(self) -> None:
        if not self._cancelled:  # a second time would look like somebody else's
            self._cancelled = True
            self._task.cancel()

    def _reason(self) -> Exception:
        return TimeoutError()


class _Row:
    """The limits of one length on one event loop. They end in the order in which they began, so one timer does for all: for the first."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._loop, self._seconds = loop, seconds
        self._ends: dict[Limit, float] = {}
        self._timed = False

    def add(self, one: Limit) -> None:
        """Begin with one."""
        self._ends[one] = time.monotonic() + self._seconds
        if not self._timed:
            self._timed = True
            self._loop.call_later(self._seconds, self._look)

    def remove(self, one: Limit) -> None:
        """Be done with one, over or not."""
        self._ends.pop(one, None)

    def _look(self) -> None:
        """End those whose time has passed, and come again for the first of the others."""
        now, self._timed = time.monotonic(), False
        for one, end in list(self._ends.items()):
            if end > now:
                self._timed = True
                self._loop.call_later(end - now, self._look)
                break
            del self._ends[one]
            one.over()


class _Rows(threading.local):
    """The rows of the event loop that a thread runs."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.of: dict[float, _Row] = {}


_rows = _Rows()


def _row(loop: asyncio.AbstractEventLoop, seconds: float) -> _Row:
    if _rows.loop is not loop or len(_rows.of) > _LENGTHS:
        _rows.loop, _rows.of = loop, {}  # limits that have begun keep their row
    row = _rows.of.get(seconds)
    if row is None:
        row = _rows.of[seconds] = _Row(loop, seconds)
    return row
