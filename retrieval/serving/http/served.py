"""One index behind a server: searched, read and changed in threads, within the server's limits."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import stat
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from starlette.requests import ClientDisconnect

from retrieval.errors import DataError, RetrievalError, StoreError
from retrieval.serving.bundle import Bundle, Encoded
from retrieval.serving.decoding import Decoded, Decoders, Kind, Undecodable
from retrieval.serving.http.audit import Audit, Change
from retrieval.serving.http.bodies import Given, NewItem, Query
from retrieval.serving.http.problems import RequestError, busy
from retrieval.serving.http.settings import (
    BATCH_BYTES,
    DECODE_SECONDS,
    WAITING_CHANGES,
    WAITING_PER_WORKER,
    WAITING_SNAPSHOTS,
    Settings,
)
from retrieval.serving.images import Limits
from retrieval.serving.index.base import Hit
from retrieval.serving.index.collection import Collection as Index
from retrieval.serving.queries import encode_vectors
from retrieval.serving.runtime import load_faiss
from retrieval.serving.stages import current, stage
from retrieval.serving.stores.contract import (
    CODE,
    FEATURES,
    VECTOR,
    Floats,
    Item,
    StoreUnavailable,
    Superseded,
    TooSlow,
    patience,
)

log = logging.getLogger("retrieval.serving.http")

DAMAGED = "The index cannot be searched: it is damaged, or its disk fails. The server's log says why."
UNREACHABLE = (
    "The store of this index cannot be reached now. Nothing is known to be damaged: try again in a moment."
)
_UNREADABLE = "The item cannot be read. The server's log says why."
_NOT_WRITTEN = (
    "The index cannot be written to now: another process writes to it, it is read-only, or its disk refuses. "
    "The server's log says which."
)
_CHANGING = "The index changes its bundle again and again. Try again in a moment."
_KEPT_BYTES = 64_000_000
"""Originals that one request copies when it changes labels or metadata."""

_TRIES = 5
_PICTURE_THREADS, _WAITING_PICTURES = 8, 64
_REGULAR = (
    os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0)
)

T = TypeVar("T")


def report(error: BaseException) -> None:
    """Log what went wrong and what caused it, with the place in the code."""
    trace, causes = error.__traceback__, []
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})" if trace is not None else ""
    cause: BaseException | None = error
    while cause is not None and len(causes) < 4:
        causes.append(f"{type(cause).__name__}: {str(cause)[:300]}")
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    log.error("%s%s", " – because of ".join(causes), where)


HAS_LEFT: ContextVar[Callable[[], Awaitable[bool]] | None] = ContextVar("has_left", default=None)
"""Says whether the client of this task's request has left, so that what waited for its turn is not begun."""


