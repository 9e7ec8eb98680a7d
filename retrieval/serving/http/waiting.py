"""Waiting for work: no longer than the deadline, and only as long as the client does."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, TypeVar

from starlette.requests import Request

from retrieval.serving.http.access.roles import caller_of
from retrieval.serving.http.errors import Gone, RequestError
from retrieval.serving.http.leaving import LEAVING, Leaving
from retrieval.serving.http.limit import Limit
from retrieval.serving.http.pool import ends

T = TypeVar("T")

_SOON = 0.05  # seconds after which a request that is worked on is watched for its client's leaving


class _Patience(Limit):
    """A limit on work that a client waits for, which ends in `Gone` when it leaves.

    Args:
        seconds: the deadline; None for none.
        leaving: of the client.
    """

    def __init__(self, seconds: float | None, leaving: Leaving) -> None:
        super().__init__(math.inf if seconds is None else seconds)
        self._leaving = leaving

    def __enter__(self) -> None:
        super().__enter__()
        if self._leaving.over:
            self._cancel()
        else:
            self._leaving.told.add(self._cancel)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leaving.told.discard(self._cancel)
        super().__exit__(kind, error, trace)

    def _reason(self) -> Exception:
        return Gone() if self._leaving.over else _late(self._seconds)


class _Watching(Limit):
    """`_Patience` where only the request itself tells of its client's leaving, as behind another process; most of it is over before anybody looks.

    Args:
        seconds: the deadline; None for none.
        receive: gives the client's leaving.
    """

    def __init__(self, seconds: float | None, receive: Callable[[], Awaitable[Any]]) -> None:
        super().__init__(_SOON)
        self._deadline = seconds
        self._receive = receive
        self._watch: asyncio.Task[None] | None = None
        self._rest: asyncio.TimerHandle | None = None
        self._left = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._rest is not None:
            self._rest.cancel()
        super().__exit__(kind, error, trace)

    def over(self) -> None:
        """Begin to watch, and later end the work."""
        if self._watch is not None:
            self._cancel()
            return
        self._watch = asyncio.ensure_future(self._wait())
        if self._deadline is not None:
            self._rest = self._loop.call_later(max(0.0, self._deadline - _SOON), self.over)

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._left = True
        self._cancel()

    def _reason(self) -> Exception:
        return Gone() if self._left or self._deadline is None else _late(self._deadline)


def _late(seconds: float) -> RequestError:
    said = f"The answer took longer than {seconds:g} seconds. Try again in a moment."
    return RequestError(503, said, "deadline")


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
    leaving: Leaving | None = request.scope.get(LEAVING)
    try:
        with _Watching(seconds, request.receive) if leaving is None else _Patience(seconds, leaving):
            return await work
    finally:
        ends.reset(before)


def arrived(request: Request) -> bool:
    """Return whether all of a request is there, so that its body need not be waited for."""
    leaving: Leaving | None = request.scope.get(LEAVING)
    return leaving is not None and leaving.whole


def client_of(request: Request) -> str:
    """Return whose request it is: clients take turns by their key, and by their address where they have none."""
    caller = caller_of(request.scope)
    return f"key {caller.name}" if caller.name else caller.address
