"""Threads that take turns between clients, do together what is alike, and drop what nobody waits for any more."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Generic, NamedTuple, TypeVar

from retrieval.serving.http.errors import CROWDED, Gone, RequestError
from retrieval.serving.http.throughput import Throughput
from retrieval.serving.stages import current, following

T = TypeVar("T")

_PURGE_SECONDS = 0.01  # between two looks through a full queue for those whom nobody waits for

ends: ContextVar[float] = ContextVar("ends", default=math.inf)
"""When nobody waits any more for what this task has done, by `time.monotonic`."""

NOBODY = object()
"""What a job gives that nobody waits for."""

_BUSY = "The server is busy: too many searches are waiting. Try again in a moment."


class Alike(NamedTuple):
    """What makes one job of several that wait.

    Attributes:
        key: of those that can be done together.
        work: does them; gives for each, in order, its result or its error.
        most: how many at once.
    """

    key: Hashable
    work: Callable[[Sequence[Job[Any]]], Sequence[Any]]
    most: int


class Job(Generic[T]):
    """One piece of work that a coroutine waits for, and whether it still does.

    Args:
        work: that gives its result.
        client: whose it is.
        alike: with which others it can be done; None: alone.
        given: what those are told about it.

    Attributes:
        client: whose work it is.
        ends: the deadline, by `time.monotonic`.
        trail: of the request that it is part of; None of the server's own work.
        queued: when it was made, by `time.perf_counter`.
    """

    __slots__ = (
        "_abandoned", "_work", "alike", "client", "ends", "future", "given", "loop", "queued", "trail",
    )  # fmt: skip

    def __init__(
        self, work: Callable[[Job[T]], T], client: str, alike: Alike | None = None, given: Any = None
    ) -> None:
        self.client = client
        self.alike, self.given = alike, given
        self.ends = ends.get()
        self._abandoned = False
        self.trail = current()
        self.queued = time.perf_counter()
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self.loop.create_future()
        self._work: Callable[[Job[T]], T] | None = work

    @property
    def abandoned(self) -> bool:
        """Whether nobody waits: the client has left, or the deadline has passed, though a busy event loop may not have noticed."""
        return self._abandoned or time.monotonic() > self.ends

    def check(self) -> None:
        """Stop here, between two steps of work, if nobody waits.

        Raises:
            Gone: abandoned.
        """
        if self.abandoned:
            raise Gone

    def abandon(self) -> None:
        """Say that nobody waits; what has not begun lets go of what it holds, such as an upload."""
        self._abandoned = True
        self._work = self.given = None

    def run(self) -> Any:
        """Do the work; return its result or its error, or `NOBODY` where nobody waits; for a thread."""
        work, self._work = self._work, None
        if work is None or self.abandoned:
            return NOBODY
        try:
            with following(self.trail):
                return work(self)
        except BaseException as error:
            return error

    def alone(self) -> Any:
        """Do the work, and return its result or its error; for whoever does several together."""
        work = self._work
        try:
            self.check()
            if work is None:
                raise Gone
            with following(self.trail):
                return work(self)
        except BaseException as error:
            return error

    def settle(self, made: Any) -> None:
        """Wake the one who waits, with a result or an error; for the event loop."""
        if self.future.done():
            return
        if isinstance(made, BaseException):
            self.future.set_exception(made)
        else:
            self.future.set_result(made)


def made_of(jobs: Sequence[Job[Any]]) -> Sequence[Any]:
    """Do alike jobs as one; return for each its result or its error. For a thread."""
    first = jobs[0]
    if len(jobs) == 1:
        return (first.run(),)
    assert first.alike is not None
    try:
        return first.alike.work(jobs)
    except BaseException as error:
        return [error] * len(jobs)


def hand_over(jobs: Sequence[Job[Any]], made: Sequence[Any]) -> None:
    """Have the event loop settle jobs that are done; for a thread, as the last that it does: the loop is awake at once, and needs Python's lock."""

    def settle() -> None:
        for job, result in zip(jobs, made, strict=True):
            job.settle(result)

    with suppress(RuntimeError):  # the loop is closed: the server has stopped
        if len(jobs) > 1:
            jobs[0].loop.call_soon_threadsafe(settle)
        elif made[0] is not NOBODY:
            jobs[0].loop.call_soon_threadsafe(jobs[0].settle, made[0])


