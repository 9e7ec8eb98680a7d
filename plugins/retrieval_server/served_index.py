"""One index of a server: searches, reads and changes in threads, within the server's limits.

Each kind of work has a pool of threads with a bounded queue: uploaded images, searches, changes,
snapshots and pictures (images of items, to show). All indexes of a server share the pools.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import methodcaller
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from retrieval.base.regular_files import out_of_files, read_beneath
from retrieval.base.runtime import load_faiss
from retrieval.base.timing import TRAIL, Trail, stage
from retrieval.bundle.bundle import Bundle, Encoded
from retrieval.errors import DataError, RetrievalError, StoreError
from retrieval.images.decoding import Limits
from retrieval.index.adding import arrays_of
from retrieval.index.change_log import Audit, Change
from retrieval.index.index import Index
from retrieval.index.sources import digest_of
from retrieval.store import contract
from retrieval.store.contract import (
    FEATURES,
    VECTOR,
    Floats,
    Item,
    StoreUnavailable,
    Superseded,
    TooSlow,
)
from retrieval.store.items import rows_of
from starlette.requests import ClientDisconnect

from retrieval_server.decoder_processes import Decoded, Decoders, Kind, Undecodable
from retrieval_server.drift import Drift
from retrieval_server.feedback import Feedback, not_kept
from retrieval_server.problems import RequestError, busy, no_item, report, store_failed
from retrieval_server.request_bodies import NewItem, Query
from retrieval_server.searching import encoded_texts, hits_of
from retrieval_server.settings import BATCH_BYTES, Settings

DAMAGED = (
    "The index cannot be searched: it is damaged, or its disk fails. The server's log says why."
)
_UNREADABLE = "The item cannot be read. The server's log says why."
_NOT_WRITTEN = (
    "The index cannot be written to at the moment: another process writes to it, it is read-only,"
    " or its disk fails. The server's log says which."
)
_CHANGING = "The index's bundle keeps changing. Try again in a moment."
DECODE_SECONDS = 5.0
WAITING_PER_WORKER = 64
WAITING_CHANGES = 16
WAITING_MARKS = 256
WAITING_SNAPSHOTS = 4
WAITING_PICTURES = 64
_PICTURE_THREADS = 8
_MOMENT_SECONDS = 0.002
_TRIES = 5
"""Number of attempts at a request while the index or its bundle is being replaced."""
_BATCH = 32
T = TypeVar("T")
Finish = Callable[[Query, Sequence[Any], Index], bytes]


class Served:
    """One index of a server.

    Attributes:
        index: the current index.
        failed: function that repeats the last search that failed because of damage, or `None`.
        drift: the nearest distances of the latest searches by image.
        feedback: the feedback on searches, or `None`.
    """

    def __init__(
        self,
        name: str,
        index: Index,
        settings: Settings,
        workers: Workers,
        audit: Audit | None = None,
        reopen: Callable[[], Index] | None = None,
        labels: Mapping[str, str] = MappingProxyType({}),
        feedback: Feedback | None = None,
    ) -> None:
        self.name = name
        self.settings = settings
        self.workers = workers
        self.failed: Callable[[], object] | None = None
        self.index = index
        self.feedback = feedback
        self.drift = Drift(index, labels)
        self._lock = threading.Lock()
        # Each open index stays open while it has users; the current index has one user more.
        self._users = Counter({index: 1})
        self._audit = audit
        self._reopen = reopen
        self._folders = [Path(os.path.realpath(folder)) for folder in settings.images]

    @contextmanager
    def use(self) -> Iterator[Index]:
        """Context manager that yields the current index and keeps it open; call it in a thread."""
        with self._lock:
            index = self.index
            self._users[index] += 1
        try:
            with contract.patience(self.settings.deadline):
                yield index
        finally:
            self._release(index)

    def _release(self, index: Index) -> None:
        """Count one user less; close the index if it has no users left."""
        with self._lock:
            self._users[index] -= 1
            if self._users[index]:
                return
            del self._users[index]
        index.close()

    def take_up(self) -> str | None:
        """Open and serve the index that has replaced this one, if any. Call this in a thread.

        Returns:
            A sentence if that fails; it has the path, so it is only for the log. Else `None`.
        """
        changed = self.index.changed()
        if changed is None or self._reopen is None:
            return changed
        try:
            index = self._reopen()
        except RetrievalError as error:
            return (
                f"{changed} The new index cannot be opened: {error} The server tries again every"
                " few seconds. If the folder itself is a mount, mount it again to see the new one."
            )
        with self._lock:
            old = self.index
            self.index = index
            self._users[index] = 1
        self._release(old)
        self.failed = None
        return None

    # Searching

    async def search_image(self, parse: Callable[[], Query], finish: Finish) -> bytes:
        """Parse a query of images and, if it is one, search in the same thread; see `search`."""

        async def ask() -> bytes:
            bundle = self.index.bundle

            def work() -> bytes | Query:
                query = parse()
                # Several images are decoded by several threads.
                if len(query.inputs) != 1 or any(query.examples.values()):
                    return query
                image = query.inputs[0].image or b""
                pixels = self.workers.decode("pixels", image, bundle).pixels[None]
                find = partial(hits_of, query=query, pixels=pixels, feedback=self.feedback)
                return self._searched(bundle, query, find, finish)

            answer = await self.workers.images.run(work)
            if isinstance(answer, bytes):
                return answer
            return await self.search(answer, finish)

        return await self._again(ask, DAMAGED)

    async def search(self, query: Query, finish: Finish) -> bytes:
        """Search and return the response, which `finish` builds in the thread of the search.

        `finish` takes the hits of each query, or the verdict if the query asks for one.
        """

        async def ask() -> bytes:
            bundle = self.index.bundle
            images = [input.image for input in query.inputs if input.image is not None]
            images += chain.from_iterable(query.examples.values())
            decoded = await self.workers.pixels(bundle, images)
            if decoded:
                pixels = np.stack([image.pixels for image in decoded])
            else:
                pixels = None
            find = partial(hits_of, query=query, pixels=pixels, feedback=self.feedback)
            search = partial(self._searched, bundle, query, find, finish)
            return await self.workers.searches.run(search)

        return await self._again(ask, DAMAGED)

    def _searched(
        self,
        bundle: Bundle,
        query: Query,
        find: Callable[[Index], Sequence[Any]],
        finish: Finish,
    ) -> bytes:
        """Search the current index and build the response; keep a search that fails for a repeat.

        Raises:
            Superseded: the index no longer serves `bundle`, which encoded the query.
        """
        try:
            with self.use() as index:
                if index.bundle is not bundle:
                    raise Superseded("Another bundle is served.")
                return finish(query, find(index), index)
        except StoreError as error:
            if not isinstance(error, Superseded | TooSlow | StoreUnavailable):
                self.failed = partial(self._searched, bundle, query, find, finish)
            raise

    async def read(
        self,
        work: Callable[[Index], T],
        sentence: str = _UNREADABLE,
        turns: Turns | None = None,
    ) -> T:
        """Return `work(index)`, run in a thread; `sentence` is the error if the store fails."""

        def used() -> T:
            with self.use() as index:
                return work(index)

        pool = turns or self.workers.searches
        return await self._again(lambda: pool.run(used), sentence)

    async def _again(self, ask: Callable[[], Awaitable[T]], sentence: str) -> T:
        """Return `await ask()`; repeat it if the index or its bundle was replaced meanwhile.

        Raises:
            RequestError: 503 if the index keeps changing, or, with the message `sentence`, if its
                store fails.
        """
        for _ in range(_TRIES):
            index = self.index
            try:
                return await ask()
            except Superseded:
                await self.workers.searches.run(self.index.follow)
            except (StoreError, FileNotFoundError) as error:
                # `FileNotFoundError`: the folder of the index may have been removed.
                temporary = isinstance(error, TooSlow | StoreUnavailable)
                if temporary or not await self.workers.pictures.run(partial(self._replaced, index)):
                    raise store_failed(error, sentence) from None
        raise RequestError(503, _CHANGING)

    def _replaced(self, failed: Index) -> bool:
        """Return whether another index is served now instead of one that failed."""
        if self.index is not failed:
            return True
        return failed.changed() is not None and self.take_up() is None

    # Encoding

    async def encode(
        self, images: Sequence[bytes], texts: Sequence[str], finish: Callable[[Encoded], bytes]
    ) -> bytes:
        """Encode images or texts and return the response, which `finish` builds in a thread."""
        # No store compares the vectors with its own and finds that another bundle is served now.
        bundle = await self.read(Index.follow)
        decoded = await self.workers.pixels(bundle, images)

        def work() -> bytes:
            if texts:
                return finish(encoded_texts(bundle, texts))
            pixels = np.stack([image.pixels for image in decoded])
            with stage("encode", len(pixels)):
                encoded = bundle.encode(pixels)
            return finish(encoded)

        return await self.workers.searches.run(work)

    # Changing

    async def put(self, new_items: Sequence[NewItem], change: Change) -> int:
        """Add or replace items atomically; return how many existed already."""
        images = [new.image for new in new_items if new.image is not None]
        thumbnails = {
            new.id: await self.workers.decoded("thumbnail", new.image)
            for new in new_items
            if new.image is not None and new.keep == "thumbnail"
        }

        async def ask() -> int:
            bundle = self.index.bundle
            widths = self.index.generation.widths
            decoded = await self.workers.pixels(bundle, images)
            embed = partial(_embedded, bundle, widths, new_items, decoded, thumbnails)
            items = await self.workers.searches.run(embed)

            def work(index: Index) -> int:
                with stage("write", len(items)):
                    replaced = index.store.upsert(items, bundle.sha256)
                change.count = len(items)
                return replaced

            return await self._change(work, change, self.workers.changes)

        return await self._again(ask, _NOT_WRITTEN)

    async def patch(self, changes: Mapping[str, Any], change: Change) -> int:
        """Change the label or metadata of the items of a change and return their number."""

        def work(index: Index) -> int:
            with stage("write"):
                change.count = index.store.update(
                    change.ids, changes, index.bundle.sha256, filter=change.filter
                )
            if change.filter is None and not change.count:
                raise no_item()
            return change.count

        turns = self.workers.changes
        return await self._again(lambda: self._change(work, change, turns), _NOT_WRITTEN)

    async def delete(self, change: Change) -> int:
        """Delete the items of a change and return their number."""

        def work(index: Index) -> int:
            change.count = index.delete(change.ids, filter=change.filter)
            return change.count

        turns = self.workers.changes
        return await self._again(lambda: self._change(work, change, turns), _NOT_WRITTEN)

    async def snapshot(self, target: Path, change: Change) -> None:
        """Write a snapshot."""
        sentence = "The snapshot cannot be written. The server's log says why."
        work = methodcaller("snapshot", target)
        turns = self.workers.snapshots
        await self._again(lambda: self._change(work, change, turns), sentence)

    async def mark(
        self, search_id: str, voter: str, marks: Mapping[str, int], change: Change
    ) -> int:
        """Take marks on the hits of a search; return how many are new or changed.

        Raises:
            RequestError: 404 for an unknown search, 503 if the marks cannot be stored.
        """
        assert self.feedback is not None  # the route has checked
        run = self.workers.marks.run

        def add() -> int:
            assert self.feedback is not None
            with self._audit.recording(change) if self._audit else nullcontext():
                change.count = self.feedback.add(search_id, voter, marks)
                return change.count

        try:
            await self.feedback.wait_for(search_id, run)
            return await run(add)
        except StoreError as error:
            raise not_kept(error) from None

    async def _change(self, work: Callable[[Index], T], change: Change, turns: Turns) -> T:
        """Run a change in the pool `turns` and record it in the audit log."""

        def recorded() -> T:
            with (
                self.use() as index,
                self._audit.recording(change) if self._audit else nullcontext(),
            ):
                return work(index)

        return await turns.run(recorded)

    # Pictures

    def shows(self, keep: str, path: Path | None) -> bool:
        """Return whether responses link to an item's image. Does not access the disk."""
        return keep in ("copy", "thumbnail") or (path is not None and bool(self._folders))

    async def picture(self, id: str, small: bool) -> bytes:
        """Return an item's image: the index's copy, or the file from which the item was indexed."""

        def work(index: Index) -> bytes:
            item = index.get(id).get(id)
            if item is None:
                raise no_item()
            if item.keep == "thumbnail" and not small:
                # A file that cannot be shown leaves the thumbnail.
                with suppress(RequestError):
                    return self._file(item)
            if item.keep in ("copy", "thumbnail"):
                kept = index.store.original(id)
            else:
                kept = None
            if kept is not None:
                return kept
            return self._file(item)

        return await self.read(work, turns=self.workers.pictures)

    def _file(self, item: Item) -> bytes:
        """Return the content of the file from which an item was indexed."""
        if item.path is None:
            raise RequestError(
                404,
                f"Item {item.id} was indexed from features, or the index does not keep its image.",
            )
        image = f"The image of item {item.id}"
        try:
            path = Path(os.path.realpath(item.path))
            folders = [folder for folder in self._folders if path.is_relative_to(folder)]
            if not folders:
                raise RequestError(404, f"{image} is outside the folders that may be shown.")
            content = read_beneath(folders[0], path.relative_to(folders[0]), BATCH_BYTES + 1)
        except (OSError, ValueError) as fault:
            if out_of_files(fault):
                raise
            raise RequestError(404, f"{image} is no longer where it was indexed.") from None
        if len(content) > BATCH_BYTES:
            raise RequestError(404, f"{image} is too large to be shown.")
        if item.bytes is not None and len(content) != item.bytes:
            raise RequestError(404, f"{image} was changed after it was indexed.")
        return content


