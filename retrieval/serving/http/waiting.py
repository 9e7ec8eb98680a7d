"""Waiting for work: no longer than the deadline, and only as long as the client does."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request

from retrieval.serving.http.access.roles import caller_of
from retrieval.serving.http.errors import Gone, RequestError
from retrieval.serving.http.pool import ends

T = TypeVar("T")

_SOON = 0.05  # seconds after which a request that is worked on is watched for its client's leaving


async def in_time(request: Request, work: Awaitable[T], seconds: float | None) -> T:
    """Return what some work gives, within a deadline and as long as its client waits.

    Args:
        request: whose work it is.
        work: what is waited for; cancelled when it is not.
        seconds: the deadline; None for none.

    Raises:
        RequestError: 503, the deadline has passed.
        Gone: the client has left.
    """
    before = ends.set(math.inf if seconds is None else time.monotonic() + seconds)
    task = asyncio.current_task()
    left = _Departure(request.receive, task)
    timer = asyncio.get_running_loop().call_later(_SOON, left.watch)
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise RequestError(
            503, f"The answer took longer than {seconds:g} seconds. Try again in a moment.", "deadline"
        ) from None
    except asyncio.CancelledError:
        if not left.noticed:
            raise
        raise Gone from None
    finally:
        timer.cancel()
        left.stop()
        ends.reset(before)


def client_of(request: Request) -> str:
    """Return whose request it is: clients take turns by their key, and by their address where they have none."""
    caller = caller_of(request.scope)
    return f"key {caller.name}" if caller.name else caller.address


class _Departure:
    """Cancels a request's task when its client leaves."""

    def __init__(self, receive: Callable[[], Awaitable[Any]], task: asyncio.Task[Any] | None) -> None:
        self._receive = receive
        self._task = task
        self._watch: asyncio.Task[None] | None = None
        self.noticed = False

    def watch(self) -> None:
        self._watch = asyncio.ensure_future(self._wait())

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.noticed = True
        if self._task is not None:
            self._task.cancel()

    def stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
