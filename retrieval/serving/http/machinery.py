"""What does the work of all indexes of a server: pools of threads, and processes that decode."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from retrieval.errors import DataError
from retrieval.serving.bundle import Bundle
from retrieval.serving.decoding.pool import Busy, Decoded, Decoders
from retrieval.serving.decoding.pool import Job as Decoding
from retrieval.serving.http.errors import CROWDED, RequestError
from retrieval.serving.http.pool import Job, Pool, ends, hand_over
from retrieval.serving.http.settings import Settings
from retrieval.serving.http.throughput import Throughput
from retrieval.serving.images import Limits, Preprocessing

_AGAIN = 1.0  # seconds after which one that was refused is told to come again: whose turn comes before that may wait for it
_PART = 0.25  # of the deadline
_PICTURE_THREADS = 4
_PICTURES_WAITING = 64


class Machinery:
    """Bounded pools: the event loop never decodes, encodes, searches or reads a file.

    Args:
        settings: limits.
        preprocessing: that the first process that decodes is made ready for.

    Attributes:
        searches: the pool for searches.
        pictures: the pool for the gallery's files, whose storage may hang.
        decoders: the processes.
    """

    def __init__(self, settings: Settings, preprocessing: Preprocessing | None) -> None:
        waiting = settings.waiting * settings.workers
        seconds = min(_AGAIN, _PART * settings.deadline)
        self._workers = settings.workers
        self._images = Throughput(waiting, seconds)
        self.searches = Pool("search", settings.workers, waiting, seconds=seconds)
        self.pictures = Pool("picture", _PICTURE_THREADS, _PICTURES_WAITING)
        self.decoders = Decoders(
            preprocessing,
            workers=settings.workers,
            limits=Limits(settings.max_pixels, settings.max_bytes),
            seconds=settings.decode_seconds,
            waiting=waiting,
        )

    def require_room(self, client: str) -> None:
        """Refuse an image that would not find room, before it is read.

        Raises:
            RequestError: 503, too many are waiting.
        """
        try:
            self.decoders.require_room(client)
        except Busy as fault:
            raise RequestError(503, str(fault), CROWDED) from None

    async def decoded(
        self,
        start: Callable[..., Decoding],
        content: bytes,
        client: str,
        work: Callable[[Any, Job[Any]], Any],
    ) -> Any:
        """Return what `work` makes of a decoded image; its process is told when nobody waits for that any more.

        The thread that is given the pixels goes on with them: handing them to another costs as much as a small search.

        Raises:
            RequestError: 503, too many are waiting.
        """
        try:
            decoding: Decoding | None = start(content, client=client, ends=ends.get())
            assert decoding is not None
            future: Any = decoding.future
            job = Job(lambda job: work(future.result(), job), client)

            def go_on(done: Any) -> None:
                nonlocal decoding, future
                begun = None if decoding is None else decoding.begun
                decoding = None
                if job.trail is not None and begun is not None:
                    job.trail.note("wait", job.queued, begun)
                    job.trail.note("decode", begun, time.perf_counter())
                made = job.run()
                # it has this callback, and a circle would keep the pixels until Python looks for garbage
                future = None
                self._images.note(1, more=self.decoders.waiting > 0)
                self.decoders.most_waiting = self._images.room
                hand_over((job,), (made,))

            future.add_done_callback(go_on)
            try:
                return await job.future
            except asyncio.CancelledError:
                job.abandon()
                if (begun := decoding) is not None:
                    begun.abandon()
                raise
        except Busy as fault:
            raise RequestError(503, str(fault), CROWDED) from None

    async def pixels(self, bundle: Bundle, images: Sequence[bytes], client: str) -> list[Decoded]:
        """Decode several images, no more at a time than there are workers: others' images get their turns between them.

        Raises:
            DataError: one of them cannot be used, or the bundle takes no images; names it where there are several.
            RequestError: 503, too many are waiting.
        """
        start = self.starter(bundle)
        turn, found = asyncio.Semaphore(self._workers), []

        async def one(number: int, image: bytes) -> Decoded:
            async with turn:
                try:
                    made: Decoded = await self.decoded(start, image, client, lambda decoded, job: decoded)
                except DataError as fault:
                    if len(images) == 1:
                        raise
                    raise DataError(f"image {number}: {fault}") from None
                return made

        tasks = [asyncio.ensure_future(one(*each)) for each in enumerate(images, 1)]
        try:
            found = [await task for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
        return found

    def starter(self, bundle: Bundle) -> Callable[..., Decoding]:
        """Return what begins to decode an image for a bundle.

        Raises:
            DataError: it takes features.
        """
        given = bundle.manifest.input
        if given.preprocessing is None:
            raise DataError(f"This index takes vectors of {given.shape[0]} features, not images.")
        return partial(self.decoders.pixels, preprocessing=given.preprocessing)

    def waiting(self) -> dict[str, int]:
        """Return how many wait in each queue."""
        return {
            "search": self.searches.waiting,
            "decode": self.decoders.waiting,
            "picture": self.pictures.waiting,
        }

    def close(self, seconds: float = 10.0) -> bool:
        """Stop decoding, and let what runs end; return whether it has, within the time."""
        self.decoders.close()
        return self.searches.close(seconds) & self.pictures.close(0.1)