# Writing


def _embedded(
    bundle: Bundle,
    widths: Mapping[str, int],
    new_items: Sequence[NewItem],
    images: Sequence[Decoded],
    thumbnails: Mapping[str, bytes],
) -> list[Item]:
    """Return the request's items with their arrays."""
    rows = _rows(bundle, widths, new_items, images)
    items = [
        Item(new.id, new.label, new.metadata, keep=new.keep, arrays=arrays)
        for new, arrays in zip(new_items, rows, strict=True)
    ]
    if not images:
        return items
    return [
        replace(
            item,
            original=new.image if new.keep == "copy" else thumbnails.get(new.id),
            stamp=digest_of(new.image or b""),
            bytes=len(new.image or b""),
            width=image.width,
            height=image.height,
        )
        for item, new, image in zip(items, new_items, images, strict=True)
    ]


def _rows(
    bundle: Bundle,
    widths: Mapping[str, int],
    items: Sequence[NewItem],
    images: Sequence[Decoded],
) -> list[dict[str, Floats]]:
    """Return the arrays that the index stores for each item."""
    manifest = bundle.manifest
    for item in items:
        item.require_bundle(bundle.sha256)
    if images:
        inputs: NDArray[Any] = np.stack([image.pixels for image in images])
    elif manifest.input.kind == "features":
        inputs = _vectors(items, manifest.input.shape[0], "features")
    else:
        inputs = _vectors(items, manifest.vector, "numbers")
        if set(widths) != {VECTOR}:
            raise DataError(
                "This index stores further outputs of the model besides an item's vector. Send the"
                " image instead, or features if the bundle takes features."
            )
        with np.errstate(over="ignore"):
            return [{VECTOR: row} for row in inputs.astype(np.float32)]
    with stage("encode", len(inputs)):
        return rows_of(arrays_of(bundle, inputs, _BATCH, FEATURES in widths))


