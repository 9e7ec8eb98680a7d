"""The work behind a request, in bounded pools: the event loop never decodes, encodes, searches or reads a file."""

from __future__ import annotations

import asyncio
import io
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from retrieval.errors import DataError, StoreError
from retrieval.serving.bundle import Bundle
from retrieval.serving.decoding.pool import Busy, Decoded, Decoders
from retrieval.serving.decoding.pool import Job as Decoding
from retrieval.serving.filters import Filter
from retrieval.serving.http.body import Query
from retrieval.serving.http.errors import RequestError
from retrieval.serving.http.guard import report
from retrieval.serving.http.pictures import Picture
from retrieval.serving.http.pool import Job, Pool
from retrieval.serving.http.settings import Settings
from retrieval.serving.images import Limits
from retrieval.serving.index.base import Hit, Index
from retrieval.serving.index.collection import Collection
from retrieval.serving.index.gallery import KEPT, Gallery
from retrieval.serving.local.store import LocalStore
from retrieval.serving.queries import encode_vectors
from retrieval.serving.runtime import load_faiss
from retrieval.serving.stages import stage
from retrieval.serving.stores.contract import Stats, Superseded, TooSlow, patience

DAMAGED = "The index cannot be searched: it is damaged, or its disk fails. The server's log says more."
_PICTURE_THREADS = 4
_PICTURES_WAITING = 64
_TRIES = 5
_LONGEST_NUMBER = 18  # digits: what SQLite and Python count with


@dataclass(frozen=True)
class _Failed:
    """A search that found the index damaged: what was given to the encoder (or the vector), k and the filter."""

    given: NDArray[Any]
    k: int
    where: Filter | None


