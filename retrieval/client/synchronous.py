"""The client that waits for its answers."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, Unpack

from retrieval.client import requests
from retrieval.client.asynchronous import AsyncClient
from retrieval.client.loop_thread import LoopThread
from retrieval.client.requests import Call, Filter, NewItem, SearchOptions
from retrieval.client.retrying import Retries
from retrieval.client.transport import Connection, Exchange
from retrieval.errors import DataError

if TYPE_CHECKING:
    from retrieval.client.answers import (
        AddAnswer,
        BatchAnswer,
        IndexAnswer,
        ItemAnswer,
        PutAnswer,
        SearchAnswer,
    )
    from retrieval.client.folder import PushProgress, PushReport
    from retrieval.client.images import Image

P = ParamSpec("P")
T = TypeVar("T")


class Client:
    """A search server, asked over HTTP; threads may share one.

    Requests run in an event loop in a thread of the client's own, which alone bounds a whole answer in time.
    An image is a path, a file's bytes, a Pillow image, or a uint8 array (H, W) or (H, W, 3). Every method may raise `DataError`, for an argument
    that cannot be, and `ServerError`: the server refuses, fails or cannot be reached.

    Args:
        url: of the server: "https://search.example.com".
        key: API key, where the server asks for one.
        index: name of the index, where the server has several.
        timeout: seconds to wait for a connection, or for the next bytes.
        retries: what is repeated, and for how long; None for `Retries()`.
        verify: of TLS: True, False, or an `ssl.SSLContext`.

    Raises:
        DataError: one of them cannot be.
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
        self._exchange = Exchange(Connection(url, key, index, timeout, retries, verify))
        self._loop = LoopThread()

        def beside() -> AsyncClient:
            return AsyncClient(url, key=key, index=index, timeout=timeout, retries=retries, verify=verify)

        self._beside = beside

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._loop.close(self._exchange.close())

    def search(
        self,
        image: Image | None = None,
        *,
        vector: Iterable[float] | None = None,
        id: str | int | None = None,
        **options: Unpack[SearchOptions],
    ) -> SearchAnswer:
        """Return what is nearest to an image, a vector (P numbers) or an item of the index.

        Args:
            image: one; or
            vector: one; or
            id: of an item, which is not among its neighbours.
            options: k, filter, candidates, fields (of the metadata), explain.
        """
        return self._do(requests.search, image, vector, id, options)

    def search_batch(
        self,
        images: Iterable[Image] = (),
        *,
        vectors: Iterable[Iterable[float]] = (),
        ids: Iterable[str | int] = (),
        **options: Unpack[SearchOptions],
    ) -> BatchAnswer:
        """Return what is nearest to each of several images, vectors or items, in one request."""
        return self._do(requests.search_batch, images, vectors, ids, options)

    def put(
        self,
        id: str,
        image: Image | None = None,
        *,
        vector: Iterable[float] | None = None,
        label: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        keep: str | None = None,
    ) -> PutAnswer:
        """Add an item, or put it in the place of the one that has its id.

        Args:
            id: of the item.
            image: of which its vector is made.
            vector: P numbers, in the place of an image. Without either the item is there, and only its label and metadata change.
            label: text.
            metadata: what JSON can hold.
            keep: what the index keeps of the image: "copy" (by default), "thumbnail" or "nothing".
        """
        return self._do(requests.put, NewItem(id, image, vector, label, metadata or {}), keep)

    def add(self, items: Iterable[NewItem], *, idempotency_key: str | None = None) -> AddAnswer:
        """Add several items in one request, or put them in the place of others: all of them, or none.

        Args:
            items: at most as many as the index's limit `batch`.
            idempotency_key: under which the server knows a repetition; a new one by default.
        """
        return self._do(requests.add, items, idempotency_key)

    def get(self, id: str | int, *, vector: bool = False) -> ItemAnswer:
        """Return an item, with its vector when asked for."""
        return self._do(requests.get, id, vector)

    def items(
        self, filter: Filter | None = None, *, fields: Sequence[str] | None = None, page: int = 100
    ) -> Iterator[ItemAnswer]:
        """Iterate over the items, or those that match, in the order of their ids; a page at a time is asked for."""
        cursor: str | None = None
        while True:
            got = self._do(requests.page, filter, fields, page, cursor)
            yield from got.items
            cursor = got.cursor
            if cursor is None:
                return

    def delete(self, id: str) -> None:
        """Delete an item; `ServerError` with status 404 where there is none."""
        self._do(requests.delete, id)

    def delete_where(self, filter: Filter) -> int:
        """Delete all items that match, and return how many; never repeated after a fault."""
        return self._do(requests.delete_where, filter)

    def image(self, id: str | int) -> bytes:
        """Return an item's original, or a PNG of it where browsers do not show its format."""
        return self._do(requests.picture, id, "image")

    def thumbnail(self, id: str | int) -> bytes:
        """Return a JPEG of an item's original, at most 256 pixels wide and high."""
        return self._do(requests.picture, id, "thumbnail")

    def index(self) -> IndexAnswer:
        """Return what the index is."""
        return self._do(requests.index)

    def snapshot(self, *, seconds: float = 3600.0) -> str:
        """Have the server write a snapshot, wait until it is whole, and return its name."""
        return self._do(requests.snapshot, seconds)

    def push(
        self,
        folder: str | Path,
        *,
        connections: int = 4,
        batch: int = 16,
        progress: Callable[[PushProgress], None] | None = None,
    ) -> PushReport:
        """Put the images below a folder on the server; see `AsyncClient.push`. Ctrl-C leaves what is there; the next call goes on.

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
            async with self._beside() as client:
                return await client.push(folder, connections=connections, batch=batch, progress=progress)

        return asyncio.run(run())

    def _do(self, make: Callable[P, Call[T]], *args: P.args, **named: P.kwargs) -> T:
        return self._loop.run(self._exchange.send(make(*args, **named)))