def _vectors(items: Sequence[NewItem], width: int, what: str) -> NDArray[np.float64]:
    for item in items:
        if (length := len(item.vector or ())) != width:
            lengths = f"{width} {what}, not {length}"
            raise DataError(f"A vector of this index has {lengths} (item {item.id[:80]!a}).")
    return np.array([item.vector for item in items], np.float64)


# Threads


class Turns:
    """A thread pool with a bounded queue, which refuses further jobs.

    A thread that wakes up runs all waiting jobs, then wakes the event loop once, because waking
    costs as much as a small search: with eight clients, a plain pool takes twice the CPU time per
    search. Jobs that still wait after 2 ms get the next thread.

    Args:
        what: the kind of jobs, for error messages, such as "searches".
        at_once: number of threads.
        waiting: maximum number of waiting jobs.
        prepare: function that each thread runs first.
    """

    def __init__(
        self, what: str, at_once: int, waiting: int, prepare: Callable[[], object] | None = None
    ) -> None:
        self._what = what
        self._at_once = at_once
        self._room = at_once + waiting
        self._threads = ThreadPoolExecutor(at_once, what, prepare)
        self._queue = deque[tuple[asyncio.Future[Any], Callable[[], Any]]]()
        self._done = deque[tuple[asyncio.Future[Any], Any, BaseException | None]]()
        self._pending = self.busy = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """Number of jobs that wait for a thread."""
        return max(0, self._pending - self._at_once)

    def require_room(self) -> None:
        """Raise a RequestError 503 if the queue is full."""
        if self._pending >= self._room:
            raise busy(f"too many {self._what} are waiting")

    async def run(self, work: Callable[[], T]) -> T:
        """Run a function in a thread and return its result.

        A job that has begun runs to its end, even if its caller is cancelled.
        """
        self.require_room()
        queued = perf_counter()
        trail = TRAIL.get() or Trail()
        loop = asyncio.get_running_loop()

        def begin() -> T:
            if trail.has_left():
                raise ClientDisconnect
            trail.note("wait", perf_counter() - queued)
            return work()

        job = loop.create_future(), partial(contextvars.copy_context().run, begin)
        self._pending += 1
        self._queue.append(job)
        # A delay of 0 still collects requests that arrived together.
        if self._timer is None:
            self._timer = loop.call_later(_MOMENT_SECONDS if self.busy else 0, self._tick, loop)
        try:
            result: T = await job[0]
            return result
        except asyncio.CancelledError:
            with suppress(ValueError):
                self._queue.remove(job)
                self._pending -= 1
            raise

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        """Return finished jobs to their callers, and wake a thread if jobs wait."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._done:
            self._pending -= 1
            future, result, error = self._done.popleft()
            if future.done():
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
        waiting = len(self._queue)
        if waiting and self.busy < self._at_once:
            self.busy = self.busy + 1
            waiting = waiting - 1
            self._threads.submit(self._work, loop)
        if waiting:
            self._timer = loop.call_later(_MOMENT_SECONDS, self._tick, loop)

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run jobs until none waits. Runs in a thread."""
        with suppress(IndexError):
            while True:
                future, work = self._queue.popleft()
                try:
                    self._done.append((future, work(), None))
                except BaseException as error:
                    self._done.append((future, None, error))
        # The loop may be closed, because the server has ended.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self._rest, loop)

    def _rest(self, loop: asyncio.AbstractEventLoop) -> None:
        self.busy -= 1
        self._tick(loop)

    def close(self) -> None:
        """Drop the waiting jobs and end the threads."""
        self._queue.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _search_alone() -> None:
    """Let FAISS use only the calling thread, because several threads search at the same time."""
    load_faiss().omp_set_num_threads(1)