class Turns:
    """Work outside the event loop: some of it at a time, some that waits, the rest refused.

    Args:
        what: is done, for the refusal: "searches".
        at_once: pieces of work at a time.
        waiting: pieces of work that may wait.
    """

    def __init__(self, what: str, at_once: int, waiting: int) -> None:
        self._what, self._most_waiting = what, waiting
        self._free = asyncio.Semaphore(at_once)
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix=what)
        self.waiting = self.running = 0

    def require_room(self) -> None:
        """Refuse work that would find no room.

        Raises:
            RequestError: 503.
        """
        if self._free.locked() and self.waiting >= self._most_waiting:
            raise busy(self._what)

    async def run(self, work: Callable[[], T]) -> T:
        """Return what some work gives, done in a thread. Whoever is cancelled leaves the work its turn until its end.

        Raises:
            RequestError: 503, too much is waiting.
        """
        self.require_room()
        queued, waits = perf_counter(), self._free.locked()
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        if waits and (has_left := HAS_LEFT.get()) is not None and await has_left():
            self._free.release()
            raise ClientDisconnect
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def noted() -> T:
            if (trail := current()) is not None:
                trail.note("wait", queued, perf_counter())
            return work()

        def end(future: Future[T]) -> None:
            self._free.release()
            self.running -= 1
            if not ended.done():
                ended.set_result(future)

        def tell(future: Future[T]) -> None:
            with suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(end, future)

        self.running += 1
        self._threads.submit(contextvars.copy_context().run, noted).add_done_callback(tell)
        done: Future[T] = await ended
        return done.result()

    def close(self) -> None:
        """Begin nothing any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class Workers:
    """What does the work of all indexes of a server.

    Args:
        settings: limits.
    """

    def __init__(self, settings: Settings) -> None:
        waiting = WAITING_PER_WORKER * settings.workers
        self.searches = Turns("searches", settings.workers, waiting)
        self.changes = Turns("changes", 1, WAITING_CHANGES)
        self.pictures = Turns("pictures", _PICTURE_THREADS, _WAITING_PICTURES)
        self.snapshots = Turns("snapshots", 1, WAITING_SNAPSHOTS)
        self.images = Turns("images", settings.workers + 1, waiting)
        limits = Limits(settings.max_pixels, settings.max_bytes)
        self.decoders = Decoders(limits, DECODE_SECONDS)

    def decode(self, kind: Kind, content: bytes, bundle: Bundle | None = None) -> Any:
        """Return a decoded image: `Decoded` as a bundle takes it, or a file's bytes; for a thread.

        Raises:
            DataError: the image cannot be decoded, or the bundle takes features.
            RequestError: 503, no process decodes.
        """
        preprocessing = None
        if bundle is not None:
            given = bundle.manifest.input
            preprocessing = given.preprocessing
            if preprocessing is None:
                raise DataError(f"This index takes vectors of {given.shape[0]} features, not images.")
        try:
            with stage("decode"):
                return self.decoders.decode(kind, content, preprocessing)
        except Undecodable as error:
            report(error)
            raise RequestError(503, "The server decodes no images now. Its log says why.", "decode") from None

    async def decoded(self, kind: Kind, content: bytes) -> bytes:
        """Return a picture of another kind; see `decode`."""
        made: bytes = await self.images.run(lambda: self.decode(kind, content))
        return made

    async def pixels(self, bundle: Bundle, images: Sequence[bytes]) -> list[Decoded]:
        """Return decoded images; of several, an error names the one.

        Raises:
            DataError, RequestError: see `decoded`.
        """
        turn = asyncio.Semaphore(2)  # others' images get their turns between these

        async def one(number: int, image: bytes) -> Decoded:
            async with turn:
                try:
                    work = partial(self.decode, "pixels", image, bundle)
                    made: Decoded = await self.images.run(work)
                except DataError as error:
                    raise (error if len(images) == 1 else DataError(f"image {number}: {error}")) from None
                return made

        if len(images) == 1:
            return [await one(1, images[0])]
        tasks = [asyncio.create_task(one(*each)) for each in enumerate(images, 1)]
        try:
            return [await task for task in tasks]
        finally:
            for task in tasks:
                task.cancel()

    @property
    def idle(self) -> bool:
        """Whether no thread works for an index."""
        return all(
            turns.running == 0 for turns in (self.searches, self.changes, self.pictures, self.snapshots)
        )

    def close(self) -> None:
        """Begin nothing any more, and end the processes that decode."""
        for turns in (self.searches, self.changes, self.pictures, self.snapshots, self.images):
            turns.close()
        self.decoders.close()


class _Held:
    """An opened index, its users, and whether another one has taken its place."""

    def __init__(self, index: Index) -> None:
        self.index, self.users, self.retired = index, 0, False


class Served:
    """One index of a server.

    Args:
        name: in addresses.
        index: opened.
        settings: limits, and what may be shown.
        workers: do the work.
        audit: the record of changes; None for none.
        reopen: opens the index that lies in the folder by now; None where another one is never taken up.

    Attributes:
        failed: repeats a search that found the index damaged; None where there is none.
    """

    def __init__(
        self,
        name: str,
        index: Index,
        settings: Settings,
        workers: Workers,
        audit: Audit | None = None,
        reopen: Callable[[], Index] | None = None,
    ) -> None:
        self.name, self.settings, self.workers = name, settings, workers
        self.failed: Callable[[], object] | None = None
        self._held, self._lock = _Held(index), threading.Lock()
        self._audit, self._reopen = audit, reopen
        self._folders = [Path(os.path.realpath(folder)) for folder in settings.images]

    @property
    def index(self) -> Index:
        """The index of this moment."""
        return self._held.index

    @contextmanager
    def use(self) -> Iterator[Index]:
        """Give the index inside a block; it stays open until that ends. For a thread."""
        with self._lock:
            held = self._held
            held.users += 1
        try:
            with patience(self.settings.deadline):
                yield held.index
        finally:
            with self._lock:
                held.users -= 1
                last = held.retired and not held.users
            if last:
                held.index.close()

    def take_up(self) -> str | None:
        """Serve the index that lies in the folder by now, if it is another one; for a thread.

        Returns:
            None when what lies there is served, else a sentence with its path, for the log.
        """
        changed = self.index.changed()
        if changed is None or self._reopen is None:
            return changed
        try:
            index = self._reopen()
        except RetrievalError as error:
            return f"{changed} What is there cannot be opened: {error}"
        with self._lock:
            old, self._held = self._held, _Held(index)
            old.retired, unused = True, not old.users
        if unused:
            old.index.close()
        self.failed = None
        return None

    # Searching

    async def search(self, query: Query, finish: Callable[[list[list[Hit]], Index], bytes]) -> bytes:
        """Answer a query.

        Args:
            query: what is searched for.
            finish: makes the answer of the hits of each query, in the thread that searched.

        Raises:
            DataError: an image or vector cannot be used, or the filter names what no item has.
            RequestError: 404, no such item; 503, too many are waiting, or the index cannot be searched now.
        """
        images = [given.image for given in query.given if given.image is not None]

        async def ask() -> bytes:
            bundle, pixels, turns = self.index.bundle, None, self.workers.searches
            if len(images) > 1:
                pixels = np.stack([one.pixels for one in await self.workers.pixels(bundle, images)])
            elif images:
                turns = (
                    self.workers.images
                )  # who decodes one image goes on with it: a hop costs as much as it

            def work() -> bytes:
                made = pixels
                if turns is self.workers.images:
                    made = self.workers.decode("pixels", images[0], bundle).pixels[None]
                return self._searched(query, bundle, made, finish)

            return await turns.run(work)

        return await self._again(ask, DAMAGED)

    def _searched(
        self,
        query: Query,
        bundle: Bundle,
        pixels: NDArray[Any] | None,
        finish: Callable[[list[list[Hit]], Index], bytes],
    ) -> bytes:
        load_faiss().omp_set_num_threads(1)  # several searches run at a time
        try:
            with self.use() as index:
                if index.bundle is not bundle:
                    raise Superseded("Another bundle is served.")
                return finish(_hits(index, query, pixels), index)
        except StoreError as error:
            if not isinstance(error, Superseded | TooSlow | StoreUnavailable):
                self.failed = partial(self._searched, query, bundle, pixels, finish)
            raise

    async def read(self, work: Callable[[Index], T], sentence: str = _UNREADABLE) -> T:
        """Return what some reading of the index gives.

        Raises:
            DataError: of a filter.
            RequestError: 503, too many are waiting, or the index cannot be read now.
        """

        def used() -> T:
            with self.use() as index:
                return work(index)

        return await self._again(lambda: self.workers.searches.run(used), sentence)

    async def _again(self, ask: Callable[[], Awaitable[T]], sentence: str) -> T:
        """Return what the index gives, asked again where another bundle or another index is served since.

        Raises:
            RequestError: 503, the index fails; its log says why, and the client is told `sentence`.
        """
        for _ in range(_TRIES):
            index = self.index
            try:
                return await ask()
            except Superseded:
                await self.workers.searches.run(self.index.follow)
            except StoreError as error:
                if not await self._was_replaced(error, index):
                    raise _told(error, sentence) from None
        raise RequestError(503, _CHANGING)

    async def _was_replaced(self, error: StoreError, failed: Index) -> bool:
        """Return whether an index failed because another one lies in its folder, which is served from now on."""
        if isinstance(error, TooSlow | StoreUnavailable):
            return False

        def work() -> bool:
            if self.index is not failed:
                return True
            return failed.changed() is not None and self.take_up() is None

        return await self.workers.pictures.run(work)

    # Changing

    async def put(self, items: Sequence[NewItem], change: Change) -> int:
        """Add items, replace or change them: all of them, or none; return how many were there.

        Raises:
            DataError: an image or item cannot be used, or one without an image and a vector is not there.
            RequestError: 503, too many changes wait, or the index cannot be written to.
        """
        images = [item.image for item in items if item.image is not None]
        vectors = any(item.vector is not None for item in items)
        small = {
            item.id: await self.workers.decoded("thumbnail", item.image)
            for item in items
            if item.image is not None and item.keep == "thumbnail"
        }

        async def ask() -> int:
            bundle = self.index.bundle
            decoded = await self.workers.pixels(bundle, images) if images else []
            work = partial(self._embedded, bundle, items, decoded, small)
            made = await self.workers.searches.run(work) if images or vectors else {}
            return await self._change(partial(_write, items, made, bundle), change)

        return await self._again(ask, _NOT_WRITTEN)

    async def delete(self, change: Change) -> int:
        """Delete the items of a change, by id or by filter; return how many there were.

        Raises:
            DataError: the filter names what no item has.
            RequestError: see `put`.
        """

        def work(index: Index) -> int:
            return index.delete(change.ids, where=change.where)

        return await self._again(lambda: self._change(work, change), _NOT_WRITTEN)

    async def snapshot(self, target: Path, change: Change) -> None:
        """Write a copy of one moment.

        Raises:
            RequestError: 503, too many snapshots wait, or this one cannot be written.
        """

        def work(index: Index) -> int | None:
            index.snapshot(target)
            return None

        sentence = "The snapshot cannot be written. The server's log says why."
        await self._again(lambda: self._change(work, change, self.workers.snapshots), sentence)

    async def _change(self, work: Callable[[Index], Any], change: Change, turns: Turns | None = None) -> Any:
        """Change the index in its turn, with its lines in the record."""

        def recorded() -> Any:
            with self.use() as index:
                if self._audit is None:
                    return work(index)
                with self._audit.recording(change) as outcome:
                    count = work(index)
                    outcome.count = len(change.ids) if change.what in ("put", "change") else count
                return count

        return await (turns or self.workers.changes).run(recorded)

    def _embedded(
        self, bundle: Bundle, items: Sequence[NewItem], decoded: Sequence[Decoded], small: Mapping[str, bytes]
    ) -> dict[str, Item]:
        """Return the items that have an image or a vector, with what the index keeps of them.

        Raises:
            DataError: vectors that the index does not take.
        """
        made: dict[str, Item] = {}
        pictured = [item for item in items if item.image is not None]
        if pictured:
            arrays = self._arrays(bundle, np.stack([one.pixels for one in decoded]))
            for item, picture, row in zip(pictured, decoded, arrays, strict=True):
                assert item.image is not None
                original = item.image if item.keep == "copy" else small.get(item.id)
                made[item.id] = Item(item.id, item.label, item.metadata, None, None, item.keep, original, len(item.image), picture.width, picture.height, row)  # fmt: skip
        if numbered := [item for item in items if item.vector is not None]:
            for item, row in zip(numbered, self._of_vectors(bundle, numbered), strict=True):
                made[item.id] = Item(item.id, item.label, item.metadata, keep="nothing", arrays=row)
        return made

    def _arrays(self, bundle: Bundle, inputs: NDArray[Any]) -> list[dict[str, Floats]]:
        """Return the arrays that the index keeps of images or features."""
        with stage("encode", len(inputs)):
            keeps = FEATURES in self.index.generation.widths
            features = bundle.features(inputs) if keeps else None
            encoded = bundle.encode(inputs) if features is None else bundle.encode_features(features)
        arrays = {VECTOR: encoded.vector}
        if encoded.code is not None:
            arrays[CODE] = encoded.code
        if features is not None:
            arrays[FEATURES] = np.asarray(features, np.float32)
        return [{name: array[row] for name, array in arrays.items()} for row in range(len(inputs))]

    def _of_vectors(self, bundle: Bundle, items: Sequence[NewItem]) -> list[dict[str, Floats]]:
        given = bundle.manifest.input
        width = given.shape[0] if given.kind == "features" else bundle.manifest.vector
        if wrong := next((item for item in items if len(item.vector or ()) != width), None):
            what = "features" if given.kind == "features" else "numbers"
            raise DataError(
                f"A vector of this index has {width} {what}, not {len(wrong.vector or ())} (item {wrong.id[:80]!a})."
            )
        vectors = np.array([item.vector for item in items], np.float64)
        if given.kind == "features":
            return self._arrays(bundle, vectors)
        if set(self.index.generation.widths) != {VECTOR}:
            raise DataError(
                "This index keeps more of an item than its vector: give the image, or features where it takes them."
            )
        with np.errstate(over="ignore"):
            return [{VECTOR: row} for row in vectors.astype(np.float32)]

    # Pictures

    def shows(self, keep: str, path: Path | None) -> bool:
        """Return whether an item's image is offered; asks no disk."""
        return keep in ("copy", "thumbnail") or (path is not None and bool(self._folders))

    async def picture(self, id: str) -> bytes:
        """Return an item's original: what the index keeps of it, or the file that it was indexed from.

        Raises:
            RequestError: 404, no such item, or its file may not be shown, is gone, or another one; 503.
        """

        def work() -> bytes:
            with self.use() as index:
                item = index.get(id).get(id)
                if item is None:
                    raise no_item()
                kept = index.store.original(id) if item.keep in ("copy", "thumbnail") else None
                return kept if kept is not None else self._file(item)

        try:
            return await self.workers.pictures.run(work)
        except StoreError as error:
            raise _told(error, _UNREADABLE) from None

    def _file(self, item: Item) -> bytes:
        """Return the file that an item was indexed from, if it lies in a folder that may be shown."""
        if item.path is None:
            raise RequestError(
                404, f"Item {item.id} was indexed from features, or the index keeps nothing of its image."
            )
        path = Path(os.path.realpath(item.path))
        if not any(path.is_relative_to(folder) for folder in self._folders):
            raise RequestError(404, f"The image of item {item.id} is in no folder that may be shown.")
        try:
            handle = os.open(path, _REGULAR)
            with os.fdopen(handle, "rb") as file:
                known = os.fstat(handle)
                if not stat.S_ISREG(known.st_mode) or known.st_size > BATCH_BYTES:
                    raise RequestError(404, f"The image of item {item.id} is too large to be shown.")
                content = file.read(known.st_size + 1)
        except (OSError, ValueError):
            raise RequestError(
                404, f"The image of item {item.id} is no longer where it was indexed."
            ) from None
        if item.bytes is not None and len(content) != item.bytes:
            raise RequestError(404, f"The image of item {item.id} was changed after it was indexed.")
        return content


