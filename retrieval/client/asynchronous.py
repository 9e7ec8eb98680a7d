"""The client for asyncio."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, Unpack

from retrieval.client import requests
from retrieval.client.folder import push_folder
from retrieval.client.requests import Call, Filter, NewItem, SearchOptions
from retrieval.client.retrying import Retries
from retrieval.client.transport import Connection, Exchange

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


class AsyncClient:
    """A search server, asked over HTTP from asyncio. Its methods are `Client`'s, to be awaited.

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

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._exchange.close()

    async def search(
        self,
        image: Image | None = None,
        *,
        vector: Iterable[float] | None = None,
        id: str | int | None = None,
        **options: Unpack[SearchOptions],
    ) -> SearchAnswer:
        """Return what is nearest; see `Client.search`."""
        return await self._do(requests.search, image, vector, id, options)

    async def search_batch(
        self,
        images: Iterable[Image] = (),
        *,
        vectors: Iterable[Iterable[float]] = (),
        ids: Iterable[str | int] = (),
        **options: Unpack[SearchOptions],
    ) -> BatchAnswer:
        """Return what is nearest to each of several; see `Client.search_batch`."""
        return await self._do(requests.search_batch, images, vectors, ids, options)

    async def put(
        self,
        id: str,
        image: Image | None = None,
        *,
        vector: Iterable[float] | None = None,
        label: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        keep: str | None = None,
    ) -> PutAnswer:
        """Add or replace an item; see `Client.put`."""
        return await self._do(requests.put, NewItem(id, image, vector, label, metadata or {}), keep)

    async def add(self, items: Iterable[NewItem], *, idempotency_key: str | None = None) -> AddAnswer:
        """Add or replace several items, all or none; see `Client.add`."""
        return await self._do(requests.add, items, idempotency_key)

    async def get(self, id: str | int, *, vector: bool = False) -> ItemAnswer:
        """Return an item, with its vector when asked for."""
        return await self._do(requests.get, id, vector)

    async def items(
        self, filter: Filter | None = None, *, fields: Sequence[str] | None = None, page: int = 100
    ) -> AsyncIterator[ItemAnswer]:
        """Iterate over the items; see `Client.items`."""
        cursor: str | None = None
        while True:
            got = await self._do(requests.page, filter, fields, page, cursor)
            for item in got.items:
                yield item
            cursor = got.cursor
            if cursor is None:
                return

    async def delete(self, id: str) -> None:
        """Delete an item; `ServerError` with status 404 where there is none."""
        await self._do(requests.delete, id)

    async def delete_where(self, filter: Filter) -> int:
        """Delete all items that match, and return how many; never repeated after a fault."""
        return await self._do(requests.delete_where, filter)

    async def image(self, id: str | int) -> bytes:
        """Return an item's original; see `Client.image`."""
        return await self._do(requests.picture, id, "image")

    async def thumbnail(self, id: str | int) -> bytes:
        """Return a small JPEG of an item's original."""
        return await self._do(requests.picture, id, "thumbnail")

    async def index(self) -> IndexAnswer:
        """Return what the index is."""
        return await self._do(requests.index)

    async def snapshot(self, *, seconds: float = 3600.0) -> str:
        """Have the server write a snapshot, wait until it is whole, and return its name."""
        return await self._do(requests.snapshot, seconds)

    async def push(
        self,
        folder: str | Path,
        *,
        connections: int = 4,
        batch: int = 16,
        progress: Callable[[PushProgress], None] | None = None,
    ) -> PushReport:
        """Put the images below a folder on the server, and return what became of them.

        An item's id is its path below the folder, its label the first folder of it, and its metadata's `sha256` the hash of the file. An item that is there
        with the same hash is not sent again, so that an interrupted push goes on. A file that the server refuses is in the report.

        Args:
            folder: looked through with all folders below it, but for hidden ones.
            connections: requests at a time; each holds one batch in memory.
            batch: most images of a request; the server's own limit where that is smaller.
            progress: told after each batch.
        """
        return await push_folder(self, Path(folder), connections, batch, progress)

    async def _do(self, make: Callable[P, Call[T]], *args: P.args, **named: P.kwargs) -> T:
        call = await asyncio.to_thread(make, *args, **named)  # it may read and encode images
        return await self._exchange.send(call)
