"""Thread pools with bounded queues for a server's work.

Uploaded images, searches, changes, snapshots and pictures (images of items, to show) have a pool
each.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from retrieval.base.runtime import load_faiss
from retrieval.base.stages import TRAIL, Trail, stage
from retrieval.bundle.bundle import Bundle
from retrieval.errors import DataError
from retrieval.images.decoding import Limits
from starlette.requests import ClientDisconnect

from retrieval_server.decoding import Decoded, Decoders, Kind, Undecodable
from retrieval_server.problems import RequestError, busy, report
from retrieval_server.settings import Settings

DECODE_SECONDS = 5.0
WAITING_PER_WORKER = 64
WAITING_CHANGES = 16
WAITING_SNAPSHOTS = 4
WAITING_PICTURES = 64
_PICTURE_THREADS = 8
_MOMENT_SECONDS = 0.002

T = TypeVar("T")


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
        if self._timer is None:  # a delay of 0 still collects requests that arrived together
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
        with suppress(RuntimeError):  # the server has ended
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
        self.images = Turns("images", settings.workers + 1, waiting, _search_alone)
        self._pools = (self.images, self.searches, self.changes, self.pictures, self.snapshots)
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
        turn = asyncio.Semaphore(2)  # leaves threads for the images of other requests

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