def no_item(where: str = "There") -> RequestError:
    """Return the refusal of an id that no item has."""
    return RequestError(404, f"{where} is no such item.")


def _told(error: StoreError, sentence: str) -> RequestError:
    """Log a fault of an index's store, and return what the client is told."""
    if isinstance(error, TooSlow):
        return RequestError(503, "The filter takes too long here. Ask for less.", "deadline")
    report(error)
    if isinstance(error, StoreUnavailable):
        return RequestError(503, UNREACHABLE, "unreachable")
    return RequestError(503, sentence, "index")


def _hits(index: Index, query: Query, pixels: NDArray[Any] | None) -> list[list[Hit]]:
    """Return what is nearest to each thing that a query gives, in order; a stored item is not its own neighbour.

    Raises:
        DataError: a vector of another width, or an index that cannot be searched by id.
        RequestError: 404, no such item.
    """
    options, answers = query.options, [list[Hit]() for _ in query.given]
    for by_id in (False, True):
        places = [place for place, given in enumerate(query.given) if (given.id is not None) == by_id]
        if not places:
            continue
        given = [query.given[place] for place in places]
        encoded = _stored(index, given) if by_id else _encoded(index.bundle, given, pixels)
        with stage("search", len(places)):
            found = index.search(encoded, options.k + by_id, candidates=options.candidates, where=query.where)
        for place, hits in zip(places, found, strict=True):
            answers[place] = [hit for hit in hits if hit.id != query.given[place].id][: options.k]
    return answers


