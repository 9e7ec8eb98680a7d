"""Decode images in processes of their own, each with a deadline, a memory limit and a replacement.

An image that a stranger sent may hang its decoder, crash it or take all memory. Here that costs one process, which is
killed and started again, and never the time of other images: one that takes longer than a moment goes on in one of a
few slow places, or is refused while those are taken.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval.decoder_process import (
    ANSWER,
    LONGEST_SENTENCE,
    PIXELS,
    PNG,
    READY,
    REQUEST,
    SENTENCE,
    Setting,
)
from retrieval.errors import DataError, RetrievalError
from retrieval.images import Limits, Preprocessing

SECONDS = 10.0
MOMENT = 1.0
_STARTING = 60.0
_ABANDONED = (
    0.2  # what an image may still take once nobody waits for it: starting a process anew costs as much
)
_TICK = 0.05
_IDLE = 5.0  # the watch sleeps for good after so long without an image
_PNG_START = b"\x89PNG\r\n\x1a\n"


class Busy(RetrievalError):
    """Too many images are waiting to be decoded; not the fault of this one."""


class _Unstarted(RetrievalError):
    """There is no process to decode with."""


@dataclass(frozen=True)
class Decoded:
    """One decoded image.

    Attributes:
        pixels: uint8 (C, H, W), as `Preprocessing` makes them.
        width: of the image before preprocessing, upright.
        height: likewise.
    """

    pixels: NDArray[np.uint8]
    width: int
    height: int


@dataclass(eq=False)
class Job:
    """One image on its way.

    Attributes:
        future: `Decoded`, or a PNG's bytes. Raises `DataError` for what is wrong with the image, `Busy` when its turn
            did not come.
    """

    kind: int
    content: bytes
    name: str
    client: str
    expires: float
    future: Future[Any] = field(default_factory=Future)
    abandoned: bool = False

    def abandon(self) -> None:
        """Say that nobody waits for the answer any more: it is not begun, or stopped soon."""
        self.abandoned = True
        self.future.cancel()


class Decoders:
    """A pool of processes that decode, started when they are needed.

    Args:
        preprocessing: what `pixels` gives; None where only `png` is called.
        workers: images at a time; as many as there are cores by default.
        limits: larger images are refused.
        seconds: an image's deadline, from its arrival to its answer; decoding it may take as much CPU time.
        memory: bytes that decoding one image may take.
        waiting: how many images may wait; 16 for each worker by default.
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
        workers = workers or os.cpu_count() or 1
        self.preprocessing = preprocessing
        self.limits = limits or Limits()
        self.seconds = seconds
        self.slow = max(1, workers // 2)
        self._most = workers + self.slow
        self._waiting = 16 * workers if waiting is None else waiting
        self._setting = Setting(
            asdict(preprocessing) if preprocessing else None,
            asdict(self.limits),
            seconds,
            self.limits.memory if memory is None else memory,
        )
        self._lock = threading.Lock()
        self._queue = _Queue()
        self._workers: list[_Worker] = []
        self._idle: list[_Worker] = []
        self._closed = False
        self._awake = threading.Event()
        self._watching = False
        self._watch = threading.Thread(target=self._keep_watch, name="decode watch", daemon=True)
        self._watch.start()

    def pixels(self, content: bytes, *, name: str = "the file", client: str = "") -> Job:
        """Decode and preprocess an image; its future is `Decoded`.

        Args:
            content: the encoded image.
            name: what to call it in an error.
            client: who sent it: those who wait are served in turn, however many images each has sent.

        Raises:
            Busy: too many are waiting.
        """
        assert self.preprocessing is not None
        return self._submit(PIXELS, content, name, client)

    def png(self, content: bytes, *, name: str = "the file", client: str = "") -> Job:
        """Make a PNG of an image, whatever its format; its future is the PNG's bytes.

        Raises:
            Busy: too many are waiting.
        """
        return self._submit(PNG, content, name, client)

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

    def _submit(self, kind: int, content: bytes, name: str, client: str) -> Job:
        job = Job(kind, content, name, client, time.monotonic() + self.seconds)
        with self._lock:
            if self._closed:
                raise Busy("The server is stopping.")
            if self._idle:
                self._idle.pop().begin(job)  # the last to have worked: its caches are warm
            else:
                if len(self._queue) >= self._waiting:
                    _refuse(self._queue.make_room(client), _too_many())
                self._queue.put(job)
                if len(self._workers) < self._most:
                    worker = _Worker(self, json.dumps(self._setting))
                    self._workers.append(worker)
                    worker.start()
            if not self._watching:
                self._watching = True
                self._awake.set()
        return job

    def next_for(self, worker: _Worker) -> None:
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
                _refuse(job, _too_many())
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
            if not job.abandoned:
                return job
        return None

    def make_room(self, client: str) -> Job:
        """Take out the last one of whoever has most waiting.

        Raises:
            Busy: that is this client.
        """
        most = max(self._clients, key=lambda name: len(self._clients[name]), default=client)
        if len(self._clients.get(most, ())) <= len(self._clients.get(client, ())) + 1:
            raise _too_many()
        return self._clients[most].pop()

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


class _Worker(threading.Thread):
    """One process, and the thread that talks with it."""

    def __init__(self, pool: Decoders, setting: str) -> None:
        super().__init__(name="decode", daemon=True)
        self.pool = pool
        self.inbox: SimpleQueue[Job | None] = SimpleQueue()
        self.slow = False
        self._setting = setting
        self._lock = threading.Lock()  # around the process's end and who decides on it
        self._process: subprocess.Popen[bytes] | None = None
        self._job: Job | None = None
        self._since = 0.0
        self._reason: RetrievalError | None = None
        self._stopped = False

    def begin(self, job: Job) -> None:
        self.inbox.put(job)

    def run(self) -> None:
        answer: Callable[[], None] | None = None
        while True:
            with suppress(_Unstarted):  # then the next job says so
                self._have_process()
            self.pool.next_for(self)
            if answer is not None:
                answer()  # only now: who asks again at once finds this worker idle
            job = self.inbox.get()
            if job is None:
                break
            answer = self._do(job)
        self._end()

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            self._kill()
        self.inbox.put(None)

    def watch(self, may_be_slow: bool) -> bool:
        """End the process when its time is over; return whether it takes a slow place now."""
        with self._lock:
            job, taken = self._job, time.monotonic() - self._since
            if self._reason is not None or self._process is None:
                return False
            if job is None:
                if self._since and taken > _STARTING:
                    self._kill()
                return False
            if job.abandoned and taken > _ABANDONED:
                self._give_up(Busy("Nobody waits for this image."))
            elif taken > self.pool.seconds:
                self._give_up(_too_slow(job.name, self.pool.seconds))
            elif time.monotonic() > job.expires:
                self._give_up(_too_many())
            elif taken > MOMENT and not self.slow:
                if may_be_slow:
                    self.slow = True
                    return True
                self._give_up(_too_many())
        return False

    def _give_up(self, reason: RetrievalError) -> None:
        self._reason = reason
        self._kill()

    def _do(self, job: Job) -> Callable[[], None] | None:
        """Return what gives the answer; None when it was given, since the process ended."""
        if not job.future.set_running_or_notify_cancel():
            return None
        try:
            self._have_process()
        except _Unstarted as fault:
            job.future.set_exception(fault)
            return None
        try:
            with self._lock:
                self._job, self._since = job, time.monotonic()
            made = self._ask(job)
        except (OSError, EOFError, ValueError):
            with self._lock:
                reason, self._reason = self._reason, None
                self._job, self.slow, self._since = None, False, 0.0
            code = self._end()
            job.future.set_exception(reason or _what_ended(code, job, self.pool.seconds))
            return None
        with self._lock:
            # a watch that gave up on it just now has killed the process, and the next job finds it dead
            dead = self._reason is not None
            self._job, self.slow, self._since, self._reason = None, False, 0.0, None
        if dead:
            self._end()
        if isinstance(made, DataError):
            return partial(job.future.set_exception, made)
        return partial(job.future.set_result, made)

    def _ask(self, job: Job) -> Any:
        """Return what the process makes of the image, or the `DataError` that it found.

        Raises:
            OSError, EOFError: the process ended.
            ValueError: what it answered cannot be.
        """
        name = job.name.encode("utf-8", "backslashreplace")
        self._write(REQUEST.pack(job.kind, len(name), len(job.content)) + name)
        self._write(job.content)
        kind, width, height, size = ANSWER.unpack(self._read(ANSWER.size))
        if kind == SENTENCE and size <= LONGEST_SENTENCE:
            text = bytes(self._read(size)).decode("utf-8", "replace")
            return DataError("".join(sign if sign.isprintable() else " " for sign in text))
        if kind != job.kind or not width or not height or width * height > self.pool.limits.pixels:
            raise ValueError
        if kind == PNG:
            if size > 5 * width * height + 65_536:
                raise ValueError
            content = bytes(self._read(size))
            if not content.startswith(_PNG_START):
                raise ValueError
            return content
        assert self.pool.preprocessing is not None
        shape = self.pool.preprocessing.shape
        if size != np.prod(shape):
            raise ValueError
        return Decoded(np.frombuffer(self._read(size), dtype=np.uint8).reshape(shape), width, height)

    def _have_process(self) -> None:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._start()

    def _start(self) -> None:
        """Start a process and wait until it is ready.

        Raises:
            _Unstarted: it did not start, or not in time.
        """
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "retrieval.decoder_process", self._setting],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **_ONE_THREAD},
                process_group=0 if os.name == "posix" else None,  # Ctrl-C is for the server, which ends it
            )
            with self._lock:
                self._process, self._since = process, time.monotonic()
                if self._stopped:
                    self._kill()
            if ANSWER.unpack(self._read(ANSWER.size)) != (READY, 0, 0, 0):
                raise EOFError
        except (OSError, EOFError) as fault:
            self._end()
            raise _Unstarted("The process that decodes images does not start; the log says why.") from fault
        finally:
            self._since = 0.0

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            try:
                if os.name == "posix":
                    os.killpg(self._process.pid, signal.SIGKILL)
                else:
                    self._process.kill()
            except OSError:
                self._process.kill()

    def _end(self) -> int:
        """End the process, if there is one, and return its exit code."""
        with self._lock:
            process = self._process
            if process is None:
                return 0
            self._kill()
            self._process = None
        code = process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        return code

    def _write(self, content: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        rest = memoryview(content)
        while rest:
            rest = rest[self._process.stdin.write(rest) or 0 :]

    def _read(self, size: int) -> bytearray:
        assert self._process is not None
        assert self._process.stdout is not None
        got = bytearray(size)
        rest = memoryview(got)
        while rest:
            count = self._process.stdout.readinto(rest)  # type: ignore[attr-defined]
            if not count:
                raise EOFError
            rest = rest[count:]
        return got


_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def _refuse(job: Job, reason: RetrievalError) -> None:
    if job.future.set_running_or_notify_cancel():
        job.future.set_exception(reason)


def _too_many() -> Busy:
    return Busy("The server is busy: too many images are waiting. Try again in a moment.")


def _too_slow(name: str, seconds: float) -> DataError:
    return DataError(
        f"{name} takes longer than {seconds:g} seconds to decode. Save it as a plain PNG or JPEG."
    )


def _what_ended(code: int, job: Job, seconds: float) -> RetrievalError:
    """Return what to say about a process that ended by itself, or answered what cannot be."""
    if os.name == "posix" and code == -signal.SIGXCPU:
        return _too_slow(job.name, seconds)
    return DataError(
        f"{job.name} cannot be decoded: it brings its decoder down. Save it as a plain PNG or JPEG."
    )