class Workers:
    """Threads and decoding processes of a server, shared by all its indexes."""

    def __init__(self, settings: Settings) -> None:
        # A thread's `prepare` must not fail, because its pool would never work again.
        load_faiss()
        waiting = WAITING_PER_WORKER * settings.workers
        self.searches = Turns("searches", settings.workers, waiting, _search_alone)
        self.changes = Turns("changes", 1, WAITING_CHANGES)
        self.pictures = Turns("pictures", _PICTURE_THREADS, WAITING_PICTURES)
        self.snapshots = Turns("snapshots", 1, WAITING_SNAPSHOTS)
        self.marks = Turns("marks", 1, WAITING_MARKS)
        self.images = Turns("images", settings.workers + 1, waiting, _search_alone)
        self._pools = (
            *(self.images, self.searches, self.changes),
            *(self.pictures, self.snapshots, self.marks),
        )
        self.decoders = Decoders(Limits(settings.max_pixels, settings.max_bytes), DECODE_SECONDS)

    def decode(self, kind: Kind, content: bytes, bundle: Bundle | None = None) -> Any:
        """Decode an image: to `Decoded` for a bundle, or to the bytes of a PNG or thumbnail.

        Decoding blocks, so call this in a thread.
        """
        preprocessing = None
        if bundle is not None:
            preprocessing = bundle.manifest.input.preprocessing
            if preprocessing is None:
                width = bundle.manifest.input.shape[0]
                raise DataError(f"This index takes vectors of {width} features, not images.")
        try:
            with stage("decode"):
                return self.decoders.decode(kind, content, preprocessing)
        except Undecodable as error:
            report(error)
            sentence = "The server cannot decode images at the moment. Its log says why."
            raise RequestError(503, sentence, "decode") from None

    async def decoded(self, kind: Kind, content: bytes) -> bytes:
        """Return an image as another kind of file; see `decode`."""
        picture: bytes = await self.images.run(lambda: self.decode(kind, content))
        return picture

    async def pixels(self, bundle: Bundle, images: Sequence[bytes]) -> list[Decoded]:
        """Decode images; see `decode`. If there are several, an error says which is invalid."""
        # Two at a time leave threads for the images of other requests.
        turn = asyncio.Semaphore(2)

        async def decoded(number: int, image: bytes) -> Decoded:
            async with turn:
                try:
                    decode = partial(self.decode, "pixels", image, bundle)
                    pixels: Decoded = await self.images.run(decode)
                except DataError as error:
                    if len(images) == 1:
                        raise
                    raise DataError(f"image {number}: {error}") from None
                return pixels

        tasks = [asyncio.create_task(decoded(*numbered)) for numbered in enumerate(images, 1)]
        try:
            return [await task for task in tasks]
        finally:
            for task in tasks:
                task.cancel()

    @property
    def idle(self) -> bool:
        """Whether no thread uses an index."""
        return not any(turns.busy for turns in self._pools)

    def close(self) -> None:
        """Drop waiting jobs, and end the threads and the decoding processes."""
        for turns in self._pools:
            turns.close()
        self.decoders.close()
