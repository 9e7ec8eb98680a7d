"""Work outside the event loop, in turns: searches, images, pictures, changes and snapshots of all
indexes.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from time import perf_counter
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect

from retrieval.errors import DataError
from retrieval.serving.bundle import Bundle
from retrieval.serving.decoding import Decoded, Decoders, Kind, Undecodable
from retrieval.serving.http.problems import RequestError, busy, report
from retrieval.serving.http.settings import Settings
from retrieval.serving.images import Limits
from retrieval.serving.stages import current, stage

DECODE_SECONDS = 5.0
WAITING_PER_WORKER = 64
WAITING_CHANGES = 16
WAITING_SNAPSHOTS = 4
WAITING_PICTURES = 64
_PICTURE_THREADS = 8

T = TypeVar("T")

HAS_LEFT: ContextVar[Callable[[], Awaitable[bool]] | None] = ContextVar("has_left", default=None)
"""Says whether the client of this task's request has left, so that what waited for its turn is not
begun.
"""


class Turns:
    """A pool of threads with a bounded queue: some work runs, some waits, the rest is refused.

    Args:
        what: the work is, for the refusal: "searches".
        at_once: pieces of work at a time.
        waiting: pieces of work that may wait.
    """

    def __init__(self, what: str, at_once: int, waiting: int) -> None:
        self._what, self._most_waiting = what, waiting
        self._free = asyncio.Semaphore(at_once)
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix=what)
        self.waiting = self.running = 0

    def require_room(self) -> None:
        """Refuse work that would find no room: RequestError 503."""
        if self._free.locked() and self.waiting >= self._most_waiting:
            raise busy(f"too many {self._what} are waiting")

    async def run(self, work: Callable[[], T]) -> T:
        """Return what some work gives, done in a thread.

        Whoever is cancelled leaves the work its turn until its end.

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
        try:
            if waits and (has_left := HAS_LEFT.get()) is not None and await has_left():
                raise ClientDisconnect
        except BaseException:  # asking waits too, so that it may be cancelled
            self._free.release()
            raise
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

        def end_in_loop(future: Future[T]) -> None:
            with suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(end, future)

        self.running += 1
        self._threads.submit(contextvars.copy_context().run, noted).add_done_callback(end_in_loop)
        done: Future[T] = await ended
        return done.result()

    def close(self) -> None:
        """Begin nothing any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class Workers:
    """The threads and decoding processes of a server, which all its indexes share."""

    def __init__(self, settings: Settings) -> None:
        waiting = WAITING_PER_WORKER * settings.workers
        self.searches = Turns("searches", settings.workers, waiting)
        self.changes = Turns("changes", 1, WAITING_CHANGES)
        self.pictures = Turns("pictures", _PICTURE_THREADS, WAITING_PICTURES)
        self.snapshots = Turns("snapshots", 1, WAITING_SNAPSHOTS)
        self.images = Turns("images", settings.workers + 1, waiting)
        self.decoders = Decoders(Limits(settings.max_pixels, settings.max_bytes), DECODE_SECONDS)

    def decode(self, kind: Kind, content: bytes, bundle: Bundle | None = None) -> Any:
        """Return a decoded image: `Decoded` as a bundle takes it, or a file's bytes; for a thread.

        Raises:
            DataError: the image cannot be decoded, or the bundle takes features.
            RequestError: 503, no process decodes.
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
            raise RequestError(
                503, "The server decodes no images now. Its log says why.", "decode"
            ) from None

    async def decoded(self, kind: Kind, content: bytes) -> bytes:
        """Return a picture of another kind; see `decode`."""
        picture: bytes = await self.images.run(lambda: self.decode(kind, content))
        return picture

    async def pixels(self, bundle: Bundle, images: Sequence[bytes]) -> list[Decoded]:
        """Return decoded images; of several, an error names the one. See `decode`."""
        turn = asyncio.Semaphore(2)  # others' images get their turns between these

        async def decoded(number: int, image: bytes) -> Decoded:
            async with turn:
                try:
                    pixels: Decoded = await self.images.run(
                        lambda: self.decode("pixels", image, bundle)
                    )
                except DataError as error:
                    raise (
                        error if len(images) == 1 else DataError(f"image {number}: {error}")
                    ) from None
                return pixels

        tasks = [
            asyncio.create_task(decoded(number, image)) for number, image in enumerate(images, 1)
        ]
        try:
            return [await task for task in tasks]
        finally:
            for task in tasks:
                task.cancel()

    @property
    def idle(self) -> bool:
        """Whether no thread works for an index."""
        pools = (self.searches, self.changes, self.pictures, self.snapshots)
        return all(turns.running == 0 for turns in pools)

    def close(self) -> None:
        """Begin nothing any more, and end the processes that decode."""
        for turns in (self.searches, self.changes, self.pictures, self.snapshots, self.images):
            turns.close()
        self.decoders.close()