def _encoded(bundle: Bundle, given: Sequence[Given], pixels: NDArray[Any] | None) -> Any:
    """Return images or vectors as an index is asked for them."""
    if pixels is None:
        vectors = [one.vector for one in given if one.vector is not None]
        if len({len(vector) for vector in vectors}) > 1:
            raise DataError("The vectors of one request must have the same number of numbers.")
        stacked = np.stack(vectors)
        if bundle.manifest.input.kind != "features":
            return stacked
    with stage("encode", len(given)):
        return bundle.encode(pixels) if pixels is not None else encode_vectors(bundle, stacked)


def _stored(index: Index, given: Sequence[Given]) -> Encoded:
    """Return items of the index as queries."""
    bundle, ids = index.bundle, [str(one.id) for one in given]
    if bundle.manifest.query_vectors:
        raise DataError(
            "The bundle of this index encodes queries in another way than items: search with the item's image."
        )
    items = index.get(ids, arrays=True)
    if index.follow() is not bundle:  # what was read may be of the bundle that is served since
        raise Superseded("Another bundle is served.")
    for number, id in enumerate(ids, 1):
        if id not in items or VECTOR not in items[id].arrays:
            raise no_item(f"Query {number}: there" if len(ids) > 1 else "There")
    vectors = np.stack([items[id].arrays[VECTOR] for id in ids])
    codes = None
    if bundle.manifest.rescorer is not None:
        codes = np.stack([items[id].arrays[CODE] for id in ids])
    return Encoded(vectors, vectors, codes, bundle.sha256)


