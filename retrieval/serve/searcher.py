"""The work behind a request, in a bounded pool of threads: the event loop never decodes, encodes or searches."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from retrieval.decoders import Busy, Decoders, Job
from retrieval.errors import DataError, RetrievalError
from retrieval.images import Limits
from retrieval.index.store import Hit, Index
from retrieval.runtime import load_faiss
from retrieval.serve.body import Query, RequestError

T = TypeVar("T")
_WAITING = 16  # requests that may wait for each thread

# What browsers show as it is, by its first bytes; the file's name is not asked.
_MEDIA = {
    b"\xff\xd8\xff": "image/jpeg",
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"GIF8": "image/gif",
    b"BM": "image/bmp",
}


@dataclass(frozen=True)
class Picture:
    """An item's original file, or a PNG of it where browsers cannot show it."""

    content: bytes
    media_type: str


class Searcher:
    """Runs searches on one index.

    Args:
        index: opened with as many encoder threads as suit `workers`.
        workers: searches at a time.
        decoders: of query images, and of pictures that browsers cannot show; closed with the searcher.

    Attributes:
        limits: of a query image.
        ready: True once a real search has been run.
        fault: why the first search failed, if it did.
    """

    def __init__(self, index: Index, workers: int, decoders: Decoders) -> None:
        self.index = index
        self.limits: Limits = decoders.limits
        self.ready = False
        self.fault: str | None = None
        self._limit = workers * (_WAITING + 1)
        self._running = 0
        self._decoders = decoders
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="search", initializer=_one_thread)

    async def run(self, work: Callable[[], T]) -> T:
        """Run something in the pool.

        Raises:
            RequestError: 503, too many are waiting.
        """
        if self._running >= self._limit:
            raise RequestError(
                503, "The server is busy: too many searches are waiting. Try again in a moment."
            )
        self._running += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._running -= 1

    async def warm_up(self) -> None:
        """Run a real search, from pixels (or features) to items, and become ready."""
        try:
            await self.run(self._first)
            self.ready = True
        except Exception as fault:
            self.fault = str(fault) if isinstance(fault, RetrievalError) else type(fault).__name__
            if not isinstance(fault, RetrievalError):
                raise

    def _first(self) -> None:
        given = self.index.bundle.manifest.input
        noise = np.random.default_rng(0).integers(0, 256, size=(1, *given.shape)).astype(given.dtype)
        if not self.index.search(self.index.bundle.encode(noise), 1)[0]:
            raise RequestError(503, "The first search found nothing.")

    async def search(self, query: Query, client: str = "") -> list[Hit]:
        """Answer a query.

        A vector is what the bundle takes: features where it takes features, else a vector as its encoder gives. When
        the task is cancelled, decoding is given up too.

        Args:
            query: an image, or a vector.
            client: who asks, so that one who sends many images delays only himself.

        Raises:
            DataError: the image or vector cannot be used.
            RequestError: 503, too many are waiting.
        """
        bundle = self.index.bundle
        if query.image is not None:
            if bundle.manifest.input.preprocessing is None:
                raise DataError(
                    f"This index takes vectors of {bundle.manifest.input.shape[0]} features, not images."
                )
            decoded = await self._decoded(self._decoders.pixels, query.image, client)
            return await self.run(lambda: self.index.search(bundle.encode(decoded.pixels[None]), query.k)[0])
        vector = query.vector
        assert vector is not None
        if bundle.manifest.input.kind != "features":
            return await self.run(lambda: self.index.search(vector, query.k)[0])
        (width,) = bundle.manifest.input.shape
        if len(vector) != width:
            raise DataError(f"A vector for this index has {width} features, not {len(vector)}.")
        return await self.run(lambda: self.index.search(bundle.encode(vector[None]), query.k)[0])

    async def _decoded(self, start: Callable[..., Job], content: bytes, client: str) -> Any:
        """Return what a process makes of an image; it is told when nobody waits for that any more."""
        try:
            job = start(content, client=client)
            try:
                return await asyncio.wrap_future(job.future)
            except asyncio.CancelledError:
                job.abandon()
                raise
        except Busy as fault:
            raise RequestError(503, str(fault)) from None

    async def picture(self, number: int, client: str = "") -> Picture:
        """Return the file that an item was indexed from, or a PNG of it where browsers cannot show it.

        Raises:
            RequestError: 404, no such item, or its file is gone or another one; 503, too many are waiting.
        """
        content = await self.run(lambda: self._original(number))
        for start, media_type in _MEDIA.items():
            if content.startswith(start):
                return Picture(content, media_type)
        if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
            return Picture(content, "image/webp")
        try:
            return Picture(await self._decoded(self._decoders.png, content, client), "image/png")
        except DataError:
            raise RequestError(404, f"The image of item {number} cannot be shown.") from None

    def _original(self, number: int) -> bytes:
        """Return the content of the file that an item was indexed from; for a thread of the pool.

        Raises:
            RequestError: 404, no such item, or its file is gone or another one.
        """
        item = self.index.item(number)
        if item is None:
            raise RequestError(404, f"There is no item {number}.")
        if item.path is None:
            raise RequestError(404, f"Item {number} was indexed from features and has no image.")
        try:
            content = _read(item.path, item.bytes)
        except OSError:
            raise RequestError(
                404, f"The image of item {number} is no longer where it was indexed."
            ) from None
        if content is None:
            raise RequestError(404, f"The image of item {number} was changed after it was indexed.")
        return content

    def close(self) -> None:
        """Stop decoding, let searches under way end, and drop what waits."""
        self._decoders.close()
        self._pool.shutdown(wait=True, cancel_futures=True)


def _read(path: Path, size: int | None) -> bytes | None:
    """Return the file's content, or None when it has another size than was indexed."""
    with path.open("rb") as file:
        if size is not None and os.fstat(file.fileno()).st_size != size:
            return None
        return file.read()


def _one_thread() -> None:
    """One FAISS thread a search: several searches run at a time, and threads of one would wait for each other."""
    load_faiss().omp_set_num_threads(1)
