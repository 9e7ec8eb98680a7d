"""Decode images in processes of their own, each with a deadline, a memory limit and a replacement.

An image that a stranger sent may hang its decoder, crash it or take all memory. Here that costs one process, which is
killed and started again, and never the time of other images: one that takes longer than a moment goes on in one of a
few slow places, or is refused while those are taken.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import OrderedDict, deque
from dataclasses import asdict

from retrieval.errors import RetrievalError
from retrieval.host.cores import cores
from retrieval.serving.decoding.process import PIXELS, PNG, THUMBNAIL, Setting
from retrieval.serving.decoding.worker import Busy as Busy
from retrieval.serving.decoding.worker import Decoded as Decoded
from retrieval.serving.decoding.worker import Job as Job
from retrieval.serving.decoding.worker import Unstarted as Unstarted
from retrieval.serving.decoding.worker import Worker, too_many
from retrieval.serving.images import Limits, Preprocessing

SECONDS = 5.0
_TICK = 0.05
_IDLE = 5.0  # the watch sleeps for good after so long without an image


class Decoders:
    """A pool of processes that decode: one at once, the others when they are needed.

    Args:
        preprocessing: what `pixels` gives, unless it is told otherwise; None where only `png` and `thumbnail` are called.
        workers: images at a time; as many as there are cores by default.
        limits: larger images are refused.
        seconds: that decoding an image may take, by the clock and of CPU time; it may wait as long for its turn.
        memory: bytes that decoding one image may take.
        waiting: how many images may wait; 16 for each worker by default.

    Attributes:
        most_waiting: how many images may wait, from now on.
    """

    def __init__(
        self,
        preprocessing: Preprocessing | None,
        *,
        workers: int | None = None,
        limits: Limits | None = None,
        seconds: float = SECONDS,
        memory: int | None = None,
        waiting: int | None = None,
    ) -> None:
        workers = workers or cores()
        self.preprocessing = preprocessing
        self.limits = limits or Limits()
        self.seconds = seconds
        self.slow = max(1, workers // 2)
        self._most = workers + self.slow
        self.most_waiting = 16 * workers if waiting is None else waiting
        self._setting = Setting(
            asdict(self.limits),
            seconds,
            self.limits.memory if memory is None else memory,
        )
        self._lock = threading.Lock()
        self._queue = _Queue()
        self._workers: list[Worker] = []
        self._idle: list[Worker] = []
        self._closed = False
        self._awake = threading.Event()
        self._watching = False
        self._watch = threading.Thread(target=self._keep_watch, name="decode watch", daemon=True)
        self._watch.start()
        if preprocessing is not None:  # the first image need not wait for a process to start
            self._start_another()

    @property
    def pids(self) -> list[int]:
        """The processes that run."""
        with self._lock:
            workers = list(self._workers)
        return [pid for worker in workers if (pid := worker.pid) is not None]

    @property
    def waiting(self) -> int:
        """How many images wait for a process."""
        return len(self._queue)

    def require_room(self, client: str) -> None:
        """Refuse an image that would not find room, before it is there.

        Raises:
            Busy: too many are waiting.
        """
        with self._lock:
            if not self._idle and len(self._queue) >= self.most_waiting:
                self._queue.crowded(client)

    def pixels(
        self,
        content: bytes,
        *,
        name: str = "the file",
        client: str = "",
        preprocessing: Preprocessing | None = None,
        ends: float = math.inf,
    ) -> Job:
        """Decode and preprocess an image; its future is `Decoded`.

        Args:
            content: the encoded image.
            name: what to call it in an error.
            client: who sent it: those who wait are served in turn, however many images each has sent.
            preprocessing: in the place of the pool's own.
            ends: when nobody waits any more, by `time.monotonic`: it is not begun after that.

        Raises:
            Busy: too many are waiting.
        """
        preprocessing = preprocessing or self.preprocessing
        assert preprocessing is not None
        return self._submit(PIXELS, content, name, client, preprocessing, ends)

    def png(self, content: bytes, *, name: str = "the file", client: str = "", ends: float = math.inf) -> Job:
        """Make a PNG of an image, whatever its format; its future is the PNG's bytes.

        Raises:
            Busy: too many are waiting.
        """
        return self._submit(PNG, content, name, client, None, ends)

    def thumbnail(
        self, content: bytes, *, name: str = "the file", client: str = "", ends: float = math.inf
    ) -> Job:
        """Make a small JPEG of an image, whatever its format; its future is the JPEG's bytes.

        Raises:
            Busy: too many are waiting.
        """
        return self._submit(THUMBNAIL, content, name, client, None, ends)

    def __enter__(self) -> Decoders:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill every process and refuse what waits. Takes less than a second, whatever they are at."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            workers, waiting = list(self._workers), self._queue.clear()
        self._awake.set()
        for job in waiting:
            _refuse(job, Busy("The server is stopping."))
        for worker in workers:
            worker.stop()
        for thread in (self._watch, *workers):
            thread.join(1.0)

    def _submit(
        self,
        kind: int,
        content: bytes,
        name: str,
        client: str,
        preprocessing: Preprocessing | None,
        ends: float,
    ) -> Job:
        job = Job(kind, content, name, client, min(time.monotonic() + self.seconds, ends), preprocessing)
        with self._lock:
            if self._closed:
                raise Busy("The server is stopping.")
            if self._idle:
                self._idle.pop().begin(job)  # the last to have worked: its caches are warm
            else:
                if len(self._queue) >= self.most_waiting:
                    _refuse(self._queue.make_room(client), too_many())
                self._queue.put(job)
                self._start_another()
            if not self._watching:
                self._watching = True
                self._awake.set()
        return job

    def _start_another(self) -> None:
        if len(self._workers) < self._most:
            setting = json.dumps(self._setting)
            worker = Worker(self.next_for, setting, self.limits, self.seconds)
            self._workers.append(worker)
            worker.start()

    def next_for(self, worker: Worker) -> None:
        """Give a worker that has nothing to do the next image, when there is one."""
        with self._lock:
            if self._closed:
                worker.inbox.put(None)
                return
            job = self._queue.get()
            if job is None:
                self._idle.append(worker)
            else:
                worker.begin(job)

    def _keep_watch(self) -> None:
        """Enforce deadlines, whatever the processes and their threads are at."""
        quiet = 0.0
        while not self._closed:
            if quiet > _IDLE:
                with self._lock:
                    if not len(self._queue) and len(self._idle) == len(self._workers):
                        self._watching = False
                        self._awake.clear()
                if not self._watching:
                    self._awake.wait()
                quiet = 0.0
            time.sleep(_TICK)
            with self._lock:
                late = self._queue.expired(time.monotonic())
                working = [worker for worker in self._workers if worker not in self._idle]
            for job in late:
                _refuse(job, too_many())
            slow = sum(worker.slow for worker in working)
            for worker in working:
                slow += worker.watch(slow < self.slow)
            quiet = quiet + _TICK if not working else 0.0


class _Queue:
    """Those who wait, first come first served within a client, one of each client in turn."""

    def __init__(self) -> None:
        self._clients: OrderedDict[str, deque[Job]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._clients.values()))

    def put(self, job: Job) -> None:
        self._clients.setdefault(job.client, deque()).append(job)

    def get(self) -> Job | None:
        """Take out the next one that somebody still waits for."""
        while self._clients:
            client, jobs = self._clients.popitem(last=False)
            job = jobs.popleft()
            if jobs:
                self._clients[client] = jobs
            if job.expires < time.monotonic():
                _refuse(job, too_many())
            elif not job.abandoned:
                return job
        return None

    def make_room(self, client: str) -> Job:
        """Take out the last one of whoever has most waiting; see `crowded`."""
        return self._clients[self.crowded(client)].pop()

    def crowded(self, client: str) -> str:
        """Return who has most waiting.

        Raises:
            Busy: that is this client.
        """
        most = max(self._clients, key=lambda name: len(self._clients[name]), default=client)
        if len(self._clients.get(most, ())) <= len(self._clients.get(client, ())) + 1:
            raise too_many()
        return most

    def expired(self, now: float) -> list[Job]:
        """Take out those whose deadline has passed, and those who are waited for no more."""
        late = []
        for client, jobs in list(self._clients.items()):
            late += [job for job in jobs if job.expires < now or job.abandoned]
            left = deque(job for job in jobs if job.expires >= now and not job.abandoned)
            if left:
                self._clients[client] = left
            else:
                del self._clients[client]
        return late

    def clear(self) -> list[Job]:
        left = [job for jobs in self._clients.values() for job in jobs]
        self._clients.clear()
        return left


def _refuse(job: Job, reason: RetrievalError) -> None:
    if job.future.set_running_or_notify_cancel():
        job.future.set_exception(reason)