def _write(items: Sequence[NewItem], made: Mapping[str, Item], bundle: Bundle, index: Index) -> int:
    """Write items in one transaction; in the thread that writes."""
    kept = [item for item in items if item.id not in made]
    there = index.get([item.id for item in kept], arrays=True) if kept else {}
    if missing := [item.id for item in kept if item.id not in there]:
        raise DataError(
            f"There is no item {missing[0][:80]!a}, so that it needs an image or a vector"
            + (f" ({len(missing):,} such items)." if len(missing) > 1 else ".")
        )
    size = sum(there[item.id].bytes or 0 for item in kept if there[item.id].keep == "copy")
    if len(kept) > 1 and size > _KEPT_BYTES:
        raise DataError(
            f"The originals of these items have more than {_KEPT_BYTES:,} bytes. Change fewer at a time."
        )
    with stage("write", len(items)):
        whole = [made.get(item.id) or _changed(index, there[item.id], item) for item in items]
        return index.store.upsert(whole, bundle.sha256)


def _changed(index: Index, item: Item, change: NewItem) -> Item:
    """Return an item with what a change names."""
    original = index.store.original(item.id) if item.keep in ("copy", "thumbnail") else None
    label = change.label if "label" in change.named else item.label
    metadata = change.metadata if "metadata" in change.named else item.metadata
    return replace(item, label=label, metadata=metadata, original=original)
