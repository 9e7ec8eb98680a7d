"""The work behind a request, in bounded pools: the event loop never decodes, encodes, searches or reads a file."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from retrieval.errors import DataError
from retrieval.serving.decoding.pool import Busy, Decoded, Decoders
from retrieval.serving.decoding.pool import Job as Decoding
from retrieval.serving.http.body import Query
from retrieval.serving.http.errors import RequestError
from retrieval.serving.http.pictures import Picture
from retrieval.serving.http.pool import Job, Pool
from retrieval.serving.http.settings import Settings
from retrieval.serving.images import Limits
from retrieval.serving.index.base import Hit, Index
from retrieval.serving.index.gallery import Gallery
from retrieval.serving.queries import encode_vectors
from retrieval.serving.runtime import load_faiss

_PICTURE_THREADS = 4
_PICTURES_WAITING = 64


class Searcher:
    """Runs searches on one index, and reads its gallery.

    Args:
        index: opened with as many encoder threads as suit `settings.workers`.
        settings: limits.

    Attributes:
        gallery: which originals may be shown.
        searches: the pool for searches.
        pictures: the pool for the gallery's files, whose storage may hang.
    """

    def __init__(self, index: Index, settings: Settings) -> None:
        self.index = index
        self.gallery = Gallery(index, settings.images)
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
            DataError: the image or vector cannot be used.
            RequestError: 503, too many are waiting.
        """
        vector = query.vector
        if vector is not None:
            return await self.searches.run(lambda job: finish(self._hits(vector, query.k, job)), client)
        given = self.index.bundle.manifest.input
        if given.preprocessing is None:
            raise DataError(f"This index takes vectors of {given.shape[0]} features, not images.")

        def work(decoded: Decoded, job: Job[bytes]) -> bytes:
            return finish(self._hits(decoded.pixels, query.k, job))

        return await self._decoded(self._decoders.pixels, query.image, client, work)

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
            decoding.future.add_done_callback(lambda future: job.run())
            try:
                return await job.future
            except asyncio.CancelledError:
                job.abandon()
                decoding.abandon()
                raise
        except Busy as fault:
            raise RequestError(503, str(fault)) from None

    def _hits(self, given: NDArray[Any], k: int, job: Job[Any]) -> list[Hit]:
        """Return what is nearest to pixels, features or a vector; for a thread."""
        # Several searches run at a time: FAISS's threads would wait for each other.
        load_faiss().omp_set_num_threads(1)
        bundle = self.index.bundle
        encoded = encode_vectors(bundle, given[None]) if given.ndim == 1 else bundle.encode(given[None])
        job.check()
        found: list[list[Hit]] = self.index.search(encoded, k)
        return found[0]

    async def picture(self, number: int, client: str = "") -> Picture:
        """Return the beginning of the file that an item was indexed from.

        Raises:
            RequestError: 404, no such item, or its file may not be shown, is gone or another one; 503, too many are waiting.
        """
        return await self.pictures.run(lambda job: self._picture(number), client)

    def _picture(self, number: int) -> Picture:
        item = self.index.item(number)
        if item is not None and item.path is not None:
            path = self.gallery.original(item.path)
            if path is None:
                raise RequestError(404, f"The image of item {number} is in no folder that may be shown.")
            item = replace(item, path=path)
        return Picture.of(number, item)

    async def piece(self, picture: Picture, offset: int, client: str = "") -> bytes:
        """Return the file's next bytes."""
        return await self.pictures.run(lambda job: picture.piece(offset), client)

    async def shown(self, picture: Picture, client: str = "") -> bytes:
        """Return a PNG of a picture that browsers cannot show.

        Raises:
            RequestError: 404, it cannot be shown; 503, too many are waiting.
        """
        content = await self.pictures.run(lambda job: picture.content(self.settings.max_bytes), client)
        try:
            return await self._decoded(self._decoders.png, content, client, lambda made, job: made)
        except DataError:
            raise RequestError(404, f"The image of item {picture.number} cannot be shown.") from None

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

    def close(self, seconds: float = 10.0) -> bool:
        """Stop decoding, and let what runs end; return whether it has, within the time."""
        self._decoders.close()
        return self.searches.close(seconds) & self.pictures.close(0.1)