class Pool:
    """Daemon threads with a bounded queue in which clients take turns: a flood of one delays the others by one job.

    Args:
        name: of the threads.
        threads: jobs at a time.
        waiting: jobs that may wait; beyond it the client with the most of them loses its newest.
        busy: the sentence for those that do not find room.
        seconds: more may wait where the last of them has its turn within these.
    """

    def __init__(
        self, name: str, threads: int, waiting: int, busy: str = _BUSY, seconds: float = 0.0
    ) -> None:
        self._throughput = Throughput(waiting, seconds)
        self._purged = -math.inf
        self._says = busy
        self._queues: dict[str, deque[Job[Any]]] = {}  # in the order of their turns
        self._count = 0
        self._idle = threads
        self._lock = threading.Lock()
        # each wakes one thread: the last to have worked is the next to work, its caches are warm
        self._resting: list[threading.Lock] = []
        self._rung = False  # one that rested is on its way; it wakes the next one if it leaves work
        self._closed = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}_{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    async def run(
        self,
        work: Callable[[Job[T]], T],
        client: str = "",
        alike: Alike | None = None,
        given: Any = None,
    ) -> T:
        """Have a thread do some work. Cancelled, it is not begun, or its result dropped.

        Args:
            work: what is done where the job is alone.
            client: whose it is.
            alike: see `Job`, as the next one.
            given: likewise.

        Raises:
            RequestError: 503, too many are waiting.
        """
        job = Job(work, client, alike, given)
        self.add(job)
        try:
            return await job.future
        except asyncio.CancelledError:
            job.abandon()
            raise

    def add(self, job: Job[Any]) -> None:
        """Have a thread do a job; for any thread.

        Raises:
            RequestError: 503, too many are waiting.
        """
        with self._lock:
            dropped = self._make_room(job.client) if self._full() else None
            self._queues.setdefault(job.client, deque()).append(job)
            self._count += 1
            bell = None if self._rung else self._to_ring()
        if bell is not None:
            bell.release()
        if dropped is not None:
            dropped.abandon()
            with suppress(RuntimeError):  # the loop is closed
                dropped.loop.call_soon_threadsafe(dropped.settle, self._busy())

    @property
    def waiting(self) -> int:
        """How many jobs wait for a thread."""
        return max(0, self._count - self._idle)

    def require_room(self, client: str) -> None:
        """Refuse a job that would not find room, before anything is done for it.

        Raises:
            RequestError: 503, too many are waiting.
        """
        if self._count - self._idle < self._throughput.room:
            return
        with self._lock:
            if self._full():
                self._longest(client)

    def _full(self) -> bool:
        """Whether nobody else may wait, also when those are forgotten for whom nobody does any more."""
        room, now = self._throughput.room, time.monotonic()
        if self._count - self._idle >= room and now - self._purged > _PURGE_SECONDS:
            self._purged = now
            for client, queue in list(self._queues.items()):
                self._queues[client] = deque(job for job in queue if not job.abandoned)
            self._count = sum(map(len, self._queues.values()))
        return self._count - self._idle >= room

    def _longest(self, client: str) -> str:
        """Return the client with the most jobs, which loses one to another.

        Raises:
            RequestError: 503, that is the one who asks.
        """
        most = max(self._queues, key=lambda name: len(self._queues[name]), default=client)
        if len(self._queues.get(most, ())) <= len(self._queues.get(client, ())) + 1:
            raise self._busy()
        return most

    def _make_room(self, client: str) -> Job[Any]:
        """Take back the newest job of the client with the most of them; see `_longest`."""
        most = self._longest(client)
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

    def _others(self, first: Job[Any]) -> list[Job[Any]]:
        """Take out what can be done together with a job, of each client in turn."""
        found: list[Job[Any]] = []
        if first.alike is None or first.alike.most < 2 or not self._count:
            return found
        key, most = first.alike.key, first.alike.most - 1
        fit = {
            client: deque(job for job in queue if job.alike is not None and job.alike.key == key)
            for client, queue in self._queues.items()
        }
        while len(found) < most and (fit := {c: jobs for c, jobs in fit.items() if jobs}):
            found += [jobs.popleft() for jobs in fit.values()][: most - len(found)]
        taken = set(map(id, found))
        for client in {job.client for job in found}:
            self._queues[client] = deque(job for job in self._queues[client] if id(job) not in taken)
        self._count -= len(found)
        return [job for job in found if not job.abandoned]

    def _serve(self) -> None:
        """Work until the pool is closed. Whoever has work left takes it without a rest: waking a thread costs as much as a small search."""
        bell = threading.Lock()
        bell.acquire()
        with self._lock:
            jobs = self._next_jobs(bell)
        while jobs is not None:
            if not jobs:
                bell.acquire()
                jobs = self._woken(bell)
                continue
            now = time.perf_counter()
            for job in jobs:
                if job.trail is not None:
                    job.trail.note("wait", job.queued, now)
            done, made = jobs, made_of(jobs)
            for job in done:
                job.alike = job.given = None
            with self._lock:
                self._idle += 1
                self._throughput.note(len(done), more=self._count > 0)
                jobs = self._next_jobs(bell)
            hand_over(done, made)
            del done, made, job  # what they hold goes now, not with the next one

    def _woken(self, bell: threading.Lock) -> list[Job[Any]] | None:
        """Take what is done next, and wake another for what is left: what came at once and is alike needs one thread only."""
        with self._lock:
            self._rung = False
            jobs = self._next_jobs(bell)
            other = self._to_ring() if self._count else None
        if other is not None:
            other.release()
        return jobs

    def _to_ring(self) -> threading.Lock | None:
        """Return whose bell is to be rung: of the one that has rested for the shortest time; None where all work."""
        if not self._resting:
            return None
        self._rung = True
        return self._resting.pop()

    def _next_jobs(self, bell: threading.Lock) -> list[Job[Any]] | None:
        """Take out what a thread does next; nothing: it rests until its bell is rung, or ends where the pool is closed: None."""
        job = self._next()
        if job is None:
            if self._closed:
                return None
            self._resting.append(bell)
            return []
        self._idle -= 1
        return [job, *self._others(job)]

    def close(self, seconds: float) -> bool:
        """Have the threads end once they are idle; return whether all have, within the time."""
        end = time.monotonic() + seconds
        with self._lock:
            self._closed, resting, self._resting = True, self._resting, []
        for bell in resting:
            bell.release()
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _busy(self) -> RequestError:
        return RequestError(503, self._says, CROWDED)
