"""The client that waits for its answers."""

from __future__ import annotations

import asyncio
import functools
import os
import ssl
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

from retrieval.client.asynchronous import AsyncClient
from retrieval.client.requests import Filter
from retrieval.client.transport import Retries
from retrieval.errors import DataError

if TYPE_CHECKING:
    from retrieval.client.answers import ItemAnswer
    from retrieval.client.folder import PushProgress, PushReport

P = ParamSpec("P")
T = TypeVar("T")


def _waiting(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    """Return a method of `Client` that waits for a method of `AsyncClient`."""

    @functools.wraps(method)
    def wait(self: Client, /, *args: P.args, **named: P.kwargs) -> T:
        return self._run(method(self._client, *args, **named))

    return wait


class Client:
    """A search server, asked over HTTP; threads may share one.

    Requests run in an event loop in a thread of the client's own, which alone bounds a whole answer
    in time. Its methods are those of `AsyncClient`, and wait for their answers.

    Args:
        url: of the server: "https://search.example.com".
        key: API key, where the server asks for one.
        index: name of the index, where the server has several.
        timeout: seconds to wait for a connection, or for the next bytes.
        retries: what is repeated, and for how long; None for `Retries()`.
        verify: of TLS: True, False, or an `ssl.SSLContext`.

    Raises:
        DataError: one of them cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        index: str | None = None,
        timeout: float = 30.0,
        retries: Retries | None = None,
        verify: ssl.SSLContext | bool = True,
    ) -> None:
        self._make = functools.partial(
            AsyncClient, url, key=key, index=index, timeout=timeout, retries=retries, verify=verify
        )
        self._client = self._make()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process = os.getpid()
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections, and end the client's thread."""
        if self._loop is not None and self._process == os.getpid():
            self._run(self._client.close())
            _stop(self._loop)
        self._closed, self._loop = True, None

    search = _waiting(AsyncClient.search)
    search_batch = _waiting(AsyncClient.search_batch)
    put = _waiting(AsyncClient.put)
    update = _waiting(AsyncClient.update)
    add = _waiting(AsyncClient.add)
    get = _waiting(AsyncClient.get)
    delete = _waiting(AsyncClient.delete)
    delete_where = _waiting(AsyncClient.delete_where)
    image = _waiting(AsyncClient.image)
    thumbnail = _waiting(AsyncClient.thumbnail)
    index = _waiting(AsyncClient.index)
    snapshot = _waiting(AsyncClient.snapshot)

    def items(
        self,
        filter: Filter | None = None,
        *,
        fields: Sequence[str] | None = None,
        page: int = 100,
    ) -> Iterator[ItemAnswer]:
        """Iterate over the items, or those that match, in the order of their ids, page by page."""
        cursor: str | None = None
        while True:
            got = self._run(self._client._page(filter, fields, page, cursor))
            yield from got.items
            cursor = got.cursor
            if cursor is None:
                return

    def push(
        self,
        folder: str | Path,
        *,
        connections: int = 4,
        batch: int = 16,
        progress: Callable[[PushProgress], None] | None = None,
    ) -> PushReport:
        """Put the images below a folder on the server; see `AsyncClient.push`.

        Ctrl-C leaves what is there; the next call goes on.

        Raises:
            DataError: an event loop is running here, as in a notebook: await `AsyncClient.push`.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise DataError("An event loop is running here: write `await AsyncClient(url).push(folder)`.")

        async def run() -> PushReport:
            async with self._make() as client:
                return await client.push(folder, connections=connections, batch=batch, progress=progress)

        return asyncio.run(run())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what a coroutine gives; an interrupted caller cancels it.

        Raises:
            DataError: this client is closed, or of the process that this one was forked from.
        """
        try:
            loop = self._running_loop()
        except DataError:
            work.close()
            raise
        future = asyncio.run_coroutine_threadsafe(work, loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _running_loop(self) -> asyncio.AbstractEventLoop:
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


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    with suppress(RuntimeError):  # it has ended
        loop.call_soon_threadsafe(loop.stop)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()
