"""`AsyncClient` for asyncio, and the blocking `Client`, which runs an `AsyncClient` in a thread."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import weakref
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    Self,
    TypedDict,
    TypeVar,
    Unpack,
)

from retrieval.errors import DataError

from retrieval_server import responses
from retrieval_server.client.bodies import (
    NewItem,
    as_items,
    dumps,
    form_of,
    id_parameter,
    json_of,
    numbers_of,
    texts_of,
    without_none,
)
from retrieval_server.client.push import Push, PushReport
from retrieval_server.client.sending import Sender

if TYPE_CHECKING:
    from retrieval_server.client.bodies import Image

    Examples = Image | Sequence[Image]
    """One or several ids of items or images."""

P = ParamSpec("P")
T = TypeVar("T")

Filter = str | Mapping[str, Any]
"""A filter of items as text or JSON: `"price < 20"` or `{"price": {"<": 20}}`."""

Order = Literal["id", "newest"]
"""An order of items: by id, or the item first that was last added or changed."""


class SearchOptions(TypedDict, total=False):
    """Options of a search; docs/http.md describes them."""

    k: int
    filter: Filter | None
    candidates: int | None
    fields: Sequence[str] | None
    explain: bool
    group_by: str | None
    group_size: int
    max_distance: float | None
    offset: int
    diversity: float
    words: float | None
    facets: Sequence[str]
    order_by: str | None
    scores: bool
    user: str | None
    bundle: str | None


class AsyncClient(Sender):
    """Asynchronous client of a search server.

    An image is a path, a file's bytes, a Pillow image, or a uint8 array (H, W) or (H, W, 3 or 4).
    Every method may raise `DataError` for an invalid argument, and `ServerError` if the server
    refuses the request, fails or cannot be reached.

    Args:
        url: address of the server, such as "https://search.example.com".
        key: API key, if the server requires one.
        index: name of the index, if the server has several.
        timeout: seconds to wait for a connection or for the next bytes.
        retries: how failed requests are repeated. `None` means `Retries()`.
        verify: TLS verification: True, False or an `ssl.SSLContext`.

    Raises:
        DataError: an argument is invalid, or the environment names an invalid proxy or certificate.
    """

    async def search(
        self,
        image: Image | None = None,
        *,
        vector: Iterable[float] | None = None,
        id: str | None = None,
        text: str | None = None,
        like: Examples = (),
        dislike: Examples = (),
        **options: Unpack[SearchOptions],
    ) -> responses.SearchAnswer:
        """Search for the items nearest to an image, a vector, an item of the index or a text.

        Give one of `image`, `vector`, `id` and `text`, or only `like`.

        Args:
            image: query image.
            vector: query vector, as wide as the index's vectors.
            id: id of an item of the index; the item itself is left out of the results.
            text: query text, if the index's model takes texts.
            like: ids or images that results should resemble; text is an id, a file is a `Path`.
                Images cannot be sent beside a `vector`, `id` or `text`.
            dislike: the same of what results should not resemble.
            options: `k`, `filter`, `fields` (of the metadata) and others; see docs/http.md.
        """
        targets = sum(target is not None for target in (image, vector, id, text))
        examples = {"like": as_items(like), "dislike": as_items(dislike)}
        if targets > 1 or not (targets or examples["like"]):
            raise DataError(
                "Search for exactly one of an image, a vector, an id and a text, or only for likes."
            )
        pictures = {}
        for name, group in examples.items():
            pictures[name] = [entry for entry in group if not isinstance(entry, str)]
            examples[name] = [entry for entry in group if isinstance(entry, str)]
        named = {name: ids for name, ids in examples.items() if ids}
        query = without_none(id=id, vector=numbers_of(vector), text=text)
        if image is None and not any(pictures.values()):
            content = json_of({**query, **named, **options})
        elif query:
            raise DataError("Beside a vector, an id or a text, like and dislike ids, not images.")
        else:
            images = [] if image is None else [image]
            content = await form_of(images, texts_of(**named, **options), **pictures)
        return await self._send("POST", "/search", responses.SearchAnswer, **content)

    async def search_batch(
        self,
        images: Iterable[Image] = (),
        *,
        vectors: Iterable[Iterable[float]] = (),
        ids: Iterable[str] = (),
        texts: Iterable[str] = (),
        **options: Unpack[SearchOptions],
    ) -> responses.BatchAnswer:
        """Search for the items nearest to several images, vectors, items or texts at once."""
        files = list(images)
        kinds: list[list[dict[str, Any]]] = [
            [{"vector": numbers_of(vector)} for vector in vectors],
            [{"id": id} for id in ids],
            [{"text": text} for text in texts],
        ]
        if sum(map(bool, (files, *kinds))) != 1:
            raise DataError("A batch takes a non-empty list of images, vectors, ids or texts.")
        if files:
            content = await form_of(files, texts_of(**options))
        else:
            content = json_of({"queries": [query for kind in kinds for query in kind], **options})
        return await self._send("POST", "/search/batch", responses.BatchAnswer, **content)

    async def identify(
        self,
        images: Image | Sequence[Image] | None = None,
        far: float = 0.01,
        *,
        vector: Iterable[float] | None = None,
        id: str | None = None,
        fields: Sequence[str] | None = None,
        bundle: str | None = None,
    ) -> responses.IdentifyAnswer:
        """Return which class of the index one or several photos of one thing show, or unknown.

        Args:
            images: one photo or a list of them.
            far: accepted share of strangers that get a label.
            vector: a vector instead of photos.
            id: id of an item instead of photos; the item itself is no evidence.
            fields: metadata of the results.
            bundle: SHA-256 of the bundle that the index must have.
        """
        if sum(target is not None for target in (images, vector, id)) != 1:
            raise DataError("Identify exactly one of images, a vector and an id.")
        options = without_none(far=far, fields=fields, bundle=bundle)
        if images is not None:
            content = await form_of(as_items(images), texts_of(**options))
        else:
            content = json_of({**without_none(id=id, vector=numbers_of(vector)), **options})
        return await self._send("POST", "/identify", responses.IdentifyAnswer, **content)

    async def encode(self, *images: Image, texts: Iterable[str] = ()) -> responses.EncodeAnswer:
        """Return the vectors of images or texts by the index's bundle; nothing is stored."""
        texts = list(texts)
        if bool(images) == bool(texts):
            raise DataError("Pass at least one image, or at least one of `texts`, not both.")
        if texts:
            content = json_of({"text": texts})
        else:
            content = await form_of(images, {})
        return await self._send("POST", "/encode", responses.EncodeAnswer, **content)

    async def feedback(
        self,
        search_id: str | None,
        *,
        liked: str | Sequence[str] = (),
        disliked: str | Sequence[str] = (),
        clicked: str | Sequence[str] = (),
        user: str | None = None,
    ) -> int:
        """Mark hits of a search, and return how many marks are new or changed.

        When this returns, the marks are on the server's disk. A mark that is sent twice counts
        once; a later mark on the same hit replaces the earlier, but a click no like or dislike.

        Args:
            search_id: the `search_id` of the search's answer.
            liked: ids of hits that are right.
            disliked: ids of hits that are wrong.
            clicked: ids of hits that were opened.
            user: any text that tells users of one key apart, of at most 64 characters.
        """
        if search_id is None:
            raise DataError("The answer has no search_id: its server takes no feedback.")
        marks = {"liked": liked, "disliked": disliked, "clicked": clicked}
        named = {
            name: [ids] if isinstance(ids, str) else list(ids) for name, ids in marks.items() if ids
        }
        if not named:
            raise DataError("Mark at least one hit as liked, disliked or clicked.")
        content = json_of({"search_id": search_id, **named, **without_none(user=user)})
        return (await self._send("POST", "/feedback", responses.FeedbackAnswer, **content)).counted

    async def put(
        self,
        id: str,
        image: Image | None = None,
        *,
        vector: Iterable[float] | None = None,
        label: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        keep: str | None = None,
        bundle: str | None = None,
    ) -> responses.PutAnswer:
        """Add an item, or replace as a whole the item with the same id.

        Args:
            id: id of the item.
            image: image that the server embeds.
            vector: vector as wide as the index's, instead of an image.
            label: class label.
            metadata: a JSON object.
            keep: the part of the image that the index keeps: "copy" (the default), "thumbnail" or
                "nothing".
            bundle: SHA-256 of the bundle that computed the vector; see `NewItem`.
        """
        if (image is None) == (vector is None):
            raise DataError(
                "An item takes an image or a vector, not both; `patch` changes its label or"
                " metadata."
            )
        if image is not None:
            content = await form_of([image], texts_of(label=label, metadata=metadata, keep=keep))
        elif keep is not None:
            raise DataError("`keep` is about an item's image, but this item has a vector.")
        else:
            fields = without_none(
                vector=numbers_of(vector), label=label, metadata=metadata, bundle=bundle
            )
            content = json_of(fields)
        return await self._send("PUT", "/item", responses.PutAnswer, **content, **id_parameter(id))

    async def patch(
        self, id: str, *, label: str | None = None, metadata: Mapping[str, Any] | None = None
    ) -> responses.PutAnswer:
        """Change an item's label, or some of its metadata.

        `None` leaves the label or all metadata as they are. Entries of `metadata` are merged into
        those of the item (RFC 7396); an entry that is `None` is removed.
        """
        content = json_of(without_none(label=label, metadata=metadata))
        return await self._send(
            "PATCH", "/item", responses.PutAnswer, **content, **id_parameter(id)
        )

    async def patch_items(
        self,
        filter: Filter,
        *,
        label: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> int:
        """Change all items that match `filter` as `patch` does, and return their number.

        A failed request is not repeated, because it might have changed some items already.
        """
        content = json_of({"filter": filter, **without_none(label=label, metadata=metadata)})
        done = await self._send("PATCH", "/items", responses.Changed, repeats=False, **content)
        return done.changed

    async def add(self, items: Iterable[NewItem]) -> responses.AddAnswer:
        """Add or replace several items in one atomic request.

        Args:
            items: the items, no more than the index's limit `batch`; all have an image or all have
                a vector.
        """
        items = list(items)
        images = [item.image for item in items if item.image is not None]
        vectors = [item.vector for item in items if item.vector is not None]
        if not items or {len(images), len(vectors)} != {0, len(items)}:
            raise DataError(
                "Pass at least one item. The items of one request have either an image each or a"
                " vector each."
            )
        described = [item.json() for item in items]
        if images:
            content = await form_of(images, {"items": dumps(described)})
        else:
            content = json_of({"items": described})
        return await self._send("POST", "/items", responses.AddAnswer, **content)

    async def get(self, id: str, *, vector: bool = False) -> responses.ItemAnswer:
        """Return an item, optionally with its vector."""
        options = {}
        if vector:
            options = {"vector": "true"}
        return await self._send("GET", "/item", responses.ItemAnswer, **id_parameter(id, **options))

    async def items(
        self,
        filter: Filter | None = None,
        *,
        fields: Sequence[str] | None = None,
        page: int = 100,
        order: Order = "id",
    ) -> AsyncIterator[responses.ItemAnswer]:
        """Iterate over all items, or those that match `filter`.

        Args:
            filter: filter of the items.
            fields: metadata of the items; by default all.
            page: number of items per request.
            order: "id", or "newest"; not every store can tell which items are the newest.
        """
        cursor: str | None = None
        while True:
            reply = await self._page(filter, fields, page, order, cursor)
            for item in reply.items:
                yield item
            if (cursor := reply.cursor) is None:
                return

    async def _page(
        self,
        filter: Filter | None,
        fields: Sequence[str] | None,
        limit: int,
        order: Order,
        cursor: str | None,
    ) -> responses.Page:
        options = texts_of(filter=filter, fields=fields, limit=limit, order=order, cursor=cursor)
        return await self._send("GET", "/items", responses.Page, params=options)

    async def delete(self, id: str) -> None:
        """Delete an item; raise a `ServerError` with status 404 if it does not exist."""
        await self._send("DELETE", "/item", bytes, gone_is_done=True, **id_parameter(id))

    async def delete_items(self, filter: Filter) -> int:
        """Delete all items that match `filter`, and return their number.

        A failed request is not repeated, because it might have deleted some items already.
        """
        content = json_of({"filter": filter})
        done = await self._send("POST", "/delete", responses.Deleted, repeats=False, **content)
        return done.deleted

    async def image(self, id: str) -> bytes:
        """Return an item's original, or a PNG of it if browsers cannot show its format."""
        return await self._send("GET", "/item/image", bytes, **id_parameter(id))

    async def thumbnail(self, id: str) -> bytes:
        """Return a JPEG of an item's original, at most 256 pixels wide and high."""
        return await self._send("GET", "/item/thumbnail", bytes, **id_parameter(id))

    async def index(self) -> responses.IndexAnswer:
        """Return the description of the index."""
        return await self._send("GET", "/index", responses.IndexAnswer)

    async def snapshot(self, *, seconds: float = 3600.0) -> str:
        """Make the server write a snapshot, wait for it and return its name."""
        options: dict[str, Any] = {"repeats": False, "seconds": seconds}
        return (await self._send("POST", "/snapshots", responses.Snapshot, **options)).snapshot

    async def push(
        self,
        folder: str | Path,
        *,
        connections: int = 4,
        batch_size: int = 16,
        progress: Callable[[int, int], None] | None = None,
    ) -> PushReport:
        """Upload the images of a folder and return a report.

        An item's id is its path relative to the folder, and its label is the first folder in this
        path. An image is not sent if the item with its id has the same SHA-256, so an interrupted
        push can be resumed. The report lists the files that could not be added.

        Args:
            folder: folder of images, which is searched recursively except for hidden folders.
            connections: number of concurrent requests; each holds one batch in memory.
            batch_size: maximum number of images per request; the server may have a lower limit.
            progress: called after each batch with the numbers of images done and in total.
        """
        return await Push(self, Path(folder), batch_size, progress).run(connections)


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    """Return a blocking method of `Client` for a method of `AsyncClient`."""

    def wait(self: Client, /, *args: P.args, **named: P.kwargs) -> T:
        return self._run(method(self._client, *args, **named))

    functools.update_wrapper(wait, method)
    return wait


class Client:
    """Blocking client of a search server, with the methods of `AsyncClient`. Thread-safe.

    Requests run in an event loop in a background thread.

    Args:
        url: address of the server, such as "https://search.example.com".
        settings: `key`, `index`, `timeout`, `retries` and `verify` of `AsyncClient`.

    Raises:
        DataError: an argument is invalid.
    """

    def __init__(self, url: str, **settings: Any) -> None:
        self._client = AsyncClient(url, **settings)
        self._process = os.getpid()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        # A client that nobody closes ends its thread when it is collected. So the thread must not
        # hold `self`.
        weakref.finalize(self, _stop, self._loop)
        threading.Thread(target=_serve, args=(self._loop,), name="client", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections, and end the thread; requests of other threads fail."""
        closed = self._closed
        self._closed = True
        if not closed and self._process == os.getpid():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            _stop(self._loop)

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    search = _blocking(AsyncClient.search)
    search_batch = _blocking(AsyncClient.search_batch)
    identify = _blocking(AsyncClient.identify)
    encode = _blocking(AsyncClient.encode)
    feedback = _blocking(AsyncClient.feedback)
    put = _blocking(AsyncClient.put)
    patch = _blocking(AsyncClient.patch)
    patch_items = _blocking(AsyncClient.patch_items)
    add = _blocking(AsyncClient.add)
    get = _blocking(AsyncClient.get)
    delete = _blocking(AsyncClient.delete)
    push = _blocking(AsyncClient.push)
    delete_items = _blocking(AsyncClient.delete_items)
    image = _blocking(AsyncClient.image)
    thumbnail = _blocking(AsyncClient.thumbnail)
    index = _blocking(AsyncClient.index)
    snapshot = _blocking(AsyncClient.snapshot)

    def items(
        self,
        filter: Filter | None = None,
        *,
        fields: Sequence[str] | None = None,
        page: int = 100,
        order: Order = "id",
    ) -> Iterator[responses.ItemAnswer]:
        """Iterate over the items; see `AsyncClient.items`."""
        cursor: str | None = None
        while True:
            reply = self._run(self._client._page(filter, fields, page, order, cursor))
            yield from reply.items
            if (cursor := reply.cursor) is None:
                return

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop's thread and return its result; Ctrl+C cancels it."""
        # A fork copies no threads, so nothing would run the loop of a copied client.
        if self._closed or self._process != os.getpid():
            work.close()
            why = "belongs to the process before the fork"
            if self._closed:
                why = "is closed"
            raise DataError(f"The client {why}. Create a new client.")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise DataError("The client was closed during the request.") from None
        except BaseException:
            future.cancel()
            raise


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    # The loop has ended already.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(loop.stop)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()
