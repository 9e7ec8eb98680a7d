"""How long a store may take over what it is asked."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_STOP: ContextVar[float] = ContextVar("stop", default=math.inf)


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Let what a store is asked in this block, in this thread, take no longer than so many seconds together; then it raises `TooSlow`."""
    token = _STOP.set(min(stop_at(), time.monotonic() + seconds))
    try:
        yield
    finally:
        _STOP.reset(token)


def stop_at() -> float:
    """Return when a store must give up on what it is asked now, by `time.monotonic`; infinity outside of `patience`."""
    return _STOP.get()
