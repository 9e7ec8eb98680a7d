"""An event loop in a thread of its own, for those who wait."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from retrieval.errors import DataError

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for any number of threads; the loop's own thread starts with the first, and ends with this object at the latest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process = os.getpid()
        self._closed = False

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what a coroutine gives; interrupted, it is cancelled.

        Raises:
            DataError: this is closed, or of the process that this one was forked from.
        """
        try:
            loop = self._started()
        except DataError:
            work.close()
            raise
        future = asyncio.run_coroutine_threadsafe(work, loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._closed:
                raise DataError("The client is closed.")
            if self._process != os.getpid():
                raise DataError("The client is of the process that this one was forked from. Make a new one.")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_serve, args=(self._loop,), name="client", daemon=True).start()
                weakref.finalize(self, _stop, self._loop)
            return self._loop

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Run a last coroutine where others have run, and end the thread."""
        with self._lock:
            begun = self._loop is not None and not self._closed and self._process == os.getpid()
        if begun:
            self.run(last)
        else:
            last.close()
        with self._lock:
            self._closed, loop, self._loop = True, self._loop, None
        if begun and loop is not None:
            _stop(loop)


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    with suppress(RuntimeError):  # it has ended
        loop.call_soon_threadsafe(loop.stop)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()
