"""The memory that all requests' bodies may take together, and how it is given back."""

from __future__ import annotations

import asyncio
import gc
import time
from dataclasses import dataclass
from typing import Any

from retrieval.serving.http.errors import RequestError
from retrieval.serving.memory import Memory

_STALLED = 1.0  # seconds without a byte after which an upload gives way to another when memory is short
_LULL = 1.0  # seconds without a body that has gone
_SOME, _MUCH = 1_000_000, 16_000_000  # bytes of bodies gone: enough to give back in a lull, and at once


@dataclass(eq=False)
class Upload:
    """One body that is arriving, or waits to be searched with; its memory comes back when it is left."""

    budget: Budget
    task: asyncio.Task[Any] | None = None  # that waits for the rest of it
    held: int = 0
    last: float = 0.0
    arriving: bool = True
    evicted: bool = False

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, *_: object) -> None:
        self.budget.end(self)


class Budget:
    """The memory that all bodies together may take; for the event loop.

    Args:
        limit: in bytes.

    Attributes:
        held: bytes of the bodies that are there.
        gone: bytes of those that are there no more.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._uploads: set[Upload] = set()
        self.held = 0
        self.gone = 0

    def upload(self) -> Upload:
        """Open an account."""
        upload = Upload(self, last=time.monotonic())
        self._uploads.add(upload)
        return upload

    def end(self, upload: Upload) -> None:
        """Close an account: its memory comes back."""
        self._uploads.discard(upload)
        self.held -= upload.held
        self.gone += upload.held

    def take(self, upload: Upload, size: int) -> None:
        """Count arrived bytes. When memory is short, the upload that has stalled longest gives its own back.

        Raises:
            RequestError: 503, all of it is taken and none has stalled.
        """
        upload.last = time.monotonic()
        while self.held + size > self._limit:
            others = [one for one in self._uploads if one.arriving and one is not upload]
            stalled = min(others, key=lambda one: one.last, default=None)
            if stalled is None or upload.last - stalled.last < _STALLED or stalled.task is None:
                raise RequestError(
                    503, "The server is busy: uploads take all its memory. Try again in a moment.", "memory"
                )
            self._uploads.discard(stalled)
            self.held -= stalled.held
            self.gone += stalled.held
            stalled.held, stalled.evicted = 0, True
            stalled.task.cancel()
        upload.held += size
        self.held += size


async def give_back(budget: Budget) -> None:
    """Give the memory of bodies that are gone back to the system, for ever: much of it soon, the rest in a lull.

    An exception and its frames are a cycle that may hold a body; collecting it can wait until nobody does.
    """
    memory, given, collected, last = Memory(), 0, 0, 0
    while True:
        await asyncio.sleep(_LULL)
        gone = budget.gone
        if gone == last and gone - collected > _SOME:
            gc.collect()
            memory.give_back()
            given = collected = gone
        elif gone - given > _MUCH:
            memory.give_back()
            given = gone
        last = gone