class Searcher:
    """Runs searches on one index, and reads its gallery.

    Args:
        index: opened with as many encoder threads as suit `settings.workers`.
        settings: limits.

    Attributes:
        gallery: which originals may be shown.
        searches: the pool for searches.
        pictures: the pool for the gallery's files, whose storage may hang.
        failed: a search that found the index damaged; None once it has succeeded again.
    """

    def __init__(self, index: Index, settings: Settings) -> None:
        self.index = index
        self.gallery = Gallery(index, settings.images)
        self.failed: _Failed | None = None
        self._reading = (
            threading.Lock()
        )  # of kept originals: one at a time is in memory that nobody has counted yet
        self.settings = settings
        waiting = settings.waiting * settings.workers
        self.searches = Pool("search", settings.workers, waiting)
        self._decoders = Decoders(
            index.bundle.manifest.input.preprocessing,
            workers=settings.workers,
            limits=Limits(settings.max_pixels, settings.max_bytes),
            seconds=settings.decode_seconds,
            waiting=waiting,
        )
        self.pictures = Pool("picture", _PICTURE_THREADS, _PICTURES_WAITING)

    async def search(self, query: Query, finish: Callable[[list[Hit]], bytes], client: str = "") -> bytes:
        """Answer a query. Cancelled, its decoding is given up, and what has not begun is not.

        Args:
            query: an image or a vector. A vector is what the bundle takes: features where it takes features, else a
                vector as its encoder gives.
            finish: makes the answer of what was found, in the thread that found it.
            client: whose query it is; clients take turns.

        Raises:
            DataError: the image or vector cannot be used, or the filter names what no item has.
            RequestError: 400, this index takes no filters; 503, too many are waiting, or the index is damaged.
        """
        if query.where is not None and not isinstance(self.index, Collection):
            raise RequestError(400, "This index is searched without filters: it is a folder of format 1.")
        try:
            for _ in range(_TRIES):
                try:
                    return await self._search(query, finish, client)
                except (
                    Superseded
                ):  # another bundle is served since, which may preprocess images in another way
                    continue
        except TooSlow:
            raise RequestError(503, "The filter takes too long here. Ask for less.", "deadline") from None
        except StoreError as fault:
            report(fault, self.settings.debug)
            raise RequestError(503, DAMAGED, "index") from None
        raise RequestError(503, "The index changes its bundle again and again. Try again in a moment.")

    async def _search(self, query: Query, finish: Callable[[list[Hit]], bytes], client: str) -> bytes:
        bundle, vector = self.index.bundle, query.vector
        if vector is not None:
            return await self.searches.run(lambda job: finish(self._hits(bundle, vector, query, job)), client)
        given = bundle.manifest.input
        if given.preprocessing is None:
            raise DataError(f"This index takes vectors of {given.shape[0]} features, not images.")

        def work(decoded: Decoded, job: Job[bytes]) -> bytes:
            return finish(self._hits(bundle, decoded.pixels, query, job))

        start = partial(self._decoders.pixels, preprocessing=given.preprocessing)
        return await self._decoded(start, query.image, client, work)

    async def _decoded(
        self,
        start: Callable[..., Decoding],
        content: bytes | None,
        client: str,
        work: Callable[[Any, Job[bytes]], bytes],
    ) -> bytes:
        """Return what `work` makes of a decoded image; its process is told when nobody waits for that any more.

        The thread that is given the pixels goes on with them: handing them to another costs as much as a small search.
        """
        try:
            decoding = start(content, client=client)
            job = Job(lambda job: work(decoding.future.result(), job), client)

            def go_on(future: Any) -> None:
                if job.trail is not None and decoding.begun is not None:
                    job.trail.note("wait", job.queued, decoding.begun)
                    job.trail.note("decode", decoding.begun, time.perf_counter())
                job.run()

            decoding.future.add_done_callback(go_on)
            try:
                return await job.future
            except asyncio.CancelledError:
                job.abandon()
                decoding.abandon()
                raise
        except Busy as fault:
            raise RequestError(503, str(fault), "queue") from None

    def _hits(self, bundle: Bundle, given: NDArray[Any], query: Query | _Failed, job: Job[Any]) -> list[Hit]:
        """Return what is nearest to pixels, features or a vector; for a thread."""
        # Several searches run at a time: FAISS's threads would wait for each other.
        load_faiss().omp_set_num_threads(1)
        if given.ndim == 1 and bundle.manifest.input.kind != "features":
            encoded: Any = given[None]
        else:
            with stage("encode", 1):
                encoded = (
                    encode_vectors(bundle, given[None]) if given.ndim == 1 else bundle.encode(given[None])
                )
        job.check()
        try:
            with patience(self.settings.deadline), stage("search"):
                found: list[list[Hit]] = self.index.search(encoded, query.k, where=query.where)
        except (Superseded, TooSlow):
            raise
        except StoreError:
            self.failed = self.failed or _Failed(given, query.k, query.where)
            raise
        return found[0]

    async def again(self) -> str | None:
        """Repeat the search that found the index damaged; return why it fails still."""
        failed = self.failed
        if failed is None:
            return None

        def work(job: Job[str | None]) -> str | None:
            try:
                self._hits(self.index.bundle, failed.given, failed, job)
            except (StoreError, Superseded) as fault:
                report(fault, self.settings.debug)
                return DAMAGED
            except DataError:  # another bundle is served since, which takes other queries
                pass
            self.failed = None
            return None

        return await self.searches.run(work)

    async def state(self, client: str = "") -> tuple[Bundle, int]:
        """Return the bundle that is served now, and the number of items.

        Raises:
            RequestError: 503, too many are waiting, or the index is damaged.
        """

        index = self.index
        if not isinstance(index, Collection):
            return index.bundle, len(index)

        def work(job: Job[tuple[Bundle, int]]) -> tuple[Bundle, int]:
            with patience(self.settings.deadline):
                return index.follow(), len(index)

        try:
            return await self.searches.run(work, client)
        except StoreError as fault:
            report(fault, self.settings.debug)
            raise RequestError(
                503, "The index cannot be read. The server's log says more.", "index"
            ) from None

    async def picture(self, id: str, client: str = "") -> Picture:
        """Return the beginning of an item's original: what the index keeps of it, or the file that it was indexed from.

        Raises:
            RequestError: 404, no such item, or its file may not be shown, is gone or another one; 503, too many are waiting.
        """
        try:
            return await self.pictures.run(lambda job: self._picture(id), client)
        except StoreError as fault:
            report(fault, self.settings.debug)
            raise RequestError(503, "The item cannot be read. The server's log says more.", "index") from None

    def _picture(self, id: str) -> Picture:
        if isinstance(self.index, Collection):
            with patience(self.settings.deadline):
                return self._living(self.index, id)
        number = number_of(id, self.index)
        item = self.index.item(number)
        if item is not None and item.path is not None:
            path = self.gallery.original(item.path)
            if path is None:
                raise RequestError(404, f"The image of item {number} is in no folder that may be shown.")
            item = replace(item, path=path)
        return Picture.of(str(number), item)

    def _living(self, index: Collection, id: str) -> Picture:
        """Return what is kept of an item's original, or its file; a thumbnail where the file is not to be had."""
        item = index.get(id).get(id)
        if item is None:
            raise RequestError(404, "There is no such item.")
        if item.keep == "copy" and (kept := self._kept(index, id)):
            return kept
        listed = index.listed(item)
        try:
            path = None if item.path is None else self.gallery.original(item.path, item.stamp)
            if item.path is not None and path is None:
                raise RequestError(404, f"The image of item {id} is in no folder that may be shown.")
            return Picture.of(id, replace(listed, path=path))
        except RequestError:
            if item.keep in KEPT and (kept := self._kept(index, id)):
                return kept
            raise

    def _kept(self, index: Collection, id: str) -> Picture | None:
        with self._reading:
            content = index.store.original(id)
        return None if content is None else Picture.kept(id, content)

    async def piece(self, picture: Picture, offset: int, client: str = "") -> bytes:
        """Return the file's next bytes."""
        return await self.pictures.run(lambda job: picture.piece(offset), client)

    async def shown(self, picture: Picture, client: str = "") -> bytes:
        """Return a PNG of a picture that browsers cannot show.

        Raises:
            RequestError: 404, it cannot be shown; 503, too many are waiting.
        """
        content = await self.pictures.run(lambda job: picture.whole(self.settings.max_bytes), client)
        try:
            return await self._decoded(self._decoders.png, content, client, lambda made, job: made)
        except DataError:
            raise RequestError(404, f"The image of item {picture.id} cannot be shown.") from None

    def sample(self) -> Query:
        """Return a query that goes the whole way of a client's, for readiness."""
        given = self.index.bundle.manifest.input
        noise = np.random.default_rng(0)
        if given.kind == "features":
            return Query(None, noise.normal(size=given.shape), 1)
        pixels = noise.integers(0, 256, size=given.shape, dtype=np.uint8).transpose(1, 2, 0)
        out = io.BytesIO()
        Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(out, "PNG")
        return Query(out.getvalue(), None, 1)

    async def embedding(self, query: Query) -> tuple[Bundle, NDArray[np.float32]]:
        """Return what the encoder makes of a query, as a vector (P,), and the bundle that it is of.

        Raises:
            RequestError: 503, too many are waiting.
        """
        bundle, vector = self.index.bundle, query.vector
        given = bundle.manifest.input
        made: list[NDArray[np.float32]] = []

        def encode(pixels: NDArray[Any]) -> bytes:
            encoded = (
                encode_vectors(bundle, pixels[None]) if pixels.ndim == 1 else bundle.encode(pixels[None])
            )
            made.append(encoded if isinstance(encoded, np.ndarray) else encoded.query[0])
            return b""

        if vector is not None:
            await self.searches.run(lambda job: encode(vector))
        else:
            start = partial(self._decoders.pixels, preprocessing=given.preprocessing)
            await self._decoded(start, query.image, "", lambda decoded, job: encode(decoded.pixels))
        return bundle, made[0]

    def decode_pids(self) -> list[int]:
        """Return the processes that decode."""
        return self._decoders.pids

    def waiting(self) -> dict[str, int]:
        """Return how many wait in each queue."""
        return {
            "search": self.searches.waiting,
            "decode": self._decoders.waiting,
            "picture": self.pictures.waiting,
        }

    def stats(self) -> Stats | None:
        """Return what the index holds, None where it cannot be read; for a thread: it reads the disk."""
        index = self.index
        try:
            if isinstance(index, Collection):
                with patience(self.settings.deadline):
                    stats = index.stats()
                if isinstance(index.store, LocalStore):
                    stats = replace(stats, details={**stats.details, "merges": index.store.merges})
                return stats
            return Stats(len(index), (), None, {})
        except StoreError as fault:
            report(fault, self.settings.debug)
            return None

    def close(self, seconds: float = 10.0) -> bool:
        """Stop decoding, and let what runs end; return whether it has, within the time."""
        self._decoders.close()
        return self.searches.close(seconds) & self.pictures.close(0.1)


def number_of(id: str, index: Index) -> int:
    """Return the number that an address names an item of a folder of format 1 by.

    Raises:
        RequestError: 404, no item has it.
    """
    if not (id.isascii() and id.isdecimal() and len(id) <= _LONGEST_NUMBER):
        raise RequestError(404, "There is no such item.")
    if int(id) >= len(index):
        raise RequestError(404, f"There is no item {int(id)}.")
    return int(id)
