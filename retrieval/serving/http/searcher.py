"""Searches of one index, in bounded pools, and what readiness asks of it."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from retrieval.errors import DataError, RetrievalError, StoreError
from retrieval.serving.bundle import Bundle, Encoded
from retrieval.serving.decoding.pool import Decoded
from retrieval.serving.http.asking import Found, ask, searched
from retrieval.serving.http.current import Current
from retrieval.serving.http.errors import RequestError
from retrieval.serving.http.guard import UNREACHABLE, report, store_failed
from retrieval.serving.http.holding import PASSING, Holding
from retrieval.serving.http.machinery import Machinery
from retrieval.serving.http.pictures import Gallery
from retrieval.serving.http.pool import Alike, Job
from retrieval.serving.http.queries import Given, Query
from retrieval.serving.http.settings import Settings
from retrieval.serving.http.together import (
    Asked,
    Pace,
    What,
    answer_together,
    encode_together,
    key_of,
)
from retrieval.serving.index.index import Index
from retrieval.serving.queries import encode_vectors
from retrieval.serving.stages import stage
from retrieval.serving.store.contract import Stats, StoreUnavailable, Superseded, TooSlow, patience

DAMAGED = "The index cannot be searched: it is damaged, or its disk fails. The server's log says more."
_TRIES = 5

T = TypeVar("T")


@dataclass(frozen=True)
class _Failed:
    """A search that found the index damaged, with the pixels that were decoded for it."""

    query: Query
    pixels: NDArray[Any] | Encoded | None


class Searcher:
    """Runs searches on one index.

    Args:
        index: opened with as many encoder threads as suit `settings.workers`.
        settings: limits.
        machinery: what does the work, shared with other indexes; by default the searcher's own.
        reopen: opens the index that lies in the folder by now; None where another one is never taken up.

    Attributes:
        current: the index, exchanged when another takes its folder.
        gallery: which originals may be shown.
        failed: a search that found the index damaged; None once it has succeeded again.
    """

    def __init__(
        self,
        index: Index,
        settings: Settings,
        machinery: Machinery | None = None,
        reopen: Callable[[], Index] | None = None,
    ) -> None:
        self._reopen = reopen
        self._taking = threading.Lock()
        self.current = Current(index)
        self.settings = settings
        self.gallery = Gallery(settings.images)
        self.failed: _Failed | None = None
        self._pace = Pace()
        self._own = machinery is None
        self.machinery = machinery or Machinery(settings, index.bundle.manifest.input.preprocessing)

    @property
    def index(self) -> Index:
        """The index of this moment."""
        return self.current.index

    def take_up(self) -> str | None:
        """Serve the index that lies in the folder by now, if it is another than the one that is served; for a thread, which may wait for the disk.

        Requests that use the old one end first; a change that is being written ends in the old one.

        Returns:
            None when what lies there is served, else a sentence for the log, with its path.
        """
        with self._taking:
            changed = self.index.changed()
            if changed is None or self._reopen is None:
                return changed
            try:
                index = self._reopen()
            except RetrievalError as fault:
                return f"{changed} What is there cannot be opened: {fault}"
            self.current.exchange(index)
            self.failed = None
        return None

    async def elsewhere(self, failed: Index) -> bool:
        """Whether another index is served than one that failed: by now, or since the files of that one are not there any more."""

        def work(job: Job[bool]) -> bool:
            with self.current.use() as index:
                return index is not failed or (index.changed() is not None and self.take_up() is None)

        return await self.machinery.pictures.run(work)

    def require_room(self, client: str, *, images: bool) -> None:
        """Refuse a search that would not find room, before anything of it is read.

        Raises:
            RequestError: 503, too many are waiting.
        """
        if images:
            self.machinery.require_room(client)
        if not images or self._pace.waits(self.index.bundle):
            self.machinery.searches.require_room(client)

    async def search(
        self,
        query: Query,
        finish: Callable[[Found], bytes],
        client: str = "",
    ) -> bytes:
        """Answer a query. Cancelled, its decoding is given up, and what has not begun is not.

        Args:
            query: images, vectors or ids. A vector is what the bundle takes: features where it takes features, else a
                vector as its encoder gives.
            finish: makes the answer of what was found, in the thread that found it.
            client: whose query it is; clients take turns.

        Raises:
            DataError: an image or vector cannot be used, or the filter names what no item has.
            RequestError: 404, no such item; 503, too many are waiting, the index is damaged, or its store cannot be reached.
        """
        try:
            for _ in range(_TRIES):
                index = self.index
                try:
                    return await self._search(query, finish, client)
                except (
                    Superseded
                ):  # another bundle is served since, which may preprocess images in another way
                    continue
                except StoreError as fault:
                    if isinstance(fault, PASSING) or not await self.elsewhere(index):
                        raise
        except TooSlow:
            raise RequestError(503, "The filter takes too long here. Ask for less.", "deadline") from None
        except StoreError as fault:
            raise store_failed(fault, DAMAGED, "index", self.settings.debug) from None
        raise RequestError(503, "The index changes its bundle again and again. Try again in a moment.")

    async def _search(self, query: Query, finish: Callable[[Found], bytes], client: str) -> bytes:
        bundle, (one, *more) = self.index.bundle, query.given
        images = [each.image for each in query.given if each.image is not None]
        if len(images) == 1:
            start = self.machinery.starter(bundle)
            if self._pace.waits(bundle):
                what: What = await self.machinery.decoded(
                    start, images[0], client, lambda decoded, job: self._encoded(bundle, decoded.pixels[None])
                )
                return await self._queued(bundle, query, what, finish, client)

            def work(decoded: Decoded, job: Job[bytes]) -> bytes:
                return finish(self._found(bundle, decoded.pixels[None], query, job))

            answer: bytes = await self.machinery.decoded(start, images[0], client, work)
            return answer
        if one.vector is not None and not more:
            return await self._queued(bundle, query, one.vector, finish, client)
        pixels = None
        if images:
            pixels = np.stack([one.pixels for one in await self.machinery.pixels(bundle, images, client)])
        return await self.machinery.searches.run(
            lambda job: finish(self._found(bundle, pixels, query, job)), client
        )

    @staticmethod
    def _encoded(bundle: Bundle, pixels: NDArray[Any]) -> What:
        """Return what a CPU encodes; a GPU does so for all that wait."""
        if bundle.device != "cpu":
            return pixels
        with stage("encode"):
            return bundle.encode(pixels)

    async def _queued(
        self, bundle: Bundle, query: Query, what: What, finish: Callable[[Found], bytes], client: str
    ) -> bytes:
        """Answer one query, together with those that wait and are alike."""

        def together(jobs: Sequence[Job[bytes]]) -> Sequence[Any]:
            return answer_together(jobs, bundle, lambda asked: self._found_together(bundle, asked))

        key = key_of(self, bundle, query, what)
        image = None if isinstance(what, np.ndarray) and what.ndim == 1 else what
        return await self.machinery.searches.run(
            lambda job: finish(self._found(bundle, image, query, job)),
            client,
            Alike(key, together, self._pace.most(self.settings)),
            Asked(query, what, finish),
        )

    def _found(
        self, bundle: Bundle, pixels: NDArray[Any] | Encoded | None, query: Query, job: Job[Any]
    ) -> Found:
        """Return what is nearest; for a thread."""
        job.check()
        with self._held(bundle, query, pixels) as index:
            hits = ask(index, query, bundle, pixels, self._pace.note)
            return Found(hits, searched(index, query) if query.explain else None)

    def _found_together(self, bundle: Bundle, asked: Sequence[Asked]) -> Sequence[Found]:
        """Return what is nearest to each of several queries that differ in nothing else; for a thread."""
        query = asked[0].query
        pixels = asked[0].what if asked[0].query.given[0].vector is None else None
        with self._held(bundle, query, pixels) as index:
            encoded = encode_together(bundle, [one.what for one in asked])
            began = perf_counter()
            with stage("search", len(asked)):
                hits = index.search(encoded, query.k, candidates=query.candidates, where=query.where)
            self._pace.note(perf_counter() - began, len(asked))
            said = searched(index, query) if any(one.query.explain for one in asked) else None
            return [
                Found([own], said if one.query.explain else None)
                for one, own in zip(asked, hits, strict=True)
            ]

    def _held(self, bundle: Bundle, query: Query, pixels: NDArray[Any] | Encoded | None) -> Holding:
        """Give the index for a search within the deadline; note the query where the index proves damaged."""

        def damaged() -> None:
            self.failed = self.failed or _Failed(query, pixels)

        return Holding(self.current, bundle, self.settings.deadline, damaged)

    async def again(self) -> str | None:
        """Repeat the search that found the index damaged; return why it fails still."""
        failed = self.failed
        if failed is None:
            return None

        def work(job: Job[str | None]) -> str | None:
            try:
                self._found(self.index.bundle, failed.pixels, failed.query, job)
            except (StoreError, Superseded) as fault:
                report(fault, self.settings.debug)
                return UNREACHABLE if isinstance(fault, StoreUnavailable) else DAMAGED
            except (DataError, RequestError):  # another bundle is served since, or the item is gone
                pass
            self.failed = None
            return None

        return await self.machinery.searches.run(work)

    async def state(self, client: str = "") -> tuple[Bundle, int]:
        """Return the bundle that is served now, and the number of items.

        Raises:
            RequestError: 503, too many are waiting, the index is damaged, or its store cannot be reached.
        """

        def work(index: Index) -> tuple[Bundle, int]:
            return index.follow(), len(index)

        return await self.read(work, client)

    async def read(self, work: Callable[[Index], T], client: str = "") -> T:
        """Return what some reading of the index gives, in a thread, within the deadline.

        Raises:
            DataError: of the filter.
            RequestError: 503, too many are waiting, the index is damaged, its store cannot be reached, or it takes too long.
        """

        def read(job: Job[T]) -> T:
            with self.current.use() as index, patience(self.settings.deadline):
                return work(index)

        index = self.index
        try:
            try:
                return await self.machinery.searches.run(read, client)
            except StoreError as fault:
                if isinstance(fault, PASSING) or not await self.elsewhere(index):
                    raise
                return await self.machinery.searches.run(read, client)
        except TooSlow:
            raise RequestError(503, "The filter takes too long here. Ask for less.", "deadline") from None
        except StoreError as fault:
            said = "The index cannot be read. The server's log says more."
            raise store_failed(fault, said, "index", self.settings.debug) from None

    def sample(self) -> Query:
        """Return a query that goes the whole way of a client's, for readiness."""
        given = self.index.bundle.manifest.input
        noise = np.random.default_rng(0)
        if given.kind == "features":
            return Query((Given(vector=noise.normal(size=given.shape)),), 1)
        pixels = noise.integers(0, 256, size=given.shape, dtype=np.uint8).transpose(1, 2, 0)
        out = io.BytesIO()
        Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(out, "PNG")
        return Query((Given(image=out.getvalue()),), 1)

    async def embedding(self, query: Query) -> tuple[Bundle, NDArray[np.float32]]:
        """Return what the encoder makes of a query's one image or vector, as a vector (P,), and the bundle that it is of.

        Raises:
            RequestError: 503, too many are waiting.
        """
        bundle, (given,) = self.index.bundle, query.given
        made: list[NDArray[np.float32]] = []

        def encode(pixels: NDArray[Any]) -> bytes:
            encoded = (
                encode_vectors(bundle, pixels[None]) if pixels.ndim == 1 else bundle.encode(pixels[None])
            )
            made.append(encoded if isinstance(encoded, np.ndarray) else encoded.query[0])
            return b""

        vector, image = given.vector, given.image
        if vector is not None:
            await self.machinery.searches.run(lambda job: encode(vector))
        elif image is not None:
            start = self.machinery.starter(bundle)
            await self.machinery.decoded(start, image, "", lambda decoded, job: encode(decoded.pixels))
        return bundle, made[0]

    def decode_pids(self) -> list[int]:
        """Return the processes that decode."""
        return self.machinery.decoders.pids

    def waiting(self) -> dict[str, int]:
        """Return how many wait in each queue."""
        return self.machinery.waiting()

    def stats(self) -> Stats | None:
        """Return what the index holds, None where it cannot be read; for a thread: it reads the disk."""
        try:
            with self.current.use() as index, patience(self.settings.deadline):
                return index.stats()
        except StoreError as fault:
            report(fault, self.settings.debug)
            return None

    def close(self, seconds: float = 10.0) -> bool:
        """Stop decoding, and let what runs end; return whether it has, within the time."""
        return self.machinery.close(seconds) if self._own else True
