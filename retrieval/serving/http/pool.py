"""Threads that take turns between clients, and drop what nobody waits for any more."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from retrieval.serving.http.errors import Gone, RequestError
from retrieval.serving.stages import current, following

T = TypeVar("T")

_BUSY = "The server is busy: too many searches are waiting. Try again in a moment."


class Job(Generic[T]):
    """One piece of work that a coroutine waits for, and whether it still does.

    Attributes:
        client: whose work it is.
        abandoned: True once nobody waits: the deadline has passed, or the client has left.
        trail: of the request that it is part of; None of the server's own work.
        queued: when it was made, by `time.perf_counter`.
    """

    def __init__(self, work: Callable[[Job[T]], T], client: str) -> None:
        self.client = client
        self.abandoned = False
        self.trail = current()
        self.queued = time.perf_counter()
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self.loop.create_future()
        self._work: Callable[[Job[T]], T] | None = work

    def check(self) -> None:
        """Stop here, between two steps of work, if nobody waits.

        Raises:
            Gone: abandoned.
        """
        if self.abandoned:
            raise Gone

    def abandon(self) -> None:
        """Say that nobody waits; what has not begun lets go of what it holds, such as an upload."""
        self.abandoned = True
        self._work = None

    def run(self) -> None:
        """Do the work and hand its result over; for a thread."""
        work, self._work = self._work, None
        if work is None:
            return
        result, fault = None, None
        try:
            with following(self.trail):
                result = work(self)
        except BaseException as error:
            fault = error
        with suppress(RuntimeError):  # the loop is closed: the server has stopped
            self.loop.call_soon_threadsafe(self.settle, result, fault)

    def settle(self, result: Any, fault: BaseException | None) -> None:
        """Wake the one who waits; for the event loop."""
        if self.future.done():
            return
        if fault is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(fault)


class Pool:
    """Daemon threads with a bounded queue in which clients take turns: a flood of one delays the others by one job.

    Args:
        name: of the threads.
        threads: jobs at a time.
        waiting: jobs that may wait; beyond it the client with the most of them loses its newest.
        busy: the sentence for those that do not find room.
    """

    def __init__(self, name: str, threads: int, waiting: int, busy: str = _BUSY) -> None:
        self._waiting = waiting
        self._says = busy
        self._queues: dict[str, deque[Job[Any]]] = {}  # in the order of their turns
        self._count = 0
        self._idle = threads
        self._lock = threading.Lock()
        self._ready: SimpleQueue[bool] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}_{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    async def run(self, work: Callable[[Job[T]], T], client: str = "") -> T:
        """Have a thread do some work. Cancelled, it is not begun, or its result dropped.

        Raises:
            RequestError: 503, too many are waiting.
        """
        job = Job(work, client)
        with self._lock:
            dropped = self._make_room(client) if self._full() and self._purge() else None
            self._queues.setdefault(client, deque()).append(job)
            self._count += 1
        if dropped is not None:
            dropped.abandon()
            dropped.settle(None, self._busy())
        self._ready.put(True)
        try:
            return await job.future
        except asyncio.CancelledError:
            job.abandon()
            raise

    @property
    def waiting(self) -> int:
        """How many jobs wait for a thread."""
        return max(0, self._count - self._idle)

    def _full(self) -> bool:
        return self._count - self._idle >= self._waiting

    def _purge(self) -> bool:
        """Forget what nobody waits for; return whether the queue is full all the same."""
        for client, queue in list(self._queues.items()):
            self._queues[client] = deque(job for job in queue if not job.abandoned)
        self._count = sum(map(len, self._queues.values()))
        return self._full()

    def _make_room(self, client: str) -> Job[Any]:
        """Take back the newest job of the client with the most of them.

        Raises:
            RequestError: 503, that is the one who asks.
        """
        most = max(self._queues, key=lambda name: len(self._queues[name]), default=client)
        if len(self._queues.get(most, ())) <= len(self._queues.get(client, ())) + 1:
            raise self._busy()
        self._count -= 1
        return self._queues[most].pop()

    def _next(self) -> Job[Any] | None:
        """Return the next client's oldest job; that client's turn comes again after all others'."""
        while self._queues:
            client = next(iter(self._queues))
            queue = self._queues.pop(client)
            if not queue:
                continue
            job = queue.popleft()
            self._count -= 1
            if queue:
                self._queues[client] = queue
            if not job.abandoned:
                return job
        return None

    def _serve(self) -> None:
        while self._ready.get():
            with self._lock:
                job = self._next()
                self._idle -= job is not None
            if job is None:
                continue
            if job.trail is not None:
                job.trail.note("wait", job.queued, time.perf_counter())
            job.run()
            job = None  # what it holds goes now, not with the next one
            with self._lock:
                self._idle += 1

    def close(self, seconds: float) -> bool:
        """Have the threads end once they are idle; return whether all have, within the time."""
        end = time.monotonic() + seconds
        for _ in self._threads:
            self._ready.put(False)
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _busy(self) -> RequestError:
        return RequestError(503, self._says, "queue")
