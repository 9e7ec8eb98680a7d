"""The client for asyncio."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import EllipsisType, TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from retrieval.client import answers, requests
from retrieval.client.folder import push_folder
from retrieval.client.requests import Filter, NewItem, SearchOptions
from retrieval.client.transport import Call, Connection, Retries

if TYPE_CHECKING:
    from retrieval.client.folder import PushProgress, PushReport
    from retrieval.client.requests import Image

T = TypeVar("T")


class AsyncClient:
    """A search server, asked over HTTP from asyncio.

    An image is a path, a file's bytes, a Pillow image, or a uint8 array (H, W) or (H, W, 3). Every
    method may raise `DataError`, for an argument that cannot be sent, and `ServerError`: the server
    refuses, fails or cannot be reached.

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
        self._connection = Connection(url, key, index, timeout, retries, verify)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._connection.close()

    async def search(
        self,
        image: Image | None = None,
        *,
        vector: Iterable[float] | None = None,
        id: str | None = None,
        **options: Unpack[SearchOptions],
    ) -> answers.SearchAnswer:
        """Return what is nearest to an image, a vector (P numbers) or an item of the index.

        Args:
            image: one; or
            vector: one; or
            id: of an item, which is not among its neighbours.
            options: k, filter, candidates, fields (of the metadata), explain.
        """
        body = await _made(requests.search_body, image, vector, id, options)
        return await self._send(Call("POST", "/search", answers.read_search, content=body))

    async def search_batch(
        self,
        images: Iterable[Image] = (),
        *,
        vectors: Iterable[Iterable[float]] = (),
        ids: Iterable[str] = (),
        **options: Unpack[SearchOptions],
    ) -> answers.BatchAnswer:
        """Return what is nearest to each of several images, vectors or items, in one request."""
        body = await _made(requests.batch_body, images, vectors, ids, options)
        return await self._send(Call("POST", "/search/batch", answers.read_batch, content=body))

    async def put(
        self,
        id: str,
        image: Image | None = None,
        *,
        vector: Iterable[float] | None = None,
        label: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        keep: str | None = None,
    ) -> answers.PutAnswer:
        """Add an item, or replace the whole item that has its id.

        Args:
            id: of the item.
            image: of which its vector is made; or
            vector: P numbers.
            label: text.
            metadata: what JSON can hold.
            keep: what the index keeps of the image: "copy" (by default), "thumbnail" or "nothing".
        """
        item = NewItem(id, image, vector, label, metadata or {})
        body = await _made(requests.item_body, item, keep) | requests.id_params(id)
        return await self._send(Call("PUT", "/item", answers.read_put, content=body))

    async def update(
        self,
        id: str,
        *,
        label: str | EllipsisType | None = ...,
        metadata: Mapping[str, Any] | EllipsisType = ...,
    ) -> answers.PutAnswer:
        """Change the label or the metadata of an item that is there; what is not given stays.

        Args:
            id: of the item.
            label: text, or None for no label.
            metadata: all of the item's metadata from now on.
        """
        changes = {"label": label, "metadata": metadata}
        given = {name: value for name, value in changes.items() if value is not ...}
        body = requests.json_body(given) | requests.id_params(id)
        return await self._send(Call("PATCH", "/item", answers.read_put, content=body))

    async def add(self, items: Iterable[NewItem]) -> answers.AddAnswer:
        """Add several items in one request, or replace those that have their ids: all or none.

        Args:
            items: at most as many as the index's limit `batch`.
        """
        body = await _made(requests.items_body, items)
        return await self._send(Call("POST", "/items", answers.read_add, content=body))

    async def get(self, id: str, *, vector: bool = False) -> answers.ItemAnswer:
        """Return an item, with its vector when asked for."""
        params = requests.id_params(id, **({"vector": "true"} if vector else {}))
        return await self._send(Call("GET", "/item", answers.read_item, content=params))

    async def items(
        self,
        filter: Filter | None = None,
        *,
        fields: Sequence[str] | None = None,
        page: int = 100,
    ) -> AsyncIterator[answers.ItemAnswer]:
        """Iterate over the items, or those that match, in the order of their ids, page by page."""
        cursor: str | None = None
        while True:
            got = await self._page(filter, fields, page, cursor)
            for item in got.items:
                yield item
            cursor = got.cursor
            if cursor is None:
                return

    async def delete(self, id: str) -> None:
        """Delete an item; `ServerError` with status 404 where there is none."""
        params = requests.id_params(id)
        await self._send(Call("DELETE", "/item", lambda content: None, gone_is_done=True, content=params))

    async def delete_where(self, filter: Filter) -> int:
        """Delete all items that match, and return how many.

        A fault never leads to a repetition, since other items may match by then.
        """
        body = requests.json_body({"filter": filter})
        call = Call("POST", "/delete", answers.read_deleted, repeats=False, content=body)
        return (await self._send(call)).deleted

    async def image(self, id: str) -> bytes:
        """Return an item's original, or a PNG of it where browsers do not show its format."""
        return await self._send(Call("GET", "/item/image", bytes, content=requests.id_params(id)))

    async def thumbnail(self, id: str) -> bytes:
        """Return a JPEG of an item's original, at most 256 pixels wide and high."""
        return await self._send(Call("GET", "/item/thumbnail", bytes, content=requests.id_params(id)))

    async def index(self) -> answers.IndexAnswer:
        """Return what the index is."""
        return await self._send(Call("GET", "/index", answers.read_index))

    async def snapshot(self, *, seconds: float = 3600.0) -> str:
        """Have the server write a snapshot, wait until it is whole, and return its name."""
        call = Call("POST", "/snapshots", answers.read_snapshot, repeats=False, seconds=seconds)
        return (await self._send(call)).snapshot

    async def push(
        self,
        folder: str | Path,
        *,
        connections: int = 4,
        batch: int = 16,
        progress: Callable[[PushProgress], None] | None = None,
    ) -> PushReport:
        """Put the images below a folder on the server, and return what became of them.

        An item's id is its path below the folder, its label the first folder of that path, and its
        metadata's `sha256` the hash of the file. An item that is there with the same hash is not
        sent again, so an interrupted push goes on. A file that the server refuses is in the report.

        Args:
            folder: searched with all folders below it, but for hidden ones; links are followed.
            connections: requests at a time; each holds one batch in memory.
            batch: most images of a request; the server's own limit where that is smaller.
            progress: called after each batch.
        """
        return await push_folder(self, Path(folder), connections, batch, progress)

    async def _page(
        self,
        filter: Filter | None,
        fields: Sequence[str] | None,
        limit: int,
        cursor: str | None,
    ) -> answers.Page:
        params = requests.texts({"filter": filter, "fields": fields, "limit": str(limit), "cursor": cursor})
        return await self._send(Call("GET", "/items", answers.read_page, content={"params": params}))

    async def _send(self, call: Call[T]) -> T:
        return await self._connection.send(call)


async def _made(make: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Make a body in a thread: it may read and encode images."""
    return await asyncio.to_thread(make, *args)
